"""The data module of image classification: sources, splits, loaders, and what the model must know of the data."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from longseq.tasks.config import read
from longseq.tasks.data.info import STAGES
from longseq.tasks.data.labels import count_classes, find_weights, name_some, rarest_labels
from longseq.tasks.data.loader import Batch, BatchLoader, Failure, TrainingLoader, find_place, work_ahead
from longseq.tasks.data.module import TaskData, same_root
from longseq.tasks.data.sampler import EvaluationSampler, TrainingSampler
from longseq.tasks.image import files, sources
from longseq.tasks.image.config import LABEL_KEYS, OWN, Augmentation, DataInfo, ImageDataKeys
from longseq.tasks.image.datasets import EvaluationBatches, StreamBatches, StreamLoader, TrainingBatches
from longseq.tasks.image.device import DeviceTransform, EncodedTrainingBatches, TrainingDraws
from longseq.tasks.image.predict import ImageFiles
from longseq.tasks.image.sources import Split, Splits
from longseq.tasks.image.transforms import evaluation_transform, normalize, training_transform
from longseq.tasks.report import EACH
from longseq.tasks.training.system import usable_cores

_log = logging.getLogger(__name__)

_MOST_WORKERS = 16
_REPORTED_PATHS = 20  # unreadable images that are logged

DIGITS = "digits"
_EVALUATED = {"class_weights": "none", "sampling": None}  # values of keys that matter only in training

_LAYOUTS: Mapping[str, type[files.Layout]] = {
    **dict.fromkeys(("folder", "torch/folder", "torch/image_folder"), files.FolderLayout),
    "csv": files.TableLayout,
    OWN: sources.OwnLayout,
}


class ImageDataModule(TaskData):
    """Images of one source, augmented for training, with fixed sets for validation and test.

    `source` is digits, folder (class folders), csv (see `longseq.tasks.image.files`), own (Datasets, see
    `longseq.tasks.image.sources.DatasetSource`), or a name that timm reads: hfds/NAME, torch/NAME, and the streams
    hfids/NAME and wds/NAME. Batches are (images, targets): uint8 images on the host, and normalised float32
    [B, C, S, S] on the device. Targets are int64 [B], with `multi_label` float32 [B, classes] of 0 and 1.
    `batch_size` is the training batch of one device. Training draws are functions of (seed, epoch, sample, repeat).
    `split_seed`, not the seed of the run, chooses the validation images that are held out. For classes of different
    sizes, see `longseq.tasks.data.labels.find_weights` and `longseq.tasks.data.sampler.EpochOrder`.
    """

    keys_class, info_class = ImageDataKeys, DataInfo
    inputs = ImageFiles

    def __init__(
        self, keys: ImageDataKeys, *, batch_size: int, seed: int = 0, augment: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(keys, batch_size=batch_size, seed=seed)
        self.root = None if keys.root is None else os.path.expanduser(keys.root)
        self.take_recipe({"recipe": {"augment": augment or {}}}, batch_size)
        self.unreadable = set[str]()  # the images that this process could not read so far
        self.splits: Splits | None = None  # None for a stream, and before `setup`

    @classmethod
    def from_config(cls, config: Mapping[str, Any], batch_size: int) -> Self:
        datamodule = super().from_config(config, batch_size)
        datamodule.take_recipe(config, batch_size)
        return datamodule

    def take_recipe(self, config: Mapping[str, Any], batch_size: int) -> None:
        augment = config["recipe"]["augment"]
        self.batch_size, self.eval_batch_size = batch_size, self.keys.eval_batch_size or batch_size
        self.augmentation = Augmentation(**{key: augment[key] for key in Augmentation.model_fields if key in augment})
        self.repeats = int(augment.get("repeats", 1))

    @classmethod
    def for_evaluation(
        cls, config: Mapping[str, Any], changes: Mapping[str, Any], *, split: str, trained: DataInfo, batch_size: int
    ) -> Self:
        own = dict(config.get("data") or trained.to_keys())
        source = changes.get("source", own.get("source"))
        same_source = source == own.get("source")
        own = {key: value for key, value in own.items() if same_source or key not in LABEL_KEYS}
        measured = {**own, **changes, **_EVALUATED}
        numbers = files.class_numbers(changes.get("class_map"))
        keys = read(ImageDataKeys, measured, "data")
        datamodule = cls(keys, batch_size=batch_size, seed=config.get("seed", 0))
        moved = not same_root(datamodule.root, own.get("root"))
        foreign = not same_source or (moved and not datamodule._holds_training(own, trained))
        datamodule.setup_evaluation(split, trained.class_names, foreign=foreign)
        if not foreign:
            datamodule._refuse_trained_images(own, split)
        datamodule._info = _adopt_classes(datamodule.info, trained, numbers)
        return datamodule

    @property
    def registered_parts(self) -> list[Any]:
        if self.splits is None or self.keys.source != OWN:
            return []
        source: Any = self.splits["train"].source
        return [type(source.dataset)]

    @property
    def batches_per_epoch(self) -> int:
        """Training batches of one device in an epoch."""
        return len(self.train_dataloader())

    def prepare_data(self) -> None:
        """Download the data if data.download=true; Lightning calls this in one process of each machine."""
        if self.keys.download and not sources.is_stream(self.keys.source):
            self.splits = self.splits or self._open_splits()

    def setup(self, stage: str | None = None) -> None:
        if self._info is not None:
            return
        keys = self.keys
        sizes: dict[str, int | None]
        if sources.is_stream(keys.source):
            _log.warning("data.source=%s is a stream: a run resumed within an epoch restarts it", keys.source)
            sizes, class_names = self._describe_stream(list(STAGES))
        else:
            self.splits = self.splits or self._open_splits()
            sizes = {stage: len(split) for stage, split in self.splits.items()}
            class_names = list(self.splits["train"].source.class_names)
        if not keys.multi_label and max(len(class_names), keys.num_classes or 0) == 1:
            raise ValueError(f"{self.root or keys.source} has only one class: {''.join(class_names)}")
        if keys.num_classes is not None and keys.num_classes < len(class_names):
            raise ValueError(f"data.num_classes={keys.num_classes} is less than the {len(class_names)} classes")
        self._info = self._describe(class_names, sizes)
        if keys.sampling == "balanced":  # fails here if the classes are unknown
            self._training_targets(self._info.num_classes)

    def setup_evaluation(self, split: str, class_names: Sequence[str], *, foreign: bool) -> None:
        """Open what an evaluation of `split` (val, test) needs, with the class numbers of a trained model.

        `foreign`: the model was not trained on this data, and all images are evaluated if there are no splits.
        """
        if sources.is_stream(self.keys.source):
            sizes, names = self._describe_stream([split])
            self._info = self._describe(names, sizes)
            return
        layout = self._layout()
        source = None if layout is None else layout.open_held_out(STAGES[split], class_names, foreign=foreign)
        if source is None:  # they are a part of the training images
            self.setup()
            return
        measured = Split.whole(source)
        self.splits = {"train": Split(source, measured.indices[:0]), "val": measured, "test": measured}
        self._info = self._describe(list(source.class_names), {split: len(measured)})

    def _layout(self) -> files.Layout | None:
        """The layout of the source; None for the digits, whose splits are fixed."""
        source = self.keys.source
        if source == DIGITS:
            return None
        kind = _LAYOUTS.get(source, sources.NamedLayout if source.startswith(("hfds/", "torch/")) else None)
        if kind is None:
            known = ", ".join([DIGITS, *_LAYOUTS, "hfds/NAME, hfids/NAME, wds/NAME, torch/NAME"])
            raise ValueError(f"data.source={source} is not among {known}")
        if kind not in (sources.NamedLayout, sources.OwnLayout):
            sources.require_root(self.root)
        return kind(self.keys)

    def _open_splits(self) -> Splits:
        """The splits of the source. Without validation images, `val_fraction` of the training images validates."""
        if (layout := self._layout()) is None:
            return sources.digits()
        keys, opened = self.keys, layout.open_all()
        train = Split.whole(opened["train"])
        if "validation" in opened:
            validation = Split.whole(opened["validation"])
        else:
            train, validation = sources.split_off(train, keys.val_fraction, keys.split_seed)
        if "test" in opened and opened["test"] is not opened.get("validation"):
            return {"train": train, "val": validation, "test": Split.whole(opened["test"])}
        _log.warning("%s has no test split: the validation images are also the test images", self.root or keys.source)
        return {"train": train, "val": validation, "test": validation}

    def _splits_of_training(self, run: Mapping[str, Any]) -> Splits:
        """The splits by the keys of the run that trained the model, below this root."""
        keys = read(ImageDataKeys, {**run, **_EVALUATED, "root": self.keys.root}, "data")
        return ImageDataModule(keys, batch_size=1)._open_splits()

    def _holds_training(self, run: Mapping[str, Any], trained: DataInfo) -> bool:
        """True if these are the images of a run, moved here, and its held-out images are a part of them."""
        if "train" not in trained.checksums:
            return False
        try:
            splits = self._splits_of_training(run)
        except (OSError, ValueError):  # data with other classes or splits
            return False
        whole = splits["val"].source is splits["train"].source
        return whole and [splits["train"].checksum()] == trained.checksums["train"]

    def _refuse_trained_images(self, run: Mapping[str, Any], split: str) -> None:
        """ValueError if images of `split` were training images of the run."""
        if self.splits is None or not len(self.splits["train"]):  # the split has images of its own
            return
        train, measured = self._splits_of_training(run)["train"], self.splits[split]
        known = {train.source.path(int(index)) for index in train.indices}
        count = sum(measured.source.path(int(index)) in known for index in measured.indices)
        if count:
            raise ValueError(f"{count} of the {len(measured)} images of split={split} were trained on")

    def _describe(self, class_names: list[str], sizes: dict[str, int | None]) -> DataInfo:
        keys = self.keys
        class_names = class_names + [str(index) for index in range(len(class_names), keys.num_classes or 0)]
        if not class_names:
            raise ValueError(f"data.source={keys.source} has no class names: give data.num_classes=N")
        checksums: dict[str, list[int]] = {}
        if self.splits is not None:
            found = {stage: self.splits[stage].checksum() for stage in sizes}
            checksums = {stage: [checksum] for stage, checksum in found.items() if checksum is not None}
        counts, samples = [0] * len(class_names), 0
        if keys.class_weights == "balanced":
            targets = self._training_targets(len(class_names))
            counts, samples = count_classes(targets, len(class_names)), len(targets)
        weights = find_weights(keys.class_weights, counts, samples, class_names, multi_label=keys.multi_label)
        known = {"class_weights": weights, "sizes": sizes, "checksums": checksums}
        return DataInfo.from_keys(keys, class_names=class_names, **known)

    def _training_targets(self, classes: int) -> np.ndarray:
        """The classes or labels of the training images. ValueError if they are unknown before images are read."""
        train = None if self.splits is None else self.splits["train"]
        targets = None if train is None else train.source.targets()
        if train is None or targets is None:
            raise ValueError(f"data.source={self.keys.source} has no list of its labels: give weights")
        found = targets[train.indices]
        wrong: Any = np.flatnonzero((found < 0) | (found >= classes)) if found.ndim == 1 else []
        if len(wrong):
            path = train.source.path(int(train.indices[wrong[0]]))
            raise ValueError(f"{path}: the label {found[wrong[0]]} is not among the classes 0 to {classes - 1}")
        return found

    def train_dataloader(self) -> TrainingLoader | StreamLoader:
        if self.splits is None:
            if self.keys.decode == "gpu":
                raise ValueError("a stream needs data.decode=cpu")
            return self._stream_loader("train", training_transform(self.info, self.augmentation))
        split, options = self.splits["train"], dict[str, Any](report=self._record)
        batches: TrainingBatches
        if self.keys.decode == "cpu":
            transform = training_transform(self.info, self.augmentation)
            batches = TrainingBatches(split, transform, self.seed)
        else:
            trainer: Any = self.trainer
            device = trainer.strategy.root_device if trainer else torch.device("cuda", torch.cuda.current_device())
            batches = EncodedTrainingBatches(split, TrainingDraws(self.info, self.augmentation), self.seed)
            work = DeviceTransform(split, self.info, self.augmentation, device, seed=self.seed)
            options["finish"] = partial(_finish, work, device, self.loader_options()["num_workers"])
        return self.training_loader(batches, self.training_sampler(), **options)

    def training_sampler(self) -> TrainingSampler:
        assert self.splits is not None, "a stream has an order of its own"
        balanced, size = self.keys.sampling is not None, len(self.splits["train"])
        classes = rarest_labels(self._training_targets(self.info.num_classes)) if balanced else None
        place = find_place(self.trainer)._asdict()
        return TrainingSampler(size, self.batch_size, repeats=self.repeats, classes=classes, seed=self.seed, **place)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> tuple[Tensor, Tensor]:
        """Normalise on the device: the host then transfers a quarter of the bytes."""
        images, targets = batch
        return normalize(images, self.info), targets

    def evaluation_loader(self, stage: str) -> BatchLoader:
        transform = evaluation_transform(self.info)
        if self.splits is None:
            return self._stream_loader(STAGES[stage], transform)
        split = self.splits[stage]
        rank, world_size, _ = find_place(self.trainer)
        sampler = EvaluationSampler(len(split), self.eval_batch_size, rank=rank, world_size=world_size)
        batches = EvaluationBatches(split, transform, self.info)
        return BatchLoader(batches, sampler, **self.loader_options(), report=self._record)

    def _stream(self, kind: str) -> Any:
        return sources.open_stream(self.keys, self.root, kind, batch_size=self.batch_size, seed=self.seed)

    def _describe_stream(self, stages: Sequence[str]) -> tuple[dict[str, int | None], list[str]]:
        """The sizes of the splits, and the class names of the first one, as far as the reader has them."""
        sources.require_one_class_list(self.keys, self.root)
        readers = [self._stream(STAGES[stage]).reader for stage in stages]
        names = [files.names_by_number(reader.class_to_idx) for reader in readers]
        for stage, held_out in zip(stages, names, strict=True):
            files.require_same_numbers(held_out, names[0], self.keys.source, STAGES[stage])
        return {stage: max(one.num_samples, 0) or None for stage, one in zip(stages, readers, strict=True)}, names[0]

    def _stream_loader(self, kind: str, transform: Any) -> StreamLoader:
        place, training = find_place(self.trainer), kind == "train"
        stream, options = self._stream(kind), self.loader_options()
        shards = stream.reader.shards  # a worker reads whole shards
        options["num_workers"] = min(options["num_workers"], max(1, shards // place.world_size) if training else shards)
        size = self.batch_size if training else self.eval_batch_size
        batches = StreamBatches(stream, transform, place, batch_size=size, training=training, seed=self.seed)
        epoch = lambda: self.trainer.current_epoch if self.trainer else 0  # noqa: E731
        return StreamLoader(batches, **options, epoch=epoch)

    def loader_options(self) -> dict[str, Any]:
        options = super().loader_options()
        if options["num_workers"] is None:
            devices = self.trainer.num_devices if self.trainer else 1
            options["num_workers"] = min(_MOST_WORKERS, usable_cores() // devices)
        return options

    def _record(self, failures: list[Failure]) -> None:
        """Warn of the unreadable images of a batch; ValueError for a wrong label, or with on_error=raise."""
        for path, reason, stops in failures:
            if stops or self.keys.on_error == "raise":
                raise ValueError(f"{path}: {reason}")
            if path not in self.unreadable:
                self.unreadable.add(path)
                if len(self.unreadable) <= _REPORTED_PATHS:
                    _log.warning("skipped unreadable image %s (%s)", path, reason, extra=EACH)


def _finish(work: DeviceTransform, device: torch.device, num_workers: int, batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yields the batches, which one thread decodes and another augments, ahead of the step."""
    if not num_workers:  # the transforms draw from the generators of this process, which threads would share
        yield from map(work, batches)
        return
    # High priority, so that many small kernels do not queue behind the large ones of the step.
    stream = torch.cuda.Stream(device, priority=-1)
    decoded = work_ahead(batches, work.decode, stream, ahead=1)
    yield from work_ahead(decoded, work.finish, stream, ahead=4)


def _adopt_classes(found: DataInfo, trained: DataInfo, numbers: Mapping[str, int] | None) -> DataInfo:
    """`found` with the class names of the trained model, which the data must share without `data.class_map`."""
    if numbers is None and found.class_names != trained.class_names:
        own, its = name_some(found.class_names), name_some(trained.class_names)
        raise ValueError(f"the data have the classes {own}, and the model {its}: give data.class_map")
    if numbers is not None:
        known = {name: number for number, name in enumerate(trained.class_names)}
        moved = [name for name, number in numbers.items() if known.get(name, number) != number]
        if moved or found.num_classes > trained.num_classes:
            raise ValueError(f"data.class_map does not fit the {trained.num_classes} classes of the model: {moved}")
    if found.in_chans != trained.in_chans:
        raise ValueError(f"the model was trained with data.in_chans={trained.in_chans}")
    if found.multi_label != trained.multi_label:
        raise ValueError(f"the model was trained with data.multi_label={str(trained.multi_label).lower()}")
    kept = ("class_names", "num_classes", "class_weights", "thresholds", "crop_mode")
    return replace(found, **{name: getattr(trained, name) for name in kept})
