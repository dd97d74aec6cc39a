"""The data module of image classification: sources, splits, loaders, and what the model must know of the data."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from timm.data.readers.reader_wds import ReaderWds
from torch import Tensor

from longseq.tasks.data.batch import Batch
from longseq.tasks.data.labels import count_classes, find_weights, name_some, rarest_labels, wrong_class
from longseq.tasks.data.loader import BatchLoader, TrainingLoader
from longseq.tasks.data.module import TaskData, refuse_training_keys
from longseq.tasks.data.place import find_place, follow
from longseq.tasks.data.prefetch import Prefetch, separate_queues
from longseq.tasks.data.sampler import BalancedSampler, EvaluationSampler, TrainingSampler
from longseq.tasks.image.augmentation import Augmentation
from longseq.tasks.image.config import LABEL_KEYS, OWN, OWN_KEYS, ImageDataKeys, ImageKeys, per_channel
from longseq.tasks.image.datasets import (
    EvaluationBatches,
    ImageFiles,
    ReadInClasses,
    StreamBatches,
    StreamLoader,
    TrainingBatches,
    Unreadable,
)
from longseq.tasks.image.draws import EvaluationDraws, TrainingDraws
from longseq.tasks.image.encoded import (
    DeviceTransform,
    EncodedEvaluationBatches,
    EncodedTrainingBatches,
    decoded_tensors,
    has_nvjpeg,
)
from longseq.tasks.image.folder import AS_TABLE
from longseq.tasks.image.info import DataInfo
from longseq.tasks.image.own_datamodule import OwnDataModule
from longseq.tasks.image.own_dataset import DatasetSource, own_held_out, own_splits
from longseq.tasks.image.ranges import warn_of_narrow_ranges
from longseq.tasks.image.repeats import warn_of_repeats
from longseq.tasks.image.shard_streams import check_shards, file_sizes
from longseq.tasks.image.shards import read_manifest
from longseq.tasks.image.sources import (
    SOURCES,
    Split,
    Splits,
    check_class_map,
    class_numbers,
    classes_at_hand,
    held_out_shards,
    held_out_split,
    holds_jpegs,
    is_stream,
    names_by_number,
    open_stream,
    require_arrays,
    require_folder,
    require_one_class_list,
    require_readable,
    require_same_numbers,
    shard_splits,
    tell_joined,
    timm_splits,
)
from longseq.tasks.image.split_folders import SPLIT_KEYS
from longseq.tasks.image.table import UnknownLabel, find_table, held_out_table, table_splits
from longseq.tasks.image.transforms import evaluation_transform, normalize, training_transform
from longseq.tasks.training.options import read, spell
from longseq.tasks.training.processes import usable_cores
from longseq.tasks.training.targets import is_named

_log = logging.getLogger(__name__)

_MOST_WORKERS = 16
_FILES_A_WORKER = 4  # of a stream, where they are of unequal sizes
_UNEVEN = 1.25  # times the smallest file
_DECODED_TOGETHER = 3  # batches
_AHEAD = 6  # batches that are finished before they are asked for

_BALANCED = "data.sampling=balanced"

# Keys of training alone.
_EVALUATED = {"class_weights": "none", "sampling": None}
# Keys that decide which of the training images are set apart for validation.
_DIVIDING = ("train_split", "val_fraction", "split_seed", "multi_label", *LABEL_KEYS)


class ImageDataModule(TaskData):
    """Images of one source, augmented for training, with fixed sets for validation and test.

    `source` is digits, fashion_mnist, cifar10, folder (a folder or a .tar with class folders), shards
    (see `longseq.tasks.image.shards`), csv (tables of images,
    see `longseq.tasks.image.table`), own (see `longseq.tasks.image.own_dataset`), or a name that timm reads: hfds/NAME,
    torch/NAME, and the streams hfids/NAME and wds/NAME. After the transfer to the device, batches are (images float32
    [B, C, S, S] normalised, targets int64 [B]), with `multi_label` targets float32 [B, classes] of 0 and 1; before it,
    images are uint8. `batch_size` is the training batch of one device. Training draws are functions of (seed, epoch,
    sample, repeat). `split_seed` chooses the validation images if the source has none, so that runs with different
    seeds share them.

    Of classes of different sizes, `class_weights` weights the losses (see `longseq.tasks.data.labels.find_weights`),
    and `sampling=balanced` draws each class equally often (see `longseq.tasks.data.sampler.BalancedSampler`).
    ValueError for errors that the user can correct.
    """

    info_class = DataInfo
    inputs = ImageFiles

    def __init__(
        self,
        keys: ImageDataKeys,
        *,
        batch_size: int,
        seed: int = 0,
        augment: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.keys = keys = read(ImageDataKeys, vars(keys), "data")
        self.root = None if keys.root is None else os.path.expanduser(keys.root)
        self.split_names = {"train": keys.train_split, "validation": keys.val_split, "test": keys.test_split}
        self.mean, self.std = (per_channel(name, getattr(keys, name), keys.in_chans) for name in ("mean", "std"))
        self.batch_size, self.eval_batch_size = batch_size, keys.eval_batch_size or batch_size
        self.seed = seed
        self.augmentation, self.repeats = _augmentation(augment or {}, batch_size)
        self._unreadable = Unreadable(keys.on_error)
        self._told: set[str] = set()  # what a warning has told of a stream
        self._info: DataInfo | None = None
        self._splits: Splits | None = None
        self._order: Sequence[str] | None = None  # of the classes of a trained model
        if keys.decode != "cpu":
            separate_queues()
        if keys.decode == "gpu":
            gpu_of(None)
            if is_stream(keys.source):
                raise ValueError(f"data.source={keys.source} is a stream, which the CPU decodes: give data.decode=cpu")

    @classmethod
    def prepare_process(cls, config: Mapping[str, Any]) -> None:
        if config["data"].get("decode", "cpu") != "cpu":
            separate_queues()

    @classmethod
    def require_files(cls, config: Mapping[str, Any]) -> None:
        keys = read(ImageDataKeys, config["data"], "data")
        root = None if keys.root is None else os.path.expanduser(keys.root)
        if keys.source == "folder":
            require_folder(root)
        elif keys.source == "csv":
            find_table(root, "train", keys.train_split)
        elif keys.source == "shards":
            read_manifest(root)
        else:
            require_arrays(keys.source, root, download=keys.download)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], batch_size: int) -> Any:
        """The data of a configuration: an `ImageDataModule`, or an `OwnDataModule`."""
        ImageKeys().check(config)
        augment = config["recipe"]["augment"]
        keys = read(ImageDataKeys, config["data"], "data")
        if is_named(keys.datamodule):
            return OwnDataModule.from_config(config, batch_size)
        if keys.train_samples is not None and not is_stream(keys.source):
            raise ValueError(
                f"data.train_samples={keys.train_samples} has no effect: it is of streams, and "
                f"data.source={keys.source} counts its images itself; leave it out"
            )
        if keys.decode == "gpu" and (config.get("trainer") or {}).get("accelerator") == "cpu":
            gpu_of(torch.device("cpu"))
        datamodule = cls(keys, batch_size=batch_size, seed=config["seed"], augment=augment)
        datamodule.prepare_data()
        datamodule.setup()
        return datamodule

    def keep_classes(self, trained: DataInfo) -> None:
        own, its = self.info.class_names, trained.class_names
        if self.keys.source in ("folder", "csv", "shards") and own != its and set(own) == set(its):
            self._order, self._splits, self._info = its, None, None
            self.setup()

    def take_recipe(self, config: Mapping[str, Any], batch_size: int) -> None:
        self.batch_size, self.eval_batch_size = batch_size, self.keys.eval_batch_size or batch_size
        self.augmentation, self.repeats = _augmentation(config["recipe"]["augment"], batch_size)

    @classmethod
    def for_evaluation(
        cls,
        config: Mapping[str, Any],
        changes: Mapping[str, Any],
        *,
        split: str,
        trained: DataInfo,
        batch_size: int,
    ) -> Any:
        if "data" not in config and "source" not in changes:
            raise ValueError("the model does not say where its data lie: give data.source=folder data.root=FOLDER")
        own = dict(config.get("data") or trained.to_keys())
        if own.get("decode") == "gpu":  # the run's, which another machine need not have
            own["decode"] = "auto"
        if changes.get("source", own.get("source")) != OWN:
            own = {key: value for key, value in own.items() if key not in OWN_KEYS}
        if changes.get("source", own.get("source")) != own.get("source"):  # how the run's source names labels
            own = {key: value for key, value in own.items() if key not in LABEL_KEYS}
        measured = {**own, **changes, **_EVALUATED}
        labels = None  # of a table, by the numbers of the model's classes
        if measured["source"] == "csv" and changes.get("class_map") is not None:
            labels = _labels_by_number(measured.pop("class_map"), trained.class_names)
        keys = read(ImageDataKeys, measured, "data")
        refuse_training_keys(changes, _EVALUATED)
        if "train_samples" in changes:
            raise ValueError(
                f"data.train_samples={keys.train_samples} has no effect: it counts the training images of a stream, of "
                "which evaluation reads none; leave it out"
            )
        mapped = changes.get("class_map") is not None
        if is_named(keys.datamodule):
            stage = {"val": "validate", "test": "test"}[split]
            given = OwnDataModule.open(keys, batch_size=keys.eval_batch_size or batch_size, stage=stage, alone=True)
            given.adopt(_adopt_classes(given.info, trained, _numbers(given.info) if mapped else None))
            return given
        datamodule = cls(keys, batch_size=batch_size, seed=config.get("seed", 0))
        foreign = keys.source != own.get("source") or _absolute(datamodule.root) != _absolute(own.get("root"))
        datamodule.setup_evaluation(split, trained.class_names, foreign=foreign, labels=labels)
        if keys.source == own.get("source") and datamodule.splits is not None:
            run = cls(read(ImageDataKeys, {**own, **_EVALUATED, "root": keys.root}, "data"), batch_size=batch_size)
            run._order = trained.class_names
            if not foreign:
                datamodule._refuse_trained_images(run, split)
            elif datamodule._measures_all_of(run, trained, split):
                _log.warning(
                    "data.root=%s holds the images of the training in another place: those that were set apart are "
                    "measured, and not all of them",
                    keys.root,
                )
                datamodule = cls(keys, batch_size=batch_size, seed=config.get("seed", 0))
                datamodule.setup_evaluation(split, trained.class_names, foreign=False, labels=labels)
                datamodule._refuse_trained_images(run, split)
        source = datamodule.splits and datamodule.splits.test.source
        numbers = getattr(source, "class_to_idx", None) or _numbers(datamodule.info)
        datamodule._info = _adopt_classes(datamodule.info, trained, numbers if mapped else None)
        return datamodule

    @property
    def info(self) -> DataInfo:
        """What models, checkpoints and exported files need to know of the data; available after `setup`."""
        assert self._info is not None, "call setup() first"
        return self._info

    @property
    def splits(self) -> Splits | None:
        """The images of each split, by index; None of a stream, and before `setup`."""
        return self._splits

    @property
    def files(self) -> dict[str, list[str]]:
        if (splits := self._splits) is None:
            return {}
        held_out = {"val": splits.validation} | ({} if splits.test is splits.validation else {"test": splits.test})
        found = {stage: split.files() for stage, split in {"train": splits.train, **held_out}.items()}
        return {stage: files for stage, files in found.items() if files is not None}

    @property
    def unreadable(self) -> list[str]:
        """Paths of the images that this process could not read so far."""
        return self._unreadable.paths

    @property
    def unreadable_reasons(self) -> dict[str, str]:
        """Why each of these images could not be read."""
        return dict(self._unreadable.reasons)

    @property
    def num_unreadable(self) -> int:
        return len(self.unreadable)

    @property
    def registered_parts(self) -> list[Any]:
        if self._splits is not None and isinstance(self._splits.train.source, DatasetSource):
            return [type(self._splits.train.source.dataset)]
        return [SOURCES[self.keys.source]] if self.keys.source in SOURCES else []

    @property
    def batches_per_epoch(self) -> int:
        """Training batches of one device in an epoch."""
        return len(self.train_dataloader())

    def prepare_data(self) -> None:
        """Download the data if data.download=true, in one process of each machine."""
        if self.keys.download and os.environ.get("LOCAL_RANK", "0") == "0" and not is_stream(self.keys.source):
            self._splits = self._splits or self._open_splits()

    def setup(self, stage: str | None = None) -> None:
        """Open the data; `stage` has no effect, and a second call does nothing."""
        if self._info is not None:
            return
        keys = self.keys
        sizes: dict[str, int | None]
        if is_stream(keys.source):
            _log.warning(
                "data.source=%s is a stream: its order is its own, so a run that goes on within an epoch reads it from "
                "the start for the rest of it; hfds/, a folder or a tar resume exactly",
                keys.source,
            )
            sizes, class_names = self._describe_stream(["train", "validation", "test"])
        else:
            splits = self._splits = self._splits or self._open_splits()
            sizes = {"train": len(splits.train), "val": len(splits.validation), "test": len(splits.test)}
            class_names = list(splits.train.source.class_names)
            self._check_classes(splits.train)
            warn_of_repeats(splits)
            warn_of_narrow_ranges(splits.train)
            require_readable(splits.validation, "validation")
            if splits.test is not splits.validation:
                require_readable(splits.test, "test")
        if not keys.multi_label and (len(class_names) == 1 or keys.num_classes == 1):
            raise ValueError(
                f"{self.root or keys.source} has one class alone ({''.join(class_names) or '0'}), and nothing to tell "
                "apart: give a folder with one folder per class"
            )
        if keys.num_classes is not None and keys.num_classes < len(class_names):
            raise ValueError(
                f"data.num_classes={keys.num_classes} is less than the {len(class_names)} classes of the data: "
                "leave it null, or pick classes with data.class_map"
            )
        self._info = self._describe(class_names, sizes)
        if keys.sampling == "balanced":  # a source that cannot do it is told before a run begins
            self._training_targets(_BALANCED, self._info.num_classes)

    def setup_evaluation(
        self, split: str, class_names: Sequence[str], *, foreign: bool, labels: Sequence[str] | None = None
    ) -> None:
        """Open only what an evaluation of `split` (val, test) needs, with the class numbers of a trained model.

        Folders, and sources that timm reads by index, then need no training images. `foreign` means that the model was
        not trained on this data: of a folder with class folders only, all images are then evaluated, and nothing is
        split off. `labels` are those of a table by the numbers of the classes, if it has others than the model.
        """
        self._order = class_names
        if self.keys.source == "csv":
            kind = {"val": "validation", "test": "test"}[split]
            name = self.split_names[kind]
            labels = list(class_names if labels is None else labels)
            table = _open_measured(self.keys, self.root, kind, name, labels, whole=foreign)
            if table is not None:
                self._splits = Splits(Split(table.source, table.indices[:0]), table, table)
                self._info = self._describe(labels, {split: len(table)})
                require_readable(table, split)
                return
        if self.keys.source == "shards":
            kind = {"val": "validation", "test": "test"}[split]
            options: dict[str, Any] = {"multi_label": self.keys.multi_label, "order": class_names}
            shards = held_out_shards(self.root, kind, whole=foreign, **options)
            if shards is not None:
                self._splits = Splits(Split(shards.source, shards.indices[:0]), shards, shards)
                self._info = self._describe(shards.source.class_names, {split: len(shards)})
                require_readable(shards, split)
                return
        if self.keys.source == OWN:
            found = own_held_out(self.keys, {"val": "validation", "test": "test"}[split])
            if found is not None:
                self._splits = Splits(Split(found.source, found.indices[:0]), found, found)
                self._info = self._describe(found.source.class_names, {split: len(found)})
                return
        if self.keys.source == "folder" or self.keys.source.startswith(("hfds/", "torch/")):
            held_out = held_out_split(
                self.keys.source,
                self.root,
                kind={"val": "validation", "test": "test"}[split],
                names=self.split_names,
                class_names=class_names,
                class_map=self.keys.class_map,
                download=self.keys.download,
                whole=foreign,
            )
            if held_out is not None:
                numbered = self.keys.source == "folder" and self.keys.class_map is None
                own = list(class_names) if numbered else held_out.source.class_names
                self._splits = Splits(Split(held_out.source, held_out.indices[:0]), held_out, held_out)
                self._info = self._describe(own, {split: len(held_out)})
                require_readable(held_out, split)
                return
        if is_stream(self.keys.source):
            sizes, names = self._describe_stream([{"val": "validation", "test": "test"}[split]])
            self._info = self._describe(names, sizes)
            return
        self.prepare_data()
        self.setup()

    def _measured(self, split: str) -> Split:
        assert self._splits is not None
        return {"val": self._splits.validation, "test": self._splits.test}[split]

    def _refuse_trained_images(self, run: ImageDataModule, split: str) -> None:
        """ValueError, in one line, for images of `split` that were for training by the keys of the run."""
        assert self._splits is not None
        changed = [key for key in _DIVIDING if getattr(self.keys, key) != getattr(run.keys, key)]
        if not changed or not len(self._splits.train):  # the split has images of its own
            return
        measured, trained = self._measured(split), run._open_splits().train
        known = {trained.source.path(index) for index in trained.indices}
        if count := sum(measured.source.path(index) in known for index in measured.indices):
            key = changed[0]
            raise ValueError(
                f"data.{key}={spell(getattr(self.keys, key))} sets other images apart than the run did "
                f"({spell(getattr(run.keys, key))}): {count} of the {len(measured)} of split={split} were trained on; "
                "leave it out"
            )

    def _measures_all_of(self, run: ImageDataModule, trained: DataInfo, split: str) -> bool:
        """True if the images of `split` are all that a run has had, those for training and those it set apart."""
        sizes = [trained.sizes.get(stage) for stage in ("train", "val")]
        known = trained.checksums.get("train")
        if known is None or None in sizes or len(self._measured(split)) != sum(filter(None, sizes)):
            return False
        return known == [run._open_splits().train.checksum(sizes=True)]

    def _check_classes(self, train: Split) -> None:
        """ValueError for training images of one class; a warning names the classes that have none."""
        present = classes_at_hand(train)
        if present is None:
            return
        if len(present) < 2:
            raise ValueError(
                f"the training images of {train.source.label} are of one class alone, "  # type: ignore[attr-defined]
                f"{train.source.class_names[present[0]]}, and there is nothing to tell apart: add images of another"
                + (f", or, if no folder tells the class, {AS_TABLE}" if self.keys.source == "folder" else "")
            )
        names = [] if self.keys.multi_label else train.source.class_names
        if absent := [name for number, name in enumerate(names) if number not in present]:
            _log.warning("no training image has the class %s, which is never learnt", name_some(absent))

    def _describe(self, class_names: list[str], sizes: dict[str, int | None]) -> DataInfo:
        class_names = class_names + [str(index) for index in range(len(class_names), self.keys.num_classes or 0)]
        if not class_names:
            raise ValueError(f"data.source={self.keys.source} does not tell its classes: give data.num_classes=N")
        check_class_map(self.keys.source, self.keys.class_map, class_names)
        known: dict[str, int | None] = {}
        if (splits := self._splits) is not None:
            held_out = (("val", splits.validation), ("test", splits.test))
            known = {stage: split.checksum() for stage, split in held_out if stage in sizes}
            known |= {"train": splits.train.checksum(sizes=True)} if "train" in sizes else {}
        return DataInfo(
            class_names=class_names,
            num_classes=len(class_names),
            img_size=self.keys.img_size,
            in_chans=self.keys.in_chans,
            mean=self.mean,
            std=self.std,
            interpolation=self.keys.interpolation,
            crop_pct=self.keys.crop_pct,
            multi_label=self.keys.multi_label,
            class_weights=self._find_weights(class_names),
            sizes=sizes,
            checksums={stage: [found] for stage, found in known.items() if found is not None},
        )

    def _find_weights(self, class_names: list[str]) -> list[float] | None:
        choice, counts, samples = self.keys.class_weights, [0] * len(class_names), 0
        if choice == "balanced":
            targets = self._training_targets("data.class_weights=balanced", len(class_names))
            counts, samples = count_classes(targets, len(class_names)), len(targets)
        return find_weights(choice, counts, samples, class_names, multi_label=self.keys.multi_label)

    def _training_targets(self, key: str, classes: int) -> np.ndarray:
        """The classes or labels of the training images.

        ValueError, in one line, if finding them would take reading the images, and for one that is not among `classes`.
        """
        targets = None if self._splits is None else self._splits.train.source.targets()
        if targets is None or self._splits is None:
            raise ValueError(
                f"{key}: the classes of data.source={self.keys.source} are not known without reading all images: give "
                "data.class_weights={NAME: NUMBER}"
            )
        train = self._splits.train
        found = targets[train.indices]
        if (wrong := wrong_class(found, classes)) is not None:
            raise ValueError(
                f"{train.source.path(int(train.indices[wrong]))}: the label {found[wrong]} is not among the classes 0 "
                f"to {classes - 1}"
            )
        return found

    def _sampler(self, train: Split) -> TrainingSampler:
        options: dict[str, Any] = {"seed": self.seed, "repeats": self.repeats, **find_place(self.trainer)._asdict()}
        if self.keys.sampling is None:
            return TrainingSampler(len(train), self.batch_size, **options)
        targets = self._training_targets(_BALANCED, self.info.num_classes)
        return BalancedSampler(rarest_labels(targets), self.batch_size, **options)

    def train_dataloader(self) -> TrainingLoader | StreamLoader:
        if self._splits is None:
            if self.repeats > 1 and "repeats" not in self._told:
                self._told.add("repeats")
                _log.warning(
                    "recipe.augment.repeats=%d has no effect on a stream, and data.source=%s is one: give 1, or a "
                    "source that is read by index",
                    *(self.repeats, self.keys.source),
                )
            transform = training_transform(self.info, self.augmentation)
            return self._stream_loader("train", transform, training=True)
        split = self._splits.train
        sampler = self._sampler(split)
        options = self._loader_options()
        batches: TrainingBatches
        if (device := self._decoding_device(split)) is None:
            batches = TrainingBatches(split, training_transform(self.info, self.augmentation), self.seed)
        else:
            draws = self._training_draws()
            batches = EncodedTrainingBatches(split, draws, self.seed)
            finish = DeviceTransform(split, self.info, device, seed=self.seed, fill=draws.fill, exact=False)
            options |= _finishing(finish, options)
        batches.read, batches.info = ReadInClasses(batches.read, self.info.num_classes), self.info
        return TrainingLoader(batches, sampler, **options, **follow(self.trainer))

    def val_dataloader(self) -> BatchLoader:
        return self._evaluation_loader("validation")

    def test_dataloader(self) -> BatchLoader:
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> BatchLoader:
        """The test images, or without a test split the validation images, for Lightning's `Trainer.predict`.

        They are in the order of `splits.test`, those of a stream in its own. An image that cannot be read has no
        prediction: it is logged and listed in `unreadable`, or stops the run with `on_error=raise`.
        """
        return super().predict_dataloader()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> tuple[Tensor, Tensor]:
        """Normalise on the device: the host then transfers a quarter of the bytes."""
        images, targets = batch
        return normalize(images, self.info), targets

    def _open_splits(self) -> Splits:
        keys = self.keys
        options: dict[str, Any] = {
            "download": keys.download,
            "val_fraction": keys.val_fraction,
            "split_seed": keys.split_seed,
        }
        if keys.source == "shards":
            options = {"val_fraction": keys.val_fraction, "split_seed": keys.split_seed, "order": self._order}
            return shard_splits(self.root, multi_label=keys.multi_label, **options)
        if keys.source == "csv":
            return table_splits(keys, self.root, self.split_names, self._order)
        if keys.source == OWN:
            return own_splits(keys)
        if keys.source in SOURCES:
            return SOURCES[keys.source](self.root, **options)
        if keys.source != "folder" and "/" not in keys.source:
            raise ValueError(
                f"data.source={keys.source} is unknown: choose {', '.join(SOURCES)}, folder, shards, csv, hfds/NAME, "
                "hfids/NAME, wds/NAME or torch/NAME"
            )
        options |= {"names": self.split_names, "class_map": keys.class_map, "order": self._order}
        return timm_splits(keys.source, self.root, **options)

    def _evaluation_loader(self, kind: str) -> BatchLoader:
        transform = evaluation_transform(self.info)
        if self._splits is None:
            return self._stream_loader(kind, transform, training=False)
        split: Split = getattr(self._splits, kind)
        rank, world_size, _ = find_place(self.trainer)
        sampler = EvaluationSampler(len(split), self.eval_batch_size, rank=rank, world_size=world_size)
        options = self._loader_options()
        batches: EvaluationBatches
        if (device := self._decoding_device(split)) is None:
            batches = EvaluationBatches(split, transform, self.info)
        else:
            batches = EncodedEvaluationBatches(split, EvaluationDraws(self.info), self.info)
            options |= _finishing(DeviceTransform(split, self.info, device), options)
        batches.read = ReadInClasses(batches.read, self.info.num_classes)
        return BatchLoader(batches, sampler, **options)

    def _training_draws(self) -> TrainingDraws:
        try:
            return TrainingDraws(self.info, self.augmentation)
        except ValueError as error:
            raise ValueError(f"data.decode=gpu: {error}; give data.decode=cpu") from error

    def _decoding_device(self, split: Split) -> torch.device | None:
        """The GPU that decodes and transforms the images of a split; None: the data workers do."""
        if self.keys.decode == "cpu":
            return None
        device: torch.device | None = self.trainer.strategy.root_device if self.trainer else None
        if self.keys.decode == "gpu":
            device = gpu_of(device)
            if device.type == "cuda" and not has_nvjpeg(device):
                raise ValueError("data.decode=gpu: this torchvision decodes no JPEG on a GPU; give data.decode=cpu")
            return device
        if device is None or device.type != "cuda" or not holds_jpegs(split) or not has_nvjpeg(device):
            return None
        try:
            TrainingDraws(self.info, self.augmentation)
        except ValueError:
            return None
        return device

    def _stream_split(self, kind: str) -> str:
        name = self.split_names[kind] or self.split_names["validation"]
        if name is None:
            raise ValueError(
                f"data.source={self.keys.source} is a stream and cannot be split: give data.val_split=NAME"
            )
        return name

    def _stream(self, kind: str, training: bool) -> Any:
        keys = self.keys
        return open_stream(
            keys.source,
            self.root,
            name=self._stream_split(kind),
            training=training,
            batch_size=self.batch_size,
            seed=self.seed,
            class_map=keys.class_map,
            num_samples=keys.train_samples if training else None,
            # Of these, earlier versions called the classes by their numbers, and so do their runs.
            named=keys.num_classes is None,
        )

    def _describe_stream(self, kinds: Sequence[str]) -> tuple[dict[str, int | None], list[str]]:
        """The sizes of splits and the class names, as far as the reader knows them; the classes are of the first."""
        require_one_class_list(self.keys.source, self.root, [self._stream_split(kind) for kind in kinds])
        for kind in kinds if "train" in kinds else ():
            if kind != "train" and self.split_names[kind] == self.split_names["train"]:
                _log.warning(
                    "data.%s and data.train_split are the same images of data.source=%s (%s): figures of images that "
                    "were trained on flatter; name another split",
                    *(SPLIT_KEYS[kind], self.keys.source, self.split_names[kind]),
                )
        readers = {kind: self._stream(kind, training=kind == "train").reader for kind in kinds}
        # Without a split of its own, the test is that of the validation.
        for split, reader in {self._stream_split(kind): reader for kind, reader in readers.items()}.items():
            if isinstance(reader, ReaderWds):
                check_shards(reader, split, self.keys.on_error)
        names = {"train": "train", "validation": "val", "test": "test"}
        sizes = {
            names[kind]: reader.num_samples if reader.num_samples > 0 else None for kind, reader in readers.items()
        }
        classes: Mapping[Any, int] = readers[kinds[0]].class_to_idx
        class_names = names_by_number(classes)
        for kind in kinds[1:]:
            own = names_by_number(readers[kind].class_to_idx)
            require_same_numbers(own, class_names, self.keys.source, kind)
        tell_joined(classes, self.keys.source)
        return sizes, class_names

    def _stream_loader(self, kind: str, transform: Any, training: bool) -> StreamLoader:
        rank, world_size, _ = find_place(self.trainer)
        stream = self._stream(kind, training)
        options = self._loader_options()
        if (shards := getattr(stream.reader, "shards", None)) is not None:
            sizes, workers = file_sizes(stream.reader, self._stream_split(kind)), options["num_workers"]
            fitted = self._fit_workers(workers, shards, sizes, world_size) if training else min(workers, shards)
            options["num_workers"] = fitted
        batches = StreamBatches(
            stream,
            transform,
            batch_size=self.batch_size if training else self.eval_batch_size,
            training=training,
            seed=self.seed,
            rank=rank,
            world_size=world_size,
        )
        batches.info = self.info
        is_counted = rank == 0 and isinstance(stream.reader, ReaderWds)
        return StreamLoader(
            batches,
            **options,
            epoch=lambda: self.trainer.current_epoch if self.trainer else 0,
            finished=partial(self._compare_count, self._stream_split(kind), stream.reader) if is_counted else None,
        )

    def _compare_count(self, split: str, reader: Any, seen: int) -> None:
        """Tell, once for each split, where its shards hold other samples than their number that was given."""
        told = reader.num_samples
        if told <= 0 or seen == told or f"split {split}" in self._told:
            return
        self._told.add(f"split {split}")
        message = f"the split {split} says {told} images, and its shards hold {seen}"
        if seen < told and self.keys.on_error == "raise":
            raise ValueError(f"{message}: is a shard cut off? data.on_error=skip measures those that are there")
        _log.warning("%s: is a shard cut off?" if seen < told else "%s", message)

    def _fit_workers(self, workers: int, shards: int, sizes: Sequence[int], world_size: int) -> int:
        """The data workers of a stream of `shards` files: one without a file gives none of the images of an epoch.

        Each takes an equal part of an epoch from files of its own, over and over again. So of files of unequal `sizes`
        it needs several, or the images of a small file come more often than others.
        """
        source = self.keys.source
        whole = source.lower().startswith("hfids/") and shards % world_size  # each device reads a part of every file
        own = shards if whole else shards // world_size
        if own == 0:
            raise ValueError(
                f"data.source={source} has {shards} file(s) for {world_size} devices, each of which reads files of its "
                "own: give more files, or fewer devices"
            )
        if workers > own and self.keys.num_workers is not None:
            raise ValueError(
                f"data.num_workers={workers}: data.source={source} has {shards} file(s), and each worker of a device "
                f"reads files of its own: give data.num_workers={own}"
            )
        fitted, even = min(workers, own), max(1, own // _FILES_A_WORKER)
        if not sizes or max(sizes) <= _UNEVEN * min(sizes):
            return fitted
        if self.keys.num_workers is None:
            fitted = min(fitted, even)
        is_uneven = own < _FILES_A_WORKER * max(1, fitted) and max(1, fitted) * world_size > 1
        if is_uneven and "sizes" not in self._told:
            self._told.add("sizes")
            _log.warning(
                "data.source=%s has files of %d to %d bytes, of which %d data worker(s) of %d device(s) take equal "
                "parts, so that images of small files come more often: give %sfiles of one size",
                *(source, min(sizes), max(sizes), max(1, fitted), world_size),
                f"data.num_workers={even}, or " if fitted > even else "",
            )
        return fitted

    def _loader_options(self) -> dict[str, Any]:
        workers = self.keys.num_workers
        if workers is None:
            workers = min(_MOST_WORKERS, usable_cores() // (self.trainer.num_devices if self.trainer else 1))
        return {
            "num_workers": workers,
            "pin_memory": self.keys.pin_memory and torch.cuda.is_available(),
            "report": self._unreadable.record,
        }


def _labels_by_number(class_map: Any, class_names: Sequence[str]) -> list[str]:
    """The labels of a table by the numbers of a model's classes: those of `data.class_map`, and the model's own names.

    ValueError, in one line, for numbers that no class has, and where two labels have one number.
    """
    numbers = class_numbers(class_map, "") or {}
    if (most := max(numbers.values(), default=0)) >= len(class_names):
        raise ValueError(
            f"data.class_map={spell(class_map)} has the number {most}, and the model's {len(class_names)} classes have "
            f"0 to {len(class_names) - 1}"
        )
    if len(set(numbers.values())) < len(numbers):
        raise ValueError(
            f"data.class_map={spell(class_map)} gives two labels of a table one number: give each its own, or write "
            "both in one way"
        )
    labels = [name if name not in numbers else "" for name in class_names]  # no label of a table is empty
    for name, number in numbers.items():
        labels[number] = name
    return labels


def _open_measured(
    keys: ImageDataKeys, root: str | None, kind: str, name: str | None, labels: Sequence[str], *, whole: bool
) -> Split | None:
    """`held_out_table` for a trained model: only then has `data.class_map` numbers for other labels."""
    try:
        return held_out_table(keys, root, kind, name, labels, whole=whole)
    except UnknownLabel as error:
        raise ValueError(
            f"{error}: write the labels as the model has them, or give the number of each by data.class_map, such as "
            '"data.class_map={NAME: 0, OTHER: 1}"'
        ) from error


def _adopt_classes(found: DataInfo, trained: DataInfo, numbers: Mapping[str, int] | None) -> DataInfo:
    """`found`, of data, with the class names of the trained model. ValueError if the data's own names differ.

    `numbers` are those of the model's classes that data.class_map gives the data's.
    """
    if numbers is not None:
        if found.num_classes > trained.num_classes:
            raise ValueError(f"data.class_map numbers {found.num_classes} classes, the model has {trained.num_classes}")
        own = _numbers(trained)
        if moved := next((name for name, number in numbers.items() if own.get(name, number) != number), None):
            raise ValueError(
                f"data.class_map gives {moved} the number {numbers[moved]}, and the model has it as {own[moved]}: give "
                f"{moved}: {own[moved]}, or leave data.class_map out"
            )
    elif found.class_names != trained.class_names:
        extra = sorted(set(found.class_names) ^ set(trained.class_names))[:3]
        raise ValueError(
            f"the data's {found.num_classes} classes are not the {trained.num_classes} of the checkpoint (they "
            f"differ in {', '.join(extra) or 'their order'}); give data with the same class folders, or "
            "data.class_map"
        )
    if found.multi_label != trained.multi_label:
        raise ValueError(
            f"data.multi_label={str(found.multi_label).lower()}: the model was trained with "
            f"{'several labels' if trained.multi_label else 'one class'} an image"
        )
    return replace(
        found,
        class_names=trained.class_names,
        num_classes=trained.num_classes,
        class_weights=trained.class_weights,
        thresholds=trained.thresholds,
        crop_mode=trained.crop_mode,
    )


def _numbers(info: DataInfo) -> dict[str, int]:
    return {name: number for number, name in enumerate(info.class_names)}


def _finishing(transform: DeviceTransform, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a loader whose batches a device finishes, in place of those of one whose workers do."""
    if options["num_workers"]:
        return {"finish": _finish_in_threads(transform)}
    # Without workers, the loader's own code draws from the global generators: it must stay in the training thread.
    return {"finish": partial(_finish, transform), "pin_memory": False}


