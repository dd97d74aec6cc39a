"""The normaliser of variational linear attention in Triton: o_t / max(n_t, eps), n_t = z_tᵀ q_t, z_t = z_{t-1} + k_t.

All kernels run over chunks in parallel. One kernel stores the sum of the keys of each chunk; the next one adds the sums
of the chunks before its own, always in the same order, which reads little compared with the chunk itself. With G the
gradient of the quotient and Z the gradient of the last z,

    do_t = G_t / max(n_t, eps)        dn_t = -(o_tᵀ G_t) / n_t², 0 where n_t < eps
    dq_t = dn_t z_t                   dk_t = dz_t = Σ_{s>=t} dn_s q_s + Z
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longseq.kernels.triton_launch import Prepared, block_width, count_slots, find_launch, launch_options, strides
from longseq.kernels.triton_tiles import (
    SIZES_AND_STRIDES,
    direction,
    load_numbers,
    load_tokens,
    sequence,
    store_tokens,
    token_after,
)
from longseq.kernels.variational_linear_attention.triton_unit import differentiate_unit

CHUNK = 64  # tokens
STEP = tl.constexpr(64)  # chunks whose sums are added at a time


@triton.jit
def _place(slot, T, cu_seqlens, sequence_of, REVERSE: tl.constexpr, CHUNK: tl.constexpr):
    """The sequence of a chunk, its batch row, first token and remaining tokens, and the first slot of the sequence."""
    n = slot // tl.cdiv(T, CHUNK)
    if cu_seqlens is not None:
        n = tl.load(sequence_of + slot).to(tl.int64)
    row, start, end, first = sequence(n, T, cu_seqlens, cu_seqlens is not None, CHUNK)
    done = (slot - first) * CHUNK
    return n, row, token_after(done, start, end, REVERSE), end - start - done, first


@triton.jit
def _add_up(sums, begin, end, H, K: tl.constexpr, BLOCK: tl.constexpr):
    """The total of one head's sums over the slots from `begin` to `end` - 1."""
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in range(begin, end, STEP):
        part = load_tokens(sums + slot * H * K, H * K, end - slot, 0, K, STEP, BLOCK)
        total += tl.sum(part, 0)
    return total


