"""Slot attention as its recurrence: the definition that every other form is compared with."""

import torch
from torch import Tensor

from longseq.kernels.reading import Reverse
from longseq.kernels.recurrence import Sequences, run_recurrence, run_segments, token
from longseq.kernels.slot_attention.activations import ACTIVATIONS


def slot_attention_step_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    state: tuple[Tensor, Tensor],
    *,
    write: Tensor | None = None,
    scale: float = 1.0,
    activation: str = "softmax",
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """`slot_attention_step` in torch: differentiable, in the state's precision."""
    keys, values = state
    q, k, value, g = (x.to(keys.dtype) for x in (q, k, v, g))
    decay = g.exp()[..., None]
    strength = (-torch.expm1(g) if write is None else write.to(keys.dtype))[..., None]  # [B, H, M, 1]
    keys = decay * keys + strength * k[..., None, :]
    values = decay * values + strength * value[..., None, :]
    weights = ACTIVATIONS[activation](scale * (keys * q[..., None, :]).sum(-1))  # [B, H, M]
    o = (values * weights[..., None]).sum(-2)
    return o.to(v.dtype), (keys, values)


def slot_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    write: Tensor | None,
    scale: float,
    activation: str,
    initial_state: tuple[Tensor, Tensor] | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    chunk_size: int,
    reverse: Reverse,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """`slot_attention`, one token at a time. `chunk_size` is ignored."""

    def recurrence(sequences: Sequences, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        outputs = []
        for t in range(sequences[0].shape[1]):
            q_t, k_t, v_t, g_t, write_t = token(sequences, t)
            o_t, state = slot_attention_step_torch(
                q_t, k_t, v_t, g_t, state, write=write_t, scale=scale, activation=activation
            )
            outputs.append(o_t)
        return torch.stack(outputs, dim=1), state

    return run_recurrence(
        recurrence,
        (q, k, v, g, write),
        initial_state,
        lambda rows, dtype: empty_slots(k, v, g, rows, dtype),
        output_dtype=v.dtype,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        unpack=run_segments,
        reverse=reverse,
    )


def empty_slots(k: Tensor, v: Tensor, g: Tensor, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The state before the first token: K~ [rows, H, M, K] and V~ [rows, H, M, V] of zeros."""
    heads, slots = g.shape[2:]
    shapes = ((rows, heads, slots, x.shape[3]) for x in (k, v))
    keys, values = (k.new_zeros(shape, dtype=dtype) for shape in shapes)
    return keys, values
