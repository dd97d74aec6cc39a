"""The choice of a token by operations of torch; on a GPU some fifty short kernels."""

import torch
from torch import Tensor

# The constants of SplitMix64, as the signed numbers that torch computes with.
INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


def token_choice(
    scores: Tensor, counter: Tensor, valid: Tensor, seen: Tensor | None, temperature: float, top_k: int | None,
    top_p: float | None, repetition_penalty: float,
) -> Tensor:  # fmt: skip
    """See `longseq.kernels.token_choice.token_choice`."""
    counter.add_(INCREMENT)
    if seen is not None:
        scores = penalize(scores, seen, repetition_penalty)
    token = choose_tokens(scores, random_places(counter), temperature, top_k, top_p)
    valid.logical_and_(token >= 0)
    token = token.clamp_min(0)
    if seen is not None:
        seen.scatter_(1, token[:, None], True)
    return token


def random_places(counters: Tensor) -> Tensor:
    """Hash whole numbers `[B]` (int64) to places `[B]` in [0, 1), multiples of 2^-24 in float32.

    Consecutive multiples of the increment give independent places.
    """
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        counters = (counters ^ _shift(counters, shift)) * multiplier
    counters = counters ^ _shift(counters, 31)
    return _shift(counters, 40).float() * 2.0**-24


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift to the right with zeros, as for a number without sign."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def penalize(scores: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Scores `[B, V]` in float32 that are lower at the tokens seen."""
    scores = _widen(scores)
    return torch.where(seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)


def sort_scores(scores: Tensor, top_k: int | None, top_p: float | None) -> tuple[Tensor, Tensor | None]:
    """The scores that remain, the best one first, and their tokens; without top_k and top_p as they are, and None."""
    if top_k is not None:
        return scores.topk(top_k, dim=-1)
    if top_p is not None:
        return scores.sort(dim=-1, descending=True, stable=True)
    return scores, None


def choose_tokens(
    scores: Tensor, places: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Choose one token a row, by a place in the row's distribution: no generator, and a row depends on itself alone.

    Shapes: scores [B, V]; places [B], in [0, 1); tokens [B], -1 in rows whose scores are no distribution.
    """
    scores = _widen(scores)
    if temperature == 0:
        best, token = scores.max(dim=-1)
        return torch.where(best.isfinite(), token, -1)
    scores, tokens = sort_scores(scores, top_k, top_p)
    probabilities = (scores / temperature).softmax(dim=-1)
    if top_p is not None:
        # A token is kept while those before it have not reached p, so that the best one always is.
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(before >= top_p, 0.0)
    reached = probabilities.cumsum(dim=-1)
    total = reached[:, -1:]
    drawn = torch.searchsorted(reached, places.to(reached.dtype)[:, None] * total, right=True)
    # Sums in parallel are not monotonous to the last bit: a place may fall on a token of probability 0, or behind all.
    drawn = drawn.clamp_max(scores.shape[-1] - 1)
    drawn = torch.where(probabilities.gather(1, drawn) > 0, drawn, probabilities.argmax(dim=-1, keepdim=True))
    token = drawn if tokens is None else tokens.gather(1, drawn)
    return torch.where(total.isfinite(), token, -1).squeeze(1)


def _widen(scores: Tensor) -> Tensor:
    return scores if scores.dtype == torch.float64 else scores.float()
