"""The delta rule in chunks of matrix products.

With the tokens of one chunk as rows and e^b the decay from the start of the chunk (⊙ D: decays between two tokens),

    L = tril(R Wᵀ ⊙ D, -1)      X = (I + L)^{-1}            R: read keys, W: write keys times beta
    U = X (V - e^b R S)         what is written: the error of each token given the writes before it
    O = e^b Q S + tril(Q Wᵀ ⊙ D) U
    S <- e^{b_C} S + (e^{b_C - b} W)ᵀ U

Only the last line runs over chunks one after the other; everything else is batched over all of them.
"""

from typing import Any

import torch
from torch import Tensor

from longseq.kernels.chunks import (
    decay_matrix,
    decay_matrix_backward,
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
    unit_lower_inverse,
)
from longseq.kernels.custom_op import refuse_transforms
from longseq.kernels.dispatch import is_exporting
from longseq.kernels.once_differentiable import once_differentiable
from longseq.kernels.precision import without_autocast
from longseq.kernels.reading import Reverse
from longseq.kernels.recurrence import Sequences, run_padded, run_recurrence


def delta_rule_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    write_key: Tensor | None,
    g: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    chunk_size: int,
    reverse: Reverse,
    recompute: bool,
) -> tuple[Tensor, Tensor | None]:
    """`delta_rule` in chunks; saves its inputs, the inverses X and the states between chunks for the backward.

    `recompute` is ignored.
    """

    def core(sequences: Sequences, state: Tensor) -> tuple[Tensor, Tensor]:
        arguments: tuple[Any, ...] = (*sequences, state, scale, chunk_size)
        if torch.jit.is_tracing():
            return _scripted(*arguments)
        if is_exporting():
            return _exported(*arguments)
        refuse_transforms()
        return _DeltaRule.apply(*arguments)

    return run_recurrence(
        core,
        (q, k, v, beta, write_key, g),
        initial_state,
        (*k.shape[2:], v.shape[3]),
        output_dtype=v.dtype,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        unpack=run_padded,
        reverse=reverse,
    )


def _exported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    write_key: Tensor | None,
    g: Tensor | None,
    state: Tensor,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """The form for torch.export: the loop over chunks is unrolled while short, else (or if T is symbolic) a Scan."""
    batch, tokens, heads, _ = q.shape
    chunk_size, chunks, unroll = export_plan(chunk_size, tokens)
    query, attention, _, offered, erased, write, whole = _parts(
        q, k, v, beta, write_key, g, scale, state.dtype, chunks, chunk_size
    )
    rows = state.flatten(0, 1)
    if unroll:
        states, written, final = _state_pass(rows, offered, erased, write, whole)
    elif whole is None:
        final, states, written = scan(_chunk_step, rows, [offered, erased, write])
    else:
        final, states, written = scan(_decayed_chunk_step, rows, [offered, erased, write, whole])
    output = query @ states + attention @ written
    return join_chunks(output, batch, heads, tokens), final.reshape(state.shape)


