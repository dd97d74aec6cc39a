"""The orthogonal state recurrence as a loop over tokens, and TTT's over chunks of matrix products.

φ are the slots of the state before a token. Each token writes a direction h_t with coefficients c_t, minus the
component a_t = φᵀ h_t along each slot:

    S_t = e^{g_t} S_{t-1} + h_t c_tᵀ - φ Diag(a_t ⊙ c_t)

TTT removes no component. In a chunk of C tokens, its h_t and c_t are found from the state S before the chunk. With
W_ts = e^{g_{s+1} + ... + g_t} for s <= t and b_t = e^{g_1 + ... + g_t}:

    S_t = b_t S + Σ_s W_ts h_s c_sᵀ
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longseq.kernels.chunks import (
    balanced_chunk_size,
    decay_matrix,
    decay_matrix_backward,
    join_chunks,
    reverse_cumsum,
    scan,
    split_chunks,
)
from longseq.kernels.custom_op import once_differentiable
from longseq.kernels.dispatch import is_exporting
from longseq.kernels.orthogonal_recurrence.reference import (
    column_norms,
    has_unit_columns,
    mend_squares,
    normalise_columns,
)
from longseq.kernels.precision import without_autocast
from longseq.kernels.recurrence import Sequences, run_padded, run_recurrence


def orthogonal_recurrence_chunk(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, *, objective: str, g: Tensor | None, normalize: bool,
    scale: float, chunk_size: int, **call: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`orthogonal_recurrence`; saves its inputs and the states before every √n of the n chunks for the backward."""
    unit = has_unit_columns(objective, normalize)

    def core(sequences: Sequences, state: Tensor) -> tuple[Tensor, Tensor]:
        state = normalise_columns(state) if unit else state
        options = (state, objective, unit, scale, chunk_size)
        if torch.jit.is_tracing():
            return _scripted(*sequences, *options)
        if is_exporting():
            return _exported(Inputs(*sequences), *options)
        if chunk_size == 1:
            # The loop over tokens makes T a constant of a compiled graph, which torch 2.11 must learn before apply.
            operator.index(q.shape[1])
        return _OrthogonalRecurrence.apply(*sequences, *options)

    return run_recurrence(core, (q, k, v, gamma, g), state_shape=(), output_dtype=v.dtype, unpack=run_padded, **call)


class Inputs(NamedTuple):
    """The sequences of a call, [B, T, H, ...]."""

    q: Tensor
    k: Tensor
    v: Tensor
    gamma: Tensor
    g: Tensor | None


