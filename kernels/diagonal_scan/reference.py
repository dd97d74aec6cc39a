"""The diagonal scans as their recurrences: the definitions that every other form is compared with."""

import torch
from torch import Tensor


def longhorn_scan_step_torch(x: Tensor, q: Tensor, k: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """`longhorn_scan_step` in torch: differentiable, in the state's precision."""
    dtype = state.dtype
    value, q, k, beta = x.to(dtype), q.to(dtype), k.to(dtype), beta.to(dtype)
    epsilon = beta / (1 + beta * (k * k).sum(-1, keepdim=True))  # [B, D]
    k = k[:, None]  # [B, 1, N]
    state = (1 - epsilon[..., None] * k * k) * state + (epsilon * value)[..., None] * k
    return (state * q[:, None]).sum(-1).to(x.dtype), state


def selective_scan_step_torch(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """`selective_scan_step` in torch: differentiable, in the state's precision."""
    dtype = state.dtype
    value, delta, B, C = x.to(dtype), delta.to(dtype), B.to(dtype), C.to(dtype)
    state = (delta[..., None] * finite_rates(A, dtype)).exp() * state + (delta * value)[..., None] * B[:, None]
    return (state * C[:, None]).sum(-1).to(x.dtype), state


def finite_rates(A: Tensor, dtype: torch.dtype) -> Tensor:
    """A in `dtype`, with its least number in place of -inf: -inf times a delta of 0 would be NaN."""
    return A.to(dtype).clamp_min(torch.finfo(dtype).min)
