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
    sum_to,
    times,
    unit_lower_inverse,
)
from longseq.kernels.custom_op import once_differentiable
from longseq.kernels.dispatch import is_exporting
from longseq.kernels.precision import without_autocast
from longseq.kernels.recurrence import Sequences, run_padded, run_recurrence


def delta_rule_chunk(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, *, write_key: Tensor | None, value_key: Tensor | None,
    g: Tensor | None, read_before_decay: bool, scale: float, chunk_size: int, **call: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`delta_rule` in chunks; saves its inputs, the inverses X and the states between chunks for the backward."""

    def core(sequences: Sequences, state: Tensor) -> tuple[Tensor, Tensor]:
        options: tuple[Any, ...] = (state, scale, read_before_decay and g is not None, chunk_size)
        if torch.jit.is_tracing():
            return _scripted(*sequences, *options)
        if is_exporting():
            return _exported(Inputs(*sequences), *options)
        return _DeltaRule.apply(*sequences, *options)

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

    query: e^b ⊙ Q; attention: A; inverse: X; xv: X V, or with value keys -X M V; minus_w: -W; write: e^{b_C - b} ⊙ P;
    whole: e^{b_C} in the layout of the state, None without a gate. With value keys, nv: N V and
    added: (e^{b_C - b} ⊙ a)ᵀ V.
    """

    query: Tensor
    attention: Tensor
    inverse: Tensor
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
def _scripted(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, write_key: Tensor | None, value_key: Tensor | None,
    g: Tensor | None, state: Tensor, scale: float, before: bool, chunk_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The form for torch.jit.trace: sizes and the loop stay dynamic in the traced graph."""
    inputs = Inputs(q, k, v, beta, write_key, value_key, g)
    output, final, _, _ = _forward(inputs, state, scale, before, chunk_size)
    return output, final


class _DeltaRule(torch.autograd.Function):
    """The eager form. Saves its inputs, X and the states before each chunk; recomputes the rest."""

    @staticmethod
    def forward(ctx, q, k, v, beta, write_key, value_key, g, state, scale, before, chunk_size):
        inputs = Inputs(q, k, v, beta, write_key, value_key, g)
        output, final, inverse, states = _forward(inputs, state, scale, before, chunk_size)
        ctx.scale, ctx.before = scale, before
        ctx.save_for_backward(*inputs, inverse, states)
        # The caller may change results in place, which autograd refuses for views.
        return output.detach(), final.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, d_output, d_final):
        *inputs, inverse, states = ctx.saved_tensors
        with without_autocast(d_final):
            grads = _backward(Inputs(*inputs), inverse, states, ctx.scale, ctx.before, d_output, d_final)
        return *grads, None, None, None


def _forward(
    inputs: Inputs, state: Tensor, scale: float, before: bool, chunk_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output [B, T, H, V], final state [B, H, K, V]; for the backward X [n, M, C, C] and the states [n, M, K, V]."""
    batch, tokens, heads, _ = inputs.q.shape
    chunk_size = fit_chunk_size(chunk_size, tokens)
    chunks = (tokens + chunk_size - 1) // chunk_size
    parts = _make_parts(inputs, scale, before, state.dtype, chunks, chunk_size)
    states, u, final = _state_pass(state.flatten(0, 1), parts)
    output = join_chunks(_read_out(parts, states, u), batch, heads, tokens)
    return output, final.reshape(state.shape), parts.inverse, states


def _read_out(parts: _Parts, states: Tensor, u: Tensor) -> Tensor:
    output, nv = parts.query @ states + parts.attention @ u, parts.nv
    return output if nv is None else output + nv


def _gate_rows(g: Tensor | None) -> Tensor | None:
    """The gate as [B, T, H, 1 or K]."""
    return g.unsqueeze(-1) if g is not None and g.dim() == 3 else g


def _make_parts(inputs: Inputs, scale: float, before: bool, dtype: torch.dtype, chunks: int, chunk_size: int) -> _Parts:
    q, k, v, beta, write_key, value_key, g = inputs  # TorchScript narrows the types of variables only
    query = split_chunks(q, dtype, chunks, chunk_size)
    query = query if scale == 1.0 else query * scale
    key, value = split_chunks(k, dtype, chunks, chunk_size), split_chunks(v, dtype, chunks, chunk_size)
    write = key if write_key is None else split_chunks(write_key, dtype, chunks, chunk_size)
    if beta is not None:
        write = write * split_chunks(beta.unsqueeze(-1), dtype, chunks, chunk_size)
    rows = _gate_rows(g)
    gate = None if rows is None else split_chunks(rows, dtype, chunks, chunk_size)
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
    return _Parts(times(query, since), attention, inverse, xv, minus_w, times(write, until), whole, nv, added)


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


def _backward(
    inputs: Inputs, inverse: Tensor, states: Tensor, scale: float, before: bool, d_output: Tensor, d_final: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of the inputs and of the initial state; None for inputs that are not given."""
    q, k, v, beta, write_key, value_key, g = inputs
    chunks, _, chunk_size, _ = inverse.shape

    def split(x: Tensor | None) -> Any:
        return None if x is None else split_chunks(x, d_final.dtype, chunks, chunk_size).flatten(0, 1)

    query, key, value, d_out, gate, a = (split(x) for x in (q, k, v, d_output, _gate_rows(g), value_key))
    query = query if scale == 1.0 else query * scale
    betas = None if beta is None else split(beta.unsqueeze(-1))
    write_keys = key if write_key is None else split(write_key)
    between = None if gate is None or gate.shape[-1] > 1 else decay_matrix(gate)
    since, since_read, until, whole = _decays(gate, before)
    inverse, states, write = inverse.flatten(0, 1), states.flatten(0, 1), times(write_keys, betas)
    query_since, key_since, write_until = times(query, since), times(key, since_read), times(write, until)
    decays = gate, between

    m = None if value_key is None else _strict_pairs(key, a, *decays, before)
    errors = value if m is None else (m @ value).neg_()
    u = inverse @ torch.baddbmm(errors, key_since, states, alpha=-1)
    minus_w = inverse @ key_since
    d_u = _pairs(query, write, *decays).mT @ d_out
    # gradient of the state before each chunk, without the part through the state after the chunk
    d_before = torch.baddbmm(query_since.mT @ d_out, minus_w.mT, d_u, alpha=-1)
    d_state, d_after = _state_pass_backward(d_final.flatten(0, 1), d_before, minus_w, write_until, whole)
    d_errors = inverse.mT @ d_u.baddbmm_(write_until, d_after)

    # gradients of e^b Q, e^c K, e^{b_C - b} P and e^{b_C - b} a, then of Q, K, P and a
    d_query = d_out @ states.mT
    d_key = (d_errors @ states.mT).neg_()
    d_write = u @ d_after.mT
    d_a: Any = None if m is None else value @ d_after.mT
    d_gate: Any = None
    if whole is not None:
        reads = d_key * key_since
        writes = d_write * write_until
        if m is not None:
            writes += d_a * times(a, until)
        d_gate = sum_to(reverse_cumsum(d_query * query_since) + (later_sum if before else reverse_cumsum)(reads), gate)
        d_gate += sum_to(earlier_sum(writes), gate)
        d_gate += sum_to((states * d_after).sum(-1).unsqueeze(-2), gate) * whole.mT
    d_query, d_key, d_write = times(d_query, since), times(d_key, since_read), times(d_write, until)

    _add_pairs((d_out @ u.mT).tril_(), query, write, *decays, d_query, d_write, d_gate)
    _add_strict_pairs((d_errors @ u.mT).neg_(), key, write, *decays, before, d_key, d_write, d_gate)
    if m is not None:
        d_a = times(d_a, until)
        _add_pairs((d_out @ value.mT).tril_(), query, a, *decays, d_query, d_a, d_gate)
        _add_strict_pairs((d_errors @ value.mT).neg_(), key, a, *decays, before, d_key, d_a, d_gate)
        d_errors = torch.baddbmm(times(a, until) @ d_after, m.mT, d_errors, alpha=-1)
        d_errors.baddbmm_(_pairs(query, a, *decays).mT, d_out)
    d_write_keys = times(d_write, betas)
    if write_key is None:
        d_key += d_write_keys

    return (
        join_like(d_query.mul_(scale), q),
        join_like(d_key, k),
        join_like(d_errors, v),
        None if beta is None else join_like((d_write * write_keys).sum(-1, keepdim=True), beta),
        None if write_key is None else join_like(d_write_keys, write_key),
        None if value_key is None else join_like(d_a, value_key),
        None if g is None else join_like(d_gate, g),
        d_state.unflatten(0, (k.shape[0], -1)),
    )


def _add_pairs(d_pairs: Tensor, x: Tensor, p: Tensor, g: Any, between: Any, d_x: Tensor, d_p: Tensor, d_g: Any) -> None:
    """Add the gradients that pass through `_pairs` to those of x, p and the gate."""
    if g is not None and between is None:
        parts = decayed_products_backward(x, p, g, d_pairs)
        for total, part in zip((d_x, d_p, d_g), parts, strict=True):
            total += part
        return
    if d_g is not None:
        d_g += decay_matrix_backward(d_pairs * _pairs(x, p, g, between))
    d_pairs = times(d_pairs, between)
    d_x.baddbmm_(d_pairs, p)
    d_p.baddbmm_(d_pairs.mT, x)


def _add_strict_pairs(
    d_pairs: Tensor, x: Tensor, p: Tensor, g: Any, between: Any, before: bool, d_x: Tensor, d_p: Tensor, d_g: Any
) -> None:
    """`_add_pairs` for `_strict_pairs`; what `d_pairs` holds on the diagonal and above it is not read."""
    d_pairs = d_pairs.tril_(-1)
    if not before:
        _add_pairs(d_pairs, x, p, g, between, d_x, d_p, d_g)
        return
    d_up = torch.zeros_like(d_x)
    _add_pairs(_up(d_pairs), _up(x), p, g, between, d_up, d_p, d_g)
    d_x += _down(d_up)


def _state_pass_backward(
    d_state: Tensor, d_before: Tensor, minus_w: Tensor, write: Tensor, whole: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The loop backward, chunks in rows [n * M, ...]: gradients of the first state and of those after each chunk."""
    rows = d_state.shape[0]
    d_after = torch.empty_like(d_before)
    for start in reversed(range(0, d_before.shape[0], rows)):
        chunk = slice(start, start + rows)
        d_after[chunk] = d_state
        through = torch.baddbmm(d_before[chunk], minus_w[chunk].mT, write[chunk] @ d_state, alpha=-1)
        d_state = through.add_(d_state if whole is None else d_state * whole[chunk])
    return d_state, d_after
