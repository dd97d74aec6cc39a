"""Batches of images: decoding, transforms, and the handling of unreadable images."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data.readers.shared_count import SharedCount
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from typing_extensions import Self

from longseq.files import check_replaced
from longseq.tasks.commands import Predict
from longseq.tasks.data.batch import Batch, Failure
from longseq.tasks.data.folders import written_name
from longseq.tasks.data.inputs import InputFiles
from longseq.tasks.data.inputs import Unreadable as NotRead
from longseq.tasks.data.labels import name_some, number_of_class
from longseq.tasks.data.loader import BatchLoader
from longseq.tasks.data.sampler import SampleIndex
from longseq.tasks.data.seeds import derive_seed
from longseq.tasks.data.unreadable import UNREADABLE, LabelError
from longseq.tasks.image.decoding import decode, first_line, image_endings, in_eight_bits, upright
from longseq.tasks.image.folder import Found, find_images
from longseq.tasks.image.info import DataInfo
from longseq.tasks.image.saliency import PICTURES, draw_saliency, saliency, write_picture
from longseq.tasks.image.shard_streams import PassedOver, leave_encoded, note_failures
from longseq.tasks.image.sources import Split
from longseq.tasks.image.split_folders import is_compressed
from longseq.tasks.image.transforms import denormalize, evaluation_transform, normalize
from longseq.tasks.training.options import nearest

_log = logging.getLogger(__name__)

REPLACEMENTS = 100
_REPORTED_PATHS = 20

# The endings of tables.
_TABLES = (".csv", ".tsv", ".parquet", ".json", ".jsonl", ".xls", ".xlsx", ".arrow")


class Unreadable:
    """Records the images that could not be read, each path once, and logs them.

    With on_error="raise", the first one raises ValueError, and a wrong label always does.
    """

    def __init__(self, on_error: str) -> None:
        self.on_error = on_error
        self.reasons: dict[str, str] = {}

    @property
    def paths(self) -> list[str]:
        return list(self.reasons)

    def record(self, failures: list[Failure]) -> None:
        """Record the failures of one batch."""
        for found, reason, stops in failures:
            path = written_name(found)
            if stops:
                raise ValueError(f"{path}: {reason}")
            if self.on_error == "raise":
                raise ValueError(
                    f"{path} is not readable ({reason}): replace it, or skip such images with data.on_error=skip"
                )
            if path in self.reasons:
                continue
            self.reasons[path] = reason
            if len(self.reasons) <= _REPORTED_PATHS:
                _log.warning("skipped unreadable image %s (%s)", path, reason)
            if len(self.reasons) == _REPORTED_PATHS:
                _log.warning("%d unreadable images so far; further ones are only counted", _REPORTED_PATHS)


class TrainingBatches(Dataset[Batch]):
    """SampleIndexes -> a full batch; an unreadable image is replaced by one that the seed of its index determines.

    Repeats of an image stand side by side in a batch: the image is read and decoded once for all of them. The batch is
    empty if too many replacements in a row are unreadable.
    """

    def __init__(self, split: Split, transform: Callable[[Image.Image], Any], seed: int) -> None:
        self.split, self.transform, self.seed = split, transform, seed
        self.info: DataInfo | None = None  # of the data, for a module without their data module
        self.read: Callable[[Split, int], tuple[Any, Any] | Failure] = read_or_failure

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, indices: list[SampleIndex]) -> Batch:
        failures: list[Failure] = []
        with preserved_random_state():
            samples = [(self.transform(image), target) for image, target in self.samples(indices, failures)]
        if len(samples) < len(indices):
            return Batch(torch.empty(0), torch.empty(0), failures)
        return Batch(
            torch.stack([image for image, _ in samples]), as_targets([target for _, target in samples]), failures
        )

    def samples(self, indices: list[SampleIndex], failures: list[Failure]) -> Iterator[tuple[Any, Any]]:
        """Each image with its class, where the generators are seeded for its transform.

        It ends early if too many replacements in a row are unreadable.
        """
        sample: tuple[Any, Any] | None = None
        position = -1
        for index in indices:
            if index.position != position or sample is None:
                known = len(failures)
                sample = self._read(index, failures)
                # The repeats of an unreadable image are replaced by different ones.
                position = index.position if len(failures) == known else -1
            if sample is None:
                return
            seed_everything(derive_seed(self.seed, *index))
            yield sample

    def _read(self, index: SampleIndex, failures: list[Failure]) -> tuple[Any, Any] | None:
        for attempt in range(REPLACEMENTS):
            position = replace_position(self.seed, index, attempt, len(self.split)) if attempt else index.position
            result = self.read(self.split, position)
            if not isinstance(result, Failure):
                return result
            failures.append(result)
        return None


class EvaluationBatches(Dataset[Batch]):
    """Positions -> a batch without the images that cannot be read."""

    def __init__(self, split: Split, transform: Callable[[Image.Image], Any], info: DataInfo) -> None:
        self.split, self.transform = split, transform
        self.info: DataInfo | None = info
        self.shape = (info.in_chans, *info.sides)
        self.num_labels = info.num_classes if info.multi_label else None
        self.read: Callable[[Split, int], tuple[Any, Any] | Failure] = read_or_failure

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, positions: list[int]) -> Batch:
        failures: list[Failure] = []
        samples = [(self.transform(image), target) for image, target in self.samples(positions, failures)]
        images = _stack([image for image, _ in samples], self.shape)
        return Batch(images, as_targets([target for _, target in samples], self.num_labels), failures)

    def samples(self, positions: list[int], failures: list[Failure]) -> Iterator[tuple[Any, Any]]:
        """Each image that can be read, with its class; the others are added to `failures`."""
        for position in positions:
            sample = self.read(self.split, position)
            if isinstance(sample, Failure):
                failures.append(sample)
            else:
                yield sample


class StreamBatches(IterableDataset[Batch]):
    """Batches of a timm IterableImageDataset, in its own order.

    Images that cannot be read are skipped: those of shards are named by shard and sample, and others by their path, or
    by their position where they have none. Training yields full batches only. In an evaluation, each rank takes every
    `world_size`-th image of the whole stream: all ranks read the whole stream, so that no image is used twice or left
    out, and the first one reports what cannot be read. `seen` [workers] is then how many samples each data worker came
    upon.

    A batch without images carries failures at the end of a stream.
    """

    def __init__(
        self,
        dataset: Any,
        transform: Callable[[Image.Image], Tensor],
        *,
        batch_size: int,
        training: bool,
        seed: int,
        rank: int,
        world_size: int,
    ) -> None:
        self.dataset, self.transform, self.batch_size = dataset, transform, batch_size
        self.info: DataInfo | None = None
        self.training, self.seed, self.rank, self.world_size = training, seed, rank, world_size
        self._epoch = SharedCount()
        self._passed = PassedOver()
        self._decode: Callable[[Any], Any] | None = None
        self.seen = torch.zeros(1, dtype=torch.long)
        if not training:
            dataset.reader.dist_rank, dataset.reader.dist_num_replicas = 0, 1

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, also for workers that have already started."""
        self._epoch.value = epoch
        self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Batch]:
        images: list[Tensor] = []
        targets: list[Any] = []
        failures: list[Failure] = []
        worker = get_worker_info()
        place = worker.id if worker else 0
        key = (self.seed, self._epoch.value, self.rank, place)
        if self._decode is None:
            self._decode = leave_encoded(self.dataset.reader)
        drawn = full = 0  # samples of all passes, and batches
        wanted: int | None = None
        while wanted is None or full < wanted:
            before = drawn
            any_read = False
            for found, target in self._read():
                count, drawn = drawn, drawn + 1
                failures += self._take_passed()
                if not self.training and count % self.world_size != self.rank:
                    continue
                try:
                    number = number_of_class(target, "the stream")
                    if found is None:
                        raise ValueError("its row has no image")
                    image = in_eight_bits(upright(self._decode(found)))
                except LabelError as error:
                    raise ValueError(f"image {count}: {error}") from error
                except UNREADABLE as error:
                    name = found.get("path") if isinstance(found, Mapping) else None
                    failures.append(Failure(name or f"image {count} of the stream", first_line(error)))
                    continue
                any_read = True
                with preserved_random_state():
                    seed_everything(derive_seed(*key, count))
                    images.append(self.transform(image))
                targets.append(number)
                if len(images) == self.batch_size:
                    yield Batch(torch.stack(images), torch.tensor(targets), failures)
                    images, targets, failures = [], [], []
                    full += 1
                    if full == wanted:
                        break
            failures += self._take_passed()
            if not self.training or not any_read:
                break
            # timm counts samples that cannot be read as well: others of the stream take their places.
            wanted = (drawn - before) // self.batch_size if wanted is None else wanted
        self.seen[place] = drawn + self._passed.samples
        self._passed.samples = 0
        if images and not self.training:
            yield Batch(torch.stack(images), torch.tensor(targets), failures)
        elif failures:
            yield Batch(torch.empty(0), torch.empty(0), failures)

    def _take_passed(self) -> list[Failure]:
        taken = self._passed.take()
        return taken if self.training or self.rank == 0 else []

    def _read(self) -> Iterator[tuple[Image.Image, Any]]:
        note_failures(self.dataset.reader, self._passed)
        try:
            yield from self.dataset
        except KeyError as error:
            if not getattr(self.dataset.reader, "remap_class", False):
                raise
            raise ValueError(
                f"data.class_map gives no number to {error.args[0]!r}, as this stream calls a class: give it one, or "
                "read the data by index (data.source=hfds/NAME)"
            ) from error


