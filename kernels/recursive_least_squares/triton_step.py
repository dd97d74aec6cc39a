"""One token of recursive least squares in Triton: one kernel if a program can hold all of A, else two.

The update needs A u before any of A changes. If A has more than MATRIX numbers, each program holds some rows of it, and
a kernel before the update stores A u.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longseq.kernels.custom_op import custom_op, results_like
from longseq.kernels.devices import channels_adjacent
from longseq.kernels.triton_launch import cdiv, find_launch, launch_options, next_power_of_2
from longseq.kernels.triton_steps import UNSPECIALISED, load_vector, place, reciprocal_root, store_vector, strides
from longseq.kernels.triton_tiles import load_block, store_block

# Measured on an H200. MATRIX: the most numbers of A that one program holds, 128 x 128, which are 64 registers in each
# thread of eight warps. ROWS: the numbers of A in a program that holds rows only and loads them as columns, too, for
# the symmetric part.
MATRIX = 16384
ROWS = 8192


@triton.jit
def _symmetric_rows(A, first, K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """BLOCK rows from `first` on of the symmetric part of A [K, K]: [BLOCK, BLOCK_K]."""
    rows = load_block(A, first, 0, K, K, BLOCK, BLOCK_K)
    if BLOCK == BLOCK_K:
        return (rows + tl.trans(rows)) * 0.5
    i = first + tl.arange(0, BLOCK)[:, None]
    j = tl.arange(0, BLOCK_K)[None, :]
    return (rows + tl.load(A + j * K + i, mask=(i < K) & (j < K), other=0.0)) * 0.5


@triton.jit(do_not_specialize=UNSPECIALISED)
def _project(
    u, A, projected, H, u_row, u_head, K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """A u, [B, H, K] in float32."""
    n, row, head, block = place(H, K, BLOCK)
    rows = _symmetric_rows(A + n * K * K, block * BLOCK, K, BLOCK, BLOCK_K)
    direction = load_vector(u + row * u_row + head * u_head, 0, K, BLOCK_K)
    store_vector(projected + n * K, block * BLOCK, tl.sum(rows * direction[None, :], 1), K, BLOCK)


@triton.jit(do_not_specialize=[*UNSPECIALISED, "refresh_period"])
def _update(
    x, u, A, projected, steps, output, A_after, steps_after, refresh, refresh_period, H, x_row, x_head, u_row, u_head,
    K: tl.constexpr, REFRESHED: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n, row, head, block = place(H, K, BLOCK)
    first = block * BLOCK
    rows = _symmetric_rows(A + n * K * K, first, K, BLOCK, BLOCK_K)
    key = load_vector(x + row * x_row + head * x_head, 0, K, BLOCK_K)
    seen = tl.load(steps + row) + 1
    if u is not None:
        direction = load_vector(u + row * u_row + head * u_head, 0, K, BLOCK_K)
        if BLOCK == BLOCK_K:
            own = tl.sum(rows * direction[None, :], 1)
            column = own
        else:
            own = load_vector(projected + n * K, first, K, BLOCK)
            column = load_vector(projected + n * K, 0, K, BLOCK_K)
        # the outer product comes before the division, so that A stays symmetric to the last bit
        rows -= own[:, None] * column[None, :] / (1.0 + tl.sum(column * direction, 0))
    if REFRESHED:
        added = tl.where(seen % refresh_period == 0, refresh, 0.0)
        i = first + tl.arange(0, BLOCK)
        rows += tl.where(i[:, None] == tl.arange(0, BLOCK_K)[None, :], added, 0.0)
    if UNIT:
        key *= reciprocal_root(tl.sum(key * key, 0))

    store_block(A_after + n * K * K, first, 0, rows, K, K, BLOCK, BLOCK_K)
    store_vector(output + n * K, first, tl.sum(rows * key[None, :], 1), K, BLOCK)
    if (head == 0) & (block == 0):
        tl.store(steps_after + row, seen)


def update_inverse(
    x: Tensor, u: Tensor | None, A: Tensor, steps: Tensor, refresh_period: int, refresh: float, *, unit: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """y [B, H, K] in `dtype`, the next A in float32 and the next steps.

    Without `u`, A stays unchanged. A `refresh_period` of 0 means no refresh. With `unit`, x is divided by its length.
    """
    x, u, A, steps = channels_adjacent(x), channels_adjacent(u), A.contiguous(), steps.contiguous()
    batch, heads, width, _ = A.shape
    y, A_after, steps_after = x.new_empty(x.shape, dtype=dtype), torch.empty_like(A), torch.empty_like(steps)
    block_k = next_power_of_2(width)
    block = block_k if block_k * block_k <= MATRIX else ROWS // block_k
    programs = batch * heads * cdiv(width, block)
    constants = {"K": width, "BLOCK": block, "BLOCK_K": block_k, **launch_options(8 if block_k > 64 else 4)}
    projected = None
    if u is not None and block < block_k:
        projected = torch.empty_like(A[..., 0])
        find_launch(_project, u.device, programs, (heads, *strides(u)), **constants)(u, A, projected)
    find_launch(
        _update, x.device, programs, (float(refresh), refresh_period, heads, *strides(x), *strides(u)),
        REFRESHED=refresh_period > 0, UNIT=unit, **constants,
    )(x, u, A, projected, steps, y, A_after, steps_after)  # fmt: skip
    return y, A_after, steps_after


@custom_op("recursive_least_squares_step", results_like(0, 2, 3))
def recursive_least_squares_step_triton(
    x: Tensor, u: Tensor, A: Tensor, steps: Tensor, refresh_period: int | None, refresh: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns y [B, H, K] in x's dtype, the next A [B, H, K, K] in float32 and the next steps [B]."""
    return update_inverse(x, u, A, steps, refresh_period or 0, refresh, unit=False, dtype=x.dtype)
