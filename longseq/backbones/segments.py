"""Documents that are longer than memory: a classifier reads them in segments, with carried state.

    logits = read_in_segments(classifier, tokens, segment=8192)

A forward model goes through the document once and carries the recurrent states and the pooling from segment to segment;
memory does not grow with the document. A model that also reads backward goes through the document layer by layer, and
keeps one layer's features of all tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from longseq.backbones.classifier import TextClassifier
from longseq.backbones.tokens import TokenBackbone
from longseq.blocks.pooling import Pooling
from longseq.blocks.precision import at_least_float32
from longseq.blocks.recompute import checkpoint_if
from longseq.blocks.residual import carry, residual_of
from longseq.blocks.sharding import has_shards, unsharded_class
from longseq.kernels.packing import Packing
from longseq.mixers import Mixer
from longseq.mixers.attention import SoftmaxAttention
from longseq.mixers.base import check_rows
from longseq.mixers.directions import Directions
from longseq.mixers.registry import name_of
from longseq.mixers.window_attention import WindowAttention
from longseq.state import fill_state, map_state, state_tensors

Gathered = tuple[Tensor, ...]  # the pooling of a document so far
Pooled = tuple[tuple[int, ...], Tensor]  # the numbers of P documents, and their pooled features [P, D]


def read_in_segments(
    model: TextClassifier,
    tokens: Tensor,
    *,
    cu_seqlens: Tensor | Packing | None = None,
    mask: Tensor | None = None,
    segment: int,
    gradient_segments: int | None = None,
) -> Tensor:
    """Classify documents; the logits are those of `model(tokens, ...)`, which reads them at once.

    Each document is cut at multiples of `segment` tokens from its own start, or of the largest number below that holds
    whole chunks of the mixers. Neighbouring pieces are read together where they fit into a segment. The gradients of a
    document do not depend on the other documents of its batch.

    By default, gradients go through all segments and equal those of reading at once: the backward pass repeats each
    segment from its saved state. With `gradient_segments=k` they end before a document's last k segments (truncated
    backpropagation through time), whose activations are kept; earlier segments still count in the logits. Stochastic
    depth is drawn for each piece.

    Args:
        tokens: `[B, T]`, padded with `mask`, or packed `[1, L]` with `cu_seqlens`; they may be on another device.
        segment: the most tokens in memory at once, at least 1, or a chunk.
        gradient_segments: k, at least 1, for models that read forward; None for all.

    Returns:
        Logits `[N, num_classes]`.

    Raises:
        ValueError: the model cannot be read in segments (see `check_segments`); `cu_seqlens` or `mask` does not fit.
    """
    check_segments(model, gradient_segments, segment)
    body = model.body
    segment = whole_chunks(model, segment)
    row, bounds = _as_row(tokens, cu_seqlens, mask)
    reader = _Reader(model, row, _cut(bounds, segment), gradient_segments)
    found = list(reader.stream() if body.direction == "forward" else reader.sweep())
    if not found:
        return model.classify(body.embedding.weight.new_zeros(len(bounds) - 1, body.d_model))
    vectors = torch.cat([vectors for _, vectors in found])
    places = torch.tensor([number for numbers, _ in found for number in numbers], device=vectors.device)
    return model.classify(vectors.new_zeros(len(bounds) - 1, body.d_model).index_copy(0, places, vectors))


def find_obstacle(model: nn.Module) -> str | None:
    """Why a model cannot be read in segments: its class, or layers that see all tokens; None if it can."""
    if not isinstance(model, TextClassifier) or unsharded_class(model).forward is not TextClassifier.forward:
        return unsharded_class(model).__name__
    found = {obstacle for block in model.body.blocks if (obstacle := _find_in_layer(block.mixer)) is not None}
    return " and ".join(sorted(found)) or None


def whole_chunks(model: TextClassifier, segment: int) -> int:
    """The largest number of tokens up to `segment` that holds whole chunks of the mixers."""
    return segment - segment % model.body.piece_multiple


def check_segments(model: nn.Module, gradient_segments: int | None = None, segment: int | None = None) -> None:
    """Raise ValueError if a classifier cannot be read in segments."""
    if (obstacle := find_obstacle(model)) is not None:
        raise ValueError(f"{obstacle} cannot be read in segments: leave data.segment=null")
    body: TokenBackbone = model.body  # type: ignore[assignment]
    if has_shards(model):
        raise ValueError("a model with sharded weights cannot be read in segments: take trainer=ddp")
    if segment is not None and segment < body.piece_multiple:
        raise ValueError(f"segment={segment}: the model reads chunks of {body.piece_multiple} tokens")
    if gradient_segments is not None and body.direction != "forward":
        raise ValueError(f"direction={body.direction} needs gradients of all segments: leave gradient_segments=null")


def _find_in_layer(reading: Mixer[Any] | Directions) -> str | None:
    """A mixer that has to see all tokens at once, or None."""
    for mixer in reading.readers:
        name = name_of(type(mixer)) or type(mixer).__name__
        if isinstance(mixer, SoftmaxAttention) and not isinstance(mixer, WindowAttention):
            return f"{name} without a window"
        if mixer.growing_state:
            return f"{name}, whose state keeps every token,"
        if not getattr(mixer, "causal", True):
            return f"{name}, which sees tokens on both sides at once,"
        if mixer.piece_multiple > 1 and (mixer.reverse or isinstance(reading, Directions)):
            return f"{name}, whose chunks of {mixer.piece_multiple} tokens (1 would do) are counted from the end too,"
    return None


@dataclass(frozen=True)
class _Step:
    """Pieces of documents that are read together: the tokens from `start` on of the row.

    Only the first piece can continue a document from the step before, which had `offset` tokens so far. A piece that
    goes on in the next step is the only one; `left` counts the further steps of its document. `borders` of the pieces
    start at 0; `documents` are their numbers.
    """

    start: int
    borders: tuple[int, ...]
    documents: tuple[int, ...]
    offset: int
    left: int

    def packing(self, device: torch.device) -> Packing | None:
        """The borders of the pieces; None for one piece."""
        return _pack(self.borders, device)

    def positions(self, device: torch.device) -> Tensor:
        """`[1, T]`, the position of each token in its document."""
        places = [torch.arange(end - start) for start, end in pairwise(self.borders)]
        places[0] += self.offset
        return torch.cat(places)[None].to(device)


def _as_row(tokens: Tensor, cu_seqlens: Tensor | Packing | None, mask: Tensor | None) -> tuple[Tensor, list[int]]:
    """Documents as one row `[L]` of real tokens, and their borders."""
    packing = check_rows(tokens, cu_seqlens, mask)
    if packing is not None:
        return tokens[0], packing.bounds
    mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    return tokens[mask], [0, *accumulate(mask.sum(1).tolist())]


def _cut(bounds: Sequence[int], segment: int) -> list[_Step]:
    """Steps of at most `segment` tokens: longer documents are cut at multiples of it, others are not cut."""
    steps: list[_Step] = []
    for number, (start, end) in enumerate(pairwise(bounds)):
        for first in range(start, end, segment):
            size = min(segment, end - first)
            last = steps[-1] if steps else None
            # The pieces of a cut document are whole segments up to the last one, so that they never share a step.
            if last is not None and last.borders[-1] + size <= segment:
                borders, documents = (*last.borders, last.borders[-1] + size), (*last.documents, number)
                steps[-1] = replace(last, borders=borders, documents=documents)
            else:
                left = -(-(end - first) // segment) - 1
                steps.append(_Step(first, (0, size), (number,), first - start, left))
    return steps


def _pack(borders: Sequence[int], device: torch.device) -> Packing | None:
    """The packing of several documents, None for a single one."""
    return None if len(borders) == 2 else Packing(torch.tensor(borders), device=device)


class _RunningPooling:
    """Pools documents whose features come in pieces; attention keeps the largest score, and sums relative to it."""

    def __init__(self, pooling: Pooling) -> None:
        self.pooling = pooling
        self.kind = pooling.kind

    def read(self, features: Tensor, step: _Step, gathered: Gathered | None) -> tuple[Tensor, Gathered | None]:
        """The vectors `[P, D]` of the documents that end in a step, and what the one that goes on has gathered.

        `features` are `[1, T, D]`; `gathered` belongs to the document that the step continues.
        """
        if not (step.offset or step.left):
            return self.pooling(features, packing=step.packing(features.device)), None
        size = step.borders[1]
        own = self._gather(features[:, :size])
        if gathered is not None:
            own = self._merge(gathered, own)
        if step.left:
            return features.new_zeros(0, features.shape[2]), own
        vector = (own[0] if len(own) == 1 else own[2] / own[1]).to(features.dtype)[None]
        if len(step.documents) == 1:
            return vector, None
        rest = _pack([border - size for border in step.borders[1:]], features.device)
        return torch.cat([vector, self.pooling(features[:, size:], packing=rest)]), None

    def _gather(self, features: Tensor) -> Gathered:
        """Gather the tokens `[1, T, D]` of a piece."""
        x = at_least_float32(features[0])
        if self.kind == "max":
            return (x.amax(0),)
        if self.kind in ("first", "last"):
            return (x[-1 if self.kind == "last" else 0],)
        # A mean is attention with equal scores.
        score = x.new_zeros(len(x)) if self.kind == "mean" else self.pooling.scores(features)[0]
        most = score.detach().amax()
        weight = (score - most).exp()
        return most, weight.sum(), (weight[:, None] * x).sum(0)

    def _merge(self, one: Gathered, other: Gathered) -> Gathered:
        """Merge two consecutive parts of a document."""
        if self.kind == "max":
            return (torch.maximum(one[0], other[0]),)
        if self.kind in ("first", "last"):
            return other if self.kind == "last" else one
        most = torch.maximum(one[0], other[0])
        scales = (one[0] - most).exp(), (other[0] - most).exp()
        total, weighted = (scales[0] * x + scales[1] * y for x, y in zip(one[1:], other[1:], strict=True))
        return most, total, weighted


class _Reader:
    """Reads the steps of a row of documents; yields the documents that end in each step with their pooled features."""

    def __init__(
        self, model: TextClassifier, row: Tensor, steps: list[_Step], gradient_segments: int | None = None
    ) -> None:
        self.model, self.body, self.pooling = model, model.body, _RunningPooling(model.pooling)
        self.weight = model.body.embedding.weight
        self.row, self.steps = row, steps
        self.gradient_segments = gradient_segments
        # Activations are recomputed if more steps have gradients than may be kept.
        self.recompute = sum(map(self._has_gradient, steps)) > (gradient_segments or 1)

    def stream(self) -> Iterator[Pooled]:
        """Read once, through all layers of a model that reads forward."""
        yield from self._pooled(self._carry(self._read))

    def sweep(self) -> Iterator[Pooled]:
        """Read layer by layer: each layer forward, backward or both ways, with a carried state for each way."""
        # The residual `[1, T, D]` of every step, or `Carried`, which each block replaces.
        x: list[Any] = [self._run(self._embed, step) for step in self.steps]
        for block in self.body.blocks:
            if not isinstance(block.mixer, Directions):
                for index, y in self._carry(partial(self._call, block), x, backward=block.mixer.reverse):
                    x[index] = y
                continue
            assert len(block.mixer.orders) == 2, "token models read forward, backward, or both ways"
            behind: list[Any] = [None] * len(x)
            for index, y in self._carry(partial(self._scan, block, 1), x, backward=True):
                behind[index] = y
            for index, y in self._carry(partial(self._join, block), x, behind):
                x[index], behind[index] = y, None
        yield from self._pooled(self._carry(self._pool, x))

    def _carry(
        self, read: Callable[..., tuple[Any, Any]], *inputs: list[Any], backward: bool = False
    ) -> Iterator[tuple[int, Any]]:
        """Call `read(step, *inputs, state)` for one step after the other; yields the step's index and the output."""
        state = None
        order = range(len(self.steps))
        for index in reversed(order) if backward else order:
            output, state = self._run(read, self.steps[index], *(each[index] for each in inputs), state)
            yield index, output

    def _run(self, function: Callable[..., Any], step: _Step, *args: Any) -> Any:
        """Call a function without gradients, with recorded ones, or with recomputed ones."""
        if self._has_gradient(step):
            return checkpoint_if(self.recompute, function, step, *args)
        with torch.no_grad():
            return function(step, *args)

    def _has_gradient(self, step: _Step) -> bool:
        return self.gradient_segments is None or step.left < self.gradient_segments

    def _pooled(self, vectors: Iterator[tuple[int, Tensor]]) -> Iterator[Pooled]:
        for index, pooled in vectors:
            step = self.steps[index]
            yield () if step.left else step.documents, pooled

    def _tokens(self, step: _Step) -> tuple[Tensor, Tensor | None]:
        """The tokens `[1, T]` of a step, and the embeddings of the n-grams that end at them (None without n-grams)."""
        device, ngrams = self.weight.device, self.model.ngrams
        reach = 0 if ngrams is None else min(step.offset, ngrams.longest - 1)
        tokens = self.row[None, step.start - reach : step.start + step.borders[-1]].long().to(device)
        context, own = tokens[:, :reach], tokens[:, reach:]
        return own, None if ngrams is None else ngrams(own, step.positions(device), context)

    def _read(self, step: _Step, carried: tuple[Any, Gathered | None] | None) -> tuple[Tensor, Any]:
        state, gathered = carried or (None, None)
        tokens, added = self._tokens(step)
        read = partial(self.body.forward_features, tokens, added=added)
        features, state = self._read_from(state, step, read, self.body.initial_state)
        vectors, gathered = self.pooling.read(features, step, gathered)
        return vectors, (state, gathered)

    def _embed(self, step: _Step) -> Tensor:
        tokens, added = self._tokens(step)
        places = None if self.body.positions is None else step.positions(tokens.device)
        return self.body.embed(tokens, places, added)

    def _pool(self, step: _Step, x: Any, gathered: Gathered | None) -> tuple[Tensor, Gathered | None]:
        return self.pooling.read(self.body.norm(residual_of(x)), step, gathered)

    def _call(self, block: Any, step: _Step, x: Any, state: Any) -> tuple[Any, Any]:
        return self._read_from(state, step, partial(block, x), block.mixer.initial_state, block.mixer.reverse)

    def _scan(self, block: Any, order: int, step: _Step, x: Any, state: Any) -> tuple[Tensor, Any]:
        """Read a step in one order of a layer; returns the output and the state for the next step in this order."""
        read = partial(block.mixer.read_order, order, block.receive(x))
        return self._read_from(state, step, read, block.mixer.readers[order].initial_state, backward=order == 1)

    def _join(self, block: Any, step: _Step, x: Any, behind: Tensor, state: Any) -> tuple[Any, Any]:
        ahead, state = self._scan(block, 0, step, x, state)
        x, y, values = block.take(x, block.mixer.join([ahead, behind]))
        return carry(block.add_branches(x, y, step.packing(y.device)), values), state

    def _read_from(
        self, carried: Any, step: _Step, read: Callable[..., Any], initial_state: Callable[..., Any],
        backward: bool = False,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Call `read` with the states before the pieces of a step, of which the first one that is read has `carried`.

        Returns what `read` returns: its output, and the state for the next step.
        """
        device, others = self.weight.device, len(step.documents) - 1
        if carried is not None and others:
            fresh = initial_state(others, device, self.weight.dtype)
            pairs = zip(state_tensors(carried), state_tensors(fresh), strict=True)
            joined = [torch.cat([own.to(new.dtype), new][:: -1 if backward else 1]) for (_, own), (_, new) in pairs]
            carried = fill_state(fresh, joined)
        wanted = bool(step.offset if backward else step.left)
        y, last = read(carried, cu_seqlens=step.packing(device), output_final_state=wanted)
        return y, map_state(lambda x: x[:1], last) if backward and wanted else last
