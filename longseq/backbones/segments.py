"""Documents that are longer than memory: a classifier reads them in segments, with carried state.

    logits = read_in_segments(classifier, tokens, segment=8192)

A forward model goes through the document once and carries the recurrent states and the pooling from segment to segment;
memory does not grow with the document. A model that also reads backward goes through the document layer by layer, and
keeps one layer's features of all tokens.
"""

from __future__ import annotations

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
    steps = _choose_gradients(_cut(bounds, segment), gradient_segments)
    pooling = _RunningPooling(model.pooling)
    reader = _Stream(model, pooling) if body.direction == "forward" else _Sweep(model, pooling)
    found = list(reader.read(row, steps))
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
    """Pieces of documents that are read together: the tokens from `start` to `stop` of the row.

    Only the first piece can continue a document from the step before, which had `offset` tokens so far. A piece that
    goes on in the next step is the only one; `left` counts the further steps of its document. `borders` of the pieces
    start at 0; `documents` are their numbers.
    """

    start: int
    borders: tuple[int, ...]
    documents: tuple[int, ...]
    offset: int
    left: int
    has_gradient: bool = True
    recompute: bool = False

    @property
    def stop(self) -> int:
        return self.start + self.borders[-1]

    @property
    def continues(self) -> bool:
        return self.offset > 0

    @property
    def goes_on(self) -> bool:
        return self.left > 0

    @property
    def ending(self) -> tuple[int, ...]:
        """The numbers of the documents that end in this step."""
        return () if self.goes_on else self.documents

    def packing(self, device: torch.device) -> Packing | None:
        """The borders of the pieces; None for one piece."""
        return _pack(self.borders, device)

    def positions(self, device: torch.device) -> Tensor:
        """`[1, T]`, the position of each token in its document."""
        places = [torch.arange(end - start) for start, end in pairwise(self.borders)]
        places[0] += self.offset
        return torch.cat(places)[None].to(device)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function without gradients, with recorded ones, or with recomputed ones."""
        if not self.has_gradient:
            with torch.no_grad():
                return function(*args)
        return checkpoint_if(self.recompute, function, *args)


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


def _choose_gradients(steps: list[_Step], gradient_segments: int | None) -> list[_Step]:
    """Mark the steps with gradients, and recompute them if more of them have gradients than may be kept."""
    kept = [gradient_segments is None or step.left < gradient_segments for step in steps]
    recompute = sum(kept) > (gradient_segments or 1)
    return [
        replace(step, has_gradient=gradient, recompute=recompute) for step, gradient in zip(steps, kept, strict=True)
    ]


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
        if not (step.continues or step.goes_on):
            return self.pooling(features, packing=step.packing(features.device)), None
        size = step.borders[1]
        own = self._gather(features[:, :size])
        if gathered is not None:
            own = self._merge(gathered, own)
        if step.goes_on:
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


class _Stream:
    """Reads documents once, through all layers of a model that reads forward."""

    def __init__(self, model: TextClassifier, pooling: _RunningPooling) -> None:
        self.model, self.body, self.pooling = model, model.body, pooling
        self.device = model.body.embedding.weight.device

    def read(self, row: Tensor, steps: list[_Step]) -> Iterator[Pooled]:
        """The documents that end in each step, with their pooled features."""
        carried: tuple[Any, Any] = (None, None)
        for step in steps:
            tokens = _tokens_of(step, row, self.model).to(self.device)
            vectors, *carried = step.run(partial(self._read, step), tokens, *carried)
            yield step.ending, vectors

    def _read(self, step: _Step, tokens: Tensor, state: Any, gathered: Gathered | None) -> tuple[Any, Any, Any]:
        tokens, added = _embed_ngrams(step, tokens, self.model)
        read = partial(self.body.forward_features, tokens, added=added)
        features, last = _read_from(state, step, read, self.body.initial_state, self.body.embedding.weight)
        vectors, gathered = self.pooling.read(features, step, gathered)
        return vectors, last, gathered


class _Sweep:
    """Reads documents layer by layer: each layer forward, backward or both ways, with a carried state for each way."""

    def __init__(self, model: TextClassifier, pooling: _RunningPooling) -> None:
        self.model, self.body, self.pooling = model, model.body, pooling
        self.device = model.body.embedding.weight.device

    def read(self, row: Tensor, steps: list[_Step]) -> Iterator[Pooled]:
        """The documents that end in each step, with their pooled features."""
        residual = [
            step.run(partial(self._embed, step), _tokens_of(step, row, self.model).to(self.device)) for step in steps
        ]
        for block in self.body.blocks:
            if isinstance(block.mixer, Directions):
                self._read_both_ways(block, residual, steps)
            else:
                self._read_one_way(block, residual, steps)
        gathered = None
        for index, step in enumerate(steps):
            vectors, gathered = step.run(partial(self._pool, step), residual[index], gathered)
            residual[index] = None
            yield step.ending, vectors

    def _embed(self, step: _Step, tokens: Tensor) -> Tensor:
        tokens, added = _embed_ngrams(step, tokens, self.model)
        places = None if self.body.positions is None else step.positions(self.device)
        return self.body.embed(tokens, places, added)

    def _pool(self, step: _Step, x: Any, gathered: Gathered | None) -> tuple[Any, Any]:
        return self.pooling.read(self.body.norm(residual_of(x)), step, gathered)

    # Each of these replaces the residual `[1, T, D]` of every step, or `Carried`, by that after the block.

    def _read_both_ways(self, block: Any, residual: list[Any], steps: list[_Step]) -> None:
        orders = range(len(block.mixer.orders))
        assert list(orders) == [0, 1], "token models read forward, backward, or both ways"
        backward: list[Any] = [None] * len(steps)
        state = None
        for index in reversed(range(len(steps))):
            step = steps[index]
            backward[index], state = step.run(partial(self._scan, step, block, 1), residual[index], state)
        for index, step in enumerate(steps):
            residual[index], state = step.run(partial(self._join, step, block), residual[index], backward[index], state)
            backward[index] = None

    def _scan(self, step: _Step, block: Any, order: int, x: Any, state: Any) -> tuple[Tensor, Any]:
        """Read a step in one order of a layer; returns the output and the state for the next step in this order."""
        read, initial = (
            partial(block.mixer.read_order, order, block.receive(x)),
            block.mixer.readers[order].initial_state,
        )
        return _read_from(state, step, read, initial, self.body.embedding.weight, backward=order == 1)

    def _join(self, step: _Step, block: Any, x: Any, backward: Tensor, state: Any) -> tuple[Any, Any]:
        forward, state = self._scan(step, block, 0, x, state)
        x, y, values = block.take(x, block.mixer.join([forward, backward]))
        return carry(block.add_branches(x, y, step.packing(self.device)), values), state

    def _read_one_way(self, block: Any, residual: list[Any], steps: list[_Step]) -> None:
        order = range(len(steps))
        state = None
        for index in reversed(order) if block.mixer.reverse else order:
            step = steps[index]
            residual[index], state = step.run(partial(self._call, step, block), residual[index], state)

    def _call(self, step: _Step, block: Any, x: Any, state: Any) -> tuple[Any, Any]:
        weight = self.body.embedding.weight
        return _read_from(state, step, partial(block, x), block.mixer.initial_state, weight, block.mixer.reverse)


def _tokens_of(step: _Step, row: Tensor, model: TextClassifier) -> Tensor:
    """The tokens `[1, C + T]` of a step, after the C tokens before them that n-grams need."""
    reach = 0 if model.ngrams is None else min(step.offset, model.ngrams.longest - 1)
    return row[None, step.start - reach : step.stop].long()


def _embed_ngrams(step: _Step, tokens: Tensor, model: TextClassifier) -> tuple[Tensor, Tensor | None]:
    """The tokens `[1, T]` of a step, and the embeddings of the n-grams that end at them (None without n-grams)."""
    if model.ngrams is None:
        return tokens, None
    context, own = tokens.split([tokens.shape[1] - step.borders[-1], step.borders[-1]], dim=1)
    return own, model.ngrams(own, step.positions(tokens.device), context)


def _read_from(
    carried: Any, step: _Step, read: Callable[..., Any], initial_state: Callable[..., Any], like: Tensor,
    backward: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """Call `read` with the states before the pieces of a step, of which the first one that is read has `carried`.

    Returns what `read` returns: its output, and the state for the next step.
    """
    others = len(step.documents) - 1
    if carried is not None and others:
        fresh = initial_state(others, like.device, like.dtype)
        pairs = zip(state_tensors(carried), state_tensors(fresh), strict=True)
        joined = [torch.cat([own.to(other.dtype), other][:: -1 if backward else 1]) for (_, own), (_, other) in pairs]
        carried = fill_state(fresh, joined)
    wanted = step.continues if backward else step.goes_on
    y, last = read(carried, cu_seqlens=step.packing(like.device), output_final_state=wanted)
    return y, map_state(lambda x: x[:1], last) if backward and wanted else last
