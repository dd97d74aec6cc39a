"""Variational linear attention as its recurrence: the definition that every other form is compared with."""

from typing import Any

import torch
from torch import Tensor

from longseq.kernels.delta_rule.reference import delta_rule_step_torch
from longseq.kernels.orthogonal_recurrence.reference import mend_squares
from longseq.kernels.recurrence import each
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


def counted_step(*, count: Tensor, lambda0: float, state: VariationalState, **token: Any) -> tuple[Tensor, Any]:
    """A step at which tokens that do not count leave the state as it is."""

    def choose(new: Tensor, old: Tensor) -> Tensor:
        return torch.where((count > 0).reshape(-1, *(1,) * (new.dim() - 1)), new, old)

    output, after = variational_linear_attention_step_torch(state=state, **token)
    return output, each(choose, after, state)


def first_state(rows: int, dtype: torch.dtype, *, k: Tensor, v: Tensor, lambda0: float, **_: Any) -> VariationalState:
    """The state before the first token, zero but for A = I / lambda0."""
    A, steps = first_inverse_state(rows, dtype, x=k, lambda0=lambda0)
    z = k.new_zeros((rows, *k.shape[2:]), dtype=dtype)
    return z.new_zeros((*z.shape, v.shape[3])), A, z, steps


def unit(x: Tensor) -> Tensor:
    """x divided by its length; a zero vector stays zero, and its gradient is not divided either."""
    return x / mend_squares((x * x).sum(-1, keepdim=True)).sqrt()
