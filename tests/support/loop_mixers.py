"""Mixers as a plug-in may have them: loops over the tokens, without an operation of longseq."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longseq.mixers import Mixer
from longseq.mixers.base import ALL_TOKENS, memory_dtype


class MeanState(NamedTuple):
    mean: Tensor


class Mean(Mixer[MeanState]):
    """m ← a m + (1 − a) x, token by token, for packed and padded rows, too."""

    def __init__(self, d_model: int, *, backend: str = "auto") -> None:
        super().__init__(d_model, backend=backend)
        self.in_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self.rate = nn.Parameter(torch.linspace(-1, 2, d_model))

    def scan(self, projected, state=None, options=ALL_TOKENS):
        cu_seqlens, mask, _, output_final_state = options
        borders = [0, projected.shape[1]] if cu_seqlens is None else cu_seqlens.cu_seqlens.tolist()
        rows = projected.shape[0] if cu_seqlens is None else len(borders) - 1
        means = (state or self.initial_state(rows, projected.device, projected.dtype)).mean
        outputs, last = [], []
        for row, (start, end) in enumerate(pairwise(borders)):
            own = MeanState(means if cu_seqlens is None else means[row : row + 1])
            for t in range(start, end):
                y, following = self.scan_step(projected[:, t], own)
                own = following if mask is None else MeanState(torch.where(mask[:, t, None], following.mean, own.mean))
                outputs.append(y)
            last.append(own.mean)
        return torch.stack(outputs, 1), MeanState(torch.cat(last)) if output_final_state else None

    def scan_step(self, projected, state):
        keep = self.rate.sigmoid()
        mean = keep * state.mean + (1 - keep) * projected
        return mean.to(projected.dtype), MeanState(mean)

    def initial_state(self, batch, device=None, dtype=None):
        return MeanState(torch.zeros(batch, self.d_model, device=device, dtype=memory_dtype(dtype)))

    def scan_flops(self, tokens):
        return 4 * tokens * self.d_model


class Leaking(Mean):
    def scan(self, projected, state=None, options=ALL_TOKENS):
        cu_seqlens = options.cu_seqlens
        y, last = super().scan(projected, state if cu_seqlens is None else None, options._replace(cu_seqlens=None))
        return y, last if cu_seqlens is None else MeanState(last.mean.expand(len(cu_seqlens.cu_seqlens) - 1, -1))
