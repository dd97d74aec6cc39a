"""The samples of each batch: pure functions of the seed, the epoch and the position in the epoch."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

BatchT = TypeVar("BatchT")

_WORD = (1 << 64) - 1


def derive_seed(*numbers: int) -> int:
    """A number in [0, 2**63) that mixes `numbers` in their order, by SplitMix64 (Steele, Lea, Flood 2014)."""
    state = 0
    for number in numbers:
        state = (state + 0x9E3779B97F4A7C15 + number) & _WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
        state ^= state >> 31
    return state >> 1


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators of the CPU and of `device`.

    Without a GPU, `torch.manual_seed` is slow: it records each of its callers for a later GPU.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)


class SampleIndex(NamedTuple):
    """A training sample: its position in the split, the number of its repeat, and the epoch."""

    position: int
    repeat: int
    epoch: int


class UpdateSampler(Sampler[BatchT]):
    """Yields one process's batches of epoch `epoch`, from batch `start` on.

    An epoch is a sequence of effective batches, one for each update of the weights. It depends only on the seed, the
    epoch and the size of the effective batch. An effective batch has `world_size * accumulate` parts of `batch_size`
    samples: sample i belongs to part `i % parts`. The n-th accumulated batch of a process is part
    `n * world_size + rank`. Samples that do not fill an effective batch are left out.

    A subclass sets `num_samples`, the samples of an epoch.
    """

    num_samples: int
    repeats = 1

    def __init__(self, batch_size: int, *, seed: int, rank: int = 0, world_size: int = 1, accumulate: int = 1) -> None:
        self.batch_size, self.seed = batch_size, seed
        self.rank, self.world_size, self.accumulate = rank, world_size, accumulate
        self.epoch = 0
        self.start = 0

    @property
    def parts(self) -> int:
        """The number of parts of an effective batch, over processes and accumulated batches."""
        return self.world_size * self.accumulate

    @property
    def effective_batch_size(self) -> int:
        """The samples of an update."""
        return self.batch_size * self.parts

    @property
    def updates(self) -> int:
        """The updates of a whole epoch."""
        return self.num_samples // self.effective_batch_size

    def require_update(self, unit: str) -> None:
        """ValueError if an epoch has fewer samples, called `unit`, than an update needs."""
        if self.updates == 0:
            needed = self.effective_batch_size
            raise ValueError(f"an update needs {needed} {unit}, and there are {self.num_samples}")

    @abstractmethod
    def shuffle(self) -> Callable[[int, int], BatchT]:
        """Draw the order of the epoch; returns the function of (update, part) that gives a batch."""

    def set_epoch(self, epoch: int) -> None:
        """Lightning calls this before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        """The batches of a whole epoch on one process, whatever `start` is."""
        return self.updates * self.accumulate

    def __iter__(self) -> Iterator[BatchT]:
        give = self.shuffle()
        for batch in range(self.start, len(self)):
            update, turn = divmod(batch, self.accumulate)
            yield give(update, turn * self.world_size + self.rank)


class TrainingSampler(UpdateSampler[list[SampleIndex]]):
    """Yields the samples of each batch.

    An epoch is an order of the samples (see `EpochOrder`), each repeated `repeats` times in a row, cut to the number of
    samples (repeated augmentation, Hoffer et al. 2020, in the form of DeiT). Neighbours belong to different processes.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        repeats: int = 1,
        classes: npt.NDArray[np.int64] | None = None,
        **options: int,
    ) -> None:
        super().__init__(batch_size, **options)  # type: ignore[arg-type]
        self.num_samples, self.repeats = num_samples, repeats
        self.require_update("training samples")
        self._order = EpochOrder(num_samples, classes)

    def shuffle(self) -> Callable[[int, int], list[SampleIndex]]:
        epoch, size, repeats = self.epoch, self.effective_batch_size, self.repeats
        generator = np.random.default_rng(derive_seed(self.seed, epoch))
        positions, turns = self._order.draw(math.ceil(self.num_samples / repeats), generator)

        def give(update: int, part: int) -> list[SampleIndex]:
            places = (divmod(p, repeats) for p in range(update * size + part, (update + 1) * size, self.parts))
            return [SampleIndex(positions[at], turns[at] * repeats + repeat, epoch) for at, repeat in places]

        return give


class EpochOrder:
    """The order of the samples of an epoch: a permutation, or with `classes [N]` each class equally often.

    A balanced epoch has as many samples as the split. Of `C` classes, each `C` neighbours are of different classes, in
    a random order. A class gives its samples in a random order, and begins again in another order after the last one:
    an epoch has some samples several times, each with its own number of repeat, and leaves others out.
    """

    def __init__(self, samples: int, classes: npt.NDArray[np.int64] | None = None) -> None:
        self._samples = samples
        self._members = [np.flatnonzero(classes == one) for one in np.unique(classes)] if classes is not None else []

    def draw(self, count: int, generator: np.random.Generator) -> tuple[list[int], list[int]]:
        """The positions of the first `count` samples, and the number of earlier draws of each."""
        if not self._members:
            return generator.permutation(self._samples)[:count].tolist(), [0] * count
        classes = len(self._members)
        rounds = math.ceil(count / classes)
        order = generator.permuted(np.tile(np.arange(classes), (rounds, 1)), axis=1)  # [rounds, classes]
        column, row = order.argsort(axis=1), np.arange(rounds)  # the place of each class in each round
        positions = np.empty_like(order)
        turns = np.empty_like(order)
        for number, members in enumerate(self._members):
            passes = math.ceil(rounds / len(members))
            given = np.concatenate([generator.permutation(members) for _ in range(passes)])[:rounds]
            positions[row, column[:, number]] = given
            turns[row, column[:, number]] = row // len(members)
        return positions.reshape(-1)[:count].tolist(), turns.reshape(-1)[:count].tolist()


class EvaluationSampler(Sampler[list[int]]):
    """Yields batches of sample positions: each sample once over all ranks, and the same number of batches on each rank.

    Batches differ in size by at most one, and may be empty. A batch takes its samples at a constant stride over the
    set, which mixes sorted classes. After `keep_order` batches are in order: rank r of n has every n-th, from r on.
    """

    def __init__(self, num_samples: int, batch_size: int, *, rank: int = 0, world_size: int = 1) -> None:
        self.num_samples, self.batch_size, self.rank, self.world_size = num_samples, batch_size, rank, world_size
        self.in_order = False

    def keep_order(self) -> None:
        """Read the samples in their order, for predictions."""
        self.in_order = True

    def __len__(self) -> int:
        return math.ceil(self.num_samples / (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[list[int]]:
        return map(self.batch, range(len(self)))

    def batch(self, number: int) -> list[int]:
        """The positions of the samples of a batch."""
        first, batches = self.rank + self.world_size * number, self.world_size * len(self)
        if self.in_order:
            return list(range(first * self.num_samples // batches, (first + 1) * self.num_samples // batches))
        return list(range(first, self.num_samples, batches))
