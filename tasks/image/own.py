"""A plug-in's torch Dataset or LightningDataModule as the data of image classification."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from PIL import Image
from torch import Tensor

from longseq.tasks.config import read
from longseq.tasks.data.labels import LabelError, find_weights
from longseq.tasks.data.loader import IMAGES, TARGETS, find_entry
from longseq.tasks.data.module import TaskData
from longseq.tasks.image.config import DATAMODULE, ImageDataKeys
from longseq.tasks.image.decoding import decoding, in_eight_bits, upright
from longseq.tasks.image.files import Layout, names_by_number
from longseq.tasks.image.info import DataInfo
from longseq.tasks.image.predict import ImageFiles
from longseq.tasks.training.targets import TARGET, build_own, is_named

_log = logging.getLogger(__name__)

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


class OwnDataModule(TaskData):
    """The loaders, hooks and state of the LightningDataModule that `data.datamodule` names.

    Batches are as in `longseq.tasks.ImageClassifier.read_batch`, with images that are ready for the model; `keys`
    (img_size, mean, std and more) state how they were prepared, for predictions and exported files. The class names are
    its attribute `classes` or `class_to_idx`; without names, their number is its `num_classes` or `data.num_classes`.
    Without a test loader, the validation is also the test. `setup` is called once for each stage (fit, validate, test).
    An evaluation (`stage` validate or test) on several processes is an error.
    """

    info_class = DataInfo
    inputs = ImageFiles
    splits = None

    def __init__(self, keys: ImageDataKeys, *, batch_size: int, stage: str = "fit") -> None:
        super().__init__()
        self.keys, self._one_process = keys, stage != "fit"
        self._build(batch_size, stage)
        if stage != "validate" and not self._has_test:
            _log.warning("%s has no test split: the validation images are also the test images", self.label)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], batch_size: int) -> OwnDataModule:
        return cls(read(ImageDataKeys, config["data"], "data"), batch_size=batch_size)

    def _build(self, batch_size: int, stage: str) -> None:
        node: Any = self.keys.datamodule
        self.own: LightningDataModule = build_own(node, f"data.{DATAMODULE}", {"batch_size": batch_size})
        self.label = str(node[TARGET])
        self.batch_size, self.eval_batch_size = batch_size, self.keys.eval_batch_size or batch_size
        self._stages: set[str | None] = set()
        if os.environ.get("LOCAL_RANK", "0") == "0":
            self.own.prepare_data()
        self.setup(stage)
        self._info = self._describe(stage)

    @property
    def info(self) -> DataInfo:
        return self._info

    @property
    def batches_per_epoch(self) -> None:
        """None: known when the run begins."""
        return

    @property
    def registered_parts(self) -> list[Any]:
        return [type(self.own)]

    def take_recipe(self, config: Mapping[str, Any], batch_size: int) -> None:
        if "batch_size" in inspect.signature(type(self.own)).parameters:
            self._build(batch_size, "fit")
        self.batch_size, self.eval_batch_size = batch_size, self.keys.eval_batch_size or batch_size

    def setup(self, stage: str | None = None) -> None:
        self.own.trainer = self.trainer
        if stage not in self._stages:
            self._stages.add(stage)
            self.own.setup(stage)  # type: ignore[arg-type]

    def teardown(self, stage: str) -> None:
        self._stages.discard(stage)
        self.own.teardown(stage)

    def state_dict(self) -> dict[str, Any]:
        return self.own.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.own.load_state_dict(state_dict)

    def on_exception(self, exception: BaseException) -> None:
        self.own.on_exception(exception)

    def train_dataloader(self) -> Any:
        loader = self.own.train_dataloader()
        size = getattr(loader, "batch_size", None)
        if isinstance(size, int) and size != self.batch_size:  # the learning rate belongs to the recipe's batch
            raise ValueError(f"{self.label} makes batches of {size}, and recipe.batch_size means {self.batch_size}")
        return loader

    def val_dataloader(self) -> Any:
        return self._evaluated("val_dataloader")

    def test_dataloader(self) -> Any:
        return self._evaluated("test_dataloader" if self._has_test else "val_dataloader")

    @property
    def _has_test(self) -> bool:
        return is_overridden("test_dataloader", self.own, LightningDataModule)

    def _evaluated(self, name: str) -> Any:
        if self._one_process and self.trainer is not None and self.trainer.world_size > 1:
            raise ValueError(f"{self.label} does not divide its samples among processes: give trainer.devices=1")
        return getattr(self.own, name)()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.own.on_before_batch_transfer(batch, dataloader_idx)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return self.own.transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """The batch as (images, labels), also for callbacks."""
        trainer: Any = self.trainer
        images, targets = trainer.lightning_module.read_batch(self.own.on_after_batch_transfer(batch, dataloader_idx))
        wanted = (self.keys.in_chans, self.keys.img_size, self.keys.img_size)
        if not isinstance(images, Tensor) or not images.is_floating_point() or images.shape[1:] != wanted:
            raise ValueError(f"{self.label}: images must be floats {['B', *wanted]}")
        return images, targets

    def _describe(self, stage: str) -> DataInfo:
        keys, names = self.keys, class_names_of(self.own, self.label)
        count = keys.num_classes or getattr(self.own, "num_classes", None) or len(names)
        if count < max(1, len(names)):
            raise ValueError(f"{self.label} has no class names: give it `classes`, or give data.num_classes=N")
        names += [str(index) for index in range(len(names), count)]
        sizes: dict[str, int | None] = {}
        if stage == "fit":
            dataset = getattr(self.own.train_dataloader(), "dataset", None)
            sizes = {"train": (len(dataset) if isinstance(dataset, Sized) else None) or keys.train_samples}
        weights = find_weights(keys.class_weights, [], 0, names, multi_label=keys.multi_label)
        return DataInfo.from_keys(keys, class_names=names, class_weights=weights, sizes=sizes)
