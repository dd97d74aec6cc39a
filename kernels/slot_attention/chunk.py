"""Slot attention as two passes of gated linear attention.

    scores_t = K~_t q_t            linear attention from keys to write strengths, gated per value channel (a slot)
    o_t = V~_tᵀ f(scores_t)        linear attention from write strengths to values, gated per key channel (a slot)

Source: Zhang et al. 2024, "Gated Slot Attention", eq. 7.
"""

from typing import Any

import torch
from torch import Tensor

from longseq.kernels.linear_attention.chunk import Inputs, linear_attention_core
from longseq.kernels.recurrence import Sequences, run_padded, run_recurrence
from longseq.kernels.slot_attention.reference import ACTIVATIONS


def slot_attention_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, write: Tensor | None, scale: float, activation: str,
    chunk_size: int, **call: Any,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:  # fmt: skip
    """`slot_attention` in chunks. Its two passes save their inputs and the states between chunks for the backward."""

    def core(sequences: Sequences, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v, g, write = sequences
        keys, values = state
        if write is None:
            write = -torch.expm1(g.to(keys.dtype))
        scores, keys = linear_attention_core(Inputs(q, k, write, None, g), keys.transpose(-1, -2), scale, chunk_size)
        weights = ACTIVATIONS[activation](scores)
        o, values = linear_attention_core(Inputs(weights, write, v, g, None), values, 1.0, chunk_size)
        return o, (keys.transpose(-1, -2), values)

    sequences, shapes = (q, k, v, g, write), tuple((*g.shape[2:], x.shape[3]) for x in (k, v))
    return run_recurrence(core, sequences, state_shape=shapes, output_dtype=v.dtype, unpack=run_padded, **call)
