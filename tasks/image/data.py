"""The data module of image classification: sources, splits, loaders, and what the model must know of the data."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longseq.tasks.config import read
from longseq.tasks.data.labels import count_classes, find_weights, rarest_labels, wrong_class
from longseq.tasks.data.loader import Batch, BatchLoader, TrainingLoader, find_place, follow, work_ahead
from longseq.tasks.data.module import TaskData
from longseq.tasks.data.sampler import BalancedSampler, EvaluationSampler, TrainingSampler
from longseq.tasks.image.augmentation import Augmentation
from longseq.tasks.image.config import LABEL_KEYS, OWN, OWN_KEYS, ImageDataKeys, ImageKeys, per_channel
from longseq.tasks.image.datasets import (
    EvaluationBatches,
    ImageFiles,
    StreamBatches,
    StreamLoader,
    TrainingBatches,
    Unreadable,
)
from longseq.tasks.image.device import DeviceTransform
from longseq.tasks.image.draws import EncodedTrainingBatches, TrainingDraws
from longseq.tasks.image.folder import class_numbers, find_split, names_by_number, open_numbered
from longseq.tasks.image.info import DataInfo
from longseq.tasks.image.own_datamodule import OwnDataModule
from longseq.tasks.image.own_dataset import DatasetSource, own_held_out, own_splits
from longseq.tasks.image.shards import open_shards
from longseq.tasks.image.sources import (
    SOURCES,
    Source,
    Split,
    Splits,
    finish_splits,
    holds_jpegs,
    is_image_folder,
    is_stream,
    open_named,
    open_stream,
    part_of,
    require_one_class_list,
    require_readable,
    require_root,
    require_same_numbers,
    timm_splits,
    warn_of_repeats,
)
from longseq.tasks.image.table import find_table, open_table, open_tables
from longseq.tasks.image.transforms import evaluation_transform, normalize, training_transform
from longseq.tasks.training.system import usable_cores
from longseq.tasks.training.targets import is_named

_log = logging.getLogger(__name__)

_MOST_WORKERS = 16

# Keys of training alone.
_EVALUATED = {"class_weights": "none", "sampling": None}

_KINDS = {"train": "train", "val": "validation", "test": "test"}


class ImageDataModule(TaskData):
    """Images of one source, augmented for training, with fixed sets for validation and test.

    `source` is digits, fashion_mnist, cifar10, folder (a folder or a .tar with class folders), shards
    (see `longseq.tasks.image.shards`), csv (tables of images, see `longseq.tasks.image.table`), own (see
    `longseq.tasks.image.own_dataset`), or a name that timm reads: hfds/NAME, torch/NAME, and the streams hfids/NAME and
    wds/NAME. After the transfer to the device, batches are (images float32 [B, C, S, S] normalised, targets int64 [B]),
    with `multi_label` targets float32 [B, classes] of 0 and 1; before it, images are uint8. `batch_size` is the
    training batch of one device. Training draws are functions of (seed, epoch, sample, repeat). `split_seed` chooses
    the validation images if the source has none, so that runs with different seeds share them.

    Of classes of different sizes, `class_weights` weights the losses (see `longseq.tasks.data.labels.find_weights`),
    and `sampling=balanced` draws each class equally often (see `longseq.tasks.data.sampler.BalancedSampler`).
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
        self._info: DataInfo | None = None
        self._splits: Splits | None = None

    @classmethod
    def prepare_process(cls, config: Mapping[str, Any]) -> None:
        if config["data"].get("decode", "cpu") != "cpu":
            # By default CUDA streams share 8 queues, and the thread that decodes would wait for whole steps.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], batch_size: int) -> Any:
        """The data of a configuration: an `ImageDataModule`, or an `OwnDataModule`."""
        ImageKeys().check(config)
        keys = read(ImageDataKeys, config["data"], "data")
        if is_named(keys.datamodule):
            return OwnDataModule.from_config(config, batch_size)
        datamodule = cls(keys, batch_size=batch_size, seed=config["seed"], augment=config["recipe"]["augment"])
        datamodule.prepare_data()
        datamodule.setup()
        return datamodule

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
        own = dict(config.get("data") or trained.to_keys())
        source = changes.get("source", own.get("source"))
        if source != OWN:
            own = {key: value for key, value in own.items() if key not in OWN_KEYS}
        if source != own.get("source"):  # which names labels in another way
            own = {key: value for key, value in own.items() if key not in LABEL_KEYS}
        measured = {**own, **changes, **_EVALUATED}
        numbers = None if changes.get("class_map") is None else class_numbers(changes["class_map"])
        if source == "csv":
            measured.pop("class_map", None)
        keys = read(ImageDataKeys, measured, "data")
        if is_named(keys.datamodule):
            stage = {"val": "validate", "test": "test"}[split]
            given = OwnDataModule.open(keys, batch_size=keys.eval_batch_size or batch_size, stage=stage, alone=True)
            given.adopt(_adopt_classes(given.info, trained, numbers))
            return given
        datamodule = cls(keys, batch_size=batch_size, seed=config.get("seed", 0))
        foreign = source != own.get("source") or _absolute(datamodule.root) != _absolute(own.get("root"))
        if foreign and source == own.get("source") and datamodule._is_moved(own, trained):
            foreign = False
        class_names = trained.class_names if numbers is None or source != "csv" else _renamed(trained, numbers)
        datamodule.setup_evaluation(split, class_names, foreign=foreign)
        if not foreign:
            datamodule._refuse_trained_images(own, split)
        datamodule._info = _adopt_classes(datamodule.info, trained, numbers)
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
    def unreadable(self) -> list[str]:
        """Paths of the images that this process could not read so far."""
        return self._unreadable.paths

    @property
    def unreadable_reasons(self) -> dict[str, str]:
        """Why each of these images could not be read."""
        return dict(self._unreadable.reasons)

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
                "data.source=%s is a stream: a run that goes on within an epoch reads it from the start", keys.source
            )
            sizes, class_names = self._describe_stream(["train", "validation", "test"])
        else:
            splits = self._splits = self._splits or self._open_splits()
            sizes = {"train": len(splits.train), "val": len(splits.validation), "test": len(splits.test)}
            class_names = list(splits.train.source.class_names)
            warn_of_repeats(splits)
            require_readable(splits.validation, "validation")
            if splits.test is not splits.validation:
                require_readable(splits.test, "test")
        if not keys.multi_label and max(len(class_names), keys.num_classes or 0) == 1:
            raise ValueError(f"{self.root or keys.source} has one class alone: {''.join(class_names)}")
        if keys.num_classes is not None and keys.num_classes < len(class_names):
            raise ValueError(f"data.num_classes={keys.num_classes} is less than the {len(class_names)} classes")
        self._info = self._describe(class_names, sizes)
        if keys.sampling == "balanced":  # a source that cannot do it is refused before a run begins
            self._training_targets(self._info.num_classes)

    def setup_evaluation(self, split: str, class_names: Sequence[str], *, foreign: bool) -> None:
        """Open only what an evaluation of `split` (val, test) needs, with the class numbers of a trained model.

        `foreign` means that the model was not trained on this data: of a folder with class folders only, all images are
        then evaluated, and nothing is split off.
        """
        kind = _KINDS[split]
        if is_stream(self.keys.source):
            sizes, names = self._describe_stream([kind])
            self._info = self._describe(names, sizes)
            return
        source = self._held_out(kind, class_names, foreign=foreign)
        if source is None:
            self.prepare_data()
            self.setup()
            return
        measured = Split.whole(source)
        self._splits = Splits(Split(source, measured.indices[:0]), measured, measured)
        self._info = self._describe(list(source.class_names), {split: len(measured)})
        require_readable(measured, split)

    def _held_out(self, kind: str, class_names: Sequence[str], *, foreign: bool) -> Source | None:
        """The images of `kind` (validation or test); None if they are a part of the training images.

        Without a test split, the validation images are the test images. With `foreign`, the test split need not be
        named, and a source without splits is the split as a whole.
        """
        keys, names = self.keys, self.split_names
        kinds = (kind, "validation") if kind == "test" else (kind,)
        if keys.source == OWN:
            return own_held_out(keys, kind)
        if keys.source == "shards":
            found = open_shards(require_root(self.root), multi_label=keys.multi_label, order=class_names)
            held_out = next((found[one] for one in kinds if one in found), None)
            return found["train"] if held_out is None and foreign and len(found) == 1 else held_out
        if keys.source.startswith(("hfds/", "torch/")) and not is_image_folder(keys.source):
            name = next((names[one] for one in kinds if names[one] is not None), None)
            if name is None:
                return None
            require_one_class_list(keys.source, self.root, [name])
            part = part_of(keys.source, kind, name)
            return open_named(keys.source, self.root, part, keys.class_map, keys.download)
        if keys.source not in ("folder", "csv") and not is_image_folder(keys.source):
            return None
        root = require_root(self.root)
        # A foreign folder has splits of its own names.
        named = {one: names[one] or (one if foreign else None) for one in kinds}
        if keys.source == "csv":
            table = next(filter(None, (find_table(root, one, named[one]) for one in kinds)), None)
            if table is None and foreign:
                table = find_table(root, "train", None)
            return None if table is None else open_table(table, keys, class_names)
        paths = [find_split(root, one, name) for one, name in named.items() if name is not None]
        path = next(filter(None, paths), None)
        if path is None and not foreign:
            return None
        if path is None and (train := find_split(root, "train", names["train"])) is not None:
            raise ValueError(f"{root} has no {kind} images: give data.root={train} to measure all of them")
        if is_image_folder(keys.source):
            return open_named(keys.source, root, path or root, keys.class_map, keys.download)
        numbers = {name: number for number, name in enumerate(class_names)}
        return open_numbered(path or root, numbers, keys.class_map, is_root=path is None)

    def _is_moved(self, run: Mapping[str, Any], trained: DataInfo) -> bool:
        """True if the data hold the training images of a run in another place, from which it set others apart."""
        if self.keys.source not in ("folder", "csv", "shards") or "train" not in trained.checksums:
            return False
        keys = read(ImageDataKeys, {**run, **_EVALUATED, "root": self.keys.root}, "data")
        try:
            splits = ImageDataModule(keys, batch_size=1)._open_splits()
        except (OSError, ValueError):  # data of other classes or splits
            return False
        apart = splits.validation.source is splits.train.source
        return apart and [splits.train.checksum()] == trained.checksums["train"]

    def _refuse_trained_images(self, run: Mapping[str, Any], split: str) -> None:
        """ValueError for images of `split` that were for training by the keys of the run."""
        splits = self._splits
        if splits is None or not len(splits.train):  # the split has images of its own
            return
        keys = read(ImageDataKeys, {**run, **_EVALUATED, "root": self.keys.root}, "data")
        train = ImageDataModule(keys, batch_size=1)._open_splits().train
        measured = {"val": splits.validation, "test": splits.test}[split]
        known = {train.source.path(int(index)) for index in train.indices}
        count = sum(measured.source.path(int(index)) in known for index in measured.indices)
        if count:
            raise ValueError(f"{count} of the {len(measured)} images of split={split} were trained on")

    def _describe(self, class_names: list[str], sizes: dict[str, int | None]) -> DataInfo:
        class_names = class_names + [str(index) for index in range(len(class_names), self.keys.num_classes or 0)]
        if not class_names:
            raise ValueError(f"data.source={self.keys.source} does not know its classes: give data.num_classes=N")
        checksums: dict[str, list[int]] = {}
        if self._splits is not None:
            splits = {"train": self._splits.train, "val": self._splits.validation, "test": self._splits.test}
            known = {stage: split.checksum() for stage, split in splits.items() if stage in sizes}
            checksums = {stage: [found] for stage, found in known.items() if found is not None}
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
            checksums=checksums,
        )

    def _find_weights(self, class_names: list[str]) -> list[float] | None:
        choice, counts, samples = self.keys.class_weights, [0] * len(class_names), 0
        if choice == "balanced":
            targets = self._training_targets(len(class_names))
            counts, samples = count_classes(targets, len(class_names)), len(targets)
        return find_weights(choice, counts, samples, class_names, multi_label=self.keys.multi_label)

    def _training_targets(self, classes: int) -> np.ndarray:
        """The classes or labels of the training images. ValueError if finding them would take reading the images."""
        targets = None if self._splits is None else self._splits.train.source.targets()
        if targets is None or self._splits is None:
            raise ValueError(f"data.source={self.keys.source} does not know the classes of its images: give weights")
        train = self._splits.train
        found = targets[train.indices]
        if (wrong := wrong_class(found, classes)) is not None:
            path = train.source.path(int(train.indices[wrong]))
            raise ValueError(f"{path}: the label {found[wrong]} is not among the classes 0 to {classes - 1}")
        return found

    def _sampler(self, train: Split) -> TrainingSampler:
        options: dict[str, Any] = {"seed": self.seed, "repeats": self.repeats, **find_place(self.trainer)._asdict()}
        if self.keys.sampling is None:
            return TrainingSampler(len(train), self.batch_size, **options)
        targets = self._training_targets(self.info.num_classes)
        return BalancedSampler(rarest_labels(targets), self.batch_size, **options)

    def train_dataloader(self) -> TrainingLoader | StreamLoader:
        if self._splits is None:
            if self.keys.decode == "gpu":
                raise ValueError("a stream needs data.decode=cpu")
            transform = training_transform(self.info, self.augmentation)
            return self._stream_loader("train", transform, training=True)
        split, options = self._splits.train, self._loader_options()
        batches: TrainingBatches
        if (device := self._decoding_device(split)) is None:
            transform = training_transform(self.info, self.augmentation)
            batches = TrainingBatches(split, transform, self.seed, self.info)
        else:
            batches = EncodedTrainingBatches(split, TrainingDraws(self.info, self.augmentation), self.seed, self.info)
            work = DeviceTransform(split, self.info, self.augmentation, device, seed=self.seed)
            options["finish"] = partial(_finish, work, device, options["num_workers"])
        return TrainingLoader(batches, self._sampler(split), **options, **follow(self.trainer))

    def val_dataloader(self) -> BatchLoader:
        return self._evaluation_loader("validation")

    def test_dataloader(self) -> BatchLoader:
        return self._evaluation_loader("test")

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> tuple[Tensor, Tensor]:
        """Normalise on the device: the host then transfers a quarter of the bytes."""
        images, targets = batch
        return normalize(images, self.info), targets

    def _open_splits(self) -> Splits:
        keys = self.keys
        divided: dict[str, Any] = {"val_fraction": keys.val_fraction, "split_seed": keys.split_seed}
        if keys.source == OWN:
            return own_splits(keys)
        if keys.source == "csv":
            table, tables = open_tables(keys, self.split_names)
            return finish_splits(table, tables, **divided, label=str(self.root))
        if keys.source == "shards":
            found: dict[str, Source] = {**open_shards(require_root(self.root), multi_label=keys.multi_label)}
            return finish_splits(found.pop("train"), found, **divided, label=str(self.root))
        if keys.source in SOURCES:
            return SOURCES[keys.source](self.root, download=keys.download, **divided)
        if keys.source != "folder" and "/" not in keys.source:
            names = ", ".join(SOURCES)
            raise ValueError(
                f"data.source={keys.source} is not among {names}, folder, shards, csv, hfds/NAME, hfids/NAME, wds/NAME "
                "and torch/NAME"
            )
        options: dict[str, Any] = {"names": self.split_names, "class_map": keys.class_map, "download": keys.download}
        return timm_splits(keys.source, self.root, **options, **divided)

    def _evaluation_loader(self, kind: str) -> BatchLoader:
        transform = evaluation_transform(self.info)
        if self._splits is None:
            return self._stream_loader(kind, transform, training=False)
        split: Split = getattr(self._splits, kind)
        rank, world_size, _ = find_place(self.trainer)
        sampler = EvaluationSampler(len(split), self.eval_batch_size, rank=rank, world_size=world_size)
        return BatchLoader(EvaluationBatches(split, transform, self.info), sampler, **self._loader_options())

    def _decoding_device(self, split: Split) -> torch.device | None:
        """The GPU that decodes and augments the training images; None: the data workers do."""
        if self.keys.decode == "cpu":
            return None
        device = (
            self.trainer.strategy.root_device if self.trainer else torch.device("cuda", torch.cuda.current_device())
        )
        if self.keys.decode == "gpu":
            if device.type != "cuda":
                raise ValueError("data.decode=gpu needs a CUDA device")
            return device
        is_batched = not (self.augmentation.auto_augment or "").startswith("augmix")
        return device if device.type == "cuda" and is_batched and holds_jpegs(split) else None

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
            named=keys.num_classes is None,
        )

    def _stream_split(self, kind: str) -> str:
        name = self.split_names[kind] or self.split_names["validation"]
        if name is None:
            raise ValueError(
                f"data.source={self.keys.source} is a stream and cannot be split: give data.val_split=NAME"
            )
        return name

    def _describe_stream(self, kinds: Sequence[str]) -> tuple[dict[str, int | None], list[str]]:
        """The sizes of splits and the class names, as far as the reader knows them; the classes are of the first."""
        require_one_class_list(self.keys.source, self.root, [self._stream_split(kind) for kind in kinds])
        readers = {kind: self._stream(kind, training=kind == "train").reader for kind in kinds}
        stages = {kind: stage for stage, kind in _KINDS.items()}
        sizes = {stages[kind]: max(reader.num_samples, 0) or None for kind, reader in readers.items()}
        class_names = names_by_number(readers[kinds[0]].class_to_idx)
        for kind in kinds[1:]:
            require_same_numbers(names_by_number(readers[kind].class_to_idx), class_names, self.keys.source, kind)
        return sizes, class_names

    def _stream_loader(self, kind: str, transform: Any, training: bool) -> StreamLoader:
        rank, world_size, _ = find_place(self.trainer)
        stream, options = self._stream(kind, training), self._loader_options()
        if (shards := getattr(stream.reader, "shards", None)) is not None:  # a worker reads whole shards
            options["num_workers"] = min(options["num_workers"], max(1, shards // world_size) if training else shards)
        batches = StreamBatches(
            stream,
            transform,
            self.info,
            batch_size=self.batch_size if training else self.eval_batch_size,
            training=training,
            seed=self.seed,
            rank=rank,
            world_size=world_size,
        )
        epoch = lambda: self.trainer.current_epoch if self.trainer else 0  # noqa: E731
        return StreamLoader(batches, **options, epoch=epoch)

    def _loader_options(self) -> dict[str, Any]:
        workers = self.keys.num_workers
        if workers is None:
            workers = min(_MOST_WORKERS, usable_cores() // (self.trainer.num_devices if self.trainer else 1))
        return {
            "num_workers": workers,
            "pin_memory": self.keys.pin_memory and torch.cuda.is_available(),
            "report": self._unreadable.record,
        }


def _finish(work: DeviceTransform, device: torch.device, num_workers: int, batches: Iterator[Batch]) -> Iterator[Batch]:
    """The batches, decoded by one thread and augmented by another, ahead of the step."""
    if not num_workers:  # their transforms draw from the generators of the process, which threads share
        yield from map(work, batches)
        return
    # Of high priority: many small kernels do not queue behind the large ones of the step.
    stream = torch.cuda.Stream(device, priority=-1)
    decoded = work_ahead(batches, work.decode, stream, ahead=1)
    yield from work_ahead(decoded, work.finish, stream, ahead=4)


def _renamed(trained: DataInfo, numbers: Mapping[str, int]) -> list[str]:
    """The labels of a table by the numbers of a model's classes: those of `data.class_map`, and the model's names."""
    if len(set(numbers.values())) < len(numbers) or max(numbers.values()) >= trained.num_classes:
        raise ValueError(f"data.class_map must give each label one number from 0 to {trained.num_classes - 1}")
    labels = [name if name not in numbers else "" for name in trained.class_names]  # no label of a table is empty
    for name, number in numbers.items():
        labels[number] = name
    return labels


def _adopt_classes(found: DataInfo, trained: DataInfo, numbers: Mapping[str, int] | None) -> DataInfo:
    """`found`, of data, with the class names of the trained model. ValueError if the data's own names differ.

    `numbers` are those that data.class_map gives to the data's classes, which may have other names.
    """
    if numbers is None and found.class_names != trained.class_names:
        raise ValueError(
            f"the data have other classes than the model, or another order: {', '.join(found.class_names[:5])}, and "
            f"{', '.join(trained.class_names[:5])}; data.class_map numbers them"
        )
    if numbers is not None:
        own = {name: number for number, name in enumerate(trained.class_names)}
        moved = [name for name, number in numbers.items() if own.get(name, number) != number]
        if moved or found.num_classes > trained.num_classes:
            raise ValueError(f"data.class_map does not fit the {trained.num_classes} classes of the model: {moved}")
    if found.multi_label != trained.multi_label:
        raise ValueError(f"the model was trained with data.multi_label={str(trained.multi_label).lower()}")
    return replace(
        found,
        class_names=trained.class_names,
        num_classes=trained.num_classes,
        class_weights=trained.class_weights,
        thresholds=trained.thresholds,
        crop_mode=trained.crop_mode,
    )


def _absolute(root: str | None) -> str | None:
    return None if root is None else os.path.realpath(os.path.expanduser(root))


def _augmentation(augment: Mapping[str, Any], batch_size: int) -> tuple[Augmentation, int]:
    """The transforms of a sample, and the number of repeats; `mixing` is the task's, but must fit the batch."""
    mixing = augment.get("mixing") or {}
    if batch_size % 2 and (mixing.get("mixup") or mixing.get("cutmix")):
        raise ValueError(f"Mixup and CutMix pair the images of a batch, but a device gets {batch_size}")
    options = {key: value for key, value in augment.items() if key in Augmentation.model_fields}
    return Augmentation(**options), int(augment.get("repeats", 1))
