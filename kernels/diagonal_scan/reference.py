"""The diagonal scans as their recurrences: the definitions that every other form is compared with."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longseq.kernels.reading import Reverse, half, run_each_way
from longseq.kernels.recurrence import Sequences, run_recurrence, run_segments, token


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
    x: Tensor,
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
    reverse: Reverse,
) -> tuple[Tensor, Tensor | None]:
    """`longhorn_scan`, one token at a time. `chunk_size` is ignored."""

    def recurrence(sequences: Sequences, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for t in range(sequences[0].shape[1]):
            x_t, q_t, k_t, beta_t = token(sequences, t)
            o_t, state = longhorn_scan_step_torch(x_t, q_t, k_t, beta_t, state)
            outputs.append(o_t)
        return torch.stack(outputs, dim=1), state

    return run_recurrence(
        recurrence,
        (x, q, k, beta),
        initial_state,
        (x.shape[2], k.shape[2]),
        output_dtype=x.dtype,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        unpack=run_segments,
        reverse=reverse,
    )


def selective_scan_reference(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
    reverse: Reverse,
) -> tuple[Tensor, Tensor | None]:
    """`selective_scan`, one token at a time. `chunk_size` is ignored."""
    if A.dim() == 3:
        return scan_each_way(
            selective_scan_reference, x, delta, A, B, C, initial_state,
            output_final_state=output_final_state, cu_seqlens=None, chunk_size=chunk_size,
        )  # fmt: skip

    def recurrence(sequences: Sequences, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for t in range(sequences[0].shape[1]):
            x_t, delta_t, B_t, C_t = token(sequences, t)
            o_t, state = selective_scan_step_torch(x_t, delta_t, A, B_t, C_t, state)
            outputs.append(o_t)
        return torch.stack(outputs, dim=1), state

    return run_recurrence(
        recurrence,
        (x, delta, B, C),
        initial_state,
        A.shape,
        output_dtype=x.dtype,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        unpack=run_segments,
        reverse=reverse,
    )


def scan_each_way(
    scan: Callable[..., tuple[Tensor, Tensor | None]],
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    initial_state: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Scan the first half of the rows forward and the second backward, each with its own A, by a form for one A."""
    return run_each_way(
        lambda i: scan(
            *(half(x, i), half(delta, i), A[i], half(B, i), half(C, i)),
            initial_state=None if initial_state is None else half(initial_state, i),
            reverse=bool(i),
            **options,
        )
    )