class StreamLoader(BatchLoader):
    """A BatchLoader over a stream; each training epoch begins at the start of the stream.

    `finished` is told at the end of an evaluation how many samples the stream had, those that cannot be read included.
    A stream has no sampler, also where Lightning makes its loader anew.
    """

    def __init__(
        self,
        dataset: StreamBatches,
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        report: Callable[[list[Failure]], None],
        epoch: Callable[[], int],
        finished: Callable[[int], None] | None = None,
        sampler: None = None,
        shuffle: bool = False,
        batch_sampler: None = None,
    ) -> None:
        dataset.dataset.set_loader_cfg(num_workers=num_workers)
        dataset.seen = torch.zeros(max(1, num_workers), dtype=torch.long).share_memory_()
        super().__init__(dataset, None, num_workers=num_workers, pin_memory=pin_memory, report=report)
        self.epoch, self.finished = epoch, finished

    def __iter__(self) -> Iterator[tuple[Any, Any]]:  # type: ignore[override]
        stream: Any = self.dataset
        stream.set_epoch(self.epoch())
        count = 0
        for inputs, targets in super().__iter__():
            if len(targets):
                count += 1
                yield inputs, targets
        if stream.training and count < len(self):
            raise ValueError(
                f"the training images end after {count} of the {len(self)} batches of an epoch: no sample of a data "
                "worker's shards could be read (see the log)"
            )
        if not stream.training and self.finished is not None:
            self.finished(int(stream.seen.sum()))

    def __len__(self) -> int:
        stream: Any = self.dataset
        if not stream.training:
            raise TypeError("a stream does not tell how many evaluation batches it gives")
        return len(stream.dataset) // stream.batch_size


