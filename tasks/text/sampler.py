"""The windows of each batch: pure functions of the seed, the epoch and the place in the epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from longseq.tasks.data.sampler import EvaluationSampler, UpdateSampler, derive_seed
from longseq.tasks.text.batch import TokenInputs
from longseq.tasks.text.windows import Assembler, Row, Windows


class WindowIndex(NamedTuple):
    """A window of a corpus, moved by `shift` places; `fresh` as in `Row`."""

    corpus: int
    window: int
    shift: int = 0
    fresh: bool = True


class WindowBatches(Dataset[tuple[TokenInputs, Tensor, list[Any]]]):
    """Maps the windows of a batch to (inputs, targets, failures) as loaders expect; there are no failures."""

    def __init__(self, corpora: Sequence[Windows], assemble: Assembler) -> None:
        self.corpora, self.assemble = corpora, assemble

    def __getitem__(self, batch: Sequence[WindowIndex | None]) -> tuple[TokenInputs, Tensor, list[Any]]:
        rows = [
            None if one is None else Row(one.corpus, self.corpora[one.corpus].spans(one.window, one.shift), one.fresh)
            for one in batch
        ]
        return *self.assemble(rows), []


class MixedSampler(UpdateSampler[list[WindowIndex]]):
    """Yields the windows of each batch, of several corpora by weights.

    An epoch has as many windows as all corpora together. Without weights it is a pass over each of them. With weights a
    corpus gives its share of the windows, and the next epoch continues where it stopped. Each pass over a corpus has
    its own order and shift.
    """

    repeats = 1

    def __init__(
        self,
        corpora: Sequence[Windows],
        batch_size: int,
        *,
        weights: Sequence[float] | None = None,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        accumulate: int = 1,
    ) -> None:
        super().__init__(batch_size, seed=seed, rank=rank, world_size=world_size, accumulate=accumulate)
        self.corpora = corpora
        self.num_samples = sum(windows.count for windows in corpora)
        refuse_few_windows(self, self.num_samples, corpora[0].length)
        if short := [windows.size for windows in corpora if weights is not None and windows.count == 0]:
            raise ValueError(f"a corpus of {short[0]} tokens has no window of {corpora[0].length}")
        self.shares = _shares([windows.count for windows in corpora], weights)

    @property
    def updates(self) -> int:
        return self.num_samples // self.effective_batch_size

    def shuffle(self) -> Callable[[int, int], list[WindowIndex]]:
        effective, epoch = self.effective_batch_size, self.epoch
        order = np.random.default_rng(derive_seed(self.seed, epoch)).permutation(self.num_samples)
        ends = np.cumsum(self.shares)
        passes: dict[tuple[int, int], tuple[np.ndarray, int]] = {}

        def find(sample: int) -> WindowIndex:
            corpus = int(np.searchsorted(ends, sample, side="right"))
            share, windows = self.shares[corpus], self.corpora[corpus]
            draw = epoch * share + sample - (int(ends[corpus]) - share)
            number, place = divmod(draw, windows.count)
            if (corpus, number) not in passes:
                random = np.random.default_rng(derive_seed(self.seed, corpus, number, 1))
                passes[corpus, number] = random.permutation(windows.count), int(random.integers(windows.size))
            places, shift = passes[corpus, number]
            return WindowIndex(corpus, int(places[place]), shift)

        def give(update: int, part: int) -> list[WindowIndex]:
            chosen = order[update * effective + part : (update + 1) * effective : self.parts]
            return [find(sample) for sample in chosen.tolist()]

        return give


class StreamSampler(UpdateSampler[list[WindowIndex]]):
    """Yields windows of streams: row b of a batch continues row b of the batch before.

    An epoch cuts the corpus, moved by a shift of its own, into as many streams as an effective batch has rows.
    ValueError where batches are accumulated: the next batch would continue another one than that before it.
    """

    repeats = 1

    def __init__(
        self,
        windows: Windows,
        batch_size: int,
        *,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        accumulate: int = 1,
    ) -> None:
        super().__init__(batch_size, seed=seed, rank=rank, world_size=world_size, accumulate=accumulate)
        if accumulate > 1:
            raise ValueError(f"data.packing=streams accumulates no batches, not {accumulate}")
        self.windows = windows
        self.num_samples = windows.count
        refuse_few_windows(self, self.num_samples, windows.length)

    @property
    def updates(self) -> int:
        return self.num_samples // self.effective_batch_size

    def shuffle(self) -> Callable[[int, int], list[WindowIndex]]:
        updates = self.updates
        shift = int(np.random.default_rng(derive_seed(self.seed, self.epoch)).integers(self.windows.size))

        def give(update: int, part: int) -> list[WindowIndex]:
            streams = range(part, self.effective_batch_size, self.parts)
            return [WindowIndex(0, stream * updates + update, shift, fresh=update == 0) for stream in streams]

        return give


class EveryWindow(Sampler[list[WindowIndex]]):
    """Yields batches for evaluation: every window of every corpus once over all ranks, as many batches on each rank.

    After `keep_order` the windows are in their order, and only the last batches have fewer: rank r of n has every n-th
    batch, from batch r on.
    """

    def __init__(self, counts: Sequence[int], batch_size: int, *, rank: int = 0, world_size: int = 1) -> None:
        self.ends = np.cumsum(counts)
        self.counts, self.world_size = counts, world_size
        self.positions = EvaluationSampler(int(self.ends[-1]), batch_size, rank=rank, world_size=world_size)
        self._in_order = False

    def keep_order(self) -> None:
        """Read the windows in their order, for predictions, which nothing else pairs with windows."""
        self._in_order = True

    def __len__(self) -> int:
        return len(self.positions)

    def __iter__(self) -> Iterator[list[WindowIndex]]:
        for positions in self._neighbours() if self._in_order else self.positions:
            corpora = np.searchsorted(self.ends, positions, side="right").tolist()
            yield [
                WindowIndex(corpus, position - int(self.ends[corpus]) + self.counts[corpus])
                for corpus, position in zip(corpora, positions, strict=True)
            ]

    def _neighbours(self) -> Iterator[list[int]]:
        """Full batches of neighbours: windows that are missing in a batch would have predictions between the others."""
        size, count = self.positions.batch_size, self.positions.num_samples
        for number in range(len(self)):
            first = (self.positions.rank + self.world_size * number) * size
            yield list(range(first, min(first + size, count)))


class EveryStream(Sampler[list[WindowIndex | None]]):
    """Yields batches for evaluation of streams: the windows are cut into streams of nearly equal length."""

    def __init__(self, count: int, batch_size: int, *, rank: int = 0, world_size: int = 1) -> None:
        self.count, self.batch_size, self.rank, self.world_size = count, batch_size, rank, world_size
        self.streams = batch_size * world_size

    def __len__(self) -> int:
        return -(-self.count // self.streams)

    def __iter__(self) -> Iterator[list[WindowIndex | None]]:
        length = len(self)
        for step in range(length):
            places = [(self.rank * self.batch_size + row) * length + step for row in range(self.batch_size)]
            yield [WindowIndex(0, place, fresh=step == 0) if place < self.count else None for place in places]


def refuse_few_windows(sampler: UpdateSampler[Any], count: int, length: int) -> None:
    """Raise ValueError if the training split is smaller than an effective batch."""
    needed = sampler.effective_batch_size
    if count < needed:
        raise ValueError(f"the training split has {count} windows of {length} tokens, and an update needs {needed}")


def _shares(counts: Sequence[int], weights: Sequence[float] | None) -> list[int]:
    """The number of windows of each corpus in an epoch: proportional to the weights, rounded by largest remainders."""
    if weights is None:
        return list(counts)
    exact = np.array(weights) / sum(weights) * sum(counts)
    shares = np.floor(exact).astype(int)
    for corpus in np.argsort(shares - exact, kind="stable")[: sum(counts) - shares.sum()]:
        shares[corpus] += 1
    return shares.tolist()
