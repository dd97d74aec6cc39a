"""Diagonal scans h_t = a_t h_{t-1} + b_t over a state [D, N]: Longhorn's and Mamba's."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from longseq.kernels.checks import check_chunk_size, check_tensors
from longseq.kernels.devices import triton_reasons
from longseq.kernels.diagonal_scan.chunk import longhorn_scan_chunk, selective_scan_chunk
from longseq.kernels.diagonal_scan.reference import (
    longhorn_scan_reference,
    longhorn_scan_step_torch,
    selective_scan_reference,
    selective_scan_step_torch,
)
from longseq.kernels.dispatch import (
    Backend,
    Call,
    is_exporting,
    loop_reasons,
    register,
    remembered,
    select,
    unpacking_reasons,
)
from longseq.kernels.precision import call_dtype, is_mixed
from longseq.kernels.reading import Reverse, check_own_parameters, check_reverse
from longseq.kernels.steps import register_steps, select_step

__all__ = ["longhorn_scan", "longhorn_scan_step", "selective_scan", "selective_scan_step"]

TRITON_ENTRIES = 64  # of a state's row, held in registers


def _scan_reasons(call: Call) -> list[str]:
    reasons = triton_reasons(call)
    if call.sizes.get("N", 1) > TRITON_ENTRIES:
        reasons.append(f"N = {call.sizes['N']}, and it holds at most {TRITON_ENTRIES} entries (use backend='torch')")
    return reasons


# Imported in the call, because importing this package must not import Triton; an import statement, because
# torch.compile follows one.
def _longhorn_scan_triton(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    from longseq.kernels.diagonal_scan.triton_scan import longhorn_scan_triton

    return longhorn_scan_triton(*args, **kwargs)


def _selective_scan_triton(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    from longseq.kernels.diagonal_scan.triton_scan import selective_scan_triton

    return selective_scan_triton(*args, **kwargs)


register(
    "longhorn_scan",
    Backend("triton", _longhorn_scan_triton, _scan_reasons),
    Backend("torch", longhorn_scan_chunk, unpacking_reasons),
    Backend("reference", longhorn_scan_reference, loop_reasons),
)
register(
    "selective_scan",
    Backend("triton", _selective_scan_triton, _scan_reasons),
    Backend("torch", selective_scan_chunk, unpacking_reasons),
    Backend("reference", selective_scan_reference, loop_reasons),
)


def _longhorn_scan_step_triton(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    from longseq.kernels.diagonal_scan.triton_step import longhorn_scan_step_triton

    return longhorn_scan_step_triton(*args, **kwargs)


def _selective_scan_step_triton(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    from longseq.kernels.diagonal_scan.triton_step import selective_scan_step_triton

    return selective_scan_step_triton(*args, **kwargs)


register_steps("longhorn_scan", longhorn_scan_step_torch, _longhorn_scan_step_triton, "N")
register_steps("selective_scan", selective_scan_step_torch, _selective_scan_step_triton, "N")


def longhorn_scan(
    x: Tensor,
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
    reverse: Reverse = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Learn x online from the key k: each channel solves a least-squares step in closed form, diagonalised.

        epsilon_t = beta_t / (1 + beta_t k_tᵀk_t)
        S_t = (1 - epsilon_t ⊗ k_t²) ⊙ S_{t-1} + (epsilon_t ⊙ x_t) ⊗ k_t;   o_t = S_t q_t

    With beta >= 0 the decay lies in (0, 1] whatever the keys. Tokens with beta = 0 leave the state as it is.

    Shapes: x, beta, o [B, T, D]; q, k [B, T, N], shared by the channels; states [B, D, N]. With `cu_seqlens` [N + 1]
    (0, the end of each packed segment) B is 1 and states have one row for each segment. With `reverse` sequences are
    read from their last token to their first: the initial state is the one behind the last token and the final state
    that at the first. With reverse="second_half" the second half of the rows of the batch is read so, and the first
    half forward. Arithmetic and state are float32, or float64 for float64 inputs; o has x's dtype. `chunk_size` (None:
    chosen from the sizes) changes speed and memory but not the result. Returns (o, final state or None).

    Raises ValueError for inputs that do not fit and for a backend that cannot run them. The values of `cu_seqlens` are
    checked by the torch and reference backends; the triton backend does not wait to read them.

    Source: Liu et al. 2024, "Longhorn: State Space Models are Amortized Online Learners", eq. 7.
    """
    run = _choose_longhorn_scan(x, q, k, beta, initial_state, cu_seqlens, chunk_size, reverse, backend)
    return run(
        x,
        q,
        k,
        beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
        reverse=reverse,
    )


