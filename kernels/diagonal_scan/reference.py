"""The diagonal scans as their recurrences: the definitions that every other form is compared with."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longseq.kernels.reading import half, run_each_way
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
    x: Tensor, q: Tensor, k: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """`longhorn_scan`, one token at a time. `chunk_size` is ignored."""
    return _scan(longhorn_scan_step_torch, (x, q, k, beta), k, **options)


def selective_scan_reference(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """`selective_scan`, one token at a time. `chunk_size` is ignored."""
    if A.dim() == 3:
        return scan_each_way(selective_scan_reference, x, delta, A, B, C, **options)

    def step(x: Tensor, delta: Tensor, B: Tensor, C: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return selective_scan_step_torch(x, delta, A, B, C, state)

    return _scan(step, (x, delta, B, C), B, **options)


def _scan(
    step: Callable[..., tuple[Tensor, Tensor]], sequences: Sequences, key: Tensor, *, chunk_size: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Apply `step` to one token after the other; `options` are those of `run_recurrence`."""
    x = sequences[0]

    def recurrence(sequences: Sequences, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for t in range(sequences[0].shape[1]):
            o_t, state = step(*token(sequences, t), state)
            outputs.append(o_t)
        return torch.stack(outputs, dim=1), state

    shape = x.shape[2], key.shape[2]
    return run_recurrence(
        recurrence, sequences, state_shape=shape, output_dtype=x.dtype, unpack=run_segments, **options
    )


def scan_each_way(
    scan: Callable[..., tuple[Tensor, Tensor | None]],
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    initial_state: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Scan the first half of the rows forward and the second backward, each with its own A, by a form for one A."""
    del options["reverse"]
    return run_each_way(
        lambda i: scan(
            *(half(x, i), half(delta, i), A[i], half(B, i), half(C, i)),
            initial_state=None if initial_state is None else half(initial_state, i),
            reverse=bool(i),
            **options,
        )
    )
