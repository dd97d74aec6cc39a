"""One token of the delta rule in one Triton kernel: the state is read once and written once.

A program holds all rows of some columns of one head's state, which no other program needs.
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


@triton.jit
def write_and_read(h, read_key, write, value, query):
    """The state [K, columns] after `value` has replaced the value that `read_key` reads, and the output for `query`."""
    read = tl.sum(h * read_key[:, None], 0)
    h += write[:, None] * (value - read)[None, :]
    return h, tl.sum(h * query[:, None], 0)


@triton.jit(do_not_specialize=UNSPECIALISED)
def _step(
    q, k, v, beta, write_key, value_key, g, state, output, after, scale, H,
    q_row, q_head, k_row, k_head, v_row, v_head, beta_row, beta_head, write_key_row, write_key_head,
    value_key_row, value_key_head, g_row, g_head,
    K: tl.constexpr, V: tl.constexpr, HAS_BETA: tl.constexpr, OWN_WRITE_KEY: tl.constexpr, ADDED: tl.constexpr,
    GATE: tl.constexpr, READ_BEFORE_DECAY: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    n, row, head, block = place(H, V, BLOCK_V)
    column = block * BLOCK_V
    h = load_block(state + n * K * V, 0, column, K, V, BLOCK_K, BLOCK_V)
    query = load_vector(q + row * q_row + head * q_head, 0, K, BLOCK_K)
    key = load_vector(k + row * k_row + head * k_head, 0, K, BLOCK_K)
    value = load_vector(v + row * v_row + head * v_head, column, V, BLOCK_V)
    write = key
    if OWN_WRITE_KEY:
        write = load_vector(write_key + row * write_key_row + head * write_key_head, 0, K, BLOCK_K)
    if HAS_BETA:
        write *= tl.load(beta + row * beta_row + head * beta_head).to(tl.float32)
    read = tl.sum(h * key[:, None], 0)
    if GATE != "":
        if GATE == "channel":
            h *= tl.exp(load_vector(g + row * g_row + head * g_head, 0, K, BLOCK_K))[:, None]
        else:
            h *= tl.exp(tl.load(g + row * g_row + head * g_head).to(tl.float32))
        if not READ_BEFORE_DECAY:
            read = tl.sum(h * key[:, None], 0)
    if ADDED:
        a = load_vector(value_key + row * value_key_row + head * value_key_head, 0, K, BLOCK_K)
        h += a[:, None] * value[None, :] - write[:, None] * read[None, :]
    else:
        h += write[:, None] * (value - read)[None, :]
    o = tl.sum(h * query[:, None], 0)
    store_block(after + n * K * V, 0, column, h, K, V, BLOCK_K, BLOCK_V)
    store_vector(output + n * V, column, scale * o, V, BLOCK_V)


@custom_op("delta_rule_step", results_like(2, 3))
def delta_rule_step_triton(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, beta: Tensor | None, write_key: Tensor | None,
    value_key: Tensor | None, g: Tensor | None, read_before_decay: bool, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns o [B, H, V] in v's dtype and the next state [B, H, K, V] in float32."""
    q, k, v, state = channels_adjacent(q), channels_adjacent(k), channels_adjacent(v), state.contiguous()
    write_key, value_key = channels_adjacent(write_key), channels_adjacent(value_key)
    gate = "" if g is None else "head" if g.dim() == 2 else "channel"
    g = channels_adjacent(g) if gate == "channel" else g
    batch, heads, key_dim, value_dim = state.shape
    output, after = v.new_empty(v.shape), torch.empty_like(state)
    tile = column_tile(key_dim, value_dim)
    find_launch(
        _step, q.device, batch * heads * cdiv(value_dim, tile.columns),
        (float(scale), heads, *(part for x in (q, k, v, beta, write_key, value_key, g) for part in strides(x))),
        K=key_dim, V=value_dim, HAS_BETA=beta is not None, OWN_WRITE_KEY=write_key is not None,
        ADDED=value_key is not None, GATE=gate, READ_BEFORE_DECAY=read_before_decay, BLOCK_K=tile.rows,
        BLOCK_V=tile.columns, **launch_options(tile.warps),
    )(q, k, v, beta, write_key, value_key, g, state, output, after)  # fmt: skip
    return output, after
