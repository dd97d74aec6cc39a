"""Windows of the tokens of corpora, the samplers that choose the windows of each batch, and the batches.

A corpus is a ring: after its last document comes the first one. Place p predicts the token at place p + 1, so a pass
over the corpus predicts each token once, separators included. Samplers are functions of seed, epoch and place.

A loader yields `(TokenInputs, targets)`. Every document begins with the separator, the token that also ends it: its
inputs are `separator, t_1, ..., t_n`, its targets `t_1, ..., t_n, separator`. So each token of a document is predicted,
also the first one, and none from another document.

    inputs, targets = batch
    logits, _ = model(inputs.tokens, cu_seqlens=inputs.packing)       # [1, B * T, vocabulary]
    loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from longseq.kernels.packing import Packing
from longseq.tasks.data.loader import Batch
from longseq.tasks.data.sampler import EvaluationSampler, UpdateSampler, derive_seed
from longseq.tasks.text.store import Corpus, Integers

IGNORED = -100  # the target of a token without a target, as in torch
_STEP = 8  # `cu_seqlens` has a multiple of this many sequences
_WINDOWS = 100_000  # that `Concatenated.sequences` looks at


class Windows(ABC):
    """The `count` windows of a corpus: spans of its places, together at most `length`."""

    count: int

    def __init__(self, corpus: Corpus, length: int) -> None:
        self.corpus, self.length, self.size = corpus, length, len(corpus.tokens)

    @abstractmethod
    def spans(self, index: int, shift: int = 0) -> list[range]:
        """The spans of a window; `shift` moves all windows of a pass along the ring, if they can be moved."""

    @abstractmethod
    def sequences(self) -> Integers:
        """The numbers of sequences (documents and parts of documents) of some windows from all over the corpus."""


class Concatenated(Windows):
    """Windows of equal length, and unless all must be `whole`, as in training, the rest of the corpus."""

    def __init__(self, corpus: Corpus, length: int, *, whole: bool) -> None:
        super().__init__(corpus, length)
        self.count = self.size // length if whole else -(-self.size // length)

    def spans(self, index: int, shift: int = 0) -> list[range]:
        first = index * self.length
        start = (first + shift) % self.size
        stop = start + min(self.length, self.size - first)
        return [span for span in (range(start, min(stop, self.size)), range(stop - self.size)) if span]

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

    def spans(self, index: int, shift: int = 0) -> list[range]:
        return [range(*piece) for piece in self._pieces[self._first[index] : self._first[index + 1]]]

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


class WindowIndex(NamedTuple):
    """A window of a corpus, moved by `shift` places; `fresh` as in `Carry`."""

    corpus: int
    window: int
    shift: int = 0
    fresh: bool = True


class MixedSampler(UpdateSampler[list[WindowIndex]]):
    """Yields the windows of each batch, of several corpora by weights.

    An epoch has as many windows as all corpora: a pass over each, or with weights its share, which continues in the
    next epoch where it stopped. Each pass over a corpus has its own order and shift.
    """

    def __init__(
        self, corpora: Sequence[Windows], batch_size: int, *, weights: Sequence[float] | None = None, **options: int
    ) -> None:
        super().__init__(batch_size, **options)  # type: ignore[arg-type]
        counts, length = [windows.count for windows in corpora], corpora[0].length
        self.corpora, self.num_samples = corpora, sum(counts)
        self.require_update(f"windows of {length} tokens")
        if short := [windows.size for windows in corpora if weights is not None and windows.count == 0]:
            raise ValueError(f"a corpus of {short[0]} tokens has no window of {length}")
        self.shares = counts
        if weights is not None:  # proportional to the weights, rounded by largest remainders
            exact = np.array(weights) / sum(weights) * sum(counts)
            shares = np.floor(exact).astype(int)
            shares[np.argsort(shares - exact, kind="stable")[: sum(counts) - shares.sum()]] += 1
            self.shares = shares.tolist()

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

    An epoch cuts the randomly shifted corpus into as many streams as an effective batch has rows. Accumulated batches
    would continue each other's rows (ValueError).
    """

    def __init__(self, windows: Windows, batch_size: int, **options: int) -> None:
        super().__init__(batch_size, **options)  # type: ignore[arg-type]
        self.windows, self.num_samples = windows, windows.count
        self.require_update(f"windows of {windows.length} tokens")
        if self.accumulate > 1:
            raise ValueError(f"data.packing=streams accumulates no batches, not {self.accumulate}")

    def shuffle(self) -> Callable[[int, int], list[WindowIndex]]:
        updates = self.updates
        shift = int(np.random.default_rng(derive_seed(self.seed, self.epoch)).integers(self.windows.size))

        def give(update: int, part: int) -> list[WindowIndex]:
            streams = range(part, self.effective_batch_size, self.parts)
            return [WindowIndex(0, stream * updates + update, shift, fresh=update == 0) for stream in streams]

        return give


