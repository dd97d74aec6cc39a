"""Recursive least squares: products with the inverse of a growing sum of outer products."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from longseq.kernels.operation import COUNTER, Recurrence, operation, step
from longseq.kernels.packing import Packing
from longseq.kernels.reading import Reverse
from longseq.kernels.recursive_least_squares.chunk import recursive_least_squares_chunk
from longseq.kernels.recursive_least_squares.reference import (
    InverseState,
    recursive_least_squares_reference,
    recursive_least_squares_step_torch,
)

TRITON_WIDTH = 64  # of the matrix, which one program holds in registers


def check_refresh(op: str, refresh_period: int | None, refresh: float, lambda0: float = 1.0, **_: Any) -> None:
    """Check the constants of the recurrence."""
    if not lambda0 > 0:
        raise ValueError(f"{op}: lambda0 is {lambda0}, but must be above 0, or the first A = I / lambda0 is not finite")
    if refresh_period is not None and refresh_period < 0:
        raise ValueError(f"{op}: refresh_period is {refresh_period}, but must not be negative; use 0 for no refresh")
    if not refresh >= 0:
        raise ValueError(f"{op}: refresh is {refresh}, but must not be negative; use refresh_period=0 for no refresh")


def count_tokens(mask: Tensor | None, **arguments: Any) -> Mapping[str, Any]:
    """The arguments of backends: `count` in place of `mask`, and zeros at the tokens that the mask leaves out.

    `count` [B, T] int64 is 1 at real tokens and 0 at the others.
    """
    x = arguments["x" if "x" in arguments else "k"]
    if mask is None:
        return {**arguments, "count": x.new_ones(x.shape[:2], dtype=torch.int64)}
    absent = ~mask[..., None, None]
    written = {name: arguments[name] for name in ("x", "k", "v", "u") if arguments.get(name) is not None}
    masked = {name: x.masked_fill(absent, 0) for name, x in written.items()}
    return {**arguments, **masked, "count": mask.long()}


_RECURRENCE = Recurrence(
    {"x": "B T H K", "u": "B T H K", "initial_state": {"A": "S H K K", "steps": COUNTER}},
    values="x",
    mixed=("u",),
    check=check_refresh,
)


@operation(
    _RECURRENCE.judge,
    triton="triton_least_squares",
    limits={"K": TRITON_WIDTH},
    torch=recursive_least_squares_chunk,
    reference=recursive_least_squares_reference,
    prepare=count_tokens,
)
def recursive_least_squares(
    x: Tensor,
    u: Tensor,
    *,
    lambda0: float = 0.1,
    refresh_period: int | None = 20,
    refresh: float = 1e-3,
    mask: Tensor | None = None,
    initial_state: InverseState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    chunk_size: int = 64,
    reverse: Reverse = False,
    backend: str = "auto",
) -> tuple[Tensor, InverseState | None]:
    """Multiply each x by the inverse of lambda0 I plus the sum of u uᵀ so far.

        A_t = A_{t-1} - (A_{t-1} u_t)(A_{t-1} u_t)ᵀ / (1 + u_tᵀ A_{t-1} u_t),   A_0 = I / lambda0
        A_t += refresh I   after every `refresh_period` tokens;   y_t = A_t x_t

    Without the refresh (`refresh_period` None or 0) A_t = (lambda0 I + Σ_{s≤t} u_s u_sᵀ)^{-1}. The state is A and the
    number of tokens so far. That number decides when a refresh is due, so that a sequence can be split into calls
    anywhere. Only the symmetric part of a given A is used. Tokens that `mask` leaves out are not counted and give y =
    0; a counted token with u = 0 changes A only by a refresh.

    Shapes: x, u, y [B, T, H, K]; mask [B, T], True at real tokens; states (A [B, H, K, K], steps [B] int64).

    Packing, direction, precision, inf and NaN: see `longseq.kernels`. In float32 uᵀ A u should stay below
    1e6 (‖u‖² below 1e6 lambda0), where the 1 beside it is lost to rounding: beyond, the chunk form is wrong or NaN.

    Returns (y, final state or None).

    Source: Pandey and Singh 2026, "Variational Linear Attention", eq. 9 and Algorithm 1, lines 12 to 19. The paper
    states that the recurrence of A cannot be parallel in time; the chunk form is.
    """


@step(_RECURRENCE, torch=recursive_least_squares_step_torch, held=("K",))
def recursive_least_squares_step(
    x: Tensor,
    u: Tensor,
    state: InverseState,
    *,
    refresh_period: int | None = 20,
    refresh: float = 1e-3,
    backend: str = "auto",
) -> tuple[Tensor, InverseState]:
    """One token of `recursive_least_squares`: x, u [B, H, K]; state (A [B, H, K, K], steps [B]).

    Returns y [B, H, K] in x's dtype and the next state, in the state's own dtype.
    """
