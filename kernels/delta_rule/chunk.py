"""The delta rule in chunks of matrix products.

With the tokens of one chunk as rows and e^b the decay from the start of the chunk (⊙ D: decays between two tokens),

    L = tril(R Wᵀ ⊙ D, -1)      X = (I + L)^{-1}            R: read keys, W: write keys times beta
    U = X (V - e^b R S)         what is written: the error of each token given the writes before it
    O = e^b Q S + tril(Q Wᵀ ⊙ D) U
    S <- e^{b_C} S + (e^{b_C - b} W)ᵀ U

Only the last line runs over chunks one after the other; everything else is batched over all of them.
"""

from typing import Any, NamedTuple

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

    What no wanted gradient needs is neither saved nor computed. `recompute` is ignored.
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


class _Wanted(NamedTuple):
    """Whether each input needs its gradient."""

    q: bool
    k: bool
    v: bool
    beta: bool
    write_key: bool
    g: bool
    state: bool

    @property
    def through_updates(self) -> bool:
        """Any gradient that passes through the updates of the state: any but q's."""
        return any(self[1:])

    @property
    def of_updates(self) -> bool:
        """Any gradient that depends on the updates: any but those of v and the state, in which results are linear."""
        return self.q or self.k or self.beta or self.write_key or self.g


class _DeltaRule(torch.autograd.Function):
    """The eager form. Saves its inputs, X and the states before each chunk; recomputes the rest."""

    @staticmethod
    def forward(ctx, q, k, v, beta, write_key, g, state, scale, chunk_size):
        output, final, inverse, states = _forward(q, k, v, beta, write_key, g, state, scale, chunk_size)
        wanted = _Wanted(*ctx.needs_input_grad[:7])
        ctx.scale, ctx.dtypes = scale, (q.dtype, v.dtype)
        read = q if wanted.through_updates else None
        offered, starts = (v, states) if wanted.of_updates else (None, None)
        ctx.save_for_backward(read, k, offered, beta, write_key, g, inverse, starts)
        # The caller may change results in place, which autograd refuses for views.
        return output.detach(), final.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, d_output, d_final):
        wanted = _Wanted(*ctx.needs_input_grad[:7])
        with without_autocast(d_final):
            return (*_backward(wanted, ctx.saved_tensors, ctx.scale, ctx.dtypes, d_output, d_final), None, None)


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
    wanted: _Wanted,
    saved: tuple[Any, ...],
    scale: float,
    dtypes: tuple[torch.dtype, torch.dtype],
    d_output: Tensor,
    d_final: Tensor,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, beta, write_key, g and the initial state; None for those that are not wanted.

    What was not saved is None. `dtypes` are those of q and v.
    """
    q, k, v, beta, write_key, g, inverse, states = saved
    chunks, _, chunk_size, _ = inverse.shape

    def split(x: Tensor) -> Tensor:
        return split_chunks(x, d_final.dtype, chunks, chunk_size).flatten(0, 1)

    read, strength, d_out = split(k), split(beta.unsqueeze(-1)), split(d_output)
    key = read if write_key is None else split(write_key)
    between, since, until, whole = _decays(None if g is None else split(g.unsqueeze(-1)))
    inverse, write, read_since = inverse.flatten(0, 1), key * strength, times(read, since)
    wants_write = wanted.beta or wanted.write_key or (wanted.k and write_key is None)

    if wanted.of_updates:
        states = states.flatten(0, 1)
        written = inverse @ torch.baddbmm(split(v), read_since, states, alpha=-1)
    if wanted.through_updates:
        query = split(q) if scale == 1.0 else split(q) * scale
        query_since, write_until = times(query, since), times(write, until)
        erased = inverse @ read_since
        attention = times(query @ write.mT, between).tril_()
        d_written = attention.mT @ d_out
        # gradient of the state before each chunk, without the part through the state after the chunk
        d_before = torch.baddbmm(query_since.mT @ d_out, erased.mT, d_written, alpha=-1)
        d_state, d_after = _state_pass_backward(d_final.flatten(0, 1), d_before, erased, write_until, whole)
    if any(wanted[1:-1]):
        d_value = inverse.mT @ d_written.baddbmm_(write_until, d_after)

    if wanted.q or wanted.g:
        d_query = d_out @ states.mT
    if wanted.k or wanted.g:
        d_read = (d_value @ states.mT).neg_()
    if wants_write or wanted.g:
        d_write = written @ d_after.mT
    if wanted.q or wants_write or wanted.g:
        d_attention = (d_out @ written.mT).tril_()
    if wanted.k or wants_write or wanted.g:
        d_lower = (d_value @ written.mT).tril_(-1).neg_()
    if wanted.g:
        lower = times(read @ write.mT, between).tril_(-1)
        d_gate = decay_matrix_backward(d_attention * attention + d_lower * lower)
        d_gate += reverse_cumsum((d_query * query_since + d_read * read_since).sum(-1, keepdim=True))
        d_gate += earlier_sum((d_write * write_until).sum(-1, keepdim=True))
        d_gate += (states * d_after).sum((-2, -1), keepdim=True) * whole
    if wanted.q or wants_write:
        d_attention = times(d_attention, between)
    if wanted.k or wants_write:
        d_lower = times(d_lower, between)
    if wanted.q:
        d_query = times(d_query, since).baddbmm_(d_attention, write).mul_(scale)
    if wanted.k:
        d_read = times(d_read, since).baddbmm_(d_lower, write)
    if wants_write:
        d_write = times(d_write, until).baddbmm_(d_attention.mT, query).baddbmm_(d_lower.mT, read)
        d_key = d_write * strength
        if wanted.k and write_key is None:
            d_read += d_key

    return (
        join_like(d_query, k, dtypes[0]) if wanted.q else None,
        join_like(d_read, k) if wanted.k else None,
        join_like(d_value, d_output, dtypes[1]) if wanted.v else None,
        join_like((d_write * key).sum(-1, keepdim=True), beta) if wanted.beta else None,
        join_like(d_key, write_key) if wanted.write_key else None,
        join_like(d_gate, g) if wanted.g else None,
        d_state.unflatten(0, (k.shape[0], -1)) if wanted.state else None,
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
