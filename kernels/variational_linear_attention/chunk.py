"""Variational linear attention as a composition of operations that run in chunks.

A pass of recursive least squares finds α_t = A_t k̂_t, the delta rule writes at α̂ and reads at k̂, and a running sum of
the keys normalises. The gradient is that of the parts.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from longseq.kernels.delta_rule.chunk import delta_rule_chunk
from longseq.kernels.recurrence import Sequences, State, run_padded, run_recurrence
from longseq.kernels.recursive_least_squares.chunk import recursive_least_squares_chunk
from longseq.kernels.variational_linear_attention.reference import VariationalState, first_state, unit


def variational_linear_attention_chunk(
    q: Tensor, k: Tensor, v: Tensor, u: Tensor | None, *, count: Tensor, lambda0: float, refresh_period: int | None,
    refresh: float, eps: float, normalize_key: bool, normalize_alpha: bool, normalizer: bool, chunk_size: int,
    **call: Any,
) -> tuple[Tensor, VariationalState | None]:  # fmt: skip
    """`variational_linear_attention` in chunks."""

    def core(sequences: Sequences, state: State) -> tuple[Tensor, State]:
        S, A, z, steps = state
        u, count = sequences[3:]
        q, k, v = (x.to(S.dtype) for x in sequences[:3])
        read = unit(k) if normalize_key else k
        part: dict[str, Any] = {
            "output_final_state": True, "cu_seqlens": None, "chunk_size": chunk_size, "reverse": False,
        }  # fmt: skip
        directions = torch.zeros_like(read) if u is None else u
        alpha, inverse = recursive_least_squares_chunk(
            read, directions, count=count, lambda0=lambda0, refresh_period=None if u is None else refresh_period,
            refresh=refresh, initial_state=None if call["initial_state"] is None else (A, steps), **part,
        )  # fmt: skip
        write = unit(alpha) if normalize_alpha else alpha
        o, memory = delta_rule_chunk(
            q, read, v, None, write_key=write, value_key=None, g=None, read_before_decay=False, scale=1.0,
            initial_state=S, **part,
        )  # fmt: skip
        assert inverse is not None
        assert memory is not None
        sums = z[:, None] + k.cumsum(1)
        if normalizer:
            o = o / (sums * q).sum(-1, keepdim=True).clamp_min(eps)
        return o, (memory, inverse[0], sums[:, -1].clone(), inverse[1])

    first = partial(first_state, k=k, v=v, lambda0=lambda0)
    return run_recurrence(core, (q, k, v, u, count), state_shape=first, output_dtype=v.dtype, unpack=run_padded, **call)
