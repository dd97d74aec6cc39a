"""Recursive least squares: products with the inverse of a growing sum of outer products."""

from typing import Any

import torch
from torch import Tensor

from longseq.kernels.checks import check_chunk_size, check_parts, check_tensors
from longseq.kernels.devices import triton_reasons, width_reasons
from longseq.kernels.dispatch import (
    Backend,
    Call,
    is_exporting,
    loop_reasons,
    register,
    select,
    unpacking_reasons,
)
from longseq.kernels.precision import call_dtype, is_mixed
from longseq.kernels.reading import Reverse, check_reverse
from longseq.kernels.recursive_least_squares.chunk import recursive_least_squares_chunk
from longseq.kernels.recursive_least_squares.reference import (
    InverseState,
    recursive_least_squares_reference,
    recursive_least_squares_step_torch,
)
from longseq.kernels.steps import register_steps, select_step

__all__ = ["recursive_least_squares", "recursive_least_squares_step"]

TRITON_WIDTH = 64  # of the matrix that one program holds in registers


def inverse_reasons(call: Call) -> list[str]:
    """The reasons against the Triton form for a matrix A of this call's width K."""
    return triton_reasons(call) + width_reasons(call, TRITON_WIDTH, "K")


# Imported in the call, because importing this package must not import Triton; an import statement, because
# torch.compile follows one.
def _recursive_least_squares_triton(*args: Any, **kwargs: Any) -> tuple[Tensor, InverseState | None]:
    from longseq.kernels.recursive_least_squares.triton_least_squares import recursive_least_squares_triton

    return recursive_least_squares_triton(*args, **kwargs)


register(
    "recursive_least_squares",
    Backend("triton", _recursive_least_squares_triton, inverse_reasons),
    Backend("torch", recursive_least_squares_chunk, unpacking_reasons),
    Backend("reference", recursive_least_squares_reference, loop_reasons),
)


def _recursive_least_squares_step_triton(*args: Any, **kwargs: Any) -> tuple[Tensor, InverseState]:
    from longseq.kernels.recursive_least_squares.triton_step import recursive_least_squares_step_triton

    return recursive_least_squares_step_triton(*args, **kwargs)


register_steps("recursive_least_squares", recursive_least_squares_step_torch, _recursive_least_squares_step_triton, "K")


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
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    reverse: Reverse = False,
    backend: str = "auto",
) -> tuple[Tensor, InverseState | None]:
    """Multiply each x by the inverse of lambda0 I plus the sum of u uᵀ so far.

        A_t = A_{t-1} - (A_{t-1} u_t)(A_{t-1} u_t)ᵀ / (1 + u_tᵀ A_{t-1} u_t),   A_0 = I / lambda0
        A_t += refresh I   after every `refresh_period` tokens;   y_t = A_t x_t

    Without the refresh (`refresh_period` None or 0) A_t = (lambda0 I + Σ_{s≤t} u_s u_sᵀ)^{-1}. The state is A and the
    number of tokens behind it, by which the refresh falls due whatever the calls that a sequence is split into. Of a
    given A the symmetric part is used. Tokens that `mask` leaves out are not counted and give y = 0; a counted token
    with u = 0 changes A only by a refresh.

    Shapes: x, u, y [B, T, H, K]; mask [B, T], True at real tokens; states (A [B, H, K, K], steps [B] int64). With
    `cu_seqlens` [N + 1] (0, the end of each packed segment) B is 1 and states have one row for each segment. With
    `reverse` sequences are read from their last token to their first: the initial state is the one behind the last
    token and the final state that at the first. With reverse="second_half" the second half of the rows of the batch is
    read so, and the first half forward. Arithmetic and A are float32, or float64 for float64 inputs; y has x's dtype.
    `chunk_size` changes speed and memory but not the result. In float32 uᵀ A u should stay below 1e6 (‖u‖² below 1e6
    lambda0), where the 1 beside it is lost to rounding: beyond, the chunk form is wrong or NaN. Returns (y, final state
    or None).

    Raises ValueError for inputs that do not fit and for a backend that cannot run them.

    Source: Pandey and Singh 2026, "Variational Linear Attention", eq. 9 and Algorithm 1, lines 12 to 19. The paper
    states that the recurrence of A cannot be parallel in time; the chunk form is.
    """
    check_chunk_size("recursive_least_squares", chunk_size)
    check_refresh("recursive_least_squares", lambda0, refresh_period, refresh)
    A, steps = check_parts("recursive_least_squares", initial_state, "A", "steps")
    sizes = check_tensors(
        "recursive_least_squares",
        {"x": (x, "B T H K"), "u": (u, "B T H K"), "initial_state[0]": (A, "S H K K")},
        cu_seqlens,
        mask=mask,
    )
    check_steps("recursive_least_squares", "initial_state[1]", steps, A)
    check_reverse("recursive_least_squares", reverse, sizes["B"], cu_seqlens)
    dtype = call_dtype(x, u, A)
    mixed = is_mixed(x, u)
    call = Call(x.device, dtype, cu_seqlens is not None, is_exporting(), sizes, reverse=reverse, mixed=mixed)
    run = select("recursive_least_squares", backend, call)
    count, (x, u) = mask_tokens(mask, x, u)
    return run(
        x,
        u,
        count=count,
        lambda0=lambda0,
        refresh_period=refresh_period,
        refresh=refresh,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
        reverse=reverse,
    )


