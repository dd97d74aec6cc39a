"""Windows: the tokens of a corpus in a row of a batch, and the samplers that choose the windows of each batch.

A corpus is a ring: after its last document comes the first one. Place p predicts the token at place p + 1, so a pass
over the corpus predicts each token once, separators included. Samplers are functions of seed, epoch and place.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from torch.utils.data import Sampler

from longseq.tasks.data.sampler import EvaluationSampler, UpdateSampler, derive_seed
from longseq.tasks.text.store import Corpus, Integers

_WINDOWS = 100_000  # that `Concatenated.sequences` looks at


class Span(NamedTuple):
    """The places from `start` to `stop`, which may exceed the corpus's size, because the corpus is a ring."""

    start: int
    stop: int


class Windows(ABC):
    """The `count` windows of a corpus, each a row of spans with together at most `length` tokens."""

    count: int

    def __init__(self, corpus: Corpus, length: int) -> None:
        self.corpus, self.length, self.size = corpus, length, len(corpus.tokens)

    @abstractmethod
    def spans(self, index: int, shift: int = 0) -> list[Span]:
        """The spans of a window; `shift` moves all windows of a pass along the ring, if they can be moved."""

    @abstractmethod
    def sequences(self) -> Integers:
        """The numbers of sequences (documents and parts of documents) of some windows from all over the corpus."""


class Concatenated(Windows):
    """Windows of equal length, and unless all must be `whole`, as in training, the rest of the corpus."""

    def __init__(self, corpus: Corpus, length: int, *, whole: bool) -> None:
        super().__init__(corpus, length)
        self.count = self.size // length if whole else -(-self.size // length)

    def spans(self, index: int, shift: int = 0) -> list[Span]:
        first = index * self.length
        start = (first + shift) % self.size
        return [Span(start, start + min(self.length, self.size - first))]

    def sequences(self) -> Integers:
        chosen = np.unique(np.linspace(0, self.count - 1, min(self.count, _WINDOWS)).astype(np.int64)) * self.length
        offsets = np.asarray(self.corpus.offsets)
        last = np.minimum(chosen + self.length, self.size)
        begun = np.searchsorted(offsets, last, side="left") - np.searchsorted(offsets, chosen, side="right")
        return 1 + begun + (last < chosen + self.length)  # the rest of a short window is one more


class Documents(Windows):
    """Whole documents, packed by best fit, longest first; those longer than a window are cut into windows and a rest.

    A piece goes into the window with the least free room that can hold it. Equal pieces keep their order.
    """

    def __init__(self, corpus: Corpus, length: int) -> None:
        super().__init__(corpus, length)
        starts, sizes = corpus.offsets[:-1], np.diff(corpus.offsets)
        parts = -(-sizes // length)
        number = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)  # of a piece in its document
        begin = np.repeat(starts, parts) + number * length
        size = np.minimum(length, np.repeat(starts + sizes, parts) - begin)
        window, self.count = _best_fit(size, length)
        self._pieces = np.stack([begin, begin + size], axis=1)[np.argsort(window, kind="stable")]
        # The first piece of each window.
        self._first = np.concatenate([[0], np.cumsum(np.bincount(window, minlength=self.count))]).astype(np.int64)

    def spans(self, index: int, shift: int = 0) -> list[Span]:
        return [Span(*map(int, piece)) for piece in self._pieces[self._first[index] : self._first[index + 1]]]

    def sequences(self) -> Integers:
        return 1 + np.diff(self._first)  # the rest of a window, if there is one, is one more


def _best_fit(sizes: Integers, length: int) -> tuple[Integers, int]:
    """The window of each piece, and the number of windows."""
    order = np.argsort(-sizes, kind="stable")
    window = np.empty(len(order), np.int64)
    rooms: list[int] = []  # the sorted amounts of free room of all windows
    open_windows: defaultdict[int, list[int]] = defaultdict(list)
    count = 0
    for piece, needed in zip(order.tolist(), sizes[order].tolist(), strict=True):
        at = bisect_left(rooms, needed)
        if at < len(rooms):
            room = rooms[at]
            chosen = open_windows[room].pop()
            if not open_windows[room]:
                rooms.pop(at)
        else:
            room, chosen, count = length, count, count + 1
        window[piece] = chosen
        if left := room - needed:
            if not open_windows[left]:
                insort(rooms, left)
            open_windows[left].append(chosen)
    return window, count


def most_sequences(cut: Sequence[Windows], rows: int) -> int:
    """A number of sequences that a batch of `rows` randomly drawn windows exceeds once in millions."""
    found = []
    for windows in cut:
        if windows.count:
            counts = windows.sequences()
            found.append(min(rows * counts.max(), rows * counts.mean() + 5 * rows**0.5 * counts.std()))
    return math.ceil(max(found))


