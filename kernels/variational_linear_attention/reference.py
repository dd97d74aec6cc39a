"""Variational linear attention as its recurrence: the definition that every other form is compared with."""

from collections.abc import Callable

import torch
from torch import Tensor

from longseq.kernels.delta_rule.reference import delta_rule_step_torch
from longseq.kernels.orthogonal_recurrence.reference import mend_squares
from longseq.kernels.reading import Reverse
from longseq.kernels.recurrence import Sequences, each, run_recurrence, run_segments, token
from longseq.kernels.recursive_least_squares.reference import first_state as first_inverse_state
from longseq.kernels.recursive_least_squares.reference import recursive_least_squares_step_torch

# the memory S [B, H, K, V], A [B, H, K, K], the sum of the keys z [B, H, K], the number of tokens seen [B]
VariationalState = tuple[Tensor, Tensor, Tensor, Tensor]


def variational_linear_attention_step_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor | None = None,
    *,
    state: VariationalState,
    refresh_period: int | None = 20,
    refresh: float = 1e-3,
    eps: float = 1e-4,
    normalize_key: bool = True,
    normalize_alpha: bool = True,
    normalizer: bool = True,
) -> tuple[Tensor, VariationalState]:
    """`variational_linear_attention_step` in torch: differentiable, in the state's precision."""
    S, A, z, steps = state
    query, key, value = q.to(S.dtype), k.to(S.dtype), v.to(S.dtype)
    z = z + key
    read = unit(key) if normalize_key else key
    period = None if u is None else refresh_period
    alpha, (A, steps) = recursive_least_squares_step_torch(read, u, (A, steps), refresh_period=period, refresh=refresh)
    write = unit(alpha) if normalize_alpha else alpha
    o, S = delta_rule_step_torch(query, read, value, S, write_key=write)
    if normalizer:
        o = o / (z * query).sum(-1, keepdim=True).clamp_min(eps)
    return o.to(v.dtype), (S, A, z, steps)


def variational_linear_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor | None,
    *,
    count: Tensor,
    lambda0: float,
    refresh_period: int | None,
    refresh: float,
    eps: float,
    normalize_key: bool,
    normalize_alpha: bool,
    normalizer: bool,
    initial_state: VariationalState | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    chunk_size: int,
    reverse: Reverse,
) -> tuple[Tensor, VariationalState | None]:
    """`variational_linear_attention`, one token at a time. `chunk_size` is ignored."""

    def recurrence(sequences: Sequences, state: VariationalState) -> tuple[Tensor, VariationalState]:
        outputs = []
        for t in range(sequences[0].shape[1]):
            q_t, k_t, v_t, u_t, count_t = token(sequences, t)
            o_t, after = variational_linear_attention_step_torch(
                q_t,
                k_t,
                v_t,
                u_t,
                state=state,
                refresh_period=refresh_period,
                refresh=refresh,
                eps=eps,
                normalize_key=normalize_key,
                normalize_alpha=normalize_alpha,
                normalizer=normalizer,
            )
            state = each(lambda new, old, real=count_t > 0: torch.where(_like(real, new), new, old), after, state)
            outputs.append(o_t)
        return torch.stack(outputs, dim=1), state

    return run_recurrence(
        recurrence,
        (q, k, v, u, count),
        initial_state,
        first_state(k, v, lambda0),
        output_dtype=v.dtype,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        unpack=run_segments,
        reverse=reverse,
    )


def first_state(k: Tensor, v: Tensor, lambda0: float) -> Callable[[int, torch.dtype], VariationalState]:
    """The state before the first token, zero but for A = I / lambda0, as a function of (rows, dtype)."""

    def make(rows: int, dtype: torch.dtype) -> VariationalState:
        A, steps = first_inverse_state(k, lambda0)(rows, dtype)
        heads, width = k.shape[2:]
        S = k.new_zeros((rows, heads, width, v.shape[3]), dtype=dtype)
        return S, A, k.new_zeros((rows, heads, width), dtype=dtype), steps

    return make


def unit(x: Tensor) -> Tensor:
    """x divided by its length; a zero vector stays zero, and its gradient is not divided either."""
    return x / mend_squares((x * x).sum(-1, keepdim=True)).sqrt()


def _like(mask: Tensor, x: Tensor) -> Tensor:
    """A mask [B] with as many dimensions as x [B, ...]."""
    return mask.reshape(-1, *(1,) * (x.dim() - 1))
