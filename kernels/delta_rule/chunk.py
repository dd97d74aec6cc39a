"""The delta rule in chunks of matrix products.

With the tokens of one chunk as rows, P the write keys times beta, b the sum of g from the start of the chunk to a row,
and c = b where the read is after the decay, or b of the row before where it is before the decay,

    L_ij = Σ_d k_id p_jd e^{c_id - b_jd}, j < i      A_ij = Σ_d q_id p_jd e^{b_id - b_jd}, j <= i
    X = (I + L)^{-1}      W = -X (e^c ⊙ K)      U = X V + W S      O = (e^b ⊙ Q) S + A U
    S <- Diag(e^{b_C}) S + (e^{b_C - b} ⊙ P)ᵀ U

U is what is written: the error of each token given the writes before it. With value keys a, and M and N as L and A with
a in place of p,

    U = -X M V + W S      O = (e^b ⊙ Q) S + A U + N V
    S <- Diag(e^{b_C}) S + (e^{b_C - b} ⊙ P)ᵀ U + (e^{b_C - b} ⊙ a)ᵀ V

Only the state runs over chunks one after the other; everything else is batched over all of them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longseq.kernels.chunks import (
    decay_matrix,
    decayed_products,
    earlier_sum,
    export_plan,
    fit_chunk_size,
    join_chunks,
    later_sum,
    scan,
    split_chunks,
    times,
    unit_lower_inverse,
)
from longseq.kernels.dispatch import is_exporting
from longseq.kernels.recurrence import Sequences, run_padded, run_recurrence


def delta_rule_chunk(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, *, write_key: Tensor | None, value_key: Tensor | None,
    g: Tensor | None, read_before_decay: bool, scale: float, chunk_size: int, **call: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`delta_rule` in chunks."""

    def core(sequences: Sequences, state: Tensor) -> tuple[Tensor, Tensor]:
        options: tuple[Any, ...] = (state, scale, read_before_decay and g is not None, chunk_size)
        if is_exporting() and not torch.jit.is_tracing():
            return _exported(Inputs(*sequences), *options)
        return _forward(*sequences, *options)

    sequences, shape = (q, k, v, beta, write_key, value_key, g), (*k.shape[2:], v.shape[3])
    return run_recurrence(core, sequences, state_shape=shape, output_dtype=v.dtype, unpack=run_padded, **call)


class Inputs(NamedTuple):
    """The sequences of a call, [B, T, H, ...]."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    write_key: Tensor | None
    value_key: Tensor | None
    g: Tensor | None


class _Parts(NamedTuple):
    """What does not depend on the state, [n, M, C, ...].

    query: e^b ⊙ Q; attention: A; xv: X V, or with value keys -X M V; minus_w: -W; write: e^{b_C - b} ⊙ P;
    whole: e^{b_C} in the layout of the state, None without a gate. With value keys, nv: N V and
    added: (e^{b_C - b} ⊙ a)ᵀ V.
    """

    query: Tensor
    attention: Tensor
    xv: Tensor
    minus_w: Tensor
    write: Tensor
    whole: Tensor | None
    nv: Tensor | None
    added: Tensor | None


def _exported(inputs: Inputs, state: Tensor, scale: float, before: bool, chunk_size: int) -> tuple[Tensor, Tensor]:
    """The form for torch.export: the loop over chunks is unrolled while short, else (or if T is symbolic) a Scan."""
    batch, tokens, heads, _ = inputs.q.shape
    chunk_size, chunks, unroll = export_plan(chunk_size, tokens)
    parts = _make_parts(inputs, scale, before, state.dtype, chunks, chunk_size)
    rows = state.flatten(0, 1)
    if unroll:
        states, u, final = _state_pass(rows, parts)
    else:
        given = [x for x in (parts.xv, parts.minus_w, parts.write, parts.whole, parts.added) if x is not None]
        step = _chunk_step(has_decay=parts.whole is not None, has_added=parts.added is not None)
        final, states, u = scan(step, rows, given)
    return join_chunks(_read_out(parts, states, u), batch, heads, tokens), final.reshape(state.shape)


@torch.jit.script_if_tracing
def _forward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, write_key: Tensor | None, value_key: Tensor | None,
    g: Tensor | None, state: Tensor, scale: float, before: bool, chunk_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The eager form, and that for torch.jit.trace: sizes and the loop stay dynamic in the traced graph."""
    batch, tokens, heads, _ = q.shape
    chunk_size = fit_chunk_size(chunk_size, tokens)
    chunks = (tokens + chunk_size - 1) // chunk_size
    inputs = Inputs(q, k, v, beta, write_key, value_key, g)
    parts = _make_parts(inputs, scale, before, state.dtype, chunks, chunk_size)
    states, u, final = _state_pass(state.flatten(0, 1), parts)
    return join_chunks(_read_out(parts, states, u), batch, heads, tokens), final.reshape(state.shape)


def _read_out(parts: _Parts, states: Tensor, u: Tensor) -> Tensor:
    output, nv = parts.query @ states + parts.attention @ u, parts.nv
    return output if nv is None else output + nv


