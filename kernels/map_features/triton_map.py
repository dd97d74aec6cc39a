"""A feature map of each head's channels in one kernel, and its gradient in another.

NORM is the order of the norm by which features are divided: 0 (no norm), 1 or 2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longseq.kernels.custom_op import custom_op
from longseq.kernels.devices import channels_adjacent
from longseq.kernels.head_features.triton_features import (
    KINDS,
    differentiate_map,
    load_rows,
    map_channels,
    place_rows,
    store_rows,
    unit_gradient,
    unit_rows,
)
from longseq.kernels.triton_launch import cdiv, find_launch, launch_options, next_power_of_2

# Measured on an H200. BLOCK: numbers of a program's block of one head. WARP: numbers of the block for each warp, 16 for
# each thread.
BLOCK = 2048
WARP = 512

NORMS = {None: 0, "l1": 1, "l2": 2}


@triton.jit(do_not_specialize=["rows", "scale"])
def apply_map(
    x, y, rows, x_row, x_head, scale,
    H: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, NORM: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The features of one head, for a block of rows."""
    head, row, there = place_rows(rows, H, BLOCK_R)
    channels = load_rows(x, row, x_row, head * x_head, there, K, BLOCK_K)
    if NORM == 0:
        feature = map_channels(channels, K, BLOCK_K, KIND)
    else:
        feature = unit_rows(channels, K, BLOCK_K, KIND, NORM == 1)
    store_rows(y, row, H * K, head * K, there, scale * feature, K, BLOCK_K)


@triton.jit(do_not_specialize=["rows", "scale"])
def differentiate_mapped(
    x, dy, dx, rows, x_row, x_head, scale,
    H: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, NORM: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The gradient of x for one head and a block of rows."""
    head, row, there = place_rows(rows, H, BLOCK_R)
    channels = load_rows(x, row, x_row, head * x_head, there, K, BLOCK_K)
    gradient = scale * load_rows(dy, row, H * K, head * K, there, K, BLOCK_K)
    if NORM == 0:
        gradient *= differentiate_map(channels, KIND)
    else:
        gradient = unit_gradient(channels, gradient, K, BLOCK_K, KIND, NORM == 1)
    store_rows(dx, row, H * K, head * K, there, gradient, K, BLOCK_K)


def _launch(kernel, x: Tensor, tensors: list[Tensor], feature_map: str, norm: str | None, scale: float) -> None:
    rows = channels_adjacent(x).reshape(-1, *x.shape[-2:])
    count, heads, width = rows.shape
    columns = next_power_of_2(width)
    block = max(1, BLOCK // columns)
    if not rows.numel():
        return
    find_launch(
        kernel, x.device, cdiv(count, block) * heads, (count, rows.stride(0), rows.stride(1), float(scale)),
        H=heads, K=width, KIND=KINDS[feature_map], NORM=NORMS[norm], BLOCK_R=block, BLOCK_K=columns,
        **launch_options(min(max(block * columns // WARP, 1), 8)),
    )(rows, *tensors)  # fmt: skip


def _allocate(x: Tensor, feature_map: str, norm: str | None, scale: float, dtype: torch.dtype | None) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype or x.dtype)


@custom_op("map_features", _allocate)
def map_features_triton(
    x: Tensor, feature_map: str, norm: str | None, scale: float, dtype: torch.dtype | None
) -> Tensor:
    """The features [..., H, K], by default in x's type."""
    y = _allocate(x, feature_map, norm, scale, dtype)
    _launch(apply_map, x, [y], feature_map, norm, scale)
    return y


@map_features_triton.gradient("x")
def map_features_backward(x: Tensor, dy: Tensor, feature_map: str, norm: str | None, scale: float) -> Tensor:
    """The gradient of x."""
    dx = x.new_empty(x.shape)
    _launch(differentiate_mapped, x, [dy.contiguous(), dx], feature_map, norm, scale)
    return dx
