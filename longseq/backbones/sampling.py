"""The choice of the next token from the scores of a language model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PLACES = 2**24  # places in [0, 1) are multiples of 1 / PLACES, which float32 holds exactly
WHOLE = 2**38  # the weight of the probability 1; WHOLE * PLACES fits into int64
# The constants of SplitMix64, as the signed numbers that torch computes with.
_INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

    temperature: divides the scores; 0 takes the best token.
    top_k: the k best tokens are kept, and those as good as the last of them; None: all.
    top_p: the fewest tokens are kept whose probabilities reach p; None: all.
    repetition_penalty: of tokens that were read or written before, scores above 0 are divided by it and others
        multiplied, before all else; 1 changes nothing.

    Source of the penalty: CTRL (Keskar et al., 2019), section 4.1. ValueError for values that make no sense.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, value, right, needed in (
            ("temperature", self.temperature, self.temperature >= 0, "at least 0"),
            ("top_k", self.top_k, self.top_k is None or self.top_k >= 1, "at least 1"),
            ("top_p", self.top_p, self.top_p is None or 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0, "above 0"),
        ):
            if not right:
                raise ValueError(f"{name}={value} must be {needed}")


class TokenSampler:
    """Draws one token for each row: `sampler(scores)` for scores `[B, V]` gives tokens `[B]`.

    A draw depends only on the row's scores, its seed and the number of its earlier draws, so it is the same in every
    batch, in a CUDA graph, and after an interruption. A call changes the sampler's tensors in place and never waits for
    the device.

    A row's counter is advanced and hashed to a place in [0, 1), by SplitMix64 (Steele et al., Fast Splittable
    Pseudorandom Number Generators, 2014, figure 16, with Stafford's variant 13 as its mixing function). The token is
    the one at which the running sum of the probabilities passes the place. Rows whose scores are no distribution (NaN
    or infinite) give the token 0. Probabilities have the precision of the scores, at least float32, and are added up
    exactly.

    Args:
        sampling: how a token is drawn.
        seeds: `[B]` int64, one a row.
        drawn: the number of earlier draws.
        seen: `[B, V]`, True at the tokens that the penalty is for; drawn ones are added. None: no penalty.
    """

    def __init__(self, sampling: Sampling, seeds: Tensor, *, drawn: int = 0, seen: Tensor | None = None) -> None:
        self.sampling = sampling
        self.seen = seen if sampling.repetition_penalty != 1 else None
        self._counter = seeds + ((drawn * _INCREMENT + 2**63) % 2**64 - 2**63)
        self._valid = torch.ones_like(seeds, dtype=torch.bool)

    def __call__(self, scores: Tensor) -> Tensor:
        sampling = self.sampling
        self._counter.add_(_INCREMENT)
        if self.seen is not None:
            scores = penalize(scores, self.seen, sampling.repetition_penalty)
        places = random_places(self._counter)
        token = choose_tokens(scores, places, sampling.temperature, sampling.top_k, sampling.top_p)
        self._valid.logical_and_(token >= 0)
        token = token.clamp_min(0)
        if self.seen is not None:
            self.seen.scatter_(1, token[:, None], True)
        return token

    def check(self) -> None:
        """Raise ValueError if the scores of a draw were not finite. Waits for the device."""
        if not bool(self._valid.all()):
            raise ValueError("the model's scores are not finite")


def random_places(counters: Tensor) -> Tensor:
    """Hash whole numbers `[B]` (int64) to places `[B]` in [0, 1), multiples of 2^-24 in float32.

    Consecutive multiples of the increment give independent places.
    """
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        counters = (counters ^ _shift(counters, shift)) * multiplier
    counters = counters ^ _shift(counters, 31)
    return _shift(counters, 40).float() / PLACES


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift to the right with zeros, as for a number without sign."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def penalize(scores: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Scores `[B, V]` in float32 that are lower at the tokens seen."""
    scores = _widen(scores)
    return torch.where(seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)


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
    if top_k is not None and top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(top_k, dim=-1).values[:, -1:], -torch.inf)
    tokens = None
    if top_p is not None:
        scores, tokens = scores.sort(dim=-1, descending=True, stable=True)
    probabilities = (scores / temperature).softmax(dim=-1)
    # Sums of integers do not depend on their order; torch's cumsum of floats on CUDA differs from run to run.
    weights = (probabilities.nan_to_num() * WHOLE).long()
    reached = weights.cumsum(dim=-1)
    if top_p is not None:
        # A token is kept while those before it have not reached p, so that the best one always is.
        weights = weights.masked_fill(reached - weights >= top_p * reached[:, -1:], 0)
        reached = weights.cumsum(dim=-1)
    total = reached[:, -1:]
    place = ((places * PLACES).long()[:, None] * total // PLACES).clamp_max(total - 1)
    drawn = torch.searchsorted(reached, place, right=True)
    token = drawn if tokens is None else tokens.gather(1, drawn)
    return torch.where(probabilities[:, :1].isfinite(), token, -1).squeeze(1)


def _widen(scores: Tensor) -> Tensor:
    return scores if scores.dtype == torch.float64 else scores.float()
