"""Vectors divided by their length in Triton: `unit` of reference.py, in one kernel for each direction.

With y = x / ‖x‖ and G the gradient of y, the gradient of x is (G - y yᵀ G) / ‖x‖; for a zero vector it is G.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longseq.kernels.triton_launch import block_width, cdiv, find_launch, launch_options, strides

ROWS = 64  # vectors of a program
WARPS = 4


@triton.jit
def _places(row_count, T, H, row, token, head, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets of a program's vectors in a tensor [B, T, H, WIDTH] with these strides; a mask of those that exist."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, BLOCK)
    places = r // H // T * row + r // H % T * token + r % H * head
    return places[:, None] + e[None, :], (r < row_count)[:, None] & (e < WIDTH)[None, :]


@triton.jit
def _squared_length(x):
    """‖x‖², but 1 for a zero vector."""
    squares = tl.sum(x * x, 1)
    return tl.where(squares <= 1e-24, 1.0, squares)


@triton.jit
def differentiate_unit(x, gradient):
    """The gradient of vectors x, in float32, from the gradient of x / ‖x‖."""
    squares = tl.sum(x * x, 1)
    length = tl.sqrt(_squared_length(x))
    y = x / length[:, None]
    along = tl.where(squares <= 1e-24, 0.0, tl.sum(y * gradient, 1))
    return (gradient - y * along[:, None]) / length[:, None]


@triton.jit(do_not_specialize=["row_count", "T", "H"])
def _normalize(
    x, y, row_count, T, H, x_row, x_token, x_head, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    place, mask = _places(row_count, T, H, x_row, x_token, x_head, WIDTH, ROWS, BLOCK)
    value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    place, mask = _places(row_count, T, H, T.to(tl.int64) * H * WIDTH, H * WIDTH, WIDTH, WIDTH, ROWS, BLOCK)
    tl.store(y + place, value / tl.sqrt(_squared_length(value))[:, None], mask=mask)


@triton.jit(do_not_specialize=["row_count", "T", "H"])
def _differentiate_normalize(
    x, d_y, d_x, row_count, T, H, x_row, x_token, x_head, dy_row, dy_token, dy_head,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place, mask = _places(row_count, T, H, x_row, x_token, x_head, WIDTH, ROWS, BLOCK)
    value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    place, mask = _places(row_count, T, H, dy_row, dy_token, dy_head, WIDTH, ROWS, BLOCK)
    gradient = tl.load(d_y + place, mask=mask, other=0.0)
    gradient = differentiate_unit(value, gradient)
    place, mask = _places(row_count, T, H, T.to(tl.int64) * H * WIDTH, H * WIDTH, WIDTH, WIDTH, ROWS, BLOCK)
    tl.store(d_x + place, gradient, mask=mask)


def unit(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [B, T, H, K] divided by its length, in `dtype`; a zero vector stays zero."""
    batch, tokens, heads, width = x.shape
    y = x.new_empty(x.shape, dtype=dtype)
    find_launch(
        _normalize, x.device, cdiv(batch * tokens * heads, ROWS), (batch * tokens * heads, tokens, heads, *strides(x)),
        WIDTH=width, ROWS=ROWS, BLOCK=block_width(width), **launch_options(WARPS),
    )(x, y)  # fmt: skip
    return y


def unit_backward(x: Tensor, d_y: Tensor) -> Tensor:
    """The gradient of x from the gradient of `unit(x)`."""
    batch, tokens, heads, width = x.shape
    d_x = x.new_empty(x.shape)
    find_launch(
        _differentiate_normalize, x.device, cdiv(batch * tokens * heads, ROWS),
        (batch * tokens * heads, tokens, heads, *strides(x), *strides(d_y)),
        WIDTH=width, ROWS=ROWS, BLOCK=block_width(width), **launch_options(WARPS),
    )(x, d_y, d_x)  # fmt: skip
    return d_x
