"""Gated linear attention in chunks of matrix products.

With the tokens of one chunk as rows and e^b the decay from the start of the chunk,

    O = (e^b ⊙ Q) S + A V         A_ij = Σ_c q_ic k_jc e^{b_ic - b_jc} for i >= j
    S <- e^{b_C} ⊙ S + (e^{b_C - b} ⊙ K)ᵀ V

With a gate for each value channel the decays move from the keys to the values:

    O = e^b ⊙ (Q S) + I           I_ic = Σ_{j<=i} (q_i · k_j) e^{b_ic - b_jc} v_jc
    S <- S ⊙ e^{b_C}ᵀ + Kᵀ (e^{b_C - b} ⊙ V)

Only the state runs over chunks one after the other, elementwise; everything else is batched over all of them.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from longseq.kernels.chunks import (
    decay_matrix,
    decay_matrix_backward,
    decayed_products,
    decayed_products_backward,
    decayed_sums,
    decayed_sums_backward,
    earlier_sum,
    export_plan,
    fit_chunk_size,
    join_chunks,
    join_like,
    later_sum,
    reverse_cumsum,
    scan,
    split_chunks,
    sum_to,
    times,
)
from longseq.kernels.custom_op import once_differentiable
from longseq.kernels.dispatch import is_exporting
from longseq.kernels.linear_attention.reference import repeat_keys
from longseq.kernels.precision import without_autocast
from longseq.kernels.recurrence import Sequences, run_padded, run_recurrence


def linear_attention_chunk(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor | None, g_value: Tensor | None, scale: float, chunk_size: int,
    **call: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`linear_attention` in chunks; saves its inputs and the states between chunks for the backward."""
    q, k = repeat_keys(q, k, v)

    def core(sequences: Sequences, state: Tensor) -> tuple[Tensor, Tensor]:
        return linear_attention_core(Inputs(*sequences), state, scale, chunk_size)

    sequences, shape = (q, k, v, g, g_value), (*k.shape[2:], v.shape[3])
    return run_recurrence(core, sequences, state_shape=shape, output_dtype=v.dtype, unpack=run_padded, **call)


class Inputs(NamedTuple):
    """The sequences of a call, [B, T, H, ...]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    g_value: Tensor | None


def linear_attention_core(inputs: Inputs, state: Tensor, scale: float, chunk_size: int) -> tuple[Tensor, Tensor]:
    """Output [B, T, H, V] and final state [B, H, K, V] in the state's dtype, by the form that suits the caller."""
    arguments: tuple[Any, ...] = (*inputs, state, scale, chunk_size)
    if torch.jit.is_tracing():
        return _scripted(*arguments)
    if is_exporting():
        return _exported(inputs, state, scale, chunk_size)
    return _LinearAttention.apply(*arguments)


def _exported(inputs: Inputs, state: Tensor, scale: float, chunk_size: int) -> tuple[Tensor, Tensor]:
    """The form for torch.export: the loop over chunks is unrolled while short, else (or if T is symbolic) a Scan.

    With a gate for each channel chunks of 16 tokens are the fastest in onnxruntime, and have the fewest nodes.
    """
    batch, tokens, heads, _ = inputs.q.shape
    if inputs.g_value is not None or (inputs.g is not None and inputs.g.dim() == 4):
        chunk_size = min(chunk_size, 16)
    chunk_size, chunks, unroll = export_plan(chunk_size, tokens)
    query, inner, update, since, whole = _parts(inputs, scale, state.dtype, chunks, chunk_size)
    if unroll or whole is None:
        states, final = _state_pass(state.flatten(0, 1), update, whole)
    else:
        final, states = scan(_chunk_step, state.flatten(0, 1), [update, whole])
    return join_chunks(times(query @ states, since) + inner, batch, heads, tokens), final.reshape(state.shape)


