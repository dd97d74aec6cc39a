"""Features of queries, keys and values, and write strengths, in one kernel, and their gradients in another."""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longseq.kernels.custom_op import Gradients, custom_op
from longseq.kernels.devices import rows_of
from longseq.kernels.head_features import features
from longseq.kernels.triton_launch import PREPARED, Prepared, cdiv, launch_options, next_power_of_2
from longseq.kernels.triton_tiles import MINUS_LOG2_E

# Measured on an H200. BLOCK: numbers of a program's block of one head. WARP: numbers of the block for each warp.
BLOCK = 1024
WARP = 256

KINDS = {name: number for number, name in enumerate(features.FEATURE_MAPS)}
EPS = tl.constexpr(features.EPS)


@triton.jit
def load_rows(x, row, stride, first, mask, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """WIDTH channels from `first` on of the rows where `mask` is true, in float32; zeros elsewhere."""
    column = tl.arange(0, BLOCK)
    inside = mask[:, None] & (column < WIDTH)[None, :]
    return tl.load(x + row[:, None] * stride + first + column[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_rows(y, row, stride, first, mask, values, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    inside = mask[:, None] & (column < WIDTH)[None, :]
    tl.store(y + row[:, None] * stride + first + column[None, :], values, mask=inside)


@triton.jit
def logistic(x):
    """The sigmoid without a division, which takes a GPU eight instructions."""
    root = tl.rsqrt(1.0 + tl.exp2(x * MINUS_LOG2_E))
    return root * root


@triton.jit
def map_channels(x, WIDTH: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr):
    """The feature map of a head's channels; zero past WIDTH."""
    if KIND == 0:
        feature = x * logistic(x)
    elif KIND == 1:
        feature = tl.maximum(x, 0.0, tl.PropagateNan.ALL)
    elif KIND == 2:
        feature = tl.where(x > 0.0, x + 1.0, tl.exp(tl.minimum(x, 0.0, tl.PropagateNan.ALL)))
    else:
        feature = x
    return tl.where((tl.arange(0, BLOCK) < WIDTH)[None, :], feature, 0.0)


@triton.jit
def differentiate_map(x, KIND: tl.constexpr):
    """The derivative of the feature map."""
    if KIND == 0:
        gate = logistic(x)
        slope = gate * (1.0 + x * (1.0 - gate))
    elif KIND == 1:
        slope = tl.where(x > 0.0, 1.0, 0.0)
    elif KIND == 2:
        slope = tl.exp(tl.minimum(x, 0.0, tl.PropagateNan.ALL))
    else:
        slope = x * 0.0 + 1.0
    return slope


@triton.jit
def squared_norm(feature, L1: tl.constexpr):
    """The squared norm of each row, L1 or L2."""
    if L1:
        norm = tl.sum(tl.abs(feature), 1)
        squares = norm * norm
    else:
        squares = tl.sum(feature * feature, 1)
    return squares


@triton.jit
def unit_rows(x, WIDTH: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, L1: tl.constexpr):
    """The feature map of a head's channels, divided by its norm."""
    feature = map_channels(x, WIDTH, BLOCK, KIND)
    return feature / tl.sqrt_rn(squared_norm(feature, L1) + EPS)[:, None]


@triton.jit
def norm_slope(unit, L1: tl.constexpr):
    """The derivative of sqrt(‖φ‖² + EPS) with respect to φ, from `unit`, which is φ divided by that root."""
    slope = unit
    if L1:
        sign = tl.where(unit > 0.0, 1.0, tl.where(unit < 0.0, -1.0, 0.0))
        slope = sign * tl.sum(tl.abs(unit), 1)[:, None]
    return slope


@triton.jit
def unit_gradient(x, dy, WIDTH: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, L1: tl.constexpr):
    """The gradient of x from the gradient of `unit_rows(x)`."""
    feature = map_channels(x, WIDTH, BLOCK, KIND)
    norm = tl.sqrt_rn(squared_norm(feature, L1) + EPS)[:, None]
    unit = feature / norm
    along = tl.sum(dy * unit, 1)[:, None]
    return (dy - along * norm_slope(unit, L1)) / norm * differentiate_map(x, KIND)


@triton.jit
def place_rows(rows, H, BLOCK_R: tl.constexpr):
    """This program's head, its rows, and a mask of the rows that exist."""
    row = (tl.program_id(0) // H).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    return tl.program_id(0) % H, row, row < rows


@triton.jit(do_not_specialize=["rows"])
def unit_features(
    x, logits, q, k, v, beta, rows, x_row, logits_row,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KIND: tl.constexpr, L1: tl.constexpr, READINGS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """q, k, v and beta of one head, for a block of rows.

    The rows of x are READINGS readings of the same tokens, which share the logits. READINGS is 0 if there are no
    logits.
    """
    head, row, there = place_rows(rows, H, BLOCK_R)
    query = load_rows(x, row, x_row, head * K, there, K, BLOCK_K)
    key = load_rows(x, row, x_row, (H + head) * K, there, K, BLOCK_K)
    value = load_rows(x, row, x_row, 2 * H * K + head * V, there, V, BLOCK_V)
    store_rows(q, row, H * K, head * K, there, unit_rows(query, K, BLOCK_K, KIND, L1), K, BLOCK_K)
    store_rows(k, row, H * K, head * K, there, unit_rows(key, K, BLOCK_K, KIND, L1), K, BLOCK_K)
    store_rows(v, row, H * V, head * V, there, value * tl.sigmoid(value), V, BLOCK_V)
    if READINGS > 0:
        logit = tl.load(logits + row % (rows // READINGS) * logits_row + head, mask=there, other=0.0).to(tl.float32)
        tl.store(beta + row * H + head, tl.sigmoid(logit), mask=there)


@triton.jit(do_not_specialize=["rows"])
def differentiate_features(
    x, logits, dq, dk, dv, d_beta, dx, d_logits, rows, x_row, logits_row,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KIND: tl.constexpr, L1: tl.constexpr, READINGS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The gradients of x and of the logits, for one head and a block of rows. That of x is left out if dx is None."""
    head, row, there = place_rows(rows, H, BLOCK_R)
    if dx is not None:
        width: tl.constexpr = 2 * H * K + H * V
        for part in tl.static_range(2):  # queries and keys
            first = (part * H + head) * K
            unit = load_rows(x, row, x_row, first, there, K, BLOCK_K)
            d_unit = load_rows(dk if part else dq, row, H * K, head * K, there, K, BLOCK_K)
            d_unit = unit_gradient(unit, d_unit, K, BLOCK_K, KIND, L1)
            store_rows(dx, row, width, first, there, d_unit, K, BLOCK_K)
        value = load_rows(x, row, x_row, 2 * H * K + head * V, there, V, BLOCK_V)
        d_value = load_rows(dv, row, H * V, head * V, there, V, BLOCK_V)
        gate = tl.sigmoid(value)
        d_value *= gate * (1.0 + value * (1.0 - gate))
        store_rows(dx, row, width, 2 * H * K + head * V, there, d_value, V, BLOCK_V)
    if READINGS > 0:
        own = rows // READINGS
        there = row < own
        d_logit = tl.load(d_beta + row * H + head, mask=there, other=0.0)
        for reading in tl.static_range(1, READINGS):
            d_logit += tl.load(d_beta + (row + reading * own) * H + head, mask=there, other=0.0)
        strength = tl.sigmoid(tl.load(logits + row * logits_row + head, mask=there, other=0.0).to(tl.float32))
        tl.store(d_logits + row * H + head, d_logit * strength * (1.0 - strength), mask=there)


@lru_cache(PREPARED)
def _prepare(
    kernel: Any, device: torch.device, rows: int, row: int, logits_row: int, readings: int, heads: int, key_dim: int,
    value_dim: int, kind: int, l1: bool,
) -> Prepared:  # fmt: skip
    """The launch of a kernel for `rows` rows of x with stride `row`."""
    block_k, block_v = next_power_of_2(key_dim), next_power_of_2(value_dim)
    widest = max(block_k, block_v)
    block = max(1, BLOCK // widest)
    return Prepared(
        kernel, device, cdiv(rows, block) * heads, (rows, row, logits_row),
        H=heads, K=key_dim, V=value_dim, KIND=kind, L1=l1, READINGS=readings,
        BLOCK_R=block, BLOCK_K=block_k, BLOCK_V=block_v, **launch_options(min(max(block * widest // WARP, 1), 8)),
    )  # fmt: skip


def _launch(
    kernel: Any, x: Tensor, logits: Tensor | None, heads: int, key_dim: int, feature_map: str, l1: bool,
    *tensors: Tensor | None,
) -> None:  # fmt: skip
    channels = x.shape[-1]
    count, (rows, row) = x.numel() // channels, rows_of(x)
    logits_row, readings = 0, 0
    if logits is not None and count:
        readings = count * heads // logits.numel()
        logits, logits_row = rows_of(logits)
    value_dim, kind = channels // heads - 2 * key_dim, KINDS[feature_map]
    launch = _prepare(kernel, x.device, count, row, logits_row, readings, heads, key_dim, value_dim, kind, l1)
    launch(rows, logits, *tensors)


def _allocate(
    x: Tensor, logits: Tensor | None, heads: int, key_dim: int, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    keys = (*x.shape[:-1], heads, key_dim)
    values = (*keys[:-1], x.shape[-1] // heads - 2 * key_dim)
    beta = x.new_empty((0,) if logits is None else keys[:-1], dtype=torch.float32)
    return x.new_empty(keys), x.new_empty(keys), x.new_empty(values), beta


@custom_op("head_features", _allocate)
def head_features(
    x: Tensor, logits: Tensor | None, num_heads: int, key_dim: int, feature_map: str, l1: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k [..., H, K] and v [..., H, V] of x [..., 2 H K + H V], in x's type; beta [..., H], empty without logits."""
    q, k, v, beta = _allocate(x, logits, num_heads, key_dim)
    _launch(unit_features, x, logits, num_heads, key_dim, feature_map, l1, q, k, v, beta)
    return q, k, v, beta


@head_features.gradient("x logits")
def head_features_backward(
    x: Tensor, logits: Tensor | None, dq: Tensor, dk: Tensor, dv: Tensor, d_beta: Tensor, num_heads: int, key_dim: int,
    feature_map: str, l1: bool, wanted: list[bool],
) -> Gradients:  # fmt: skip
    """The gradients of x and of the logits."""
    logits = logits if wanted[1] else None
    dx = x.new_empty(x.shape) if wanted[0] else None
    d_logits = None if logits is None else logits.new_empty(logits.shape)
    _launch(
        differentiate_features, x, logits, num_heads, key_dim, feature_map, l1,
        dq.contiguous(), dk.contiguous(), dv.contiguous(), d_beta.contiguous(), dx, d_logits,
    )  # fmt: skip
    return dx, d_logits


def head_features_triton(
    x: Tensor, *, logits: Tensor | None, num_heads: int, key_dim: int, feature_map: str, key_norm: str
) -> tuple[Tensor, ...]:
    """`head_features` as one kernel, whose gradient is one kernel, too."""
    q, k, v, beta = head_features(x, logits, num_heads, key_dim, feature_map, key_norm == "l1")
    return (q, k, v) if logits is None else (q, k, v, beta)
