"""A LightningDataModule of the user's own, which a plug-in defines, as the data of image classification."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Mapping, Sized
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from longseq.tasks.config import read
from longseq.tasks.data.given import given_loader
from longseq.tasks.data.labels import find_weights
from longseq.tasks.data.module import TaskData
from longseq.tasks.image.config import DATAMODULE, ImageDataKeys, per_channel
from longseq.tasks.image.datasets import ImageFiles
from longseq.tasks.image.info import DataInfo
from longseq.tasks.image.own_dataset import class_names_of
from longseq.tasks.training.targets import TARGET, build_own

_log = logging.getLogger(__name__)


class OwnDataModule(TaskData):
    """The loaders, hooks and state of the LightningDataModule that `data.datamodule` names.

    Its batches are those of `longseq.tasks.ImageClassifier.read_batch`, with images that are ready for the model:
    `keys` (img_size, mean, std and more) say how they were made, for predictions and exported files. The names of the
    classes are its attribute `classes` or `class_to_idx`; without names, their number is its `num_classes` or
    `data.num_classes`. Without a test loader the validation is also the test. `setup` is called once for each stage.
    """

    info_class = DataInfo
    inputs = ImageFiles

    splits = None

    def __init__(self, keys: ImageDataKeys, *, batch_size: int, alone: bool = False) -> None:
        super().__init__()
        self.keys, self._alone = keys, alone
        self._build(batch_size)

    @classmethod
    def open(cls, keys: ImageDataKeys, *, batch_size: int, stage: str, alone: bool = False) -> OwnDataModule:
        """The data module, set up for `stage`, with the info of its data; with `alone` it is for one process."""
        datamodule = cls(keys, batch_size=batch_size, alone=alone)
        datamodule._prepare(stage)
        if stage != "validate" and not datamodule._has_test:
            _log.warning("%s has no test split: the validation images are also the test images", datamodule.label)
        return datamodule

    @classmethod
    def from_config(cls, config: Mapping[str, Any], batch_size: int) -> OwnDataModule:
        return cls.open(read(ImageDataKeys, config["data"], "data"), batch_size=batch_size, stage="fit")

    def adopt(self, info: DataInfo) -> None:
        """Take the info of a trained model's data, which this data fits."""
        self._info = info

    def _build(self, batch_size: int) -> None:
        node: Any = self.keys.datamodule
        self.own: LightningDataModule = build_own(node, f"data.{DATAMODULE}", {"batch_size": batch_size})
        self.own.trainer = self.trainer
        self.label = str(node[TARGET])
        self.batch_size = batch_size
        self.eval_batch_size = self.keys.eval_batch_size or batch_size
        self._takes_batch = "batch_size" in inspect.signature(type(self.own)).parameters
        self._prepared = False
        self._stages: set[str | None] = set()

    def _prepare(self, stage: str) -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            self.prepare_data()
        self.setup(stage)
        self._info = self._describe(stage)

    @property
    def trainer(self) -> Any:  # type: ignore[override]
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        self._trainer = trainer
        if "own" in vars(self):
            self.own.trainer = trainer

    @property
    def info(self) -> DataInfo:
        return self._info

    @property
    def batches_per_epoch(self) -> None:
        """None: the loader knows it when the run begins."""
        return

    @property
    def registered_parts(self) -> list[Any]:
        return [type(self.own)]

    def take_recipe(self, config: Mapping[str, Any], batch_size: int) -> None:
        if self._takes_batch:
            self._build(batch_size)
            self._prepare("fit")
        self.batch_size, self.eval_batch_size = batch_size, self.keys.eval_batch_size or batch_size

    def prepare_data(self) -> None:
        if not self._prepared:
            self._prepared = True
            self.own.prepare_data()

    def setup(self, stage: str | None = None) -> None:
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
        loader = given_loader(self.own, "train_dataloader", self.label)
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
        if self._alone and self.trainer is not None and self.trainer.world_size > 1:
            raise ValueError(f"{self.label} does not divide its samples among processes: give trainer.devices=1")
        return given_loader(self.own, name, self.label)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.own.on_before_batch_transfer(batch, dataloader_idx)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return self.own.transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """The batch as the pair that the module reads, which callbacks see, too. ValueError for other images."""
        batch = self.own.on_after_batch_transfer(batch, dataloader_idx)
        module: Any = self.trainer.lightning_module
        images, targets = module.read_batch(batch)
        wanted = (self.keys.in_chans, self.keys.img_size, self.keys.img_size)
        if not isinstance(images, Tensor) or not images.is_floating_point() or images.shape[1:] != wanted:
            raise ValueError(f"{self.label}: images must be floats {['B', *wanted]}")
        if len(targets) != len(images):
            raise ValueError(f"{self.label}: a batch has {len(images)} images and {len(targets)} labels")
        return images, targets

    def _describe(self, stage: str) -> DataInfo:
        keys, names = self.keys, class_names_of(self.own, self.label)
        count = keys.num_classes or getattr(self.own, "num_classes", None) or len(names)
        if count < max(1, len(names)):
            raise ValueError(f"{self.label} does not know its classes: give it `classes`, or give data.num_classes=N")
        names += [str(index) for index in range(len(names), count)]
        sizes: dict[str, int | None] = {}
        if stage == "fit":
            dataset = getattr(given_loader(self.own, "train_dataloader", self.label), "dataset", None)
            sizes = {"train": (len(dataset) if isinstance(dataset, Sized) else None) or keys.train_samples}
        return DataInfo(
            class_names=names,
            num_classes=count,
            img_size=keys.img_size,
            in_chans=keys.in_chans,
            mean=per_channel("mean", keys.mean, keys.in_chans),
            std=per_channel("std", keys.std, keys.in_chans),
            interpolation=keys.interpolation,
            crop_pct=keys.crop_pct,
            multi_label=keys.multi_label,
            class_weights=find_weights(keys.class_weights, [], 0, names, multi_label=keys.multi_label),
            sizes=sizes,
        )
