"""Variational linear attention as its recurrence: the definition that every other form is compared with."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longseq.kernels.delta_rule.reference import delta_rule_step_torch
from longseq.kernels.orthogonal_recurrence.reference import mend_squares
from longseq.kernels.reading import Reverse
from longseq.kernels.recurrence import each, run_tokens
from longseq.kernels.recursive_least_squares.reference import first_state as first_inverse_state
from longseq.kernels.recursive_least_squares.reference import recursive_least_squares_step_torch

# the memory S [B, H, K, V], A [B, H, K, K], the sum of the keys z [B, H, K], the number of tokens seen [B]
VariationalState = tuple[Tensor, Tensor, Tensor, Tensor]


def variational_linear_attention_step_torch(
    q: Tensor, k: Tensor, v: Tensor, u: Tensor | None = None, *, state: VariationalState,
    refresh_period: int | None = 20, refresh: float = 1e-3, eps: float = 1e-4, normalize_key: bool = True,
    normalize_alpha: bool = True, normalizer: bool = True,
) -> tuple[Tensor, VariationalState]:  # fmt: skip
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
    q: Tensor, k: Tensor, v: Tensor, u: Tensor | None, *, count: Tensor, lambda0: float, chunk_size: int,
    initial_state: VariationalState | None, output_final_state: bool, cu_seqlens: Tensor | None, reverse: Reverse,
    **options: Any,
) -> tuple[Tensor, VariationalState | None]:  # fmt: skip
    """`variational_linear_attention`, one token at a time. `chunk_size` is ignored; `options` are those of a step."""

    def step(token: list[Any], state: VariationalState) -> tuple[Tensor, VariationalState]:
        *tensors, count_t = token
        o, after = variational_linear_attention_step_torch(*tensors, state=state, **options)
        return o, each(lambda new, old: torch.where(_like(count_t > 0, new), new, old), after, state)

    return run_tokens(
        step, (q, k, v, u, count), initial_state=initial_state, state_shape=first_state(k, v, lambda0),
        output_dtype=v.dtype, output_final_state=output_final_state, cu_seqlens=cu_seqlens, reverse=reverse,
    )  # fmt: skip


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
