"""The sum of a residual and a branch with its norm in one kernel, and their gradients in another."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longseq.kernels.custom_op import custom_op
from longseq.kernels.devices import as_rows
from longseq.kernels.triton_launch import cdiv, next_power_of_2

# Measured on an H200. Numbers of a program's block, and of a warp's; programs of the gradient at most, each of which
# walks through blocks a whole grid apart and adds up the gradients of weight and bias.
BLOCK = 2048
WARP = 1024
PROGRAMS = 1056


@triton.jit
def _load(x, row, stride, inside, BLOCK_D: tl.constexpr):
    place = row[:, None] * stride + tl.arange(0, BLOCK_D)[None, :]
    return tl.load(x + place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store(y, row, D: tl.constexpr, inside, values, BLOCK_D: tl.constexpr):
    tl.store(y + row[:, None] * D + tl.arange(0, BLOCK_D)[None, :], values, mask=inside)


@triton.jit
def _standardise(total, inside, eps, D: tl.constexpr, CENTRED: tl.constexpr):
    """Rows of mean square one, and the factor that made them so."""
    if CENTRED:
        total = tl.where(inside, total - (tl.sum(total, 1) / D)[:, None], 0.0)
    factor = (1.0 / tl.sqrt_rn(tl.sum(total * total, 1) / D + eps))[:, None]
    return total * factor, factor


@triton.jit(do_not_specialize=["rows", "eps"])
def normalise(
    x, branch, weight, bias, total, y, rows, x_row, branch_row, eps,
    D: tl.constexpr, HAS_BRANCH: tl.constexpr, HAS_BIAS: tl.constexpr, CENTRED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The sum and its norm, of some rows."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_D)
    inside = (row < rows)[:, None] & (column < D)[None, :]
    added = _load(x, row, x_row, inside, BLOCK_D)
    if HAS_BRANCH:
        added += _load(branch, row, branch_row, inside, BLOCK_D)
        added = added.to(total.dtype.element_ty)
        _store(total, row, D, inside, added, BLOCK_D)
        added = added.to(tl.float32)
    unit, _ = _standardise(added, inside, eps, D, CENTRED)
    unit *= tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        unit += tl.load(bias + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    _store(y, row, D, inside, unit, BLOCK_D)


@triton.jit(do_not_specialize=["rows", "blocks", "eps"])
def differentiate_norm(
    total, weight, d_total, dy, dx, d_branch, d_weight, d_bias, rows, blocks, total_row, eps,
    D: tl.constexpr, HAS_TOTAL: tl.constexpr, HAS_BRANCH: tl.constexpr, HAS_BIAS: tl.constexpr, CENTRED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The gradients of the summands, and this program's part of those of weight and bias."""
    column = tl.arange(0, BLOCK_D)
    scale = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    weighed = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    added = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        row = (block * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
        inside = (row < rows)[:, None] & (column < D)[None, :]
        unit, factor = _standardise(_load(total, row, total_row, inside, BLOCK_D), inside, eps, D, CENTRED)
        d_unit = _load(dy, row, D, inside, BLOCK_D)
        weighed += d_unit * unit
        if HAS_BIAS:
            added += d_unit
        d_unit *= scale
        along = (tl.sum(d_unit * unit, 1) / D)[:, None] * unit
        if CENTRED:
            along += (tl.sum(d_unit, 1) / D)[:, None]
        gradient = (d_unit - along) * factor
        if HAS_TOTAL:
            gradient += _load(d_total, row, D, inside, BLOCK_D)
        _store(dx, row, D, inside, gradient, BLOCK_D)
        if HAS_BRANCH:
            _store(d_branch, row, D, inside, gradient, BLOCK_D)
    place = tl.program_id(0) * D + column
    tl.store(d_weight + place, tl.sum(weighed, 0), mask=column < D)
    if HAS_BIAS:
        tl.store(d_bias + place, tl.sum(added, 0), mask=column < D)


def _blocks(width: int) -> dict[str, int]:
    """Rows and columns of a program's block, and its warps."""
    columns = next_power_of_2(width)
    rows = max(1, BLOCK // columns)
    return {"BLOCK_R": rows, "BLOCK_D": columns, "num_warps": min(max(rows * columns // WARP, 1), 8)}


@custom_op("add_norm")
def add_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, centred: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The sum of x and branch [..., D], empty without a branch, and its norm in `dtype`."""
    total, y = _allocate(x, branch, dtype)
    rows, branches = as_rows(x), None if branch is None else as_rows(branch)
    blocks = _blocks(rows.shape[1])
    if y.numel():
        with torch.cuda.device_of(x):  # Triton launches on the current device
            normalise[(cdiv(rows.shape[0], blocks["BLOCK_R"]),)](
                rows, branches, weight.contiguous(), None if bias is None else bias.contiguous(), total, y,
                rows.shape[0], rows.stride(0), 0 if branches is None else branches.stride(0), eps,
                D=rows.shape[1], HAS_BRANCH=branch is not None, HAS_BIAS=bias is not None, CENTRED=centred, **blocks,
            )  # fmt: skip
    return total, y


@add_norm.register_fake
def _(x, branch, weight, bias, eps, centred, dtype):
    return _allocate(x, branch, dtype)


def _allocate(x: Tensor, branch: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    y = x.new_empty(x.shape, dtype=dtype)
    if branch is None:
        return x.new_empty((0,)), y
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, branch.dtype)), y


@custom_op("add_norm_backward")
def add_norm_backward(
    total: Tensor,
    weight: Tensor,
    d_total: Tensor | None,
    dy: Tensor,
    eps: float,
    centred: bool,
    has_bias: bool,
    dtype: torch.dtype,
    branch_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x in `dtype`, of a branch of another type (else empty), and of weight and, if there is one, bias."""
    rows, gradients = as_rows(total), None if d_total is None else d_total.contiguous()
    dx = total.new_empty(total.shape, dtype=dtype)
    d_branch = total.new_empty((0,) if branch_dtype is None else total.shape, dtype=branch_dtype)
    shape = _blocks(rows.shape[1])
    blocks = cdiv(rows.shape[0], shape["BLOCK_R"])
    parts = total.new_empty((1 + has_bias, min(blocks, PROGRAMS), rows.shape[1]), dtype=torch.float32)
    if dx.numel():
        with torch.cuda.device_of(total):
            differentiate_norm[(parts.shape[1],)](
                rows, weight.contiguous(), gradients, dy.contiguous(), dx, d_branch, parts[0], parts[-1],
                rows.shape[0], blocks, rows.stride(0), eps,
                D=rows.shape[1], HAS_TOTAL=d_total is not None, HAS_BRANCH=branch_dtype is not None,
                HAS_BIAS=has_bias, CENTRED=centred, **shape,
            )  # fmt: skip
    return dx, d_branch, parts.sum(1).to(weight.dtype)


@add_norm_backward.register_fake
def _(total, weight, d_total, dy, eps, centred, has_bias, dtype, branch_dtype):
    return (
        total.new_empty(total.shape, dtype=dtype),
        total.new_empty((0,) if branch_dtype is None else total.shape, dtype=branch_dtype),
        weight.new_empty((1 + has_bias, *weight.shape)),
    )


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
        dy = total.new_zeros(total.shape)
    dx, d_branch, sums = add_norm_backward(
        total, weight, d_total, dy, ctx.eps, ctx.centred, ctx.has_bias, ctx.dtype, ctx.branch_dtype
    )
    if ctx.branch_dtype is None:
        d_branch = dx
    return dx, d_branch if ctx.has_branch else None, sums[0], sums[1] if ctx.has_bias else None, None, None, None


add_norm.register_autograd(_differentiate, setup_context=_setup_context)


def add_norm_triton(
    x: Tensor, weight: Tensor, *, bias: Tensor | None, branch: Tensor | None, eps: float, centred: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`add_norm` as one kernel, whose gradient is one kernel, too."""
    total, y = add_norm(x, branch, weight, bias, float(eps), centred, dtype)
    return x if branch is None else total, y