def _exported(
    inputs: Inputs, state: Tensor, objective: str, unit: bool, scale: float, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """The form for torch.export: one Scan over tokens or chunks."""
    batch, tokens, heads, _ = inputs.q.shape
    chunks = tokens if chunk_size == 1 else (tokens + 2 * chunk_size - 1) // chunk_size
    xs = _split(inputs, scale, state.dtype, chunks, chunk_size)
    step, _ = _forms(chunk_size)

    def turn(state: Tensor, *xs: Tensor) -> list[Tensor]:
        output, state, _ = step(state, objective, unit, *xs)
        return [state, output]

    final, output = scan(turn, state.flatten(0, 1), list(xs))
    return join_chunks(output, batch, heads, tokens), final.reshape(state.shape)


@torch.jit.script_if_tracing
def _scripted(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, g: Tensor | None, state: Tensor, objective: str,
    unit: bool, scale: float, chunk_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The form for torch.jit.trace: sizes and the loop stay dynamic in the traced graph."""
    batch, tokens, heads = q.shape[0], q.shape[1], q.shape[2]
    chunks = (tokens + chunk_size - 1) // chunk_size
    inputs = Inputs(q, k, v, gamma, g)
    query, key, value, strength, gate = _split(inputs, scale, state.dtype, chunks, chunk_size)
    running = state.flatten(0, 1)
    outputs: list[Tensor] = []
    for i in range(chunks):
        q_i, k_i, v_i, gamma_i, gate_i = query[i], key[i], value[i], strength[i], gate[i]
        if chunk_size == 1:
            output, running, _ = _token(running, objective, unit, q_i, k_i, v_i, gamma_i, gate_i)
        else:
            output, running, _ = _chunk(running, objective, unit, q_i, k_i, v_i, gamma_i, gate_i)
        outputs.append(output)
    return join_chunks(torch.stack(outputs), batch, heads, tokens), running.reshape(state.shape)


class _OrthogonalRecurrence(torch.autograd.Function):
    """The eager form. Saves its inputs and every √n-th state; recomputes the states between them."""

    @staticmethod
    def forward(ctx, q, k, v, gamma, g, state, objective, unit, scale, chunk_size):
        batch, tokens, heads, _ = q.shape
        chunk_size = min(chunk_size, tokens)
        chunks = -(-tokens // chunk_size)
        xs = _split(Inputs(q, k, v, gamma, g), scale, state.dtype, chunks, chunk_size)
        step, _ = _forms(chunk_size)
        running, every, kept, outputs = state.flatten(0, 1), balanced_chunk_size(chunks), [], []
        for i in range(chunks):
            if i % every == 0:
                kept.append(running)
            output, running, _ = step(running, objective, unit, *[x[i] for x in xs])
            outputs.append(output)
        ctx.save_for_backward(q, k, v, gamma, g, torch.stack(kept))
        ctx.options = objective, unit, scale, chunk_size
        # The caller may change results in place, which autograd refuses for views.
        output = join_chunks(torch.stack(outputs), batch, heads, tokens)
        return output.detach(), running.reshape(state.shape).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, d_output, d_final):
        *inputs, kept = ctx.saved_tensors
        arguments: tuple[Any, ...] = (*ctx.options, d_output, d_final)
        with without_autocast(d_final):
            grads = _backward(Inputs(*inputs), kept, *arguments)
        return *grads, None, None, None, None


def _backward(
    inputs: Inputs, kept: Tensor, objective: str, unit: bool, scale: float, chunk_size: int, d_output: Tensor,
    d_final: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of the inputs and of the initial state; None for inputs that are not given."""
    q, k, v, gamma, g = inputs
    chunks = -(-q.shape[1] // chunk_size)
    xs = _split(inputs, scale, kept.dtype, chunks, chunk_size)
    d_chunks = split_chunks(d_output, kept.dtype, chunks, chunk_size)
    step, step_backward = _forms(chunk_size)
    d_state, every, grads = d_final.flatten(0, 1), balanced_chunk_size(chunks), []
    for start in reversed(range(0, chunks, every)):
        segment, state, steps = range(start, min(start + every, chunks)), kept[start // every], []
        for i in segment:
            _, after, parts = step(state, objective, unit, *[x[i] for x in xs])
            steps.append((state, after, parts))
            state = after
        for i in reversed(segment):
            d_state, *own = step_backward(*steps.pop(), objective, unit, d_chunks[i], d_state, *[x[i] for x in xs])
            grads.append(own)
    d_q, d_k, d_v, d_gamma, d_gate = (torch.stack(x[::-1]) for x in zip(*grads, strict=True))
    if g is not None and chunk_size == 1:
        d_gate = d_gate * xs[4]
    return (
        _join_like(d_q.mul_(scale), q),
        _join_like(d_k, k),
        _join_like(d_v, v),
        _join_like(d_gamma, gamma),
        None if g is None else _join_like(d_gate, g),
        d_state.unflatten(0, (q.shape[0], -1)),
    )


def _join_like(x: Tensor, like: Tensor) -> Tensor:
    """[n, B * H, C, D] -> the shape and type of `like`, [B, T, H, D] or [B, T, H]."""
    batch, tokens, heads = like.shape[:3]
    return join_chunks(x, batch, heads, tokens).reshape(like.shape).to(like.dtype)


def _forms(chunk_size: int) -> tuple[Callable[..., tuple[Tensor, Tensor, list[Tensor]]], Callable[..., list[Any]]]:
    return (_token, _token_backward) if chunk_size == 1 else (_chunk, _chunk_backward)


def _split(
    inputs: Inputs, scale: float, dtype: torch.dtype, chunks: int, chunk_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Chunked scale q, k, v, gamma and gate [n, R, C, M or D or 1], R = B * H.

    The gate is g in chunks of several tokens and its exponential, the decay itself, in those of one.
    """
    q, k, v, gamma, g = inputs  # TorchScript narrows the types of variables only
    query = split_chunks(q, dtype, chunks, chunk_size)
    strength = split_chunks(gamma.unsqueeze(-1), dtype, chunks, chunk_size)
    gate = torch.zeros_like(strength) if g is None else split_chunks(g.unsqueeze(-1), dtype, chunks, chunk_size)
    return (
        query if scale == 1.0 else query * scale,
        split_chunks(k, dtype, chunks, chunk_size),
        split_chunks(v, dtype, chunks, chunk_size),
        strength,
        gate.exp() if chunk_size == 1 else gate,
    )


def _slots(state: Tensor, objective: str, unit: bool) -> tuple[Tensor, Tensor | None]:
    """φ [R, D, M], and without N the lengths [R, 1, M] that coefficients are divided by. TTT reads the state itself."""
    if unit or objective == "ttt":
        return state, None
    lengths = column_norms(state)
    return state / lengths, lengths


def _writes(objective: str, slots: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """h [R, C, D], c and a [R, C, M] of tokens that see the same slots."""
    if objective == "decode":
        h = torch.baddbmm(v, k, slots.transpose(-1, -2), alpha=-1)
        return h, gamma * k, torch.bmm(h, slots)
    if objective == "ttt":
        direction, length = _decoded(slots, k)
        h = (v - direction * (direction * v).sum(-1, keepdim=True)) / length
        return h, gamma * k, torch.zeros_like(k)
    a = torch.bmm(v, slots)
    return v, gamma * (k - a if objective == "encode" else k), a


def _decoded(state: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Direction [R, C, D] and length [R, C, 1] of what TTT decodes from the keys."""
    z = torch.bmm(k, state.transpose(-1, -2))
    length = mend_squares((z * z).sum(-1, keepdim=True)).sqrt()
    return z / length, length


def _writes_backward(
    objective: str, slots: Tensor, k: Tensor, v: Tensor, gamma: Tensor, h: Tensor, a: Tensor,
    d_h: Tensor, d_c: Tensor, d_a: Tensor, d_slots: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of k, v and gamma from those of what `_writes` returned; that of the slots is added to `d_slots`."""
    if objective == "ttt":
        return _ttt_backward(slots, k, v, gamma, h, d_h, d_c, d_slots)
    d_k, written = gamma * d_c, k
    if objective == "encode":
        d_a, written = d_a - d_k, k - a
    d_v = torch.baddbmm(d_h, d_a, slots.mT)
    _add_products(d_slots, h, d_a)
    if objective == "decode":
        _add_products(d_slots, d_v, k, sign=-1)
        d_k.baddbmm_(d_v, slots, alpha=-1)
    return d_k, d_v, (written * d_c).sum(-1, keepdim=True)


def _add_products(total: Tensor, left: Tensor, right: Tensor, *, sign: int = 1) -> None:
    """Add Σ_t left_t right_tᵀ to `total` [R, D, M]: for one token by elements, on a CPU in half the time."""
    if left.shape[1] == 1:
        total.addcmul_(left.mT, right, value=sign)
    else:
        total.baddbmm_(left.mT, right, alpha=sign)


def _ttt_backward(
    state: Tensor, k: Tensor, v: Tensor, gamma: Tensor, h: Tensor, d_h: Tensor, d_c: Tensor, d_state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    direction, length = _decoded(state, k)
    d_v = d_h / length
    d_along = -(d_v * direction).sum(-1, keepdim=True)
    d_direction = d_along * v - (direction * v).sum(-1, keepdim=True) * d_v
    d_length = -((d_h * h).sum(-1, keepdim=True) + (d_direction * direction).sum(-1, keepdim=True)) / length
    d_z = torch.addcmul(d_direction / length, direction, d_length)
    _add_products(d_state, d_z, k)
    return (
        torch.bmm(d_z, state).addcmul_(gamma, d_c),
        torch.addcmul(d_v, d_along, direction),
        (k * d_c).sum(-1, keepdim=True),
    )


def _token(
    state: Tensor, objective: str, unit: bool, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, decay: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """One exact step: the output [R, 1, D], the next state [R, D, M], and what the backward needs of it.

    That is h, c (before it is divided by a length), a and, with N, the norms [R, 1, M] before it.
    """
    slots, lengths = _slots(state, objective, unit)
    h, c, a = _writes(objective, slots, k, v, gamma)
    parts = [h, c, a]
    if lengths is not None:
        c, a = c / lengths, a / lengths
    state = (state * torch.addcmul(decay, c, a, value=-1.0)).addcmul_(h.transpose(-1, -2), c)
    if unit:
        norms = column_norms(state)
        state = state / norms  # not in place: an exported graph keeps the state from before for its own gradients
        parts.append(norms)
    return torch.bmm(q, state.transpose(-1, -2)), state, parts


def _token_backward(
    before: Tensor, after: Tensor, parts: list[Tensor], objective: str, unit: bool, d_output: Tensor, d_state: Tensor,
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, decay: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the state before a token, of q, k, v, gamma and the decay."""
    d_q = torch.bmm(d_output, after)
    h, c, a, *norms = parts
    slots, lengths = _slots(before, objective, unit)
    written, present = (c, a) if lengths is None else (c / lengths, a / lengths)
    d_state = torch.addcmul(d_state, d_output.mT, q)
    if unit:
        along = (after * d_state).sum(-2, keepdim=True)
        d_state.addcmul_(after, along, value=-1).div_(norms[0])
    d_keep = (before * d_state).sum(-2, keepdim=True)
    d_c = torch.bmm(h, d_state).addcmul_(d_keep, present, value=-1)
    d_a = -d_keep * written
    if lengths is not None:
        d_c, d_a = d_c / lengths, d_a / lengths
    d_h = torch.bmm(written, d_state.mT)
    d_before = d_state.mul_(torch.addcmul(decay, written, present, value=-1))
    d_slots = d_before if lengths is None else torch.zeros_like(d_before)
    d_inputs = _writes_backward(objective, slots, k, v, gamma, h, a, d_h, d_c, d_a, d_slots)
    if lengths is not None:
        d_lengths = -(d_c * written + d_a * present) - (d_slots * slots).sum(-2, keepdim=True) / lengths
        d_before += torch.addcmul(d_slots / lengths, slots, d_lengths)  # none passes the length of a zero column
    return [d_before, d_q, *d_inputs, d_keep.sum(-1, keepdim=True)]


def _chunk(
    state: Tensor, objective: str, unit: bool, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, g: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """One chunk of TTT: the output [R, C, D], the next state [R, D, M], and what the backward needs.

    That is h [R, C, D], c [R, C, M] and the decays W [R, C, C] and b [R, C, 1].
    """
    h, c, _ = _writes(objective, state, k, v, gamma)
    w, b = decay_matrix(g), g.cumsum(-2).exp()
    output = torch.bmm(w * torch.bmm(q, c.transpose(-1, -2)), h) + b * torch.bmm(q, state.transpose(-1, -2))
    last = w[:, -1:].transpose(-1, -2)
    state = torch.baddbmm(state * b[:, -1:], h.transpose(-1, -2), last * c)
    return output, state, [h, c, w, b]


def _chunk_backward(
    before: Tensor, after: Tensor, parts: list[Tensor], objective: str, unit: bool, d_output: Tensor, d_after: Tensor,
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, g: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the state before a chunk and of q, k, v, gamma and g in it."""
    h, c, w, b = parts
    into_state, d_weights = torch.bmm(d_output, before), torch.bmm(d_output, h.mT)
    d_products, last = d_weights * w, w[:, -1:].mT
    d_q = torch.bmm(d_products, c) + b * into_state
    written, products = torch.bmm(h, d_after), torch.bmm(q, c.mT)
    d_h = torch.baddbmm(last * torch.bmm(c, d_after.mT), (w * products).mT, d_output)
    d_c = torch.baddbmm(last * written, d_products.mT, q)
    d_state = torch.baddbmm(d_after * b[:, -1:], (b * d_output).mT, q)
    d_w = d_weights * products
    d_w[:, -1] += (written * c).sum(-1)
    d_b = (into_state * q).sum(-1, keepdim=True)
    d_b[:, -1:] += (d_after * before).sum((-2, -1), keepdim=True)
    d_slots = torch.zeros_like(d_state)
    d_inputs = _ttt_backward(before, k, v, gamma, h, d_h, d_c, d_slots)
    d_g = decay_matrix_backward(d_w * w) + reverse_cumsum(d_b * b)
    return [d_state + d_slots, d_q, *d_inputs, d_g]