@torch.jit.script_if_tracing
def _scripted(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, g_value: Tensor | None, state: Tensor, scale: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The form for torch.jit.trace: sizes and the loop stay dynamic in the traced graph."""
    output, final, _ = _forward(Inputs(q, k, v, g, g_value), state, scale, chunk_size)
    return output, final


class _LinearAttention(torch.autograd.Function):
    """The eager form. Saves its inputs and the states before each chunk; recomputes the rest."""

    @staticmethod
    def forward(ctx, q, k, v, g, g_value, state, scale, chunk_size):
        output, final, states = _forward(Inputs(q, k, v, g, g_value), state, scale, chunk_size)
        ctx.scale, ctx.chunk_size = scale, fit_chunk_size(chunk_size, q.shape[1])
        ctx.save_for_backward(q, k, v, g, g_value, states)
        # The caller may change results in place, which autograd refuses for views.
        return output.detach(), final.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, d_output, d_final):
        *inputs, states = ctx.saved_tensors
        with without_autocast(d_output):
            grads = _backward(Inputs(*inputs), states, ctx.scale, ctx.chunk_size, d_output, d_final)
        return *grads, None, None


def _forward(inputs: Inputs, state: Tensor, scale: float, chunk_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Output [B, T, H, V], final state [B, H, K, V]; for the backward the states before each chunk [n, M, K, V]."""
    batch, tokens, heads, _ = inputs.q.shape
    chunk_size = fit_chunk_size(chunk_size, tokens)
    chunks = (tokens + chunk_size - 1) // chunk_size
    query, inner, update, since, whole = _parts(inputs, scale, state.dtype, chunks, chunk_size)
    states, final = _state_pass(state.flatten(0, 1), update, whole)
    return join_chunks(times(query @ states, since) + inner, batch, heads, tokens), final.reshape(state.shape), states


def _split(inputs: Inputs, scale: float, dtype: torch.dtype, chunks: int, chunk_size: int) -> Inputs:
    """Chunked q times scale, k, v [n, M, C, K or V], gate [n, M, C, 1 or K] and value gate [n, M, C, V]."""
    q, k, v, g, g_value = inputs  # TorchScript narrows the types of variables only
    if g is not None and g.dim() == 3:
        g = g.unsqueeze(-1)
    query = split_chunks(q, dtype, chunks, chunk_size)
    return Inputs(
        query if scale == 1.0 else query * scale,
        split_chunks(k, dtype, chunks, chunk_size),
        split_chunks(v, dtype, chunks, chunk_size),
        None if g is None else split_chunks(g, dtype, chunks, chunk_size),
        None if g_value is None else split_chunks(g_value, dtype, chunks, chunk_size),
    )


def _parts(
    inputs: Inputs, scale: float, dtype: torch.dtype, chunks: int, chunk_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Everything that does not depend on the state. The state adds (query @ state) ⊙ since to the output.

    Returns the query, decayed if the keys have a gate; the output of each token from its own chunk [n, M, C, V]; the
    update of the state by each chunk [n, M, K, V]; `since`, None unless the values have a gate; and the decay over each
    chunk, in the layout of the state.
    """
    query, key, value, gate, value_gate = _split(inputs, scale, dtype, chunks, chunk_size)
    inner = _inner(query, key, value, gate, value_gate)
    since, until, whole = _decays(gate)
    value_since, value_until, value_whole = _decays(value_gate)
    if whole is not None:
        whole = whole.transpose(-1, -2)
    update = times(key, until).transpose(-1, -2) @ times(value, value_until)
    return times(query, since), inner, update, value_since, value_whole if whole is None else whole


def _inner(query: Tensor, key: Tensor, value: Tensor, gate: Tensor | None, value_gate: Tensor | None) -> Tensor:
    """The output of each token from the tokens of its own chunk, A V or I: [n, M, C, V]."""
    if value_gate is not None:
        weights = query @ key.transpose(-1, -2)
        return decayed_sums(weights.flatten(0, 1), value.flatten(0, 1), value_gate.flatten(0, 1)).reshape(value.shape)
    if gate is not None and gate.shape[-1] > 1:
        rows = decayed_products(query.flatten(0, 1), key.flatten(0, 1), gate.flatten(0, 1))
        return rows.reshape(query.shape[0], query.shape[1], query.shape[2], query.shape[2]) @ value
    products = (query @ key.transpose(-1, -2)).tril()
    return times(products, None if gate is None else decay_matrix(gate)) @ value


def _decays(g: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """For g [..., C, D]: decays since the chunk's start and until its end, and over all of it [..., 1, D]."""
    if g is None:
        return None, None, None
    return g.cumsum(-2).exp(), later_sum(g).exp(), g.sum(-2).unsqueeze(-2).exp()


def _state_pass(state: Tensor, update: Tensor, whole: Tensor | None) -> tuple[Tensor, Tensor]:
    """The states before each chunk [n, M, K, V] and the final state [M, K, V]."""
    if whole is None:
        sums = torch.cat((state.unsqueeze(0), update)).cumsum(0)
        return sums[:-1], sums[-1].clone()  # a view would keep all sums in memory as long as the state
    states: list[Tensor] = []
    for i in range(update.shape[0]):
        states.append(state)
        state = torch.addcmul(update[i], state, whole[i])
    return torch.stack(states), state


def _chunk_step(state: Tensor, update: Tensor, whole: Tensor) -> list[Tensor]:
    """One step of `_state_pass` in the form of the scan operator: its outputs share no memory."""
    return [torch.addcmul(update, state, whole), state.clone()]


def _backward(
    inputs: Inputs, states: Tensor, scale: float, chunk_size: int, d_output: Tensor, d_final: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, g, g_value and the initial state; None for a gate that is not given."""
    batch, tokens = d_output.shape[:2]
    chunks = -(-tokens // chunk_size)
    d_out = split_chunks(d_output, d_final.dtype, chunks, chunk_size).flatten(0, 1)
    chunked = _split(inputs, scale, d_final.dtype, chunks, chunk_size)
    flat: Any = (None if x is None else x.flatten(0, 1) for x in chunked)
    query, key, value, gate, value_gate = flat
    since, until, whole = _decays(gate)
    value_since, value_until, value_whole = _decays(value_gate)
    d_read, states = times(d_out, value_since), states.flatten(0, 1)
    query_since, key_until, value_until_end = times(query, since), times(key, until), times(value, value_until)
    state_decay = value_whole if whole is None else whole.mT
    d_state, d_after = _state_pass_backward(d_final.flatten(0, 1), query_since.mT @ d_read, state_decay)

    d_query = d_read @ states.mT
    d_key = value_until_end @ d_after.mT
    d_value = key_until @ d_after
    d_gate: Any = None
    if whole is not None:
        d_gate = sum_to(reverse_cumsum(d_query * query_since).add_(earlier_sum(d_key * key_until)), gate)
        d_gate += sum_to((states * d_after).sum(-1).unsqueeze(-2), gate) * whole
    if value_whole is not None:
        d_gate = reverse_cumsum(d_read * (query @ states)).add_(earlier_sum(d_value * value_until_end))
        d_gate += (states * d_after).sum(-2, keepdim=True) * value_whole
    into_query, into_key, into_value, into_gate = _inner_backward(query, key, value, gate, value_gate, d_out)

    q, k, v, g, g_value = inputs
    return (
        join_like(times(d_query, since).add_(into_query).mul_(scale), q),
        join_like(times(d_key, until).add_(into_key), k),
        join_like(times(d_value, value_until).add_(into_value), v),
        None if g is None else join_like(d_gate.add_(into_gate), g),
        None if g_value is None else join_like(d_gate.add_(into_gate), g_value),
        d_state.unflatten(0, (batch, -1)),
    )


def _inner_backward(
    query: Any, key: Any, value: Any, gate: Tensor | None, value_gate: Tensor | None, d_output: Tensor
) -> tuple[Any, ...]:
    """Gradients of query, key, value and gate that pass through `_inner`; None for the gate if there is none."""
    if value_gate is not None:
        d_products = decayed_products(d_output, value, value_gate)
        gradients = decayed_sums_backward(query @ key.mT, value, value_gate, d_output)
        return d_products @ key, d_products.mT @ query, *gradients
    d_products = (d_output @ value.mT).tril_()
    if gate is not None and gate.shape[-1] > 1:
        d_value = decayed_products(query, key, gate).mT @ d_output
        d_query, d_key, into_gate = decayed_products_backward(query, key, gate, d_products)
        return d_query, d_key, d_value, into_gate
    decay = None if gate is None else decay_matrix(gate)
    products = times((query @ key.mT).tril_(), decay)
    d_gate = None if gate is None else decay_matrix_backward(d_products * products)
    d_products = times(d_products, decay)
    return d_products @ key, d_products.mT @ query, products.mT @ d_output, d_gate


def _state_pass_backward(d_state: Tensor, d_before: Tensor, whole: Tensor | None) -> tuple[Tensor, Tensor]:
    """The loop backward, chunks in rows [n * M, ...]: gradients of the first state and of those after each chunk."""
    rows = d_state.shape[0]
    d_after = torch.empty_like(d_before)
    for start in reversed(range(0, d_before.shape[0], rows)):
        chunk = slice(start, start + rows)
        d_after[chunk] = d_state
        d_state = d_before[chunk] + (d_state if whole is None else d_state * whole[chunk])
    return d_state, d_after