class ImageFiles(InputFiles):
    """The image files of a folder (all levels), or one file, in the order of their paths, transformed for a model.

    Items are (uint8 [C, H, W], path), or of an image that cannot be read the reason, which is logged. `passed_over`
    lists the files of the folder that are hidden or have no image ending. ValueError if there are no images.
    """

    draws_saliency = True

    def __init__(self, path: str, info: DataInfo) -> None:
        root = Path(path)
        if not root.exists():
            raise ValueError(f"input={path} does not exist: give an image file or a folder of images")
        _refuse_other_files(root)
        found = Found([str(root)], [], []) if root.is_file() else find_images(str(root))
        self.paths, self.passed_over = sorted(found.images), found.passed_over
        if not self.paths:
            endings = ", ".join(sorted(image_endings()))
            raise ValueError(f"input={path} holds no images: the endings looked for are {endings}")
        self.info = info
        self.transform = evaluation_transform(info)
        self.shape = (info.in_chans, *info.sides)
        self._root = str(root.parent if root.is_file() else root)
        self._notes: list[str] = []

    @classmethod
    def open(cls, path: str, info: DataInfo, keys: Predict) -> Self:
        if keys.saliency_class is not None and str(keys.saliency_class) not in info.class_names:
            near = nearest(str(keys.saliency_class), info.class_names)
            raise ValueError(
                f"saliency_class={keys.saliency_class} is none of the model's {info.num_classes} classes: "
                + (f"did you mean {near}?" if near else f"choose one of {name_some(info.class_names)}")
            )
        images = super().open(path, info, keys)
        if keys.saliency is not None:
            for one in images.paths:
                check_replaced(images._picture_of(one, keys.saliency), "saliency", PICTURES)
        return images

    def _picture_of(self, path: str, folder: str) -> Path:
        """The picture of an image's saliency in a folder with the folders of the input."""
        return Path(folder, os.path.relpath(path, self._root) + ".png")

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, str] | NotRead:
        path = self.paths[index]
        try:
            return self.transform(decode(path)), path
        except UNREADABLE as error:
            _log.warning("skipped unreadable image %s (%s)", path, first_line(error))
            return NotRead(path, f"unreadable: {first_line(error)}")

    def collate(self, items: list[tuple[Tensor, str] | NotRead]) -> tuple[Tensor, list[str], list[NotRead]]:
        """Images uint8 [B, C, H, W], their paths, and the images that cannot be read."""
        read = [item for item in items if not isinstance(item, NotRead)]
        images = _stack([image for image, _ in read], self.shape)
        return images, [path for _, path in read], [item for item in items if isinstance(item, NotRead)]

    def prepare(self, batch: Tensor) -> Tensor:
        """The normalised images."""
        return normalize(batch, self.info)

    def score(self, model: nn.Module, batch: Tensor, paths: list[str], keys: Predict) -> Tensor:
        if keys.saliency is None:
            return super().score(model, batch, paths, keys)
        names, chosen = self.info.class_names, None
        if keys.saliency_class is not None:
            chosen = torch.full((len(batch),), names.index(str(keys.saliency_class)), device=batch.device)
        logits, maps = saliency(model, batch, chosen)
        chosen = logits.argmax(dim=1) if chosen is None else chosen
        spread = logits.sigmoid() if self.info.multi_label else logits.softmax(dim=1)
        probabilities = spread.gather(1, chosen[:, None])[:, 0].tolist()
        pixels = denormalize(batch, self.info).cpu()
        captions = [f"{names[one]} {value:.3f}" for one, value in zip(chosen.tolist(), probabilities, strict=True)]
        for path, *shown in zip(paths, pixels, maps.cpu(), captions, strict=True):
            write_picture(draw_saliency(*shown), self._picture_of(path, keys.saliency))
        self._notes = [f"pictures of saliency written below {keys.saliency}"]
        return logits

    def notes(self) -> list[str]:
        return self._notes