def check_refresh(op: str, lambda0: float, refresh_period: int | None, refresh: float) -> None:
    """Check the constants of the recurrence."""
    if not lambda0 > 0:
        raise ValueError(f"{op}: lambda0 is {lambda0}, but must be above 0, or the first A = I / lambda0 is not finite")
    if refresh_period is not None and refresh_period < 0:
        raise ValueError(f"{op}: refresh_period is {refresh_period}, but must not be negative; use 0 for no refresh")
    if not refresh >= 0:
        raise ValueError(f"{op}: refresh is {refresh}, but must not be negative; use refresh_period=0 for no refresh")


def check_steps(op: str, name: str, steps: Tensor | None, like: Tensor | None) -> None:
    """Check the counter of a state: one integer for each row of `like`, its first tensor."""
    if steps is None or like is None or is_exporting():
        return
    if steps.dtype != torch.int64:
        raise ValueError(f"{op}: {name} is {steps.dtype}, but must be int64: the tokens seen by each row; cast it")
    if steps.shape != like.shape[:1]:
        raise ValueError(f"{op}: {name} has shape {tuple(steps.shape)}, but must be [{like.shape[0]}], one a row")
    if steps.device != like.device:
        raise ValueError(f"{op}: {name} is on {steps.device} but the rest of the state on {like.device}; move it there")


def mask_tokens(mask: Tensor | None, *sequences: Tensor | None) -> tuple[Tensor, list[Any]]:
    """A sequence of ones at real tokens [B, T] int64, and the sequences [B, T, H, ...] with zeros at the others."""
    first = next(x for x in sequences if x is not None)
    if mask is None:
        return torch.ones_like(first[:, :, 0, 0], dtype=torch.int64), list(sequences)
    absent = ~mask[..., None, None]
    return mask.long(), [None if x is None else x.masked_fill(absent, 0) for x in sequences]


def recursive_least_squares_step(
    x: Tensor,
    u: Tensor,
    state: InverseState,
    *,
    lambda0: float = 0.1,
    refresh_period: int | None = 20,
    refresh: float = 1e-3,
    backend: str = "auto",
) -> tuple[Tensor, InverseState]:
    """One token of `recursive_least_squares`: x, u [B, H, K]; state (A [B, H, K, K], steps [B]).

    Returns y [B, H, K] in x's dtype and the next state, in the state's own dtype. `lambda0` has no meaning here: a step
    brings its state.

    Raises ValueError for tensors that do not fit and for a backend that cannot run them: the triton backend has no
    gradient.
    """
    op = "recursive_least_squares_step"
    check_refresh(op, lambda0, refresh_period, refresh)
    A, steps = check_parts(op, state, "A", "steps", name="state")
    layouts = {"x": (x, "B H K"), "u": (u, "B H K"), "state[0]": (A, "B H K K")}
    run = select_step("recursive_least_squares", backend, layouts)
    check_steps(op, "state[1]", steps, A)
    return run(x, u, state, refresh_period=refresh_period, refresh=refresh)
