"""A plug-in's torch Datasets as the data of image classification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from longseq.tasks.data.labels import LabelError
from longseq.tasks.data.loader import IMAGES, TARGETS, find_entry
from longseq.tasks.image.config import ImageDataKeys
from longseq.tasks.image.decoding import decoding, in_eight_bits, upright
from longseq.tasks.image.files import Layout, names_by_number
from longseq.tasks.training.targets import TARGET, build_own, is_named

_SETS = {"train": "train_set", "validation": "val_set", "test": "test_set"}


class DatasetSource:
    """The samples of a Dataset: pairs (image, label), or dictionaries with the keys of `ImageClassifier.read_batch`.

    An image is a Pillow image, a uint8 array `[H, W]` or `[H, W, 3]`, or a uint8 tensor `[C, H, W]`. A label is a class
    number, or for several labels `[C]` of 0 and 1. Class names come from the Dataset's `classes` or `class_to_idx`, as
    in torchvision, and are numbers otherwise. If the Dataset has `targets`, each sample must agree with them.
    """

    def __init__(self, dataset: Any, label: str, *, num_classes: int | None, multi_label: bool) -> None:
        self.dataset, self.label, self.multi_label = dataset, label, multi_label
        self.class_names = class_names_of(dataset, label) or [str(index) for index in range(num_classes or 0)]
        if not self.class_names:
            raise ValueError(f"{label} has no class names: give it `classes`, or give data.num_classes=N")
        self.num_classes = max(len(self.class_names), num_classes or 0)
        known = getattr(dataset, "targets", None)
        self._targets = None
        if known is not None and not callable(known):
            self._targets = np.asarray(known).astype(np.float32 if multi_label else np.int64)
            wanted = (len(dataset), self.num_classes) if multi_label else (len(dataset),)
            if self._targets.shape != wanted:
                raise ValueError(f"{label}.targets {list(self._targets.shape)} must be {list(wanted)}")
        try:
            self.read(0)
        except LabelError as error:
            raise ValueError(f"{label}: {error}") from error

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, index: int) -> tuple[Image.Image, Any]:
        sample = self.dataset[index]
        if isinstance(sample, Mapping):
            image, target = find_entry(sample, IMAGES, "images"), find_entry(sample, TARGETS, "labels")
        else:
            image, target = sample
        label = self._label(target)
        if self._targets is not None and not np.array_equal(label, self._targets[index]):
            raise LabelError(f"its label is not targets[{index}], which is {self._targets[index].tolist()}")
        return as_image(image), label

    def path(self, index: int) -> str:
        return f"{self.label}#{index}"

    def targets(self) -> np.ndarray | None:
        return self._targets

    def _label(self, target: Any) -> Any:
        values = np.asarray(target)
        if self.multi_label:
            if values.shape != (self.num_classes,) or not np.isin(values, (0, 1)).all():
                raise LabelError(f"its labels must be {self.num_classes} numbers, each 0 or 1")
            return values.astype(np.float32)
        if values.size != 1 or not np.issubdtype(values.dtype, np.integer):
            raise LabelError(f"its label {target!r} must be the number of a class")
        number = int(values.reshape(()))
        if not 0 <= number < self.num_classes:
            raise LabelError(f"its label {number} is not among the classes 0 to {self.num_classes - 1}")
        return number


def as_image(image: Any) -> Image.Image:
    """An upright 8-bit image from a Pillow image, or a uint8 array `[H, W(, 1 or 3)]` or tensor `[C, H, W]`."""
    if isinstance(image, Image.Image):
        with decoding():
            return in_eight_bits(upright(image))
    pixels = image.permute(1, 2, 0).numpy() if isinstance(image, Tensor) and image.ndim == 3 else np.asarray(image)
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (1, 3)):
        raise ValueError(f"the image {list(pixels.shape)} of {pixels.dtype} must be uint8 with 1 or 3 channels")
    return Image.fromarray(np.ascontiguousarray(pixels.squeeze(2) if pixels.shape[2:] == (1,) else pixels))


class OwnLayout(Layout):
    """The Datasets of `data.train_set`, `data.val_set` and `data.test_set`; the last two may be missing."""

    def __init__(self, keys: ImageDataKeys) -> None:
        super().__init__(keys)
        self.names = {kind: kind for kind in _SETS}

    def find(self, kind: str, name: str) -> str | None:
        return _SETS[kind] if kind == "train" or is_named(getattr(self.keys, _SETS[kind])) else None

    def open(self, part: str, class_names: Sequence[str] | None = None) -> DatasetSource:
        node, keys = getattr(self.keys, part), self.keys
        dataset = build_own(node, f"data.{part}")
        return DatasetSource(dataset, str(node[TARGET]), num_classes=keys.num_classes, multi_label=keys.multi_label)


def class_names_of(dataset: Any, label: str) -> list[str]:
    """The class names in the order of their numbers; empty if the Dataset has none."""
    classes, numbers = getattr(dataset, "classes", None), getattr(dataset, "class_to_idx", None)
    if classes is None and isinstance(numbers, Mapping):
        if sorted(numbers.values()) != list(range(len(numbers))):
            raise ValueError(f"{label}.class_to_idx must number its classes from 0 to {len(numbers) - 1}")
        return names_by_number(numbers)
    return [] if classes is None else [str(name) for name in classes]
