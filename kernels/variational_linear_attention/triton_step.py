"""One token of variational linear attention in Triton: a step of the inverse, which gives α, and a step of the memory.

The steps are two launches, because every column of the memory needs the whole vector α = A k, while the columns do not
need each other.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longseq.kernels.custom_op import custom_op, results_like
from longseq.kernels.delta_rule.triton_step import write_and_read
from longseq.kernels.devices import channels_adjacent
from longseq.kernels.recursive_least_squares.triton_step import update_inverse
from longseq.kernels.triton_launch import cdiv, find_launch, launch_options
from longseq.kernels.triton_steps import (
    UNSPECIALISED,
    column_tile,
    load_vector,
    place,
    reciprocal_root,
    store_vector,
    strides,
)
from longseq.kernels.triton_tiles import load_block, store_block


@triton.jit(do_not_specialize=UNSPECIALISED)
def _step(
    q, k, v, alpha, memory, sums, output, memory_after, sums_after, eps, H,
    q_row, q_head, k_row, k_head, v_row, v_head,
    K: tl.constexpr, V: tl.constexpr, UNIT_KEY: tl.constexpr, UNIT_ALPHA: tl.constexpr, NORMALIZER: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    n, row, head, block = place(H, V, BLOCK_V)
    column = block * BLOCK_V
    state = load_block(memory + n * K * V, 0, column, K, V, BLOCK_K, BLOCK_V)
    query = load_vector(q + row * q_row + head * q_head, 0, K, BLOCK_K)
    key = load_vector(k + row * k_row + head * k_head, 0, K, BLOCK_K)
    value = load_vector(v + row * v_row + head * v_head, column, V, BLOCK_V)
    write = load_vector(alpha + n * K, 0, K, BLOCK_K)
    z = load_vector(sums + n * K, 0, K, BLOCK_K) + key
    if UNIT_KEY:
        key *= reciprocal_root(tl.sum(key * key, 0))
    if UNIT_ALPHA:
        write *= reciprocal_root(tl.sum(write * write, 0))

    state, o = write_and_read(state, key, write, value, query)
    if NORMALIZER:
        weight = tl.sum(z * query, 0)
        o = o / tl.where(weight < eps, eps, weight)
    store_block(memory_after + n * K * V, 0, column, state, K, V, BLOCK_K, BLOCK_V)
    store_vector(output + n * V, column, o, V, BLOCK_V)
    if block == 0:
        store_vector(sums_after + n * K, 0, z, K, BLOCK_K)


@custom_op("variational_linear_attention_step", results_like(2, 4, 5, 6, 7))
def variational_linear_attention_step_triton(
    q: Tensor, k: Tensor, v: Tensor, u: Tensor | None, S: Tensor, A: Tensor, z: Tensor, steps: Tensor,
    refresh_period: int | None, refresh: float, eps: float, normalize_key: bool, normalize_alpha: bool,
    normalizer: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns o [B, H, V] in v's dtype, the next S, A and z in float32, and the next steps."""
    q, k, v, S, z = channels_adjacent(q), channels_adjacent(k), channels_adjacent(v), S.contiguous(), z.contiguous()
    period = 0 if u is None else refresh_period or 0
    alpha, A_after, steps_after = update_inverse(
        k, u, A, steps, period, refresh, unit=normalize_key, dtype=torch.float32
    )
    batch, heads, key_dim, value_dim = S.shape
    output, S_after, z_after = v.new_empty(v.shape), torch.empty_like(S), torch.empty_like(z)
    tile = column_tile(key_dim, value_dim)
    find_launch(
        _step, q.device, batch * heads * cdiv(value_dim, tile.columns),
        (float(eps), heads, *strides(q), *strides(k), *strides(v)),
        K=key_dim, V=value_dim, UNIT_KEY=normalize_key, UNIT_ALPHA=normalize_alpha, NORMALIZER=normalizer,
        BLOCK_K=tile.rows, BLOCK_V=tile.columns, **launch_options(tile.warps),
    )(q, k, v, alpha, S, z, output, S_after, z_after)  # fmt: skip
    return output, S_after, A_after, z_after, steps_after
