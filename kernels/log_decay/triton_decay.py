"""Log decays of heads or channels in one kernel, and their gradients in another.

z has rows of D = H K columns (K = 1 for heads), A_log is [P, H] and dt_bias [P, D]. Each of the P = 1 or 2 parts of the
rows has its own parameters.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longseq.kernels.custom_op import Gradients, custom_op
from longseq.kernels.devices import rows_of
from longseq.kernels.triton_launch import cdiv, find_launch, launch_options, next_power_of_2
from longseq.kernels.triton_tiles import load_rows

# BLOCK: numbers of a program's block. COLUMNS: the most columns of the block. PROGRAMS: the largest number of programs
# if the gradients of parameters are needed. Each of them takes every n-th block of rows and sums those gradients.
BLOCK = 1024
COLUMNS = 128
PROGRAMS = 4096
WARPS = 4


@triton.jit
def _load_parameters(A_log, dt_bias, part, column, D, K):
    """exp(A_log) and dt_bias of some columns as rows [1, BLOCK_D]."""
    slope = tl.exp(tl.load(A_log + part * (D // K) + column // K, mask=column < D, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias + part * D + column, mask=column < D, other=0.0).to(tl.float32)
    return slope[None, :], bias[None, :]


@triton.jit
def _softplus(x):
    """softplus(x) = max(x, 0) + log(1 + u) with u = exp(-|x|), and its derivative sigmoid(x).

    log(1 + u) = 2 artanh(s) with s = u / (2 + u) <= 1/3. The terms of artanh's series that are left out are below 2^-25
    of it, so that the result is precise also where it is small. A NaN gives NaN: it comes through u.
    """
    u = tl.exp(-tl.abs(x))
    s = u / (2.0 + u)
    t = s * s
    series = 1 + t * (1 / 3 + t * (1 / 5 + t * (1 / 7 + t * (1 / 9 + t * (1 / 11 + t * (1 / 13))))))
    return tl.maximum(x, 0.0) + 2 * s * series, tl.where(x >= 0, 1.0, u) / (1.0 + u)


@triton.jit(do_not_specialize=["rows", "blocks", "bound"])
def decay(
    z, A_log, dt_bias, g, rows, blocks, D, K, z_row, bound,
    BOUNDED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """g for a block of rows and columns of one part."""
    over_d = tl.cdiv(D, BLOCK_D)
    column = (tl.program_id(0) % over_d) * BLOCK_D + tl.arange(0, BLOCK_D)
    part, block = tl.program_id(0) // over_d // blocks, tl.program_id(0) // over_d % blocks
    slope, bias = _load_parameters(A_log, dt_bias, part, column, D, K)
    row = (block * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    inside = (row < rows)[:, None] & (column < D)[None, :]
    row += part * rows
    x = load_rows(z, row, z_row, column, inside) + bias
    value = bound * tl.sigmoid(slope * x) if BOUNDED else -slope * _softplus(x)[0]
    tl.store(g + row[:, None] * D + column[None, :], value, mask=inside)


@triton.jit(do_not_specialize=["rows", "blocks", "programs", "bound"])
def differentiate_decay(
    z, A_log, dt_bias, dg, dz, sums, rows, blocks, programs, D, K, z_row, dg_row, bound,
    BOUNDED: tl.constexpr, WEIGHS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dz for every n-th block of rows of one part; if WEIGHS, also sums of the gradients of dt_bias and A_log there."""
    over_d = tl.cdiv(D, BLOCK_D)
    column = (tl.program_id(0) % over_d) * BLOCK_D + tl.arange(0, BLOCK_D)
    place = tl.program_id(0) // over_d
    part, first = place // programs, place % programs
    slope, bias = _load_parameters(A_log, dt_bias, part, column, D, K)
    d_bias = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    d_log = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for block in range(first, blocks, programs):
        row = (block * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
        inside = (row < rows)[:, None] & (column < D)[None, :]
        row += part * rows
        x = load_rows(z, row, z_row, column, inside) + bias
        gradient = load_rows(dg, row, dg_row, column, inside)
        if BOUNDED:
            share = tl.sigmoid(slope * x)
            gradient *= bound * share * (1.0 - share) * slope
            d_log += gradient * x
        else:
            value, share = _softplus(x)
            gradient *= -slope
            d_log += gradient * value
            gradient *= share
        tl.store(dz + row[:, None] * D + column[None, :], gradient, mask=inside)
        d_bias += gradient
    if WEIGHS:
        tl.store(sums + place * D + column, tl.sum(d_bias, 0), mask=column < D)
        tl.store(sums + (tl.num_programs(0) // over_d + place) * D + column, tl.sum(d_log, 0), mask=column < D)


def _plan(z: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[int, int, int, int, int, int, dict[str, Any]]:
    """Parts, rows of a part, D, K, the blocks of rows of a part and of columns, and the options of a launch."""
    parts = A_log.numel() // A_log.shape[-1]
    columns, rows = dt_bias.numel() // parts, z.numel() // dt_bias.numel()
    width = min(next_power_of_2(columns), COLUMNS)
    options = {"BLOCK_R": BLOCK // width, "BLOCK_D": width, **launch_options(WARPS)}
    blocks, over_d = cdiv(rows, BLOCK // width), cdiv(columns, width)
    return parts, rows, columns, columns // A_log.shape[-1], blocks, over_d, options


def _allocate(z: Tensor, *_: Any) -> Tensor:
    return z.new_empty(z.shape, dtype=torch.float32)


@custom_op("log_decay", _allocate)
def log_decay_triton(z: Tensor, A_log: Tensor, dt_bias: Tensor, bound: float | None) -> Tensor:
    """The log decays, of the shape of z."""
    g = _allocate(z)
    parts, rows, columns, channels, blocks, over_d, options = _plan(z, A_log, dt_bias)
    inputs, z_row = rows_of(z.flatten(A_log.dim() - dt_bias.dim() - 1))
    find_launch(
        decay, z.device, parts * blocks * over_d, (rows, blocks, columns, channels, z_row, float(bound or 0.0)),
        BOUNDED=bound is not None, **options,
    )(inputs, A_log.contiguous(), dt_bias.contiguous(), g)  # fmt: skip
    return g


@log_decay_triton.gradient("z A_log dt_bias")
def log_decay_backward(
    z: Tensor, A_log: Tensor, dt_bias: Tensor, dg: Tensor, bound: float | None, wanted: list[bool]
) -> Gradients:
    """The gradients of z, A_log and dt_bias."""
    dz, weighs = z.new_empty(z.shape), wanted[1] or wanted[2]
    parts, rows, columns, channels, blocks, over_d, options = _plan(z, A_log, dt_bias)
    (inputs, z_row), (gradients, dg_row) = (rows_of(x.flatten(A_log.dim() - dt_bias.dim() - 1)) for x in (z, dg))
    programs = min(blocks, max(1, PROGRAMS // (parts * over_d))) if weighs else blocks
    sums = z.new_empty((2, parts, programs, columns) if weighs else 0, dtype=torch.float32)
    find_launch(
        differentiate_decay, z.device, parts * programs * over_d,
        (rows, blocks, programs, columns, channels, z_row, dg_row, float(bound or 0.0)),
        BOUNDED=bound is not None, WEIGHS=weighs, **options,
    )(inputs, A_log.contiguous(), dt_bias.contiguous(), gradients, dz, sums)  # fmt: skip
    if not weighs:
        return dz, None, None
    d_bias, d_log = sums.sum(2)
    d_log = d_log.view(*A_log.shape, channels).sum(-1)
    return dz, d_log.to(A_log.dtype), d_bias.view_as(dt_bias).to(dt_bias.dtype)