@triton.jit(do_not_specialize=SIZES_AND_STRIDES)
def sum_keys(
    k, cu_seqlens, sequence_of, sums, T, H, k_row, k_token, k_head,
    K: tl.constexpr, REVERSE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of the keys of one chunk of one head."""
    head = (tl.program_id(0) % H).to(tl.int64)
    slot = (tl.program_id(0) // H).to(tl.int64)
    _, row, start, live, _ = _place(slot, T, cu_seqlens, sequence_of, REVERSE, CHUNK)
    NEXT = direction(REVERSE)
    key = load_tokens(k + row * k_row + start * k_token + head * k_head, k_token * NEXT, live, 0, K, CHUNK, BLOCK)
    e = tl.arange(0, BLOCK)
    tl.store(sums + (slot * H + head) * K + e, tl.sum(key.to(tl.float32), 0), mask=e < K)


@triton.jit(do_not_specialize=SIZES_AND_STRIDES)
def divide(
    values, q, k, initial, cu_seqlens, sequence_of, sums, output, products, final,
    eps, T, H, o_row, o_token, o_head, q_row, q_token, q_head, k_row, k_token, k_head,
    K: tl.constexpr, V: tl.constexpr, REVERSE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The quotients and n for one chunk of one head; the last chunk of a sequence also stores the last z."""
    head = (tl.program_id(0) % H).to(tl.int64)
    slot = (tl.program_id(0) // H).to(tl.int64)
    n, row, start, live, first = _place(slot, T, cu_seqlens, sequence_of, REVERSE, CHUNK)
    NEXT = direction(REVERSE)
    e = tl.arange(0, BLOCK)
    before = _add_up(sums + head * K, first, slot, H, K, BLOCK)
    if initial is not None:
        before += tl.load(initial + (n * H + head) * K + e, mask=e < K, other=0.0).to(tl.float32)
    key = load_tokens(k + row * k_row + start * k_token + head * k_head, k_token * NEXT, live, 0, K, CHUNK, BLOCK)
    key = key.to(tl.float32)
    if (live <= CHUNK) & ((live > 0) | (slot == first)):
        tl.store(final + (n * H + head) * K + e, before + tl.sum(key, 0), mask=e < K)
    query = load_tokens(q + row * q_row + start * q_token + head * q_head, q_token * NEXT, live, 0, K, CHUNK, BLOCK)
    weight = tl.sum((before[None, :] + tl.cumsum(key, 0)) * query.to(tl.float32), 1)
    i = tl.arange(0, CHUNK)
    tl.store(products + (row * T + start + i * NEXT) * H + head, weight, mask=i < live)
    value = load_tokens(
        values + row * o_row + start * o_token + head * o_head, o_token * NEXT, live, 0, V, CHUNK, BLOCK_V
    )
    value /= tl.where(weight < eps, eps, weight)[:, None]
    store_tokens(output + ((row * T + start) * H + head) * V, H * V * NEXT, live, 0, value, V, CHUNK, BLOCK_V)


@triton.jit(do_not_specialize=SIZES_AND_STRIDES)
def differentiate_values(
    values, q, cu_seqlens, sequence_of, products, d_output, d_values, d_products, sums,
    eps, T, H, o_row, o_token, o_head, q_row, q_token, q_head, do_row, do_token, do_head,
    K: tl.constexpr, V: tl.constexpr, REVERSE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The gradients of o and n, and the sum of dn q, for one chunk of one head."""
    head = (tl.program_id(0) % H).to(tl.int64)
    slot = (tl.program_id(0) // H).to(tl.int64)
    _, row, start, live, _ = _place(slot, T, cu_seqlens, sequence_of, REVERSE, CHUNK)
    NEXT = direction(REVERSE)
    token = (row * T + start) * H + head
    value = load_tokens(
        values + row * o_row + start * o_token + head * o_head, o_token * NEXT, live, 0, V, CHUNK, BLOCK_V
    )
    d_output += row * do_row + start * do_token + head * do_head
    gradient = load_tokens(d_output, do_token * NEXT, live, 0, V, CHUNK, BLOCK_V).to(tl.float32)
    weight = load_numbers(products + token, H * NEXT, live, CHUNK)
    small = weight < eps
    weight = tl.where(small, eps, weight)
    # The quotient comes first: n² could overflow or underflow where the quotient does not.
    d_weight = tl.where(small, 0.0, -tl.sum(value / weight[:, None] * gradient, 1) / weight)
    i = tl.arange(0, CHUNK)
    tl.store(d_products + token + i * (H * NEXT), d_weight, mask=i < live)
    gradient /= weight[:, None]
    store_tokens(d_values + token * V, H * V * NEXT, live, 0, gradient, V, CHUNK, BLOCK_V)
    query = load_tokens(q + row * q_row + start * q_token + head * q_head, q_token * NEXT, live, 0, K, CHUNK, BLOCK)
    e = tl.arange(0, BLOCK)
    total = tl.sum(query.to(tl.float32) * d_weight[:, None], 0)
    tl.store(sums + (slot * H + head) * K + e, total, mask=e < K)


@triton.jit(do_not_specialize=SIZES_AND_STRIDES)
def differentiate_keys(
    q, k, initial, cu_seqlens, sequence_of, sums, d_products, d_sums, d_final, d_query, d_read, d_solved,
    d_q, d_k, d_initial, T, H, q_row, q_token, q_head, k_row, k_token, k_head,
    K: tl.constexpr, REVERSE: tl.constexpr, UNIT: tl.constexpr, OF_KEY: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of q and k for one chunk of one head; a sequence's first chunk also stores that of the first z.

    The other gradients of q and k are added. If UNIT, `d_read` is the gradient of k / ‖k‖, and so is `d_solved` (from
    α) unless OF_KEY, which makes it a gradient of k.
    """
    head = (tl.program_id(0) % H).to(tl.int64)
    slot = (tl.program_id(0) // H).to(tl.int64)
    n, row, start, live, first = _place(slot, T, cu_seqlens, sequence_of, REVERSE, CHUNK)
    NEXT = direction(REVERSE)
    token = (row * T + start) * H + head
    state = (n * H + head) * K
    e = tl.arange(0, BLOCK)
    before = _add_up(sums + head * K, first, slot, H, K, BLOCK)
    if initial is not None:
        before += tl.load(initial + state + e, mask=e < K, other=0.0).to(tl.float32)
    weight = load_numbers(d_products + token, H * NEXT, live, CHUNK)
    key = load_tokens(k + row * k_row + start * k_token + head * k_head, k_token * NEXT, live, 0, K, CHUNK, BLOCK)
    key = key.to(tl.float32)
    dq = load_tokens(d_query + token * K, H * K * NEXT, live, 0, K, CHUNK, BLOCK)
    dq += (before[None, :] + tl.cumsum(key, 0)) * weight[:, None]
    store_tokens(d_q + token * K, H * K * NEXT, live, 0, dq, K, CHUNK, BLOCK)

    dk = load_tokens(d_read + token * K, H * K * NEXT, live, 0, K, CHUNK, BLOCK)
    by_alpha = load_tokens(d_solved + token * K, H * K * NEXT, live, 0, K, CHUNK, BLOCK)
    if not OF_KEY:
        dk += by_alpha
    if UNIT:
        dk = differentiate_unit(key, dk)
    if OF_KEY:
        dk += by_alpha
    after = _add_up(d_sums + head * K, slot + 1, slot + tl.cdiv(live, CHUNK), H, K, BLOCK)
    if d_final is not None:
        after += tl.load(d_final + state + e, mask=e < K, other=0.0).to(tl.float32)
    query = load_tokens(q + row * q_row + start * q_token + head * q_head, q_token * NEXT, live, 0, K, CHUNK, BLOCK)
    query = query.to(tl.float32) * weight[:, None]
    dk += after[None, :] + tl.cumsum(query, 0, reverse=True)
    store_tokens(d_k + token * K, H * K * NEXT, live, 0, dk, K, CHUNK, BLOCK)
    if slot == first:
        tl.store(d_initial + state + e, after + tl.sum(query, 0), mask=e < K)


def find_launch_of_chunks(
    kernel: Any, k: Tensor, sums: Tensor, reverse: int, *strided: Tensor, eps: tuple[float, ...] = (),
    value_dim: int = 0, **constants: bool,
) -> Prepared:  # fmt: skip
    """The launch of a kernel for the chunks of k, of which `sums` has a row for each; it takes the strides of others.

    Kernels that divide take `eps` and the width of the values, too.
    """
    numbers = (*eps, *k.shape[1:3], *[stride for x in strided for stride in strides(x)])
    widths = {"K": k.shape[3], "BLOCK": block_width(k.shape[3])}
    if value_dim:
        widths |= {"V": value_dim, "BLOCK_V": block_width(value_dim)}
    options = launch_options(4 if kernel is not differentiate_keys and max(k.shape[3], value_dim) <= 64 else 8)
    constants |= widths | {"REVERSE": reverse, "CHUNK": CHUNK} | options
    return find_launch(kernel, k.device, sums.shape[0] * k.shape[2], numbers, **constants)


def allocate_sums(k: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """An empty tensor for the sums of each chunk's keys, [slots, H, K] in float32."""
    slots = count_slots(k.shape[0], k.shape[1], CHUNK, cu_seqlens)
    return k.new_empty((slots, *k.shape[2:]), dtype=torch.float32)
