"""Projections to widths that matrix products of half precision are slow at, and pairs of projections."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from longseq.blocks.precision import product_dtype
from longseq.kernels.dispatch import is_exporting

ALIGNMENT = 8  # numbers of half precision in the 16 bytes that a GPU loads at once


class AlignedLinear(nn.Linear):
    """`nn.Linear` that a GPU computes at a multiple of 8 outputs in half precision; its parameters keep their width.

    The zeros that pad the weight cost a copy of it, which sequences are worth, and one token is not. The result is a
    view of the wider product.
    """

    def forward(self, x: Tensor) -> Tensor:
        missing = -self.out_features % ALIGNMENT
        if not missing or x.ndim < 3 or not gains_by_alignment(self.weight):
            return super().forward(x)
        weight = functional.pad(self.weight, (0, 0, 0, missing))
        bias = None if self.bias is None else functional.pad(self.bias, (0, missing))
        return functional.linear(x, weight, bias)[..., : self.out_features]


def project_pair(forward: nn.Linear, backward: nn.Linear, x: Tensor) -> Tensor:
    """Project the first half of the rows of `x [2 B, T, I]` by one layer and the second by another, in one product.

    The halves may also be apart, [2, B, T, I]: so `expand` gives both layers the same rows.
    """
    halves = x if x.ndim == 4 else x.unflatten(0, (2, -1))
    weight = torch.stack((forward.weight, backward.weight))
    bias = None if forward.bias is None else torch.stack((forward.bias, backward.bias))
    missing = -forward.out_features % ALIGNMENT
    if missing and gains_by_alignment(forward.weight):
        weight = functional.pad(weight, (0, 0, 0, missing))
        bias = None if bias is None else functional.pad(bias, (0, missing))
    rows = halves.flatten(1, 2)
    y = torch.bmm(rows, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, weight.mT)
    return y[..., : forward.out_features].unflatten(1, halves.shape[1:3]).flatten(0, 1)


def gains_by_alignment(weight: Tensor) -> bool:
    """Whether products with a weight have kernels that need aligned rows."""
    return weight.device.type == "cuda" and product_dtype(weight).itemsize == 2 and not is_exporting()
