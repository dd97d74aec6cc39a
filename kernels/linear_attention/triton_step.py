"""One token of linear attention in one Triton kernel, which reads and writes the state once.

A program holds all rows of some columns of one head's state; no other program needs these columns.
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


@triton.jit(do_not_specialize=UNSPECIALISED)
def _step(
    q, k, v, g, g_value, state, output, after, scale, H,
    q_row, q_head, k_row, k_head, v_row, v_head, g_row, g_head, g_value_row, g_value_head,
    K: tl.constexpr, V: tl.constexpr, SHARE: tl.constexpr, HEAD_GATED: tl.constexpr, KEY_GATED: tl.constexpr,
    VALUE_GATED: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    n, row, head, block = place(H, V, BLOCK_V)
    column = block * BLOCK_V
    memory = load_block(state + n * K * V, 0, column, K, V, BLOCK_K, BLOCK_V)
    query = load_vector(q + row * q_row + head // SHARE * q_head, 0, K, BLOCK_K)
    key = load_vector(k + row * k_row + head // SHARE * k_head, 0, K, BLOCK_K)
    value = load_vector(v + row * v_row + head * v_head, column, V, BLOCK_V)
    if VALUE_GATED:
        gate = load_vector(g_value + row * g_value_row + head * g_value_head, column, V, BLOCK_V)
        memory *= tl.exp(gate)[None, :]
    if HEAD_GATED:
        memory *= tl.exp(tl.load(g + row * g_row + head * g_head).to(tl.float32))
    if KEY_GATED:
        memory *= tl.exp(load_vector(g + row * g_row + head * g_head, 0, K, BLOCK_K))[:, None]

    memory += key[:, None] * value[None, :]
    o = tl.sum(memory * query[:, None], 0)
    store_block(after + n * K * V, 0, column, memory, K, V, BLOCK_K, BLOCK_V)
    store_vector(output + n * V, column, scale * o, V, BLOCK_V)


@custom_op("linear_attention_step", results_like(2, 3))
def linear_attention_step_triton(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, g: Tensor | None, g_value: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns o [B, H, V] in v's dtype and the next state [B, H, K, V] in float32."""
    q, k, v, state = channels_adjacent(q), channels_adjacent(k), channels_adjacent(v), state.contiguous()
    key_gated = g is not None and g.dim() == 3
    g, g_value = channels_adjacent(g) if key_gated else g, channels_adjacent(g_value)
    batch, heads, key_dim, value_dim = state.shape
    output, after = v.new_empty(v.shape), torch.empty_like(state)
    tile = column_tile(key_dim, value_dim)
    find_launch(
        _step, q.device, batch * heads * cdiv(value_dim, tile.columns),
        (float(scale), heads, *strides(q), *strides(k), *strides(v), *strides(g), *strides(g_value)),
        K=key_dim, V=value_dim, SHARE=heads // q.shape[1], HEAD_GATED=g is not None and not key_gated,
        KEY_GATED=key_gated, VALUE_GATED=g_value is not None, BLOCK_K=tile.rows, BLOCK_V=tile.columns,
        **launch_options(tile.warps),
    )(q, k, v, g, g_value, state, output, after)  # fmt: skip
    return output, after
