"""Which samples make a batch: pure functions of seed, epoch, rank and world size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from torch.utils.data import Sampler

from longseq.tasks.data.seeds import derive_seed


class SampleIndex(NamedTuple):
    """One training sample: its position in the split, which repeat of it this is, and the epoch."""

    position: int
    repeat: int
    epoch: int


class TrainingSampler(Sampler[list[SampleIndex]]):
    """Yields the batches of one rank, from batch `start` of epoch `epoch` on.

    An epoch is a permutation of the samples, each `repeats` times in a row, cut to the number of samples (repeated
    augmentation, Hoffer et al. 2020, in the form of DeiT). Neighbours go to different ranks, so a batch over all ranks
    holds the same samples whatever the number of ranks. What does not fill a batch on every rank is dropped.
    """

    def __init__(
        self, num_samples: int, batch_size: int, *, seed: int, repeats: int = 1, rank: int = 0, world_size: int = 1
    ) -> None:
        if batch_size < 1 or repeats < 1:
            raise ValueError(f"batch_size={batch_size} and repeats={repeats} must be at least 1")
        if batch_size * world_size > num_samples:
            raise ValueError(
                f"a batch of {batch_size} on {world_size} device(s) needs {batch_size * world_size} training images, "
                f"but there are {num_samples}: choose recipe.batch_size of at most {num_samples}"
            )
        self.num_samples, self.batch_size, self.repeats = num_samples, batch_size, repeats
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.epoch = 0
        self.start = 0

    def set_epoch(self, epoch: int) -> None:
        """Lightning calls this before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Batches of a whole epoch on one rank, whatever `start` is."""
        return self.num_samples // (self.batch_size * self.world_size)

    def __iter__(self) -> Iterator[list[SampleIndex]]:
        epoch, stride = self.epoch, self.batch_size * self.world_size
        distinct = math.ceil(self.num_samples / self.repeats)
        order = np.random.default_rng(derive_seed(self.seed, epoch)).permutation(self.num_samples)[:distinct].tolist()
        for batch in range(self.start, len(self)):
            positions = range(batch * stride + self.rank, (batch + 1) * stride, self.world_size)
            yield [SampleIndex(order[p // self.repeats], p % self.repeats, epoch) for p in positions]


class EvaluationSampler(Sampler[list[int]]):
    """Yields batches of sample positions: over all ranks every sample once, and as many batches on each rank.

    Nothing is padded: batches differ in size by at most one, and are empty on some ranks when there are fewer samples
    than ranks. A batch strides over the whole set, so that sets sorted by class give mixed batches.
    """

    def __init__(self, num_samples: int, batch_size: int, *, rank: int = 0, world_size: int = 1) -> None:
        if batch_size < 1:
            raise ValueError(f"the evaluation batch size {batch_size} must be at least 1")
        self.num_samples, self.batch_size, self.rank, self.world_size = num_samples, batch_size, rank, world_size

    def __len__(self) -> int:
        return math.ceil(self.num_samples / (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[list[int]]:
        for batch in range(len(self)):
            first = self.rank + self.world_size * batch
            yield list(range(first, self.num_samples, self.world_size * len(self)))