def _finish_in_threads(transform: DeviceTransform) -> Callable[[Iterator[Batch]], Iterator[Batch]]:
    """A thread receives and decodes batches; a second one crops and colours what was decoded before.

    The first begins a group when the second has taken the one before it, so that images of two groups are in memory.
    """
    decode = partial(transform.decode_groups, together=_DECODED_TOGETHER)
    decoded = Prefetch(decode, transform.device, ahead=1, tensors=decoded_tensors)
    finished = Prefetch(transform.finish, transform.device, ahead=_AHEAD, tensors=lambda batch: batch[:2])
    return lambda batches: finished(decoded(batches))


def _finish(transform: DeviceTransform, batches: Iterable[Batch]) -> Iterator[Batch]:
    for batch in batches:
        yield from transform([batch])


def gpu_of(device: torch.device | None) -> torch.device:
    """The CUDA device of a run, or the current one without a run. ValueError if there is none."""
    if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
        raise ValueError("data.decode=gpu needs a CUDA device: give trainer=gpu where there is one, or data.decode=cpu")
    return device or torch.device("cuda", torch.cuda.current_device())


def _absolute(root: str | None) -> str | None:
    return None if root is None else os.path.realpath(os.path.expanduser(root))


def _augmentation(augment: Mapping[str, Any], batch_size: int) -> tuple[Augmentation, int]:
    """The transforms of a sample, and the number of repeats; `mixing` is the task's, but must fit the batch."""
    options = dict(augment)
    repeats, mixing = int(options.pop("repeats", 1)), options.pop("mixing", None) or {}
    known = list(Augmentation.model_fields)
    if unknown := sorted(set(options) - set(known)):
        raise ValueError(f"augment has no {', '.join(unknown)}: its keys are {', '.join(known)}, repeats, mixing")
    if batch_size % 2 and (mixing.get("mixup") or mixing.get("cutmix")):
        raise ValueError(
            f"Mixup and CutMix pair the images of a batch, but a device gets {batch_size}: choose an even batch size"
        )
    return Augmentation(**options), repeats
