"""Gated linear attention in chunks of matrix products.

With the tokens of one chunk as rows and e^b the decay from the start of the chunk,

    O = (e^b ⊙ Q) S + P V         P_ij = Σ_c q_ic k_jc e^{b_ic - b_jc} for i >= j
    S <- e^{b_C} ⊙ S + (e^{b_C - b} ⊙ K)ᵀ V

Only the last line runs over chunks one after the other, elementwise; everything else is batched over all of them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longseq.kernels.chunks import (
    decay_matrix,
    decay_matrix_backward,
    decayed_products,
    decayed_products_backward,
    earlier_sum,
    export_plan,
    fit_chunk_size,
    join_chunks,
    join_like,
    later_sum,
    reverse_cumsum,
    scan,
    split_chunks,
    times,
)
from longseq.kernels.dispatch import is_exporting
from longseq.kernels.precision import without_autocast
from longseq.kernels.recurrence import Sequences, run_padded, run_recurrence


def linear_attention_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor | None]:
    """`linear_attention` in chunks; saves its inputs and the states between chunks for the backward."""

    def core(sequences: Sequences, state: Tensor) -> tuple[Tensor, Tensor]:
        arguments: tuple[Any, ...] = (*sequences, state, scale, chunk_size)
        if torch.jit.is_tracing():
            return _scripted(*arguments)
        if is_exporting():
            return _exported(*arguments)
        return _LinearAttention.apply(*arguments)

    return run_recurrence(
        core,
        (q, k, v, g),
        initial_state,
        (*k.shape[2:], v.shape[3]),
        output_dtype=v.dtype,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        unpack=run_padded,
    )


def _exported(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor, scale: float, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """The form for torch.export: the loop over chunks is unrolled while short, else (or if T is symbolic) a Scan."""
    batch, tokens, _, _ = q.shape
    chunk_size, chunks, unroll = export_plan(chunk_size, tokens)
    query, products, value, update, whole = _parts(q, k, v, g, scale, state.dtype, chunks, chunk_size)
    if unroll or whole is None:
        states, final = _state_pass(state.flatten(0, 1), update, whole)
    else:
        final, states = scan(_chunk_step, state.flatten(0, 1), [update, whole])
    return join_chunks(query @ states + products @ value, batch, tokens), final.reshape(state.shape)


@torch.jit.script_if_tracing
def _scripted(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor, scale: float, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """The form for torch.jit.trace: sizes and the loop stay dynamic in the traced graph."""
    output, final, _ = _forward(q, k, v, g, state, scale, chunk_size)
    return output, final


class _LinearAttention(torch.autograd.Function):
    """The eager form. Saves its inputs and the states before each chunk; recomputes the rest."""

    @staticmethod
    def forward(ctx, q, k, v, g, state, scale, chunk_size):
        output, final, states = _forward(q, k, v, g, state, scale, chunk_size)
        ctx.save_for_backward(q, k, v, g, states)
        ctx.scale, ctx.chunk_size = scale, fit_chunk_size(chunk_size, q.shape[1])
        return output, final

    @staticmethod
    @once_differentiable
    def backward(ctx, d_output, d_final):
        q, k, v, g, states = ctx.saved_tensors
        with without_autocast(states):
            return (*_backward(q, k, v, g, states, ctx.scale, ctx.chunk_size, d_output, d_final), None, None)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor, scale: float, chunk_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [B, T, H, V], final state [B, H, K, V]; for the backward the states before each chunk [n, M, K, V]."""
    batch, tokens, _, _ = q.shape
    chunk_size = fit_chunk_size(chunk_size, tokens)
    chunks = (tokens + chunk_size - 1) // chunk_size
    query, products, value, update, whole = _parts(q, k, v, g, scale, state.dtype, chunks, chunk_size)
    states, final = _state_pass(state.flatten(0, 1), update, whole)
    return join_chunks(query @ states + products @ value, batch, tokens), final.reshape(state.shape), states


