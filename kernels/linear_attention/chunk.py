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
    decayed_products,
    decayed_sums,
    export_plan,
    fit_chunk_size,
    join_chunks,
    later_sum,
    scan,
    split_chunks,
    times,
)
from longseq.kernels.dispatch import is_exporting
from longseq.kernels.linear_attention.reference import repeat_keys
from longseq.kernels.recurrence import Sequences, run_padded, run_recurrence


def linear_attention_chunk(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor | None, g_value: Tensor | None, scale: float, chunk_size: int,
    **call: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`linear_attention` in chunks."""
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
    if is_exporting() and not torch.jit.is_tracing():
        return _exported(inputs, state, scale, chunk_size)
    return _forward(*inputs, state, scale, chunk_size)


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
def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, g_value: Tensor | None, state: Tensor, scale: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The eager form, and that for torch.jit.trace: sizes and the loop stay dynamic in the traced graph."""
    batch, tokens, heads, _ = q.shape
    chunk_size = fit_chunk_size(chunk_size, tokens)
    chunks = (tokens + chunk_size - 1) // chunk_size
    query, inner, update, since, whole = _parts(Inputs(q, k, v, g, g_value), scale, state.dtype, chunks, chunk_size)
    states, final = _state_pass(state.flatten(0, 1), update, whole)
    return join_chunks(times(query @ states, since) + inner, batch, heads, tokens), final.reshape(state.shape)


def _parts(
    inputs: Inputs, scale: float, dtype: torch.dtype, chunks: int, chunk_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Everything that does not depend on the state. The state adds (query @ state) ⊙ since to the output.

    Returns the query, decayed if the keys have a gate; the output of each token from its own chunk [n, M, C, V]; the
    update of the state by each chunk [n, M, K, V]; `since`, None unless the values have a gate; and the decay over each
    chunk, in the layout of the state.
    """
    q, k, v, g, g_value = inputs  # TorchScript narrows the types of variables only
    query = split_chunks(q, dtype, chunks, chunk_size)
    query = query if scale == 1.0 else query * scale
    key, value = split_chunks(k, dtype, chunks, chunk_size), split_chunks(v, dtype, chunks, chunk_size)
    if g is not None and g.dim() == 3:
        g = g.unsqueeze(-1)
    gate = None if g is None else split_chunks(g, dtype, chunks, chunk_size)
    value_gate = None if g_value is None else split_chunks(g_value, dtype, chunks, chunk_size)
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
