"""Windows: which tokens of a corpus a row of a batch holds. Pure functions, without random numbers of their own.

A corpus is read as a ring: after its last document comes the first one. Place p predicts the token at place p + 1, so
that each token of the corpus, separators included, is predicted once in a pass over it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longseq.tasks.text.batch import IGNORED, Carry, TokenBatch, TokenInputs
from longseq.tasks.text.store import Corpus, Integers

# Of a corpus, so many windows tell how many sequences a window has; a batch may have so many standard deviations more
# than the mean; and lengths of `cu_seqlens` are multiples of this.
_WINDOWS = 100_000
_DEVIATIONS = 5
_STEP = 8


class Span(NamedTuple):
    """The places from `start` to `stop`. Only `start` must be below the corpus's size, because the corpus is a ring."""

    start: int
    stop: int


class Windows(ABC):
    """The windows of T tokens of a corpus: `count` of them, each a row of spans that together hold at most T tokens."""

    count: int

    def __init__(self, corpus: Corpus, length: int) -> None:
        self.corpus, self.length, self.size = corpus, length, len(corpus.tokens)

    @abstractmethod
    def spans(self, index: int, shift: int = 0) -> list[Span]:
        """The spans of window `index`; `shift` moves all windows of a pass along the ring, if they can be moved."""

    @abstractmethod
    def sequences(self) -> Integers:
        """How many sequences each of some windows has, from all over the corpus: documents and parts of documents."""


class Concatenated(Windows):
    """Windows of equal length, without regard to documents. For training the shorter rest is left out.

    Without `whole` the rest is a window too.
    """

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
    """Whole documents, packed by best fit, longest first. Longer ones than a window are cut into windows and a rest."""

    def __init__(self, corpus: Corpus, length: int) -> None:
        super().__init__(corpus, length)
        self._pieces, self._first = _best_fit(corpus.offsets, length)
        self.count = len(self._first) - 1

    def spans(self, index: int, shift: int = 0) -> list[Span]:
        return [Span(*map(int, piece)) for piece in self._pieces[self._first[index] : self._first[index + 1]]]

    def sequences(self) -> Integers:
        return 1 + np.diff(self._first)  # the rest of a window, if there is one, is one more


def _best_fit(offsets: Integers, length: int) -> tuple[np.ndarray, Integers]:
    """Pieces of documents `[P, 2]` (start, stop) in the order of their windows, and the first piece of each window.

    A piece goes into the window with the least free room that can hold it. Equal pieces keep their order.
    """
    starts, sizes = offsets[:-1], np.diff(offsets)
    parts = -(-sizes // length)
    number = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)  # of a piece in its document
    begin = np.repeat(starts, parts) + number * length
    size = np.minimum(length, np.repeat(starts + sizes, parts) - begin)
    order = np.argsort(-size, kind="stable")
    window = np.empty(len(order), np.int64)
    rooms: list[int] = []  # the sorted amounts of free room of all windows
    open_windows: defaultdict[int, list[int]] = defaultdict(list)
    count = 0
    for piece, needed in zip(order.tolist(), size[order].tolist(), strict=True):
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
    by_window = np.argsort(window, kind="stable")
    first = np.concatenate([[0], np.cumsum(np.bincount(window, minlength=count))]).astype(np.int64)
    return np.stack([begin, begin + size], axis=1)[by_window], first


def most_sequences(cut: Sequence[Windows], rows: int) -> int:
    """How many sequences a batch of windows that are drawn at random has, at the most, but for one in millions."""
    found = []
    for windows in cut:
        if windows.count:
            counts = windows.sequences()
            found.append(min(rows * counts.max(), rows * counts.mean() + _DEVIATIONS * rows**0.5 * counts.std()))
    return math.ceil(max(found))


class Row(NamedTuple):
    """A row of a batch: spans of a corpus. `fresh` states that no earlier batch holds the tokens before the row."""

    corpus: int
    spans: list[Span]
    fresh: bool = True


