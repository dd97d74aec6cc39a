"""Recursive least squares as its recurrence: the definition that every other form is compared with."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from longseq.kernels.recurrence import Sequences, run_recurrence, run_segments, token

# the matrix A [B, H, K, K] and the number of tokens that it has seen [B]
InverseState = tuple[Tensor, Tensor]


def recursive_least_squares_step_torch(
    x: Tensor, u: Tensor | None, state: InverseState, *, refresh_period: int | None = 20, refresh: float = 1e-3,
) -> tuple[Tensor, InverseState]:  # fmt: skip
    """`recursive_least_squares_step` in torch: differentiable, in the state's precision. Without u, A stays."""
    A, steps = state
    steps = steps + 1
    added = refresh_due(steps, torch.ones_like(steps), refresh_period, refresh, A.dtype)
    y, A = update(x.to(A.dtype), None if u is None else u.to(A.dtype), added, symmetric(A), identity(A))
    return y.to(x.dtype), (A, steps)


def recursive_least_squares_reference(
    x: Tensor, u: Tensor, *, count: Tensor, lambda0: float, refresh_period: int | None, refresh: float, chunk_size: int,
    **call: Any,
) -> tuple[Tensor, InverseState | None]:  # fmt: skip
    """`recursive_least_squares`, one token at a time. `chunk_size` is ignored."""

    def core(sequences: Sequences, state: InverseState) -> tuple[Tensor, InverseState]:
        A, steps = state
        seen = steps[:, None] + sequences[2].cumsum(1)
        added = refresh_due(seen, sequences[2], refresh_period, refresh, A.dtype)
        A, eye, outputs = symmetric(A), identity(A), []
        for t in range(seen.shape[1]):
            x_t, u_t, _ = token(sequences, t)
            y_t, A = update(x_t.to(A.dtype), u_t.to(A.dtype), added[:, t], A, eye)
            outputs.append(y_t)
        return torch.stack(outputs, dim=1), (A, seen[:, -1])

    first = partial(first_state, x=x, lambda0=lambda0)
    return run_recurrence(core, (x, u, count), state_shape=first, output_dtype=x.dtype, unpack=run_segments, **call)


def first_state(rows: int, dtype: torch.dtype, *, x: Tensor, lambda0: float) -> InverseState:
    """The state before the first token: A = I / lambda0 and no steps."""
    heads, width = x.shape[2:]
    eye = torch.eye(width, dtype=dtype, device=x.device) / lambda0
    return eye.expand(rows, heads, width, width), torch.zeros(rows, dtype=torch.int64, device=x.device)


def refresh_due(seen: Tensor, count: Tensor, period: int | None, refresh: float, dtype: torch.dtype) -> Tensor:
    """What the refresh adds to the diagonal after each token; `seen` counts the tokens up to and including this one."""
    if not period:
        return torch.zeros_like(seen, dtype=dtype)
    return ((seen % period == 0) & (count > 0)).to(dtype) * refresh


def symmetric(A: Tensor) -> Tensor:
    """The symmetric part of A."""
    return (A + A.transpose(-1, -2)) / 2


def identity(A: Tensor) -> Tensor:
    return torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)


def update(x: Tensor, u: Tensor | None, added: Tensor, A: Tensor, eye: Tensor) -> tuple[Tensor, Tensor]:
    """y and the next A for one token: x, u [B, H, K], added [B], A [B, H, K, K] symmetric, eye [K, K].

    Without u, A changes only by `added`.
    """
    if u is not None:
        column = (A * u.unsqueeze(-2)).sum(-1)  # [B, H, K]
        delta = 1 + (column * u).sum(-1)  # [B, H]
        # the outer product before the division, which keeps A symmetric to the last bit
        A = A - column.unsqueeze(-1) * column.unsqueeze(-2) / delta[..., None, None]
    A = A + added[:, None, None, None] * eye
    return (A * x.unsqueeze(-2)).sum(-1), A