@remembered("longhorn_scan")
def _choose_longhorn_scan(
    x: Tensor, q: Tensor, k: Tensor, beta: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None,
    chunk_size: int | None, reverse: Reverse, backend: str,
) -> Callable[..., Any]:  # fmt: skip
    if chunk_size is not None:
        check_chunk_size("longhorn_scan", chunk_size)
    sizes = check_tensors(
        "longhorn_scan",
        {
            "x": (x, "B T D"),
            "q": (q, "B T N"),
            "k": (k, "B T N"),
            "beta": (beta, "B T D"),
            "initial_state": (initial_state, "S D N"),
        },
        cu_seqlens,
    )
    check_reverse("longhorn_scan", reverse, sizes["B"], cu_seqlens)
    dtype = call_dtype(x, q, k, beta, initial_state)
    call = Call(x.device, dtype, cu_seqlens is not None, is_exporting(), sizes, reverse=reverse)
    return select("longhorn_scan", backend, call)


def selective_scan(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
    reverse: Reverse = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Mamba's state space model with input-dependent step sizes.

        S_t = exp(delta_t ⊗ 1 ⊙ A) ⊙ S_{t-1} + (delta_t ⊙ x_t) ⊗ B_t;   o_t = S_t C_t

    Tokens with delta = 0 leave the state as it is. The skip connection D x and the gate are left to the caller.

    Shapes: x, delta, o [B, T, D] with delta >= 0; A [D, N] with A <= 0; B, C [B, T, N], shared by the channels; states
    [B, D, N]. With `cu_seqlens` [N + 1] (0, the end of each packed segment) B is 1 and states have one row for each
    segment. With `reverse` sequences are read from their last token to their first: the initial state is the one behind
    the last token and the final state that at the first. With reverse="second_half" the second half of the rows of the
    batch is read so, and the first half forward; A may then be [2, D, N], one for each half. Arithmetic
    and state are float32, or float64 for float64 inputs; o has x's dtype. `chunk_size` (None: chosen from the sizes)
    changes speed and memory but not the result. Returns (o, final state or None).

    Raises ValueError for inputs that do not fit and for a backend that cannot run them. The values of `cu_seqlens` are
    checked by the torch and reference backends; the triton backend does not wait to read them.

    Source: Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", Algorithm 2, with the
    authors' simplification delta B of the discretised B.
    """
    run = _choose_selective_scan(x, delta, A, B, C, initial_state, cu_seqlens, chunk_size, reverse, backend)
    return run(
        x,
        delta,
        A,
        B,
        C,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
        reverse=reverse,
    )


@remembered("selective_scan")
def _choose_selective_scan(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, chunk_size: int | None, reverse: Reverse, backend: str,
) -> Callable[..., Any]:  # fmt: skip
    if chunk_size is not None:
        check_chunk_size("selective_scan", chunk_size)
    sizes = check_tensors(
        "selective_scan",
        {
            "x": (x, "B T D"),
            "delta": (delta, "B T D"),
            "A": (A, "D N" if A.dim() == 2 else "P D N"),
            "B": (B, "B T N"),
            "C": (C, "B T N"),
            "initial_state": (initial_state, "S D N"),
        },
        cu_seqlens,
    )
    check_reverse("selective_scan", reverse, sizes["B"], cu_seqlens)
    if A.dim() == 3:
        check_own_parameters("selective_scan", "A", A, reverse)
    dtype = call_dtype(x, delta, A, B, C, initial_state)
    mixed = is_mixed(x, delta, A)
    call = Call(x.device, dtype, cu_seqlens is not None, is_exporting(), sizes, reverse=reverse, mixed=mixed)
    return select("selective_scan", backend, call)


def longhorn_scan_step(
    x: Tensor, q: Tensor, k: Tensor, beta: Tensor, state: Tensor, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """One token of `longhorn_scan`: x, beta [B, D]; q, k [B, N]; state [B, D, N].

    Returns o [B, D] in x's dtype and the next state, in the state's own dtype.

    Raises ValueError for tensors that do not fit and for a backend that cannot run them: the triton backend has no
    gradient.
    """
    run = select_step(
        "longhorn_scan",
        backend,
        {
            "x": (x, "B D"),
            "q": (q, "B N"),
            "k": (k, "B N"),
            "beta": (beta, "B D"),
            "state": (state, "B D N"),
        },
    )
    return run(x, q, k, beta, state)


def selective_scan_step(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """One token of `selective_scan`: x, delta [B, D]; A [D, N]; B, C [B, N]; state [B, D, N].

    Returns o [B, D] in x's dtype and the next state, in the state's own dtype.

    Raises ValueError for tensors that do not fit and for a backend that cannot run them: the triton backend has no
    gradient.
    """
    run = select_step(
        "selective_scan",
        backend,
        {
            "x": (x, "B D"),
            "delta": (delta, "B D"),
            "A": (A, "D N"),
            "B": (B, "B N"),
            "C": (C, "B N"),
            "state": (state, "B D N"),
        },
    )
    return run(x, delta, A, B, C, state)
