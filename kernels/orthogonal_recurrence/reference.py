"""The orthogonal state recurrence, token by token: the definition that every other form is compared with."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longseq.kernels.recurrence import Sequences, run_recurrence, run_segments, token


def orthogonal_recurrence_step_torch(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, state: Tensor, *, objective: str = "decode",
    g: Tensor | None = None, normalize: bool = True, scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`orthogonal_recurrence_step` in torch: differentiable, in the state's precision."""
    unit = has_unit_columns(objective, normalize)
    state = normalise_columns(state) if unit else state
    state = _advance(state, state, k, v, gamma, objective, g)
    state = normalise_columns(state) if unit else state
    return _read(state, q, scale).to(v.dtype), state


def orthogonal_recurrence_reference(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, *, objective: str, g: Tensor | None, normalize: bool,
    scale: float, chunk_size: int, **call: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`orthogonal_recurrence`, one token at a time, from slots that are frozen for `chunk_size` tokens."""
    unit = has_unit_columns(objective, normalize)

    def core(sequences: Sequences, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs, frozen = [], state
        for t in range(sequences[0].shape[1]):
            q_t, k_t, v_t, gamma_t, g_t = token(sequences, t)
            if t % chunk_size == 0:
                state = normalise_columns(state) if unit else state
                frozen = state
            state = _advance(state, frozen, k_t, v_t, gamma_t, objective, g_t)
            outputs.append(_read(normalise_columns(state) if unit else state, q_t, scale))
        return torch.stack(outputs, dim=1), normalise_columns(state) if unit else state

    return run_recurrence(core, (q, k, v, gamma, g), state_shape=(), output_dtype=v.dtype, unpack=run_segments, **call)


def has_unit_columns(objective: str, normalize: bool) -> bool:
    """Whether the slots are kept at unit length. "ttt" normalises the vector that it decodes instead."""
    return normalize and objective != "ttt"


def column_norms(state: Tensor) -> Tensor:
    """Norms of the columns of [..., D, M] as [..., 1, M]; one for a zero column, which then stays as it is."""
    return mend_squares((state * state).sum(-2, keepdim=True)).sqrt()


def mend_squares(x: Tensor) -> Tensor:
    """Squared lengths; one for lengths up to 1e-12, because a zero vector cannot be normalised."""
    return F.threshold(x, 1e-24, 1.0)


def normalise_columns(state: Tensor) -> Tensor:
    """The columns of [..., D, M] at unit length, zero columns as they are."""
    return state / column_norms(state)


def _advance(
    state: Tensor, frozen: Tensor, k: Tensor, v: Tensor, gamma: Tensor, objective: str, g: Tensor | None
) -> Tensor:
    """The state [B, H, D, M] after one token, whose update is found from the slots of `frozen`; not normalised."""
    dtype = state.dtype
    k, v, gamma = k.to(dtype)[..., None, :], v.to(dtype)[..., None], gamma.to(dtype)[..., None, None]
    if g is not None:
        state = g.to(dtype).exp()[..., None, None] * state
    return state - gamma * _gradient(frozen, k, v, objective)


def _gradient(state: Tensor, k: Tensor, v: Tensor, objective: str) -> Tensor:
    """Half the gradient of the compression loss by the state [B, H, D, M], for k [B, H, 1, M] and v [B, H, D, 1]."""
    if objective == "ttt":
        z = (state * k).sum(-1, keepdim=True)
        length = column_norms(z)
        direction = z / length  # the gradient is orthogonal to it
        return (direction * (direction * v).sum(-2, keepdim=True) - v) / length * k
    lengths = column_norms(state)
    slots = state / lengths
    h = v if objective == "encode" else -v
    if objective == "decode":
        h = h + (slots * k).sum(-1, keepdim=True)
    along = (slots * h).sum(-2, keepdim=True)
    c = along - k if objective == "encode" else k
    return c * (h - slots * along) / lengths


def _read(state: Tensor, q: Tensor, scale: float) -> Tensor:
    return scale * (state * q.to(state.dtype)[..., None, :]).sum(-1)
