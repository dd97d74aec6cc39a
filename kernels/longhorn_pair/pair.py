"""A Longhorn layer between its projections, read in both directions, as a composition of other operations."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longseq.kernels.diagonal_scan import longhorn_scan
from longseq.kernels.dispatch import is_exporting
from longseq.kernels.precision import without_autocast
from longseq.kernels.reading import half, halves
from longseq.kernels.short_convolution import short_convolution
from longseq.kernels.silu_product import silu_product

_TILE = 32  # numbers of bfloat16 in a row of a tile of AMX


def longhorn_pair_torch(
    projected: Tensor, taps: Tensor, offset: Tensor, selection: Tensor, rate: Tensor, rate_offset: Tensor, skip: Tensor
) -> Tensor:
    """`longhorn_pair` by the torch forms of its parts."""
    ranks = rate.shape[2]
    entries = (selection.shape[1] - ranks) // 2
    with without_autocast(projected):
        x, gate = projected.chunk(2, dim=-1)
        if is_exporting():
            return _exported(x, gate, taps, offset, selection, rate, rate_offset, skip)
        x, _ = short_convolution(x, taps, offset, activation="silu", reverse="second_half", backend="torch")
        rank, key, query = _project(x, selection).split([ranks, entries, entries], dim=-1)
        beta = _project(rank, rate, rate_offset).sigmoid()
        y, _ = longhorn_scan(x, query, key, beta, reverse="second_half", backend="torch")
        return silu_product(y, gate, skip=x, skip_weight=skip, backend="torch")


def _exported(
    x: Tensor, gate: Tensor, taps: Tensor, offset: Tensor, selection: Tensor, rate: Tensor, rate_offset: Tensor,
    skip: Tensor,
) -> Tensor:  # fmt: skip
    """The same in the order of reading throughout: one sequence is turned in place of five."""
    ranks = rate.shape[2]
    entries = (selection.shape[1] - ranks) // 2
    options: dict[str, Any] = {"activation": "silu", "backend": "torch"}
    ways = (x, x.flip(1))
    x = torch.cat([short_convolution(way, taps[i], offset[i], **options)[0] for i, way in enumerate(ways)])
    rank, key, query = _project(x, selection).split([ranks, entries, entries], dim=-1)
    beta = _project(rank, rate, rate_offset).sigmoid()
    y, _ = longhorn_scan(x, query, key, beta, backend="torch")
    forward, backward = (part + skip[i] * half(x, i) for i, part in enumerate(halves(y)))
    return (forward + backward.flip(1)) * F.silu(gate)


def _project(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Each half of the rows of x times its own weight [2, O, I]."""
    halves = x.unflatten(0, (2, x.shape[0] // 2))
    rows, weight = halves.flatten(1, 2), weight.to(x.dtype)
    outputs, inputs = weight.shape[1:]
    more_inputs, more_outputs = -inputs % _TILE, -outputs % _TILE
    if x.dtype == torch.bfloat16 and x.device.type == "cpu" and (more_inputs or more_outputs):
        # On processors with AMX, oneDNN 3.12 reads rows in whole tiles: behind the end of a row it multiplies numbers
        # of the next row by zero, and a NaN among them reaches this row. Rows of x have `inputs` numbers, and those of
        # the gradient of y have `outputs`.
        rows, weight = F.pad(rows, (0, more_inputs)), F.pad(weight, (0, more_inputs, 0, more_outputs))
        bias = None if bias is None else F.pad(bias, (0, more_outputs))
    weight = weight.mT
    y = torch.bmm(rows, weight) if bias is None else torch.baddbmm(bias.to(x.dtype).unsqueeze(1), rows, weight)
    return y[..., :outputs].unflatten(1, halves.shape[1:3]).flatten(0, 1)