def _refuse_other_files(path: Path) -> None:
    """Raise ValueError, in one line, for a file that is no image but may hold or list some."""
    if not path.is_file():
        return
    if path.suffix.lower() in _TABLES:
        raise ValueError(
            f"input={path} is a table, and images are read from files: give the folder of those that it lists, or one "
            "image; `longseq evaluate` reads tables, by data.source=csv data.root=FILE.csv"
        )
    if path.suffix.lower() == ".tar" or is_compressed(str(path)):
        raise ValueError(
            f"input={path} is an archive, and images are read from files: unpack it and give that folder, or one image"
        )


def as_targets(targets: Sequence[Any], num_labels: int | None = None) -> Tensor:
    """Classes as int64 [B], or rows of several labels as float32 [B, C]; `num_labels` is C for an empty batch."""
    if targets and isinstance(targets[0], np.ndarray):
        return torch.from_numpy(np.stack(targets)).float()
    if num_labels is not None:
        return torch.zeros(0, num_labels)
    return torch.tensor([int(target) for target in targets], dtype=torch.int64)


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch's CPU."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - timm's transforms draw from the global generator
    torch.default_generator.manual_seed(seed)


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore the generators of `seed_everything` afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])


def _stack(images: list[Tensor], shape: tuple[int, int, int]) -> Tensor:
    """Images [B, C, H, W], also for B = 0."""
    return torch.stack(images) if images else torch.empty(0, *shape, dtype=torch.uint8)


def replace_position(seed: int, index: SampleIndex, attempt: int, count: int) -> int:
    """The position, among `count`, of the image that takes the place of an unreadable one at this attempt."""
    return derive_seed(seed, *index, attempt) % count


def read_or_failure(split: Split, position: int) -> tuple[Image.Image, Any] | Failure:
    """The decoded image at a position of a split and its class, or why it cannot be read."""
    index = int(split.indices[position])
    try:
        return split.source.read(index)
    except LabelError as error:
        return Failure(split.source.path(index), str(error), stops=True)
    except UNREADABLE as error:
        return Failure(split.source.path(index), first_line(error))


class ReadInClasses:
    """A way to read a position of a split, such as `read_or_failure`, that stops the run at a label of no class."""

    def __init__(self, read: Callable[[Split, int], tuple[Any, Any] | Failure], num_classes: int) -> None:
        self.read, self.num_classes = read, num_classes

    def __call__(self, split: Split, position: int) -> tuple[Any, Any] | Failure:
        found = self.read(split, position)
        if isinstance(found, Failure) or not isinstance(found[1], int) or 0 <= found[1] < self.num_classes:
            return found
        told = f"the label {found[1]} is not among the classes 0 to {self.num_classes - 1}"
        return Failure(split.source.path(int(split.indices[position])), told, stops=True)