class WindowIndex(NamedTuple):
    """A window of a corpus, moved by `shift` places; `fresh` as in `longseq.tasks.text.batch.Carry`."""

    corpus: int
    window: int
    shift: int = 0
    fresh: bool = True


class _WindowSampler(UpdateSampler[list[WindowIndex]]):
    """A sampler with `num_samples` windows in an epoch. ValueError if these are fewer than an update needs."""

    def __init__(self, num_samples: int, length: int, batch_size: int, **options: int) -> None:
        super().__init__(batch_size, **options)  # type: ignore[arg-type]
        self.num_samples, needed = num_samples, self.effective_batch_size
        if num_samples < needed:
            raise ValueError(
                f"the training split has {num_samples} windows of {length} tokens, and an update needs {needed}"
            )


class MixedSampler(_WindowSampler):
    """Yields the windows of each batch, of several corpora by weights.

    An epoch has as many windows as all corpora together. Without weights it is a pass over each of them. With weights
    each corpus gives its share of the windows, and continues in the next epoch where it stopped. Each pass over a
    corpus has its own order and shift.
    """

    def __init__(
        self, corpora: Sequence[Windows], batch_size: int, *, weights: Sequence[float] | None = None, **options: int
    ) -> None:
        counts, length = [windows.count for windows in corpora], corpora[0].length
        super().__init__(sum(counts), length, batch_size, **options)
        self.corpora = corpora
        if short := [windows.size for windows in corpora if weights is not None and windows.count == 0]:
            raise ValueError(f"a corpus of {short[0]} tokens has no window of {length}")
        self.shares = counts if weights is None else _shares(counts, weights)

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


def _shares(counts: Sequence[int], weights: Sequence[float]) -> list[int]:
    """The windows of each corpus in an epoch: proportional to the weights, rounded by largest remainders."""
    exact = np.array(weights) / sum(weights) * sum(counts)
    shares = np.floor(exact).astype(int)
    for corpus in np.argsort(shares - exact, kind="stable")[: sum(counts) - shares.sum()]:
        shares[corpus] += 1
    return shares.tolist()


class StreamSampler(_WindowSampler):
    """Yields windows of streams: row b of a batch continues row b of the batch before.

    An epoch cuts the corpus, moved by a random shift, into as many streams as an effective batch has rows. ValueError
    for accumulated batches, which would continue each other's rows.
    """

    def __init__(self, windows: Windows, batch_size: int, **options: int) -> None:
        super().__init__(windows.count, windows.length, batch_size, **options)
        if self.accumulate > 1:
            raise ValueError(f"data.packing=streams accumulates no batches, not {self.accumulate}")
        self.windows = windows

    def shuffle(self) -> Callable[[int, int], list[WindowIndex]]:
        updates = self.updates
        shift = int(np.random.default_rng(derive_seed(self.seed, self.epoch)).integers(self.windows.size))

        def give(update: int, part: int) -> list[WindowIndex]:
            streams = range(part, self.effective_batch_size, self.parts)
            return [WindowIndex(0, stream * updates + update, shift, fresh=update == 0) for stream in streams]

        return give


class EveryWindow(Sampler[list[WindowIndex]]):
    """Yields batches for evaluation: every window of every corpus once over all ranks, as many batches on each rank.

    After `keep_order` the windows are in order, and rank r of n has every n-th batch, from batch r on.
    """

    def __init__(self, counts: Sequence[int], batch_size: int, *, rank: int = 0, world_size: int = 1) -> None:
        self.ends = np.cumsum(counts)
        self.counts, self.world_size = counts, world_size
        self.positions = EvaluationSampler(int(self.ends[-1]), batch_size, rank=rank, world_size=world_size)
        self._in_order = False

    def keep_order(self) -> None:
        """Read the windows in their order, for predictions."""
        self._in_order = True

    def __len__(self) -> int:
        return len(self.positions)

    def __iter__(self) -> Iterator[list[WindowIndex]]:
        size, count, rank = self.positions.batch_size, self.positions.num_samples, self.positions.rank
        for number in range(len(self)):
            if self._in_order:  # full batches, because a missing window would have predictions of its own
                first = (rank + self.world_size * number) * size
                positions = list(range(first, min(first + size, count)))
            else:
                positions = self.positions.batch(number)
            corpora = np.searchsorted(self.ends, positions, side="right").tolist()
            yield [
                WindowIndex(corpus, position - int(self.ends[corpus]) + self.counts[corpus])
                for corpus, position in zip(corpora, positions, strict=True)
            ]


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