@torch.jit.script_if_tracing
def _scripted(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    write_key: Tensor | None,
    g: Tensor | None,
    state: Tensor,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """The form for torch.jit.trace: sizes and the loop stay dynamic in the traced graph."""
    output, final, _, _ = _forward(q, k, v, beta, write_key, g, state, scale, chunk_size)
    return output, final


class _DeltaRule(torch.autograd.Function):
    """The eager form. Saves its inputs, X and the states before each chunk; recomputes the rest."""

    @staticmethod
    def forward(ctx, q, k, v, beta, write_key, g, state, scale, chunk_size):
        output, final, inverse, states = _forward(q, k, v, beta, write_key, g, state, scale, chunk_size)
        ctx.save_for_backward(q, k, v, beta, write_key, g, inverse, states)
        ctx.scale = scale
        return output, final

    @staticmethod
    @once_differentiable
    def backward(ctx, d_output, d_final):
        q, k, v, beta, write_key, g, inverse, states = ctx.saved_tensors
        with without_autocast(states):
            return (*_backward(q, k, v, beta, write_key, g, inverse, states, ctx.scale, d_output, d_final), None, None)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    write_key: Tensor | None,
    g: Tensor | None,
    state: Tensor,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output [B, T, H, V], final state [B, H, K, V]; for the backward X [n, M, C, C] and the states [n, M, K, V]."""
    batch, tokens, heads, _ = q.shape
    chunk_size = fit_chunk_size(chunk_size, tokens)
    chunks = (tokens + chunk_size - 1) // chunk_size
    query, attention, inverse, offered, erased, write, whole = _parts(
        q, k, v, beta, write_key, g, scale, state.dtype, chunks, chunk_size
    )
    states, written, final = _state_pass(state.flatten(0, 1), offered, erased, write, whole)
    output = query @ states + attention @ written
    return join_chunks(output, batch, heads, tokens), final.reshape(state.shape), inverse, states


def _split(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    write_key: Tensor | None,
    g: Tensor | None,
    scale: float,
    dtype: torch.dtype,
    chunks: int,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Chunked query times scale, read key, value, write key before its strength, strength and gate, [n, M, C, ...]."""
    query, read = split_chunks(q, dtype, chunks, chunk_size), split_chunks(k, dtype, chunks, chunk_size)
    return (
        query if scale == 1.0 else query * scale,
        read,
        split_chunks(v, dtype, chunks, chunk_size),
        read if write_key is None else split_chunks(write_key, dtype, chunks, chunk_size),
        split_chunks(beta.unsqueeze(-1), dtype, chunks, chunk_size),
        None if g is None else split_chunks(g.unsqueeze(-1), dtype, chunks, chunk_size),
    )


def _decays(g: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """For g [n, M, C, 1]: decays between two tokens, since the chunk's start, until its end, and over all of it."""
    if g is None:
        return None, None, None, None
    return decay_matrix(g), g.cumsum(-2).exp(), later_sum(g).exp(), g.sum(-2, keepdim=True).exp()


def _parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    write_key: Tensor | None,
    g: Tensor | None,
    scale: float,
    dtype: torch.dtype,
    chunks: int,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The parts without the state: e^b Q, tril(Q Wᵀ ⊙ D), X, X V, X e^b R, e^{b_C - b} W and e^{b_C}."""
    query, read, value, write, strength, gate = _split(q, k, v, beta, write_key, g, scale, dtype, chunks, chunk_size)
    between, since, until, whole = _decays(gate)
    write = write * strength
    transposed = write.transpose(-1, -2)
    lower = times(read @ transposed, between).tril(-1)
    attention = times(query @ transposed, between).tril()
    inverse = unit_lower_inverse(lower.flatten(0, 1)).reshape(lower.shape)
    erased = inverse @ times(read, since)
    return times(query, since), attention, inverse, inverse @ value, erased, times(write, until), whole


def _state_pass(
    state: Tensor, offered: Tensor, erased: Tensor, write: Tensor, whole: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The loop over chunks: states before each chunk [n, M, K, V], U [n, M, C, V], final state [M, K, V]."""
    states: list[Tensor] = []
    written: list[Tensor] = []
    for i in range(offered.shape[0]):
        states.append(state)
        written.append(torch.baddbmm(offered[i], erased[i], state, alpha=-1.0))
        if whole is not None:
            state = state * whole[i]
        state = torch.baddbmm(state, write[i].transpose(-1, -2), written[i])
    return torch.stack(states), torch.stack(written), state


def _chunk_step(state: Tensor, offered: Tensor, erased: Tensor, write: Tensor) -> list[Tensor]:
    """One step of `_state_pass` in the form of the scan operator: its outputs share no memory."""
    written = torch.baddbmm(offered, erased, state, alpha=-1.0)
    return [torch.baddbmm(state, write.transpose(-1, -2), written), state.clone(), written]


def _decayed_chunk_step(state: Tensor, offered: Tensor, erased: Tensor, write: Tensor, whole: Tensor) -> list[Tensor]:
    written = torch.baddbmm(offered, erased, state, alpha=-1.0)
    return [torch.baddbmm(state * whole, write.transpose(-1, -2), written), state.clone(), written]


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    write_key: Tensor | None,
    g: Tensor | None,
    inverse: Tensor,
    states: Tensor,
    scale: float,
    d_output: Tensor,
    d_final: Tensor,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, beta, write_key, g and the initial state."""
    chunks, _, chunk_size, _ = inverse.shape
    dtype = states.dtype
    *split, gate = _split(q, k, v, beta, write_key, g, scale, dtype, chunks, chunk_size)
    query, read, value, key, strength = (x.flatten(0, 1) for x in split)
    gate = None if gate is None else gate.flatten(0, 1)
    d_output = split_chunks(d_output, dtype, chunks, chunk_size).flatten(0, 1)
    inverse, states = inverse.flatten(0, 1), states.flatten(0, 1)
    between, since, until, whole = _decays(gate)
    write = key * strength
    query_since, read_since, write_until = times(query, since), times(read, since), times(write, until)
    erased = inverse @ read_since
    written = inverse @ torch.baddbmm(value, read_since, states, alpha=-1)
    attention = times(query @ write.mT, between).tril_()

    d_written = attention.mT @ d_output
    # gradient of the state before each chunk, without the part through the state after the chunk
    d_before = torch.baddbmm(query_since.mT @ d_output, erased.mT, d_written, alpha=-1)
    d_state, d_after = _state_pass_backward(d_final.flatten(0, 1), d_before, erased, write_until, whole)
    d_written.baddbmm_(write_until, d_after)
    d_value = inverse.mT @ d_written
    d_attention, d_lower = (d_output @ written.mT).tril_(), (d_value @ written.mT).tril_(-1).neg_()
    d_query, d_read, d_write = d_output @ states.mT, (d_value @ states.mT).neg_(), written @ d_after.mT

    d_gate = None
    if gate is not None and whole is not None:
        lower = times(read @ write.mT, between).tril_(-1)
        d_gate = decay_matrix_backward(d_attention * attention + d_lower * lower)
        d_gate += reverse_cumsum((d_query * query_since + d_read * read_since).sum(-1, keepdim=True))
        d_gate += earlier_sum((d_write * write_until).sum(-1, keepdim=True))
        d_gate += (states * d_after).sum((-2, -1), keepdim=True) * whole
    d_query, d_read, d_write = times(d_query, since), times(d_read, since), times(d_write, until)
    d_attention, d_lower = times(d_attention, between), times(d_lower, between)
    d_query.baddbmm_(d_attention, write)
    d_read.baddbmm_(d_lower, write)
    d_write.baddbmm_(d_attention.mT, query).baddbmm_(d_lower.mT, read)
    d_strength = (d_write * key).sum(-1, keepdim=True)
    d_key = d_write * strength
    if write_key is None:
        d_read += d_key

    return (
        join_like(d_query.mul_(scale), q),
        join_like(d_read, k),
        join_like(d_value, v),
        join_like(d_strength, beta),
        None if write_key is None else join_like(d_key, write_key),
        None if g is None or d_gate is None else join_like(d_gate, g),
        d_state.unflatten(0, (q.shape[0], -1)),
    )


def _state_pass_backward(
    d_state: Tensor, d_before: Tensor, erased: Tensor, write: Tensor, whole: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The loop backward, chunks in rows [n * M, ...]: gradients of the first state and of those after each chunk."""
    rows = d_state.shape[0]
    d_after = torch.empty_like(d_before)
    for start in reversed(range(0, d_before.shape[0], rows)):
        chunk = slice(start, start + rows)
        d_after[chunk] = d_state
        through = torch.baddbmm(d_before[chunk], erased[chunk].mT, write[chunk] @ d_state, alpha=-1)
        d_state = through.add_(d_state if whole is None else d_state * whole[chunk])
    return d_state, d_after
