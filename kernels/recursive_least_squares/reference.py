"""Recursive least squares as its recurrence: the definition that every other form is compared with."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longseq.kernels.recurrence import each

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


def counted(step: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, Any]]:
    """A step at which tokens that do not count leave the state as it is."""

    def run(*, count: Tensor, lambda0: float, state: Any, **arguments: Any) -> tuple[Tensor, Any]:
        def choose(new: Tensor, old: Tensor) -> Tensor:
            return torch.where((count > 0).reshape(-1, *(1,) * (new.dim() - 1)), new, old)

        output, after = step(state=state, **arguments)
        return output, each(choose, after, state)

    return run


def first_state(rows: int, dtype: torch.dtype, *, x: Tensor, lambda0: float, **_: Any) -> InverseState:
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
