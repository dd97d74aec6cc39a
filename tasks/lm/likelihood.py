"""Log-probabilities of texts and of continuations by a language model, many at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longseq.backbones.tokens import TokenBackbone
from longseq.backbones.vocabulary_loss import CHUNK_SCORES, IGNORED
from longseq.blocks.precision import at_least_float32
from longseq.state import select_state

# Tokens that a model reads at a time, over all rows: they bound the memory, whatever the lengths. Not tuned.
PIECE_TOKENS = 1 << 16


class Row(NamedTuple):
    """Tokens, of which those from `start` (at least 1) on are scored by the tokens before them."""

    tokens: Sequence[int]
    start: int = 1


class Likelihood(NamedTuple):
    """The natural logarithm of the probability of a row's scored tokens; `is_greedy` if each is the most probable."""

    log_probability: float
    is_greedy: bool


def document_rows(model: TokenBackbone, tokens: Sequence[int], start: int = 1) -> list[Row]:
    """The rows whose scored tokens are those of a document from `start` on.

    A model with learned positions reads windows of `max_length` tokens, the last of which overlaps the one before. The
    first one begins with the document, so that it holds what stands before `start`, unless that fills whole windows.
    Every other model reads the document whole.
    """
    most = model.max_length
    if most is None or len(tokens) - 1 <= most:
        return [Row(tokens, start)]
    rows = []
    for place in range((start - 1) // most * most, len(tokens) - 1, most):
        stop = min(place + most + 1, len(tokens))
        begin = max(0, stop - 1 - most)
        rows.append(Row(tokens[begin:stop], max(start, place + 1) - begin))
    return rows


@torch.inference_mode()
def score_rows(model: TokenBackbone, rows: Sequence[Row], batch_size: int) -> list[Likelihood]:
    """The likelihood of each row, in their order; `batch_size` rows of similar lengths are read together.

    Long rows are read in pieces, with the state carried from one to the next. A model with learned positions reads no
    more than the last `max_length` tokens before the last one of a row.

    Raises:
        ValueError: more tokens of a row are scored than a model has learned positions.
    """
    rows = [_fit(model, row) for row in rows]
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index].tokens))
    found: dict[int, Likelihood] = {}
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        found |= dict(zip(chosen, _score_batch(model, [rows[index] for index in chosen]), strict=True))
    return [found[index] for index in range(len(rows))]


def _fit(model: TokenBackbone, row: Row) -> Row:
    tokens, start = row
    most = model.max_length
    if most is None or len(tokens) - 1 <= most:
        return row
    left_out = len(tokens) - 1 - most
    if left_out >= start:
        raise ValueError(f"{len(tokens) - start} tokens are scored at once, and the model has {most} positions")
    return Row(tokens[left_out:], start - left_out)


def _score_batch(model: TokenBackbone, rows: Sequence[Row]) -> list[Likelihood]:
    """The likelihoods of rows that are sorted by their lengths, the longest first."""
    device = next(model.parameters()).device
    lengths = torch.tensor([len(row.tokens) - 1 for row in rows])
    longest = int(lengths[0])
    inputs, targets = torch.zeros(len(rows), longest, dtype=torch.long), torch.full((len(rows), longest), IGNORED)
    for index, (tokens, start) in enumerate(rows):
        read = torch.tensor(tokens)
        inputs[index, : len(tokens) - 1] = read[:-1]
        targets[index, start - 1 : len(tokens) - 1] = read[start:]
    inputs, targets = inputs.to(device), targets.to(device)
    total = torch.zeros(len(rows), dtype=torch.float64, device=device)
    missed = torch.zeros(len(rows), dtype=torch.float64, device=device)  # scored tokens that are not the most probable
    state: Any = None
    begin, multiple = 0, model.piece_multiple
    while begin < longest:
        # The rows that go on fill all pieces before. What stands behind the end of a row changes nothing before it,
        # and its state is not used: neither needs a mask.
        going_on = int((lengths > begin).sum())
        end = min(longest, begin + max(1, PIECE_TOKENS // going_on // multiple) * multiple)
        if state is not None:
            state = select_state(state, torch.arange(going_on, device=device))
        part = slice(begin, end)
        features, state = model.forward_features(inputs[:going_on, part], state, output_final_state=end < longest)
        _score(model, features, targets[:going_on, part], total, missed)
        begin = end
    return [Likelihood(*one) for one in zip(total.tolist(), (missed == 0).tolist(), strict=True)]


def _score(model: TokenBackbone, features: Tensor, targets: Tensor, total: Tensor, missed: Tensor) -> None:
    """Add the log-probabilities of the targets `[B, T]` to `total` and count what is `missed`, both `[B]`."""
    places = (targets != IGNORED).nonzero()
    for some in places.split(max(1, CHUNK_SCORES // model.vocab_size)):
        row, place = some.unbind(1)
        wanted = targets[row, place]
        scores = at_least_float32(model.forward_head(features[row, place]))
        own = scores.log_softmax(-1).gather(1, wanted[:, None])[:, 0]
        total.index_add_(0, row, own.double())
        missed.index_add_(0, row, (scores.argmax(-1) != wanted).double())