class EveryWindow(EvaluationSampler):
    """Yields batches for evaluation: every window of every corpus once over all ranks, as many batches on each rank.

    After `keep_order` the windows are in order, and rank r of n has every n-th batch, from batch r on.
    """

    def __init__(self, counts: Sequence[int], batch_size: int, *, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(sum(counts), batch_size, rank=rank, world_size=world_size)
        self.windows = [WindowIndex(corpus, window) for corpus, count in enumerate(counts) for window in range(count)]

    def __iter__(self) -> Iterator[list[WindowIndex]]:  # type: ignore[override]
        for number in range(len(self)):
            positions: Iterable[int] = self.batch(number)
            if self.in_order:  # full batches, because a missing window would have predictions of its own
                first = (self.rank + self.world_size * number) * self.batch_size
                positions = range(first, min(first + self.batch_size, self.num_samples))
            yield [self.windows[position] for position in positions]


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


class Carry(NamedTuple):
    """How rows of streams continue the previous batch: row b continues row b.

    first: `[B]` int64, the sequence in `cu_seqlens` at the beginning of row b; b itself if rows are not packed.
    last: `[B]` int64, the sequence at the end of row b; the next batch continues its final state.
    fresh: `[B]` bool, True where row b begins without a state: with a document, or with a part of a document whose
        beginning was not in the batch before.
    """

    first: Tensor
    last: Tensor
    fresh: Tensor


class TokenInputs(NamedTuple):
    """The inputs of a token model for a batch of B windows of T tokens, and the number of targets.

    All batches of a loader have one shape: missing windows, and the rest of a window that documents do not fill, hold
    separators without targets. Lightning moves the tensors to the device; the numbers stay on the host.

    tokens: `[1, B * T]` int64, all windows in one row; or `[B, T]` if the state is not reset where documents begin.
    cu_seqlens: `[N + 1]` int32, the borders of sequences: one begins with each window and each document. The last
        border, B * T, repeats (empty sequences), so that all batches have the same N, or with very many short
        documents 2, 4, ... times as many. None for `[B, T]`.
    max_seqlen: the length of the longest possible sequence, a constant of the loader.
    units: targets of this batch on this process that are not IGNORED; may be 0 when several processes evaluate.
    byte_count: bytes of the targets. The bytes of a document are spread evenly over its
        targets, so that the windows of a split add up to the bytes of its documents. None if unknown.
    carry: how the batch continues the one before, for streams; else None.
    mask: `[B, T]` bool, False at padding, which is not read and predicts nothing; None without padding.
    """

    tokens: Tensor
    cu_seqlens: Tensor | None
    max_seqlen: int
    units: int
    byte_count: int | None
    carry: Carry | None = None
    mask: Tensor | None = None

    @property
    def sequences(self) -> int:
        """The sequences, each with its own state."""
        return len(self.tokens) if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    @property
    def packing(self) -> Packing | None:
        """The borders of the sequences, for a model; None for rows that are not packed."""
        if self.cu_seqlens is None:
            return None
        return Packing(self.cu_seqlens, self.tokens.shape[1], max_seqlen=self.max_seqlen)


TokenBatch = tuple[TokenInputs, Tensor]


class WindowBatches(Dataset[Batch]):
    """Maps B windows of T tokens to inputs and targets.

    All batches have one shape (see `TokenInputs`). Without `reset_state` rows are `[B, T]` and not packed; `carries` is
    for streams. `start` is read where a document begins; by default it is the separator, which is always predicted.
    """

    def __init__(
        self,
        cut: Sequence[Windows],
        rows: int,
        *,
        separator: int,
        reset_state: bool,
        carries: bool,
        start: int | None = None,
    ) -> None:
        self.cut, self.length, self.rows, self.separator = cut, cut[0].length, rows, separator
        self.reset_state, self.carries = reset_state, carries
        self.start = separator if start is None else start
        # Randomly drawn windows exceed this number of sequences once in millions of batches.
        counts = [windows.sequences() for windows in cut if windows.count]
        most = max(min(rows * one.max(), rows * one.mean() + 5 * rows**0.5 * one.std()) for one in counts)
        self._slots = math.ceil(most / _STEP) * _STEP

    def __getitem__(self, batch: Sequence[WindowIndex | None]) -> Batch:
        """The batch of at most B windows; rows that are None or missing have no targets."""
        shape = (self.rows, self.length)
        tokens, targets = np.full(shape, self.separator, np.int64), np.full(shape, IGNORED, np.int64)
        fresh = np.ones(self.rows, bool)
        begins = np.zeros(shape, bool)  # where sequences begin
        begins[:, 0] = True
        byte_count = 0
        for index, one in enumerate(batch):
            if one is None:
                continue
            windows, place = self.cut[one.corpus], 0
            for span in windows.spans(one.window, one.shift):
                inside = slice(place, place + len(span))
                tokens[index, inside], targets[index, inside], starts, covered = self._read(windows.corpus, span)
                byte_count += covered
                begins[index, place] = begins[index, place + starts] = True
                if place == 0:
                    fresh[index] = one.fresh or (self.reset_state and len(starts) > 0 and starts[0] == 0)
                place += len(span)
            begins[index, place : place + 1] = True  # the rest
        flat, cu_seqlens = shape, None
        first = last = torch.arange(self.rows)
        if self.reset_state:
            places, counts = np.flatnonzero(begins), begins.sum(axis=1)
            slots = self._slots
            while slots < len(places):
                slots *= 2
            borders = np.full(slots + 1, tokens.size, np.int32)
            borders[: len(places)] = places
            flat, cu_seqlens = (1, -1), torch.from_numpy(borders)
            first, last = torch.from_numpy(counts.cumsum() - counts), torch.from_numpy(counts.cumsum() - 1)
        inputs = TokenInputs(
            tokens=torch.from_numpy(tokens.reshape(flat)),
            cu_seqlens=cu_seqlens,
            max_seqlen=self.length,
            units=int((targets != IGNORED).sum()),
            byte_count=byte_count,
            carry=Carry(first, last, torch.from_numpy(fresh)) if self.carries else None,
        )
        return Batch(inputs, torch.from_numpy(targets.reshape(flat)), [])

    def _read(self, corpus: Corpus, span: range) -> tuple[np.ndarray, np.ndarray, Integers, int]:
        """Tokens and targets of a span, the places in it where documents begin, and the bytes of its targets."""
        start, stop = span.start, span.stop
        read = np.asarray(corpus.tokens.take(np.arange(start, stop + 1), mode="wrap")).astype(np.int64)
        tokens, targets = read[:-1], read[1:].copy()
        one = int(np.searchsorted(corpus.offsets, start, side="right")) - 1
        other = int(np.searchsorted(corpus.offsets, stop, side="left"))
        offsets = np.asarray(corpus.offsets[one : other + 1])
        first = offsets[:-1] + (0 if corpus.prompts is None else corpus.prompts[one:other])
        count = np.maximum(1, offsets[1:] - first)
        before = np.clip(start - first, 0, count)  # targets of each document before `start`
        until = np.clip(stop - first, 0, count)
        total = np.asarray(corpus.byte_counts[one:other])
        covered = int((total * until // count - total * before // count).sum())
        for begin, end in zip(np.maximum(offsets[:-1], start), np.minimum(first, stop), strict=True):
            targets[begin - start : max(begin, end) - start] = IGNORED  # targets of the prompt
        begins = offsets[:-1][offsets[:-1] >= start] - start
        tokens[begins] = self.start
        return tokens, targets, begins, covered
