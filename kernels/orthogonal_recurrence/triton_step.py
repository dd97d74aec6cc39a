"""One token of the exact orthogonal recurrence in one Triton kernel, which writes the state once.

A program holds one head's state. A larger state is taken in blocks of whole columns. For "decode" and "ttt", it is then
read twice, because their sum over all columns comes before the first update.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longseq.kernels.custom_op import custom_op, results_like
from longseq.kernels.devices import channels_adjacent
from longseq.kernels.orthogonal_recurrence.reference import has_unit_columns
from longseq.kernels.triton_launch import find_launch, launch_options
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

# Numbers of a state that a program holds at a time, 64 registers in each thread of eight warps. A quarter of them and
# four times as many took the same time on an H200.
STATE = 16384


@triton.jit
def _decode(
    state, k, M: tl.constexpr, D: tl.constexpr, UNIT: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr
):
    """What the key decodes, [BLOCK_D]: from columns divided by their length with UNIT, else from the columns as they
    are.
    """
    decoded = tl.zeros((BLOCK_D,), tl.float32)
    for first in range(0, M, BLOCK_M):
        slots = load_block(state, 0, first, D, M, BLOCK_D, BLOCK_M)
        key = load_vector(k, first, M, BLOCK_M)
        if UNIT:
            key *= reciprocal_root(tl.sum(slots * slots, 0))
        decoded += tl.sum(slots * key[None, :], 1)
    return decoded


@triton.jit
def _advance(slots, h, key, strength, decay, OBJECTIVE: tl.constexpr, UNIT: tl.constexpr):
    """The columns of the state after a token, before N."""
    if OBJECTIVE == "ttt":
        after = decay * slots + h[:, None] * (strength * key)[None, :]
    else:
        r = reciprocal_root(tl.sum(slots * slots, 0))
        directions = slots * r[None, :]
        along = tl.sum(directions * h[:, None], 0)
        if OBJECTIVE == "encode":
            key -= along
        after = (h[:, None] - directions * along[None, :]) * (strength * key)[None, :]
        if UNIT:
            after += decay * directions
        else:
            after = decay * slots + after * r[None, :]
    return after


@triton.jit(do_not_specialize=UNSPECIALISED)
def _step(
    q, k, v, gamma, g, state, output, after, scale, H,
    q_row, q_head, k_row, k_head, v_row, v_head, gamma_row, gamma_head, g_row, g_head,
    D: tl.constexpr, M: tl.constexpr, OBJECTIVE: tl.constexpr, UNIT: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    n, row, head, _ = place(H, 1, 1)
    state += n * D * M
    after += n * D * M
    q += row * q_row + head * q_head
    k += row * k_row + head * k_head
    h = load_vector(v + row * v_row + head * v_head, 0, D, BLOCK_D)
    strength = tl.load(gamma + row * gamma_row + head * gamma_head).to(tl.float32)
    decay = 1.0
    if g is not None:
        decay = tl.exp(tl.load(g + row * g_row + head * g_head).to(tl.float32))

    if OBJECTIVE == "decode":
        h -= _decode(state, k, M, D, True, BLOCK_D, BLOCK_M)
    if OBJECTIVE == "ttt":
        decoded = _decode(state, k, M, D, False, BLOCK_D, BLOCK_M)
        r = reciprocal_root(tl.sum(decoded * decoded, 0))
        direction = decoded * r
        h = (h - direction * tl.sum(direction * h, 0)) * r
    o = tl.zeros((BLOCK_D,), tl.float32)
    for first in range(0, M, BLOCK_M):
        slots = load_block(state, 0, first, D, M, BLOCK_D, BLOCK_M)
        slots = _advance(slots, h, load_vector(k, first, M, BLOCK_M), strength, decay, OBJECTIVE, UNIT)
        if UNIT:
            slots *= reciprocal_root(tl.sum(slots * slots, 0))[None, :]
        o += tl.sum(slots * load_vector(q, first, M, BLOCK_M)[None, :], 1)
        store_block(after, 0, first, slots, D, M, BLOCK_D, BLOCK_M)
    store_vector(output + n * D, 0, scale * o, D, BLOCK_D)


@custom_op("orthogonal_recurrence_step", results_like(2, 4))
def orthogonal_recurrence_step_triton(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, state: Tensor, objective: str, g: Tensor | None, normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns o [B, H, D] in v's type and the next state [B, H, D, M] in float32."""
    q, k, v, state = channels_adjacent(q), channels_adjacent(k), channels_adjacent(v), state.contiguous()
    batch, heads, width, slots = state.shape
    output, after = v.new_empty(v.shape), torch.empty_like(state)
    tile = column_tile(width, slots, STATE)
    find_launch(
        _step, q.device, batch * heads,
        (float(scale), heads, *strides(q), *strides(k), *strides(v), *strides(gamma), *strides(g)),
        D=width, M=slots, OBJECTIVE=objective, UNIT=has_unit_columns(objective, normalize), BLOCK_D=tile.rows,
        BLOCK_M=tile.columns, **launch_options(tile.warps),
    )(q, k, v, gamma, g, state, output, after)  # fmt: skip
    return output, after
