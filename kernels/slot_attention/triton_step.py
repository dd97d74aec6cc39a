"""One token of slot attention in one Triton kernel, which reads and writes the slots' keys and values once.

A program holds some value columns of all slots of one head. The weight of a slot depends on its whole key, so every
program of a head reads all keys; each writes its share of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longseq.kernels.custom_op import custom_op, results_like
from longseq.kernels.devices import channels_adjacent
from longseq.kernels.triton_launch import cdiv, find_launch, launch_options
from longseq.kernels.triton_steps import UNSPECIALISED, column_tile, load_vector, place, store_vector, strides
from longseq.kernels.triton_tiles import load_block, store_block

# Measured on an H200. VALUES and KEYS: the numbers of values that a program holds and of keys that it reads at a time.
# With more value columns in a program, fewer programs read the keys.
VALUES = 4096
KEYS = 8192


@triton.jit
def _rest_of_decay(g):
    """1 - e^g. Its series is used for small g, where the difference would be lost in rounding."""
    series = 1.0 + g * (1.0 / 6.0) * (1.0 + g * (1.0 / 7.0) * (1.0 + g * (1.0 / 8.0)))
    series = 1.0 + g * (1.0 / 3.0) * (1.0 + g * (1.0 / 4.0) * (1.0 + g * (1.0 / 5.0) * series))
    return tl.where(tl.abs(g) < 0.5, -g * (1.0 + g * 0.5 * series), 1.0 - tl.exp(g))


@triton.jit
def _weigh(x, live, ACTIVATION: tl.constexpr):
    """The weights of the slots from their scores. In a softmax, slots that are not `live` have weight 0."""
    if ACTIVATION == "softmax":
        x = tl.where(live, x, float("-inf"))
        x = tl.exp(x - tl.max(x, 0))
        x = x / tl.sum(x, 0)
    elif ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "relu":
        x = tl.where(x < 0.0, 0.0, x)
    elif ACTIVATION == "relu_squared":
        x = tl.where(x < 0.0, 0.0, x * x)
    else:
        tl.static_assert(ACTIVATION == "identity")
    return x


@triton.jit(do_not_specialize=UNSPECIALISED)
def _step(
    q, k, v, g, write, keys, values, output, keys_after, values_after, scale, H,
    q_row, q_head, k_row, k_head, v_row, v_head, g_row, g_head, write_row, write_head,
    M: tl.constexpr, K: tl.constexpr, V: tl.constexpr, HAS_WRITE: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    n, row, head, block = place(H, V, BLOCK_V)
    column = block * BLOCK_V
    held = load_block(values + n * M * V, 0, column, M, V, BLOCK_M, BLOCK_V)
    value = load_vector(v + row * v_row + head * v_head, column, V, BLOCK_V)
    gate = load_vector(g + row * g_row + head * g_head, 0, M, BLOCK_M)
    decay = tl.exp(gate)
    if HAS_WRITE:
        strength = load_vector(write + row * write_row + head * write_head, 0, M, BLOCK_M)
    else:
        strength = _rest_of_decay(gate)

    match = tl.zeros((BLOCK_M,), tl.float32)
    for first in range(0, K, BLOCK_K):
        query = load_vector(q + row * q_row + head * q_head, first, K, BLOCK_K)
        key = load_vector(k + row * k_row + head * k_head, first, K, BLOCK_K)
        part = load_block(keys + n * M * K, 0, first, M, K, BLOCK_M, BLOCK_K)
        part = decay[:, None] * part + strength[:, None] * key[None, :]
        match += tl.sum(part * query[None, :], 1)
        if block == first // BLOCK_K % ((V + BLOCK_V - 1) // BLOCK_V):
            store_block(keys_after + n * M * K, 0, first, part, M, K, BLOCK_M, BLOCK_K)
    weights = _weigh(scale * match, tl.arange(0, BLOCK_M) < M, ACTIVATION)

    held = decay[:, None] * held + strength[:, None] * value[None, :]
    store_block(values_after + n * M * V, 0, column, held, M, V, BLOCK_M, BLOCK_V)
    store_vector(output + n * V, column, tl.sum(held * weights[:, None], 0), V, BLOCK_V)


@custom_op("slot_attention_step", results_like(2, 4, 5))
def slot_attention_step_triton(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, keys: Tensor, values: Tensor, write: Tensor | None, scale: float,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns o [B, H, V] in v's dtype and the next state, [B, H, M, K] and [B, H, M, V] in float32."""
    q, k, v, g = channels_adjacent(q), channels_adjacent(k), channels_adjacent(v), channels_adjacent(g)
    write, keys, values = channels_adjacent(write), keys.contiguous(), values.contiguous()
    batch, heads, slots, key_dim = keys.shape
    value_dim = values.shape[3]
    output, keys_after, values_after = v.new_empty(v.shape), torch.empty_like(keys), torch.empty_like(values)
    tile, key_tile = column_tile(slots, value_dim, VALUES), column_tile(slots, key_dim, KEYS)
    find_launch(
        _step, q.device, batch * heads * cdiv(value_dim, tile.columns),
        (float(scale), heads, *strides(q), *strides(k), *strides(v), *strides(g), *strides(write)),
        M=slots, K=key_dim, V=value_dim, HAS_WRITE=write is not None, ACTIVATION=activation, BLOCK_M=tile.rows,
        BLOCK_K=key_tile.columns, BLOCK_V=tile.columns, **launch_options(max(tile.warps, key_tile.warps)),
    )(q, k, v, g, write, keys, values, output, keys_after, values_after)  # fmt: skip
    return output, keys_after, values_after