def _make_parts(inputs: Inputs, scale: float, before: bool, dtype: torch.dtype, chunks: int, chunk_size: int) -> _Parts:
    q, k, v, beta, write_key, value_key, g = inputs  # TorchScript narrows the types of variables only
    query = split_chunks(q, dtype, chunks, chunk_size)
    query = query if scale == 1.0 else query * scale
    key, value = split_chunks(k, dtype, chunks, chunk_size), split_chunks(v, dtype, chunks, chunk_size)
    write = key if write_key is None else split_chunks(write_key, dtype, chunks, chunk_size)
    if beta is not None:
        write = write * split_chunks(beta.unsqueeze(-1), dtype, chunks, chunk_size)
    if g is not None and g.dim() == 3:
        g = g.unsqueeze(-1)
    gate = None if g is None else split_chunks(g, dtype, chunks, chunk_size)
    between = None if gate is None or gate.shape[-1] > 1 else decay_matrix(gate)
    since, since_read, until, whole = _decays(gate, before)
    inverse = unit_lower_inverse(_strict_pairs(key, write, gate, between, before).flatten(0, 1))
    inverse = inverse.reshape(key.shape[0], key.shape[1], key.shape[2], key.shape[2])
    xv = inverse @ value
    nv: Tensor | None = None
    added: Tensor | None = None
    if value_key is not None:
        own = split_chunks(value_key, dtype, chunks, chunk_size)
        xv = -(inverse @ (_strict_pairs(key, own, gate, between, before) @ value))
        nv = _pairs(query, own, gate, between) @ value
        added = times(own, until).transpose(-1, -2) @ value
    attention = _pairs(query, write, gate, between)
    minus_w = inverse @ times(key, since_read)
    return _Parts(times(query, since), attention, xv, minus_w, times(write, until), whole, nv, added)


def _decays(g: Tensor | None, before: bool) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """For g [..., C, D]: decays since the chunk's start of queries and of reads, until its end, and over all of it.

    The last is in the layout of the state, [..., D, 1].
    """
    if g is None:
        return None, None, None, None
    since = g.cumsum(-2).exp()
    since_read = earlier_sum(g).exp() if before else since
    return since, since_read, later_sum(g).exp(), g.sum(-2).unsqueeze(-1).exp()


def _pairs(x: Tensor, p: Tensor, g: Tensor | None, between: Tensor | None) -> Tensor:
    """Σ_d x_id p_jd e^{b_id - b_jd} for i >= j, else 0: [..., C, C]; `between` holds the decays of a gate per head."""
    if g is not None and between is None:
        size = x.shape[-2]
        products = decayed_products(_flat(x), _flat(p), _flat(g))
        return products.reshape(x.shape[:-2] + (size, size))  # noqa: RUF005 (TorchScript)
    return times(x @ p.transpose(-1, -2), between).tril()


def _flat(x: Tensor) -> Tensor:
    """[n, M, C, D] -> [n * M, C, D]."""
    return x.reshape(-1, x.shape[-2], x.shape[-1])


def _strict_pairs(x: Tensor, p: Tensor, g: Tensor | None, between: Tensor | None, before: bool) -> Tensor:
    """`_pairs` for i > j with the decays of reads. A read before the decay is a query of the row above."""
    if before:
        return _down(_pairs(_up(x), p, g, between))
    return _pairs(x, p, g, between).tril(-1)


def _up(x: Tensor) -> Tensor:
    """Each row in place of the one above it; the last row is 0."""
    return F.pad(x[..., 1:, :], (0, 0, 0, 1))


def _down(x: Tensor) -> Tensor:
    """Each row in place of the one below it; the first row is 0."""
    return F.pad(x[..., :-1, :], (0, 0, 1, 0))


def _state_pass(state: Tensor, parts: _Parts) -> tuple[Tensor, Tensor, Tensor]:
    """The loop over chunks: states before each chunk [n, M, K, V], U [n, M, C, V], final state [M, K, V]."""
    states: list[Tensor] = []
    u: list[Tensor] = []
    whole, added = parts.whole, parts.added
    for i in range(parts.xv.shape[0]):
        states.append(state)
        u.append(torch.baddbmm(parts.xv[i], parts.minus_w[i], state, alpha=-1.0))
        if whole is not None:
            state = state * whole[i]
        if added is not None:
            state = state + added[i]
        state = torch.baddbmm(state, parts.write[i].transpose(-1, -2), u[i])
    return torch.stack(states), torch.stack(u), state


def _chunk_step(*, has_decay: bool, has_added: bool) -> Callable[..., list[Tensor]]:
    """One step of `_state_pass` in the form of the scan operator: its outputs share no memory."""

    def step(state: Tensor, xv: Tensor, minus_w: Tensor, write: Tensor, *others: Tensor) -> list[Tensor]:
        u = torch.baddbmm(xv, minus_w, state, alpha=-1.0)
        after = state * others[0] if has_decay else state
        if has_added:
            after = after + others[-1]
        return [torch.baddbmm(after, write.transpose(-1, -2), u), state.clone(), u]

    return step