class Assembler:
    """Makes batches of rows of T tokens from corpora, all of one shape (see `TokenInputs`).

    `sequences` is how many sequences a batch holds at the most, from which the length of `cu_seqlens` follows: kernels
    have programs for them all. A batch with more gets twice the length. Without `reset_state` rows are not packed:
    `[B, T]`, whatever documents are in them. `start` is the token that is read at the beginning of a document, by
    default the separator; the separator alone is predicted.
    """

    def __init__(
        self,
        corpora: Sequence[Corpus],
        length: int,
        rows: int,
        *,
        sequences: int,
        separator: int,
        reset_state: bool,
        carries: bool,
        start: int | None = None,
    ) -> None:
        self.corpora, self.length, self.rows, self.separator = corpora, length, rows, separator
        self.reset_state, self.carries = reset_state, carries
        self.start = separator if start is None else start
        self._slots = -(-sequences // _STEP) * _STEP

    def __call__(self, rows: Sequence[Row | None]) -> TokenBatch:
        """The batch of at most B rows; rows that are None or missing have no targets."""
        shape = (self.rows, self.length)
        tokens, targets = np.full(shape, self.separator, np.int64), np.full(shape, IGNORED, np.int64)
        fresh = np.ones(self.rows, bool)
        borders: list[list[int]] = []  # of each row: where sequences begin
        byte_count = 0
        for index in range(self.rows):
            row = rows[index] if index < len(rows) else None
            begins = [0]
            place = 0
            for span in [] if row is None else row.spans:
                assert row is not None
                size = span.stop - span.start
                inside = slice(place, place + size)
                tokens[index, inside], targets[index, inside], starts, covered = self._read(row.corpus, span)
                byte_count += covered
                begins += [place, *(place + starts).tolist()]
                if place == 0:
                    fresh[index] = row.fresh or (self.reset_state and len(starts) > 0 and starts[0] == 0)
                place += size
            borders.append(sorted({*begins, *([place] if place < self.length else [])}))
        cu_seqlens, first, last = self._pack(borders) if self.reset_state else (None, None, None)
        flat = (1, -1) if self.reset_state else shape
        inputs = TokenInputs(
            tokens=torch.from_numpy(tokens.reshape(flat)),
            cu_seqlens=cu_seqlens,
            max_seqlen=self.length,
            units=int((targets != IGNORED).sum()),
            byte_count=byte_count,
            carry=Carry(first, last, torch.from_numpy(fresh)) if self.carries else None,
        )
        return inputs, torch.from_numpy(targets.reshape(flat))

    def _read(self, number: int, span: Span) -> tuple[np.ndarray, np.ndarray, Integers, int]:
        """Tokens and targets of a span, the places in it where documents begin, and the bytes of its targets."""
        corpus = self.corpora[number]
        size, length = len(corpus.tokens), span.stop - span.start
        if span.stop < size:
            read = np.asarray(corpus.tokens[span.start : span.stop + 1])
        else:
            read = np.asarray(corpus.tokens.take(range(span.start, span.stop + 1), mode="wrap"))
        read = read.astype(np.int64)
        tokens, targets = read[:-1], read[1:].copy()
        starts: list[np.ndarray] = []
        covered = 0
        start, done = span.start, 0
        while done < length:  # twice, where the span crosses the end of the ring
            stop = min(start + length - done, size)
            begun, bytes_here, ignored = self._documents(number, start, stop)
            starts.append(begun - start + done)
            for begin, end in ignored:
                targets[begin - start + done : end - start + done] = IGNORED
            covered += bytes_here
            done += stop - start
            start = 0
        begins = np.concatenate(starts)
        tokens[begins] = self.start  # targets are a copy
        return tokens, targets, begins, covered

    def _documents(self, number: int, start: int, stop: int) -> tuple[Integers, int, list[tuple[int, int]]]:
        """For the places from `start` to `stop`: where documents begin, the targets' bytes, the targets left out."""
        corpus = self.corpora[number]
        one = int(np.searchsorted(corpus.offsets, start, side="right")) - 1
        other = int(np.searchsorted(corpus.offsets, stop, side="left"))
        offsets = np.asarray(corpus.offsets[one : other + 1])
        first = offsets[:-1] + (0 if corpus.prompts is None else corpus.prompts[one:other])
        count = np.maximum(1, offsets[1:] - first)
        before = np.clip(start - first, 0, count)  # targets of each document before `start`
        until = np.clip(stop - first, 0, count)
        total = np.asarray(corpus.byte_counts[one:other])
        covered = int((total * until // count - total * before // count).sum())
        ignored = []
        if corpus.prompts is not None:
            begins, ends = np.maximum(offsets[:-1], start), np.minimum(first, stop)
            ignored = [(int(b), int(e)) for b, e in zip(begins, ends, strict=True) if b < e]
        begun = offsets[:-1][offsets[:-1] >= start]
        return begun.astype(np.int64), covered, ignored

    def _pack(self, borders: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
        """The borders of all rows in one tensor, padded to a fixed length; the first and last sequence of each row."""
        counts = np.array([len(row) for row in borders])
        ends = np.cumsum(counts)
        slots = self._slots
        while slots < ends[-1]:
            slots *= 2
        packed = np.full(slots + 1, self.rows * self.length, np.int32)
        packed[: ends[-1]] = np.concatenate([index * self.length + np.array(row) for index, row in enumerate(borders)])
        return torch.from_numpy(packed), torch.from_numpy(ends - counts), torch.from_numpy(ends - 1)
