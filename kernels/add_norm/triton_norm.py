"""The sum of a residual and a branch with its norm in one kernel, and their gradients in another.

PAIRED kernels take x [2 rows, D], two readings of the same tokens (row i and row i + rows belong together), and weight
[2, D].
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from longseq.kernels.custom_op import custom_op
from longseq.kernels.devices import contiguous, rows_of
from longseq.kernels.triton_launch import PREPARED, Prepared, cdiv, launch_options, next_power_of_2
from longseq.kernels.triton_tiles import load_rows

# Measured on an H200. BLOCK: numbers of a program's block. WARP: numbers of the block for each warp. PROGRAMS: the
# largest grid of the gradient. Each of its programs takes every `PROGRAMS`th block and sums the gradients of weight and
# bias.
BLOCK = 2048
WARP = 1024
PROGRAMS = 1056


@triton.jit
def _store(y, row, D: tl.constexpr, inside, values, BLOCK_D: tl.constexpr):
    tl.store(y + row[:, None] * D + tl.arange(0, BLOCK_D)[None, :], values, mask=inside)


@triton.jit
def _standardise(total, inside, eps, D: tl.constexpr, CENTRED: tl.constexpr):
    """Each row divided by its root mean square, after subtraction of the mean if CENTRED, and the factor."""
    if CENTRED:
        total = tl.where(inside, total - (tl.sum(total, 1) / D)[:, None], 0.0)
    factor = (1.0 / tl.sqrt_rn(tl.sum(total * total, 1) / D + eps))[:, None]
    return total * factor, factor


@triton.jit(do_not_specialize=["rows", "eps"])
def normalise(
    x, branch, weight, bias, total, y, rows, x_row, branch_row, eps,
    D: tl.constexpr, CENTRED: tl.constexpr, PAIRED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A block of rows: the sum of x and branch, and its norm; if PAIRED, the sum of the norms of both readings."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_D)
    inside = (row < rows)[:, None] & (column < D)[None, :]
    added = load_rows(x, row, x_row, column, inside)
    if branch is not None:
        added += load_rows(branch, row, branch_row, column, inside)
        added = added.to(total.dtype.element_ty)
        _store(total, row, D, inside, added, BLOCK_D)
        added = added.to(tl.float32)
    unit, _ = _standardise(added, inside, eps, D, CENTRED)
    unit *= tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    if PAIRED:
        x += rows.to(tl.int64) * x_row
        other, _ = _standardise(load_rows(x, row, x_row, column, inside), inside, eps, D, CENTRED)
        unit += other * tl.load(weight + D + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        unit += tl.load(bias + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    _store(y, row, D, inside, unit, BLOCK_D)


@triton.jit
def _pull_back(d_unit, unit, factor, D: tl.constexpr, CENTRED: tl.constexpr):
    """The gradient of the rows that `_standardise` took, from the gradient of its result."""
    along = (tl.sum(d_unit * unit, 1) / D)[:, None] * unit
    if CENTRED:
        along += (tl.sum(d_unit, 1) / D)[:, None]
    return (d_unit - along) * factor


@triton.jit(do_not_specialize=["rows", "blocks", "eps"])
def differentiate_norm(
    total, weight, d_total, dy, dx, d_branch, sums, rows, blocks, total_row, eps,
    D: tl.constexpr, HAS_BRANCH: tl.constexpr, HAS_BIAS: tl.constexpr, CENTRED: tl.constexpr, PAIRED: tl.constexpr,
    WEIGHS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The gradients of x and branch; if WEIGHS, also this program's part of the gradients of weight and bias.

    If PAIRED, both readings get their gradients, and the second row of the weight takes the place of the bias.
    """
    column = tl.arange(0, BLOCK_D)
    scale = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    other_scale = scale
    if PAIRED:
        other_scale = tl.load(weight + D + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    weighed = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    added = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        row = (block * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
        inside = (row < rows)[:, None] & (column < D)[None, :]
        unit, factor = _standardise(load_rows(total, row, total_row, column, inside), inside, eps, D, CENTRED)
        d_unit = load_rows(dy, row, D, column, inside)
        weighed += d_unit * unit
        if HAS_BIAS:
            added += d_unit
        gradient = _pull_back(d_unit * scale, unit, factor, D, CENTRED)
        if PAIRED:
            behind = row + rows
            unit, factor = _standardise(load_rows(total, behind, total_row, column, inside), inside, eps, D, CENTRED)
            added += d_unit * unit
            other = _pull_back(d_unit * other_scale, unit, factor, D, CENTRED)
            _store(dx, behind, D, inside, other, BLOCK_D)
        if d_total is not None:
            gradient += load_rows(d_total, row, D, column, inside)
        _store(dx, row, D, inside, gradient, BLOCK_D)
        if HAS_BRANCH:
            _store(d_branch, row, D, inside, gradient, BLOCK_D)
    if WEIGHS:
        place = tl.program_id(0) * D + column
        tl.store(sums + place, tl.sum(weighed, 0), mask=column < D)
        if HAS_BIAS or PAIRED:
            tl.store(sums + tl.num_programs(0) * D + place, tl.sum(added, 0), mask=column < D)


def _blocks(width: int, readings: int) -> dict[str, int]:
    """The rows and columns of a program's block for `readings` readings, and its options."""
    columns = next_power_of_2(width)
    rows = max(1, BLOCK // (columns * readings))
    return {"BLOCK_R": rows, "BLOCK_D": columns, **launch_options(min(max(readings * rows * columns // WARP, 1), 8))}


@lru_cache(PREPARED)
def _prepare(
    device: torch.device, rows: int, width: int, x_row: int, branch_row: int, eps: float, centred: bool, readings: int
) -> Prepared:
    """The launch of `normalise`."""
    blocks = _blocks(width, readings)
    return Prepared(
        normalise, device, cdiv(rows, blocks["BLOCK_R"]), (rows, x_row, branch_row, eps),
        D=width, CENTRED=centred, PAIRED=readings == 2, **blocks,
    )  # fmt: skip


def _like(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _allocate(x, branch, weight, bias, eps, centred, dtype):
    y = x.new_empty((x.shape[0] // 2, *x.shape[1:]), dtype=dtype) if weight.dim() == 2 else _like(x, dtype)
    if branch is None:
        return x.new_empty((0,)), y
    return _like(x, torch.promote_types(x.dtype, branch.dtype)), y


@custom_op("add_norm", _allocate)
def add_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, centred: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The sum of x and branch [..., D] (empty without a branch), and its norm in `dtype`.

    For a weight [2, D], the first dimension of x holds two readings, one half each: y is the sum of their norms.
    """
    total, y = _allocate(x, branch, weight, bias, eps, centred, dtype)
    rows, x_row = rows_of(x)
    branches, branch_row = (None, 0) if branch is None else rows_of(branch)
    width = x.shape[-1]
    if width:
        launch = _prepare(x.device, y.numel() // width, width, x_row, branch_row, eps, centred, weight.dim())
        launch(rows, branches, weight.contiguous(), contiguous(bias), total, y)
    return total, y


def _allocate_gradients(total, weight, d_total, dy, eps, centred, has_bias, dtype, branch_dtype, weighs):
    return (
        _like(total, dtype),
        total.new_empty((0,)) if branch_dtype is None else _like(total, branch_dtype),
        weight.new_empty((1 + (has_bias or weight.dim() == 2), weight.shape[-1]) if weighs else 0),
    )


@custom_op("add_norm_backward", _allocate_gradients)
def add_norm_backward(
    total: Tensor, weight: Tensor, d_total: Tensor | None, dy: Tensor, eps: float, centred: bool, has_bias: bool,
    dtype: torch.dtype, branch_dtype: torch.dtype | None, weighs: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x in `dtype`, of a branch of another type (else empty), and of weight and bias.

    The last tensor is [2, D] for a weight with a bias or of two readings, else [1, D]; without `weighs`, it is empty.
    """
    rows, row = rows_of(total)
    dx, d_branch, sums = _allocate_gradients(
        total, weight, d_total, dy, eps, centred, has_bias, dtype, branch_dtype, False
    )
    readings, width = weight.dim(), total.shape[-1]
    count = total.numel() // (width * readings) if width else 0
    launch, programs = _prepare_backward(
        total.device, count, width, row, eps, branch_dtype is not None, has_bias, centred, readings, weighs
    )
    parts = total.new_empty((1 + (has_bias or readings == 2), programs if weighs else 0, width), dtype=torch.float32)
    launch(rows, weight.contiguous(), contiguous(d_total), dy.contiguous(), dx, d_branch, parts)
    return dx, d_branch, parts.sum(1).to(weight.dtype) if weighs else sums


@lru_cache(PREPARED)
def _prepare_backward(
    device: torch.device, rows: int, width: int, row: int, eps: float, has_branch: bool, has_bias: bool, centred: bool,
    readings: int, weighs: bool,
) -> tuple[Prepared, int]:  # fmt: skip
    """The launch of `differentiate_norm`, and the size of its grid."""
    shape = _blocks(width, readings)
    blocks = cdiv(rows, shape["BLOCK_R"])
    programs = min(blocks, PROGRAMS)
    launch = Prepared(
        differentiate_norm, device, programs, (rows, blocks, row, eps),
        D=width, HAS_BRANCH=has_branch, HAS_BIAS=has_bias, CENTRED=centred, PAIRED=readings == 2, WEIGHS=weighs,
        **shape,
    )  # fmt: skip
    return launch, programs


def _setup_context(ctx, inputs, output):
    x, branch, weight, bias, ctx.eps, ctx.centred, _ = inputs
    ctx.has_branch, ctx.has_bias, ctx.dtype = branch is not None, bias is not None, x.dtype
    ctx.branch_dtype = None if branch is None or branch.dtype == x.dtype else branch.dtype
    ctx.save_for_backward(output[0] if ctx.has_branch else x, weight)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, d_total, dy):
    total, weight = ctx.saved_tensors
    if not ctx.has_branch:
        d_total = None
    if dy is None:
        dy = total.new_zeros(total.shape if weight.dim() == 1 else (total.shape[0] // 2, *total.shape[1:]))
    weighs = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
    dx, d_branch, sums = add_norm_backward(
        total, weight, d_total, dy, ctx.eps, ctx.centred, ctx.has_bias, ctx.dtype, ctx.branch_dtype, weighs
    )
    if ctx.branch_dtype is None:
        d_branch = dx
    if not weighs:
        d_weight, d_bias = None, None
    elif weight.dim() == 2:
        d_weight, d_bias = sums, None
    else:
        d_weight, d_bias = sums.unbind() if ctx.has_bias else (sums[0], None)
    return dx, d_branch if ctx.has_branch else None, d_weight, d_bias, None, None, None


add_norm.register_autograd(_differentiate, setup_context=_setup_context)


def add_norm_triton(
    x: Tensor, weight: Tensor, *, bias: Tensor | None, branch: Tensor | None, eps: float, centred: bool,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`add_norm` as one kernel, whose gradient is one kernel, too."""
    if dtype is None:
        dtype = x.dtype if branch is None else torch.promote_types(x.dtype, branch.dtype)
    total, y = add_norm(x, branch, weight, bias, float(eps), centred, dtype)
    return x if branch is None else total, y
