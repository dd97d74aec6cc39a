"""A torch Dataset of the user's own, which a plug-in defines, as a source of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset

from longseq.tasks.data.given import IMAGES, TARGETS, find_entry
from longseq.tasks.data.unreadable import UNREADABLE, LabelError, SampleError
from longseq.tasks.image.config import ImageDataKeys
from longseq.tasks.image.decoding import in_eight_bits, upright
from longseq.tasks.image.sources import Source, Split, Splits, finish_splits
from longseq.tasks.training.targets import TARGET, build_own, is_named


class DatasetSource:
    """The samples of a Dataset: pairs (image, label), or dictionaries with the names that other libraries give.

    An image is Pillow's, an array `[H, W]` or `[H, W, 3]`, or a tensor `[C, H, W]`, both uint8. A label is the number
    of a class, or for several labels `[C]` of 0 and 1. The names of the classes are those of the Dataset's `classes` or
    `class_to_idx`, as torchvision's have them, and else numbers; all labels are its `targets` if it has them, and
    each sample that is read must agree with them.
    """

    def __init__(self, dataset: Any, label: str, *, num_classes: int | None, multi_label: bool) -> None:
        if isinstance(dataset, IterableDataset) or not callable(getattr(dataset, "__len__", None)):
            raise ValueError(
                f"{label} has no length (__len__), which the order of samples needs: give it one, or a "
                "LightningDataModule as data.datamodule"
            )
        self.dataset, self.label, self.multi_label = dataset, label, multi_label
        if not len(dataset):
            raise ValueError(f"{label} holds no sample")
        self.class_names = class_names_of(dataset, label) or [str(index) for index in range(num_classes or 0)]
        if not self.class_names:
            raise ValueError(
                f"{label} does not tell its classes: give it an attribute `classes`, a list of names, or give "
                "data.num_classes=N"
            )
        self.num_classes = max(len(self.class_names), num_classes or 0)
        self._targets = self._known_targets()
        try:
            self.read(0)  # what is wrong with every sample is told before a run begins
        except (*UNREADABLE, LabelError) as error:
            raise ValueError(f"{label}, sample 0: {error}") from error

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, index: int) -> tuple[Image.Image, Any]:
        try:
            sample = self.dataset[index]
        except UNREADABLE:
            raise
        except Exception as error:
            raise SampleError(f"{self.path(index)}: {type(error).__name__}: {error}") from error
        if isinstance(sample, Mapping):
            image, target = find_entry(sample, IMAGES, "images"), find_entry(sample, TARGETS, "labels")
        elif isinstance(sample, tuple | list) and len(sample) == 2:
            image, target = sample
        else:
            size = f" of {len(sample)}" if isinstance(sample, tuple | list) else ""
            raise ValueError(
                f"a sample is a {type(sample).__name__}{size}, and must be (image, label) or a dictionary of them"
            )
        label = self._label(target)
        if self._targets is not None and not np.array_equal(label, self._targets[index]):
            raise LabelError(
                f"its label is {np.asarray(label).tolist()}, and targets[{index}] is {self._targets[index].tolist()}: "
                "let both agree (a target_transform changes the label alone), or leave targets out"
            )
        return as_image(image), label

    def path(self, index: int) -> str:
        return f"{self.label}#{index}"

    def targets(self) -> np.ndarray | None:
        return self._targets

    def _label(self, target: Any) -> Any:
        """The label as a target. LabelError for one that does not fit the classes."""
        values = np.asarray(target)
        if self.multi_label:
            if values.shape != (self.num_classes,) or not np.isin(values, (0, 1)).all():
                raise LabelError(f"labels {_shape_of(values)} must be {self.num_classes} numbers, each 0 or 1")
            return values.astype(np.float32)
        if values.size != 1 or not np.issubdtype(values.dtype, np.integer):
            raise LabelError(f"the label {target!r} must be the number of a class")
        number = int(values.reshape(()))
        if not 0 <= number < self.num_classes:
            raise LabelError(f"the label {number} is not among the classes 0 to {self.num_classes - 1}")
        return number

    def _known_targets(self) -> np.ndarray | None:
        known = getattr(self.dataset, "targets", None)
        if known is None or callable(known):
            return None
        targets = np.asarray(known)
        wanted = (len(self), self.num_classes) if self.multi_label else (len(self),)
        if targets.shape != wanted:
            raise ValueError(f"{self.label}.targets {_shape_of(targets)} must be {list(wanted)}, or leave them out")
        if not self.multi_label and (targets.min() < 0 or targets.max() >= self.num_classes):
            raise ValueError(
                f"{self.label}.targets go from {targets.min()} to {targets.max()}, and the classes from 0 to "
                f"{self.num_classes - 1}: correct them, or give data.num_classes=N"
            )
        return targets.astype(np.float32 if self.multi_label else np.int64)


def as_image(image: Any) -> Image.Image:
    """An upright image of 8 bits of Pillow's image, an array `[H, W]`, `[H, W, 1]` or `[H, W, 3]`, or a tensor
    `[C, H, W]`, both uint8. ValueError for others.
    """
    if isinstance(image, Image.Image):
        return in_eight_bits(upright(image))
    kind = "tensor" if isinstance(image, Tensor) else "array" if isinstance(image, np.ndarray) else None
    if kind is None:
        raise ValueError(f"the image is a {type(image).__name__}, and must be one of Pillow, an array or a tensor")
    if isinstance(image, Tensor):
        whole = image.dtype == torch.uint8
        pixels = image.permute(1, 2, 0).numpy() if whole and image.ndim == 3 else np.zeros(0)
    else:
        whole, pixels = image.dtype == np.uint8, image
    if not whole or pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (1, 3)):
        raise ValueError(
            f"the image is a {kind} {list(image.shape)} of {image.dtype}, and must be uint8 "
            f"{'[C, H, W] with 1 or 3 channels' if kind == 'tensor' else '[H, W] or [H, W, 3]'}: longseq augments and "
            "normalises it; finished batches are for a LightningDataModule (data.datamodule)"
        )
    return Image.fromarray(np.ascontiguousarray(pixels.squeeze(2) if pixels.shape[2:] == (1,) else pixels))


def own_splits(keys: ImageDataKeys) -> Splits:
    """The splits of `data.train_set`, `data.val_set` and `data.test_set`; of these two any may be missing."""
    train = _open(keys, "train_set")
    kinds = {"validation": "val_set", "test": "test_set"}
    held_out: dict[str, Source] = {
        kind: _same_classes(_open(keys, key), train) for kind, key in kinds.items() if is_named(getattr(keys, key))
    }
    return finish_splits(train, held_out, keys.val_fraction, keys.split_seed, train.label)


def own_held_out(keys: ImageDataKeys, kind: str) -> Split | None:
    """The split `kind`, validation or test, by itself; None if it is a part of the training set."""
    for key in ("test_set", "val_set") if kind == "test" else ("val_set",):
        if is_named(getattr(keys, key)):
            return Split.whole(_open(keys, key))
    if not is_named(keys.train_set):
        raise ValueError(
            "data.test_set is no validation set: give split=test, or 'data.val_set={_target_: my_module.MyDataset}'"
        )
    return None


def _open(keys: ImageDataKeys, key: str) -> DatasetSource:
    node = getattr(keys, key)
    dataset = build_own(node, f"data.{key}")
    return DatasetSource(dataset, str(node[TARGET]), num_classes=keys.num_classes, multi_label=keys.multi_label)


def _same_classes(source: DatasetSource, train: DatasetSource) -> DatasetSource:
    if source.class_names != train.class_names:
        raise ValueError(
            f"{source.label} has the classes {_some(source.class_names)}, and the training set has "
            f"{_some(train.class_names)}: number them alike"
        )
    return source


def class_names_of(dataset: Any, label: str) -> list[str]:
    """The names of the classes in their order, empty if the Dataset does not tell them."""
    classes, numbers = getattr(dataset, "classes", None), getattr(dataset, "class_to_idx", None)
    if classes is None and isinstance(numbers, Mapping):
        if sorted(numbers.values()) != list(range(len(numbers))):
            raise ValueError(f"{label}.class_to_idx must number its classes from 0 to {len(numbers) - 1}")
        classes = sorted(numbers, key=numbers.__getitem__)
    if classes is None:
        return []
    if isinstance(classes, str) or not isinstance(classes, Sequence | np.ndarray) or not len(classes):
        raise ValueError(f"{label}.classes must be a list of names")
    return [str(name) for name in classes]


def _shape_of(values: np.ndarray) -> str:
    return f"{list(values.shape)} of {values.dtype}"


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{', ...' * (len(names) > 3)}"