def _split(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float, dtype: torch.dtype, chunks: int, chunk_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Chunked query times scale, key, value [n, M, C, K or V] and gate [n, M, C, 1 or K]."""
    if g is not None and g.dim() == 3:
        g = g.unsqueeze(-1)
    query = split_chunks(q, dtype, chunks, chunk_size)
    return (
        query if scale == 1.0 else query * scale,
        split_chunks(k, dtype, chunks, chunk_size),
        split_chunks(v, dtype, chunks, chunk_size),
        None if g is None else split_chunks(g, dtype, chunks, chunk_size),
    )


def _parts(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float, dtype: torch.dtype, chunks: int, chunk_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """All that does not depend on the state: e^b Q, P, V, (e^{b_C - b} K)ᵀ V and e^{b_C} [n, M, 1 or K, 1]."""
    query, key, value, gate = _split(q, k, v, g, scale, dtype, chunks, chunk_size)
    since, until, whole = _decays(gate)
    if gate is not None and gate.shape[-1] > 1:
        rows = decayed_products(query.flatten(0, 1), key.flatten(0, 1), gate.flatten(0, 1))
        products = rows.reshape(query.shape[0], query.shape[1], chunk_size, chunk_size)
    else:
        products = (query @ key.transpose(-1, -2)).tril()
        if gate is not None:
            products = products * decay_matrix(gate)
    return times(query, since), products, value, times(key, until).transpose(-1, -2) @ value, whole


def _decays(g: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """For g [..., C, 1 or K]: decays since the chunk's start and until its end, and over all of it [..., 1 or K, 1]."""
    if g is None:
        return None, None, None
    return g.cumsum(-2).exp(), later_sum(g).exp(), g.sum(-2).unsqueeze(-1).exp()


def _state_pass(state: Tensor, update: Tensor, whole: Tensor | None) -> tuple[Tensor, Tensor]:
    """The states before each chunk [n, M, K, V] and the final state [M, K, V]."""
    if whole is None:
        sums = torch.cat((state.unsqueeze(0), update)).cumsum(0)
        return sums[:-1], sums[-1].clone()  # a view would keep all sums alive with the state
    states: list[Tensor] = []
    for i in range(update.shape[0]):
        states.append(state)
        state = torch.addcmul(update[i], state, whole[i])
    return torch.stack(states), state


def _chunk_step(state: Tensor, update: Tensor, whole: Tensor) -> list[Tensor]:
    """One turn of `_state_pass` as the scan operator wants it: its outputs share no memory."""
    return [torch.addcmul(update, state, whole), state.clone()]


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    states: Tensor,
    scale: float,
    chunk_size: int,
    d_output: Tensor,
    d_final: Tensor,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, g and the initial state."""
    dtype = states.dtype
    chunks = states.shape[0]
    *split, gate = _split(q, k, v, g, scale, dtype, chunks, chunk_size)
    query, key, value = (x.flatten(0, 1) for x in split)
    gate = None if gate is None else gate.flatten(0, 1)
    d_output, states = split_chunks(d_output, dtype, chunks, chunk_size).flatten(0, 1), states.flatten(0, 1)
    since, until, whole = _decays(gate)
    query_since, key_until = times(query, since), times(key, until)
    d_products = (d_output @ value.mT).tril_()

    d_state, d_after = _state_pass_backward(d_final.flatten(0, 1), query_since.mT @ d_output, whole)
    d_query, d_key, d_value = d_output @ states.mT, value @ d_after.mT, key_until @ d_after
    d_gate = None
    if gate is not None and whole is not None:
        d_gate = _sum_to(reverse_cumsum(d_query * query_since).add_(earlier_sum(d_key * key_until)), gate)
        d_gate += _sum_to((states * d_after).sum(-1).unsqueeze(-2), gate) * whole.mT
    d_query, d_key = times(d_query, since), times(d_key, until)
    products, into_query, into_key, into_gate = _products_backward(query, key, gate, d_products)
    d_query += into_query
    d_key += into_key
    d_gate = None if d_gate is None or into_gate is None else d_gate + into_gate
    d_value.baddbmm_(products.mT, d_output)

    return (
        join_like(d_query.mul_(scale), q),
        join_like(d_key, k),
        join_like(d_value, v),
        None if g is None or d_gate is None else join_like(d_gate, g),
        d_state.unflatten(0, (q.shape[0], -1)),
    )


def _products_backward(
    query: Tensor, key: Tensor, gate: Tensor | None, d_products: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """P, recomputed, and the gradients of query, key and gate that pass through it."""
    if gate is not None and gate.shape[-1] > 1:
        return decayed_products(query, key, gate), *decayed_products_backward(query, key, gate, d_products)
    products, d_gate = (query @ key.mT).tril_(), None
    if gate is not None:
        decay = decay_matrix(gate)
        products *= decay
        d_gate = decay_matrix_backward(d_products * products)
        d_products = d_products * decay
    return products, d_products @ key, d_products.mT @ query, d_gate


def _sum_to(x: Tensor, gate: Tensor) -> Tensor:
    """Sum over the key channels that share a gate."""
    return x.sum(-1, keepdim=True) if gate.shape[-1] == 1 else x


def _state_pass_backward(d_state: Tensor, d_before: Tensor, whole: Tensor | None) -> tuple[Tensor, Tensor]:
    """The loop backward, chunks in rows [n * M, ...]: gradients of the first state and of those after each chunk."""
    rows = d_state.shape[0]
    d_after = torch.empty_like(d_before)
    for start in reversed(range(0, d_before.shape[0], rows)):
        chunk = slice(start, start + rows)
        d_after[chunk] = d_state
        d_state = d_before[chunk] + (d_state if whole is None else d_state * whole[chunk])
    return d_state, d_after
