"""The choice of a token from the scores of a language model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

    temperature: divides the scores; 0 takes the best token.
    top_k: the k best tokens are kept; None: all.
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


def choose_tokens(scores: Tensor, places: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
    """Choose one token a row, by a place in the row's distribution: no generator, and a row depends on itself alone.

    Shapes: scores [B, V]; places [B], in [0, 1); seen [B, V], True at tokens that the penalty is for; tokens [B].
    """
    scores = scores.float()
    if seen is not None and sampling.repetition_penalty != 1:
        penalty = sampling.repetition_penalty
        scores = torch.where(seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
    if sampling.temperature == 0:
        return scores.argmax(dim=-1)
    ordered, tokens = scores.sort(dim=-1, descending=True, stable=True)
    probabilities = (ordered[:, : sampling.top_k] / sampling.temperature).softmax(dim=-1)
    reached = probabilities.cumsum(dim=-1)
    if sampling.top_p is not None:
        # A token is kept while those before it have not reached p, so that the best one always is.
        probabilities = probabilities.masked_fill(reached - probabilities >= sampling.top_p, 0.0)
        reached = probabilities.cumsum(dim=-1)
    # The sum of what was kept is not 1 to the last bit; no place may lie behind it, or at a token that was dropped.
    wanted = places.to(reached.dtype)[:, None] * reached[:, -1:]
    drawn = torch.searchsorted(reached, wanted, right=True)
    last = (probabilities > 0).sum(dim=-1, keepdim=True) - 1
    return tokens.gather(1, torch.minimum(drawn, last)).squeeze(1)
