"""The delta rule as its recurrence: the definition that every other form is compared with."""

import torch
from torch import Tensor

from longseq.kernels.reading import Reverse
from longseq.kernels.recurrence import Sequences, run_recurrence, run_segments, token


def delta_rule_step_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    write_key: Tensor | None = None,
    g: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`delta_rule_step` in torch: differentiable, in the state's precision."""
    dtype = state.dtype
    q, k, value, beta = q.to(dtype), k.to(dtype), v.to(dtype), beta.to(dtype)
    if g is not None:
        state = state * g.to(dtype).exp()[..., None, None]
    write = beta[..., None] * (k if write_key is None else write_key.to(dtype))  # [B, H, K]
    read = (state * k[..., None]).sum(-2)  # [B, H, V]
    state = state + write[..., None] * (value - read)[..., None, :]
    o = scale * (state * q[..., None]).sum(-2)
    return o.to(v.dtype), state


def delta_rule_reference(
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
    """`delta_rule`, one token at a time. `chunk_size` and `recompute` are ignored."""

    def recurrence(sequences: Sequences, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for t in range(sequences[0].shape[1]):
            q_t, k_t, v_t, beta_t, write_key_t, g_t = token(sequences, t)
            o_t, state = delta_rule_step_torch(q_t, k_t, v_t, beta_t, state, write_key=write_key_t, g=g_t, scale=scale)
            outputs.append(o_t)
        return torch.stack(outputs, dim=1), state

    return run_recurrence(
        recurrence,
        (q, k, v, beta, write_key, g),
        initial_state,
        (*k.shape[2:], v.shape[3]),
        output_dtype=v.dtype,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        unpack=run_segments,
        reverse=reverse,
    )
