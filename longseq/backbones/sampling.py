"""The choice of a token from the scores of a language model: on any device, and inside a CUDA graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longseq.kernels import token_choice
from longseq.kernels.token_choice.choice import INCREMENT


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


class TokenSampler:
    """Draws one token for each row: `sampler(scores)` for scores `[B, V]` gives tokens `[B]`.

    A draw depends only on the row's scores, its seed and the number of its earlier draws, so it is the same in every
    batch, on every device, in a CUDA graph, and after an interruption. A call changes the sampler's tensors in place
    and never waits for the device.

    Args:
        sampling: how a token is drawn.
        seeds: `[B]` int64, one a row.
        drawn: the number of earlier draws.
        seen: `[B, V]`, True at the tokens that the penalty is for; drawn ones are added. None: no penalty.
    """

    def __init__(self, sampling: Sampling, seeds: Tensor, *, drawn: int = 0, seen: Tensor | None = None) -> None:
        self.sampling = sampling
        self.seen = seen if sampling.repetition_penalty != 1 else None
        self._counter = seeds + ((drawn * INCREMENT + 2**63) % 2**64 - 2**63)
        self._valid = torch.ones_like(seeds, dtype=torch.bool)

    def __call__(self, scores: Tensor) -> Tensor:
        return token_choice(scores, self._counter, self._valid, self.seen, **vars(self.sampling))

    def check(self) -> None:
        """Raise ValueError if the scores of a draw were not finite. Waits for the device."""
        if not bool(self._valid.all()):
            raise ValueError("the model's scores are not finite")
