"""Batches of tokens: rows of windows, the borders of the documents in them, and the target of each token.

A loader yields `(TokenInputs, targets)`. Every document begins with the separator, the token that also ends it: its
inputs are `separator, t_1, ..., t_n`, its targets `t_1, ..., t_n, separator`. So each token of a document is predicted,
also the first one, and none from another document.

    (inputs, targets) = batch
    packing = Packing(inputs.cu_seqlens, inputs.tokens.shape[1], max_seqlen=inputs.max_seqlen)
    logits, _ = model(inputs.tokens, cu_seqlens=packing)              # [1, B * T, vocabulary]
    loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from longseq.tasks.data.loader import Batch
from longseq.tasks.text.store import Corpus, Integers
from longseq.tasks.text.windows import Span, WindowIndex, Windows, most_sequences

IGNORED = -100  # the target of a token without a target, as in torch
_STEP = 8  # `cu_seqlens` has a multiple of this many sequences


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


TokenBatch = tuple[TokenInputs, Tensor]


class WindowBatches(Dataset[Batch]):
    """Maps B windows of T tokens to inputs and targets.

    All batches have one shape (see `TokenInputs`). `sequences` is the expected maximum of sequences in a batch, by
    default `most_sequences`. Without `reset_state` rows are `[B, T]` and not packed; `carries` is for streams. `start`
    is the token that is read where a document begins, by default the separator, which is always predicted.
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
        sequences: int | None = None,
    ) -> None:
        self.cut, self.length, self.rows, self.separator = cut, cut[0].length, rows, separator
        self.reset_state, self.carries = reset_state, carries
        self.start = separator if start is None else start
        self._slots = -(-(most_sequences(cut, rows) if sequences is None else sequences) // _STEP) * _STEP

    def __getitem__(self, batch: Sequence[WindowIndex | None]) -> Batch:
        """The batch of at most B windows; rows that are None or missing have no targets."""
        shape = (self.rows, self.length)
        tokens, targets = np.full(shape, self.separator, np.int64), np.full(shape, IGNORED, np.int64)
        fresh = np.ones(self.rows, bool)
        borders = [[0] for _ in range(self.rows)]  # of each row: where sequences begin
        byte_count = 0
        for index, one in enumerate(batch):
            if one is None:
                continue
            windows = self.cut[one.corpus]
            begins, place = [0], 0
            for span in windows.spans(one.window, one.shift):
                size = span.stop - span.start
                inside = slice(place, place + size)
                tokens[index, inside], targets[index, inside], starts, covered = self._read(windows.corpus, span)
                byte_count += covered
                begins += [place, *(place + starts).tolist()]
                if place == 0:
                    fresh[index] = one.fresh or (self.reset_state and len(starts) > 0 and starts[0] == 0)
                place += size
            borders[index] = sorted({*begins, *([place] if place < self.length else [])})
        flat, cu_seqlens = shape, None
        first = last = torch.arange(self.rows)
        if self.reset_state:
            flat = (1, -1)
            cu_seqlens, first, last = self._pack(borders)
        inputs = TokenInputs(
            tokens=torch.from_numpy(tokens.reshape(flat)),
            cu_seqlens=cu_seqlens,
            max_seqlen=self.length,
            units=int((targets != IGNORED).sum()),
            byte_count=byte_count,
            carry=Carry(first, last, torch.from_numpy(fresh)) if self.carries else None,
        )
        return Batch(inputs, torch.from_numpy(targets.reshape(flat)), [])

    def _read(self, corpus: Corpus, span: Span) -> tuple[np.ndarray, np.ndarray, Integers, int]:
        """Tokens and targets of a span, the places in it where documents begin, and the bytes of its targets."""
        size, length = len(corpus.tokens), span.stop - span.start
        if span.stop < size:
            read = corpus.tokens[span.start : span.stop + 1]
        else:
            read = corpus.tokens.take(range(span.start, span.stop + 1), mode="wrap")
        read = np.asarray(read).astype(np.int64)
        tokens, targets = read[:-1], read[1:].copy()
        starts: list[np.ndarray] = []
        covered = 0
        start, done = span.start, 0
        while done < length:  # twice for a span that crosses the end of the ring
            stop = min(start + length - done, size)
            begun, bytes_here, ignored = _documents(corpus, start, stop)
            starts.append(begun - start + done)
            for begin, end in ignored:
                targets[begin - start + done : end - start + done] = IGNORED
            covered += bytes_here
            done += stop - start
            start = 0
        begins = np.concatenate(starts)
        tokens[begins] = self.start
        return tokens, targets, begins, covered

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


def _documents(corpus: Corpus, start: int, stop: int) -> tuple[Integers, int, list[tuple[int, int]]]:
    """For the places from `start` to `stop`: where documents begin, the targets' bytes, the targets of prompts."""
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
