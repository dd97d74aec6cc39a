"""A product gated by SiLU in one kernel, and its gradients in another.

PAIRED kernels take x and skip [2 rows, D], two readings of the same tokens (row i and row i + rows belong together),
and skip_weight [2, D].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longseq.kernels.custom_op import Gradients, custom_op
from longseq.kernels.devices import contiguous, rows_of
from longseq.kernels.triton_launch import cdiv, find_launch, launch_options, next_power_of_2
from longseq.kernels.triton_tiles import load_rows

# Measured on an H200, without a skip. CHANNELS: the most channels of a program's block. BLOCK: numbers of the block.
# WARP: numbers of the block for each warp. PROGRAMS: the largest number of programs for one block of channels if the
# gradient of skip_weight is needed. Each of them takes every `PROGRAMS`th block of rows and sums that gradient.
CHANNELS = 1024
BLOCK = 2048
WARP = 512
PROGRAMS = 1024


@triton.jit
def _value(x, skip, scale, row, x_row, skip_row, column, inside):
    """x + scale skip, which the gate multiplies, and the skip."""
    value = load_rows(x, row, x_row, column, inside)
    skipped = value
    if skip is not None:
        skipped = load_rows(skip, row, skip_row, column, inside)
        value += scale * skipped
    return value, skipped


@triton.jit
def _scale(skip_weight, column, D):
    """The weights of the skip as a row [1, BLOCK_D]; zeros without a skip."""
    scale = (column * 0).to(tl.float32)[None, :]
    if skip_weight is not None:
        scale = tl.load(skip_weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    return scale


@triton.jit(do_not_specialize=["rows"])
def multiply(
    x, gate, skip, skip_weight, y, rows, D, x_row, gate_row, skip_row,
    PAIRED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """y for a block of rows and channels; if PAIRED, the gate multiplies the sum of both readings."""
    over_d = tl.cdiv(D, BLOCK_D)
    row = (tl.program_id(0) // over_d).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = (tl.program_id(0) % over_d) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (row < rows)[:, None] & (column < D)[None, :]
    scale = _scale(skip_weight, column, D)
    value, _ = _value(x, skip, scale, row, x_row, skip_row, column, inside)
    if PAIRED:
        scale = _scale(skip_weight + D, column, D)
        value += _value(x, skip, scale, row + rows, x_row, skip_row, column, inside)[0]
    z = load_rows(gate, row, gate_row, column, inside)
    tl.store(y + row[:, None] * D + column[None, :], value * z * tl.sigmoid(z), mask=inside)


@triton.jit(do_not_specialize=["rows", "blocks", "programs"])
def differentiate_product(
    x, gate, skip, skip_weight, dy, dx, d_gate, d_skip, d_weight, rows, blocks, programs, D,
    x_row, gate_row, skip_row, dy_row, d_gate_row,
    PAIRED: tl.constexpr, WEIGHS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of rows and channels; if WEIGHS, also this program's part of that of skip_weight.

    The gradients of both readings of a pair are equal. With d_skip, both it and dx are written for each of them;
    without it, dx is written once.
    """
    over_d = tl.cdiv(D, BLOCK_D)
    first = tl.program_id(0) // over_d
    column = (tl.program_id(0) % over_d) * BLOCK_D + tl.arange(0, BLOCK_D)
    scale = _scale(skip_weight, column, D)
    other_scale = scale
    if PAIRED:
        other_scale = _scale(skip_weight + D, column, D)
    weighed = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    other_weighed = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for block in range(first, blocks, programs):
        row = (block * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
        inside = (row < rows)[:, None] & (column < D)[None, :]
        value, skipped = _value(x, skip, scale, row, x_row, skip_row, column, inside)
        other_skipped = skipped
        if PAIRED:
            other, other_skipped = _value(x, skip, other_scale, row + rows, x_row, skip_row, column, inside)
            value += other
        z = load_rows(gate, row, gate_row, column, inside)
        share = tl.sigmoid(z)
        gradient = load_rows(dy, row, dy_row, column, inside)
        place = row[:, None] * D + column[None, :]
        d_gate_place = row[:, None] * d_gate_row + column[None, :]
        tl.store(d_gate + d_gate_place, gradient * value * share * (1.0 + z * (1.0 - share)), mask=inside)
        gradient *= z * share
        tl.store(dx + place, gradient, mask=inside)
        if skip is not None:
            if d_skip is not None:
                tl.store(d_skip + place, gradient * scale, mask=inside)
            weighed += gradient * skipped
        if PAIRED:
            if d_skip is not None:
                place = (row + rows)[:, None] * D + column[None, :]
                tl.store(dx + place, gradient, mask=inside)
                tl.store(d_skip + place, gradient * other_scale, mask=inside)
            other_weighed += gradient * other_skipped
    if WEIGHS:
        tl.store(d_weight + first * D + column, tl.sum(weighed, 0), mask=column < D)
        if PAIRED:
            tl.store(d_weight + (programs + first) * D + column, tl.sum(other_weighed, 0), mask=column < D)


def _blocks(channels: int) -> dict[str, int]:
    """The rows and columns of a program's block, and its options."""
    columns = min(next_power_of_2(channels), CHANNELS)
    rows = max(1, BLOCK // columns)
    return {"BLOCK_R": rows, "BLOCK_D": columns, **launch_options(min(max(rows * columns // WARP, 1), 8))}


def _allocate(x: Tensor, gate: Tensor, *_: Tensor | None) -> Tensor:
    return x.new_empty(gate.shape, dtype=torch.promote_types(x.dtype, gate.dtype))


@custom_op("silu_product", _allocate)
def silu_product_triton(x: Tensor, gate: Tensor, skip: Tensor | None, skip_weight: Tensor | None) -> Tensor:
    """The gated product [..., D]; its type is the promotion of those of x and gate.

    With skip_weight [2, D], the first dimension of x and skip holds two readings, one half each, and the gate
    multiplies their sum.
    """
    y = _allocate(x, gate)
    (values, x_row), (gates, gate_row) = rows_of(x), rows_of(gate)
    skips, skip_row = (None, 0) if skip is None else rows_of(skip)
    channels = gate.shape[-1]
    rows = gate.numel() // max(channels, 1)
    shape = _blocks(channels)
    launch = find_launch(
        multiply, x.device, cdiv(rows, shape["BLOCK_R"]) * cdiv(channels, shape["BLOCK_D"]),
        (rows, channels, x_row, gate_row, skip_row), PAIRED=_is_pair(skip_weight), **shape,
    )  # fmt: skip
    launch(values, gates, skips, contiguous(skip_weight), y)
    return y


def _is_pair(skip_weight: Tensor | None) -> bool:
    return skip_weight is not None and skip_weight.dim() == 2


@silu_product_triton.gradient("x gate skip skip_weight")
def silu_product_backward(
    x: Tensor, gate: Tensor, skip: Tensor | None, skip_weight: Tensor | None, dy: Tensor, wanted: list[bool]
) -> Gradients:
    """The gradients of x, gate, skip and skip_weight."""
    dx, d_gate = x.new_empty(x.shape), gate.new_empty(gate.shape)
    d_skip = x.new_empty((0,)) if skip is None else skip.new_empty(skip.shape)
    return dx, d_gate, d_skip, differentiate(x, gate, skip, skip_weight, dy, dx, d_gate, d_skip, wanted[3])


def differentiate(
    x: Tensor, gate: Tensor, skip: Tensor | None, skip_weight: Tensor | None, dy: Tensor,
    dx: Tensor, d_gate: Tensor, d_skip: Tensor | None, weighs: bool = True,
) -> Tensor:  # fmt: skip
    """Writes dx, d_gate and d_skip, and returns the gradient of skip_weight: empty without a skip or without `weighs`.

    If `d_skip` is None, dx [B, ...] is written once for both readings of a pair, which share it; the gradient of the
    skip is dx times its weight. The rows of `d_gate` may lie apart, at one stride.
    """
    (values, x_row), (gates, gate_row), (gradients, dy_row) = rows_of(x), rows_of(gate), rows_of(dy)
    skips, skip_row = (None, 0) if skip is None else rows_of(skip)
    channels = gate.shape[-1]
    rows = gate.numel() // max(channels, 1)
    shape = _blocks(channels)
    blocks, over_d = cdiv(rows, shape["BLOCK_R"]), cdiv(channels, shape["BLOCK_D"])
    weighs = weighs and skip_weight is not None
    programs = min(blocks, max(1, PROGRAMS // over_d)) if weighs else blocks
    weights = (0,) if skip_weight is None else skip_weight.shape[:-1]
    parts = x.new_empty((*weights, programs, channels) if weighs else 0, dtype=torch.float32)
    d_gate_row = d_gate.stride(-2) if d_gate.dim() > 1 else channels
    launch = find_launch(
        differentiate_product, x.device, programs * over_d,
        (rows, blocks, programs, channels, x_row, gate_row, skip_row, dy_row, d_gate_row),
        PAIRED=_is_pair(skip_weight), WEIGHS=weighs, **shape,
    )  # fmt: skip
    launch(values, gates, skips, contiguous(skip_weight), gradients, dx, d_gate, d_skip, parts)
    return parts.sum(-2).to(skip_weight.dtype) if weighs and skip_weight is not None else x.new_empty((0,))
