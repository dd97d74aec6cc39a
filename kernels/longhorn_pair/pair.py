"""A Longhorn layer between its projections, read in both directions, as a composition of other operations."""

import torch
from torch import Tensor

from longseq.kernels.diagonal_scan import longhorn_scan
from longseq.kernels.precision import without_autocast
from longseq.kernels.short_convolution import short_convolution
from longseq.kernels.silu_product import silu_product


def longhorn_pair_torch(
    projected: Tensor, taps: Tensor, offset: Tensor, selection: Tensor, rate: Tensor, rate_offset: Tensor, skip: Tensor
) -> Tensor:
    """`longhorn_pair` by the torch forms of its parts."""
    ranks = rate.shape[2]
    entries = (selection.shape[1] - ranks) // 2
    with without_autocast(projected):
        x, gate = projected.chunk(2, dim=-1)
        x, _ = short_convolution(x, taps, offset, activation="silu", reverse="second_half", backend="torch")
        rank, key, query = _project(x, selection).split([ranks, entries, entries], dim=-1)
        beta = _project(rank, rate, rate_offset).sigmoid()
        y, _ = longhorn_scan(x, query, key, beta, reverse="second_half", backend="torch")
        return silu_product(y, gate, skip=x, skip_weight=skip, backend="torch")


def _project(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Each half of the rows of x times its own weight [2, O, I]."""
    halves = x.unflatten(0, (2, x.shape[0] // 2))
    rows, weight = halves.flatten(1, 2), weight.to(x.dtype).mT
    y = torch.bmm(rows, weight) if bias is None else torch.baddbmm(bias.to(x.dtype).unsqueeze(1), rows, weight)
    return y.unflatten(1, halves.shape[1:3]).flatten(0, 1)
