"""Batches of images: decoding, transforms, and the handling of unreadable images."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from PIL import Image
from timm.data.readers.shared_count import SharedCount
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from longseq.tasks.data.labels import LabelError, number_of_class
from longseq.tasks.data.loader import UNREADABLE, Batch, BatchLoader, Failure, Place
from longseq.tasks.data.sampler import SampleIndex, derive_seed
from longseq.tasks.image.config import DataInfo
from longseq.tasks.image.decoding import first_line
from longseq.tasks.image.sources import Split, as_image

REPLACEMENTS = 100


class TrainingBatches(Dataset[Batch]):
    """SampleIndexes -> a full batch. The index of an unreadable image determines the image that replaces it.

    Repeats of an image are neighbours: it is decoded once for all. ValueError if too many replacements are unreadable.
    """

    def __init__(self, split: Split, transform: Callable[..., Any], seed: int) -> None:
        self.split, self.transform, self.seed = split, transform, seed

    def __getitem__(self, indices: list[SampleIndex]) -> Batch:
        failures: list[Failure] = []
        with isolate_rng(include_cuda=False):
            samples = [(self.transform(image), target) for image, target in self.samples(indices, failures)]
        images, targets = zip(*samples, strict=True)
        return Batch(torch.stack(images), as_targets(targets), failures)

    def samples(self, indices: list[SampleIndex], failures: list[Failure]) -> Iterator[tuple[Any, Any]]:
        """Seeds the generators for the transform of each image, and yields it with its class."""
        sample: Any = None
        position = -1
        for index in indices:
            if index.position != position:
                known = len(failures)
                sample = self._read(index, failures)
                # The repeats of an unreadable image are replaced by different ones.
                position = index.position if len(failures) == known else -1
            seed_everything(derive_seed(self.seed, *index))
            yield sample

    def read(self, index: int) -> tuple[Any, Any]:
        """The image of this index in the source, for the transform, and its class."""
        return self.split.source.read(index)

    def _read(self, index: SampleIndex, failures: list[Failure]) -> tuple[Any, Any]:
        for attempt in range(REPLACEMENTS):
            position = derive_seed(self.seed, *index, attempt) % len(self.split) if attempt else index.position
            result = read_or_failure(self.split, position, self.read)
            if not isinstance(result, Failure):
                return result
            failures.append(result)
        raise ValueError(f"no sample of a training batch can be read: {failures[-1].path}: {failures[-1].reason}")


class EvaluationBatches(Dataset[Batch]):
    """Positions -> a batch; images that cannot be read are left out."""

    def __init__(self, split: Split, transform: Callable[[Image.Image], Any], info: DataInfo) -> None:
        self.split, self.transform, self.info = split, transform, info

    def __getitem__(self, positions: list[int]) -> Batch:
        failures: list[Failure] = []
        images, targets = [], []
        for position in positions:
            sample = read_or_failure(self.split, position)
            if isinstance(sample, Failure):
                failures.append(sample)
            else:
                images.append(self.transform(sample[0]))
                targets.append(sample[1])
        empty = torch.empty(0, self.info.in_chans, *self.info.sides, dtype=torch.uint8)
        return Batch(torch.stack(images) if images else empty, as_targets(targets, self.info), failures)


class StreamBatches(IterableDataset[Batch]):
    """Batches of a timm IterableImageDataset, in its own order; unreadable images are left to its library.

    Training yields only full batches. In an evaluation, each rank reads the whole stream and takes every
    `world_size`-th image, so that none is used twice or left out.
    """

    def __init__(
        self, dataset: Any, transform: Any, place: Place, *, batch_size: int, training: bool, seed: int
    ) -> None:
        self.dataset, self.transform, self.place = dataset, transform, place
        self.batch_size, self.training, self.seed = batch_size, training, seed
        self._epoch = SharedCount()
        if not training:
            dataset.reader.dist_rank, dataset.reader.dist_num_replicas = 0, 1

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, also for workers that have already started."""
        self._epoch.value = epoch
        self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Batch]:
        images: list[Tensor] = []
        targets: list[int] = []
        worker = get_worker_info()
        key = (self.seed, self._epoch.value, self.place.rank, worker.id if worker else 0)
        for count, (image, target) in enumerate(self.dataset):
            if not self.training and count % self.place.world_size != self.place.rank:
                continue
            with isolate_rng(include_cuda=False):
                seed_everything(derive_seed(*key, count))
                images.append(self.transform(as_image(image)))
            targets.append(number_of_class(target, f"image {count} of the stream"))
            if len(images) == self.batch_size:
                yield Batch(torch.stack(images), torch.tensor(targets), [])
                images, targets = [], []
        if images and not self.training:
            yield Batch(torch.stack(images), torch.tensor(targets), [])


class StreamLoader(BatchLoader):
    """A BatchLoader over a stream; each training epoch begins at the start of the stream.

    It ignores the samplers that Lightning passes when it recreates a loader.
    """

    def __init__(
        self,
        dataset: StreamBatches,
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        epoch: Callable[[], int],
        sampler: None = None,
        shuffle: bool = False,
        batch_sampler: None = None,
    ) -> None:
        dataset.dataset.set_loader_cfg(num_workers=num_workers)
        super().__init__(dataset, None, num_workers=num_workers, pin_memory=pin_memory)
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Any, Any]]:  # type: ignore[override]
        stream: Any = self.dataset
        stream.set_epoch(self.epoch())
        count = 0
        for batch in super().__iter__():
            count += 1
            yield batch
        if stream.training and count < len(self):
            raise ValueError(f"the training images end after {count} of the {len(self)} batches of an epoch")

    def __len__(self) -> int:
        stream: Any = self.dataset
        if not stream.training:
            raise TypeError("the length of a stream is unknown")
        return len(stream.dataset) // stream.batch_size


def as_targets(targets: Sequence[Any], info: DataInfo | None = None) -> Tensor:
    """Classes as int64 [B], or rows of several labels as float32 [B, C]; an empty batch needs `info`."""
    if targets and isinstance(targets[0], np.ndarray):
        return torch.from_numpy(np.stack(targets)).float()
    if info is not None and info.multi_label:
        return torch.zeros(0, info.num_classes)
    return torch.tensor([int(target) for target in targets], dtype=torch.int64)


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch's CPU."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - timm's transforms draw from the global generator
    torch.default_generator.manual_seed(seed)


def read_or_failure(
    split: Split, position: int, read: Callable[[int], tuple[Any, Any]] | None = None
) -> tuple[Any, Any] | Failure:
    """The image at a position of a split, as `read` gives it, and its class; or the reason why it cannot be read."""
    index = int(split.indices[position])
    try:
        return (read or split.source.read)(index)
    except LabelError as error:
        return Failure(split.source.path(index), str(error), stops=True)
    except UNREADABLE as error:
        return Failure(split.source.path(index), first_line(error))
