"""The diagonal scans as their recurrences: the definitions that every other form is compared with."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longseq.kernels.reading import half, run_each_way
from longseq.kernels.recurrence import run_tokens


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


def longhorn_scan_reference(
    x: Tensor, q: Tensor, k: Tensor, beta: Tensor, *, chunk_size: Any, **call: Any
) -> tuple[Tensor, Tensor | None]:
    """`longhorn_scan`, one token at a time. `chunk_size` is ignored."""

    def step(token: list[Any], state: Tensor) -> tuple[Tensor, Tensor]:
        x, q, k, beta = token
        return longhorn_scan_step_torch(x, q, k, beta, state)

    return run_tokens(step, (x, q, k, beta), state_shape=(x.shape[2], k.shape[2]), output_dtype=x.dtype, **call)


def selective_scan_reference(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, *, chunk_size: Any, **call: Any
) -> tuple[Tensor, Tensor | None]:
    """`selective_scan`, one token at a time. `chunk_size` is ignored."""
    if A.dim() == 3:
        return scan_each_way(selective_scan_reference, x, delta, A, B, C, chunk_size=chunk_size, **call)

    def step(token: list[Any], state: Tensor) -> tuple[Tensor, Tensor]:
        x, delta, B, C = token
        return selective_scan_step_torch(x, delta, A, B, C, state)

    return run_tokens(step, (x, delta, B, C), state_shape=(x.shape[2], B.shape[2]), output_dtype=x.dtype, **call)


def scan_each_way(
    scan: Callable[..., tuple[Tensor, Tensor | None]], x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, *,
    initial_state: Tensor | None, reverse: Any, **call: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Scan the first half of the rows forward and the second backward, each with its own A, by a form for one A."""

    def run(i: int) -> tuple[Tensor, Tensor | None]:
        state = None if initial_state is None else half(initial_state, i)
        rows = half(x, i), half(delta, i), A[i], half(B, i), half(C, i)
        return scan(*rows, initial_state=state, reverse=bool(i), **call)

    return run_each_way(run)
