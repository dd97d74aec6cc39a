"""The orthogonal state recurrence of Lattice, and TTT's rule as its neighbour."""

from typing import Any

from torch import Tensor

from longseq.kernels.checks import check_chunk_size, check_tensors
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
from longseq.kernels.orthogonal_recurrence.chunk import orthogonal_recurrence_chunk
from longseq.kernels.orthogonal_recurrence.reference import (
    orthogonal_recurrence_reference,
    orthogonal_recurrence_step_torch,
)
from longseq.kernels.precision import call_dtype, is_mixed
from longseq.kernels.reading import Reverse, check_reverse
from longseq.kernels.steps import register_steps, select_step

__all__ = ["OBJECTIVES", "orthogonal_recurrence", "orthogonal_recurrence_step"]

OBJECTIVES = ("decode", "encode", "similarity", "ttt")
TRITON_WIDTH = 128  # of a state's rows and columns: it is held in registers
TRITON_CHUNK = 64  # tokens


def _triton_reasons(call: Call) -> list[str]:
    reasons = width_reasons(call, TRITON_WIDTH, "D", "M")
    if call.sizes.get("C", 1) > TRITON_CHUNK:
        reasons.append(f"chunk_size = {call.sizes['C']}, and it goes to {TRITON_CHUNK} (use backend='torch')")
    return triton_reasons(call) + reasons


# Imported in the call, because importing this package must not import Triton; an import statement, because
# torch.compile follows one.
def _orthogonal_recurrence_triton(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    from longseq.kernels.orthogonal_recurrence.triton_orthogonal import orthogonal_recurrence_triton

    return orthogonal_recurrence_triton(*args, **kwargs)


register(
    "orthogonal_recurrence",
    Backend("triton", _orthogonal_recurrence_triton, _triton_reasons),
    Backend("torch", orthogonal_recurrence_chunk, unpacking_reasons),
    Backend("reference", orthogonal_recurrence_reference, loop_reasons),
)


def _orthogonal_recurrence_step_triton(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    from longseq.kernels.orthogonal_recurrence.triton_step import orthogonal_recurrence_step_triton

    return orthogonal_recurrence_step_triton(*args, **kwargs)


register_steps("orthogonal_recurrence", orthogonal_recurrence_step_torch, _orthogonal_recurrence_step_triton, "D")


def orthogonal_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    *,
    objective: str = "decode",
    g: Tensor | None = None,
    normalize: bool = True,
    threshold: Tensor | None = None,
    scale: float = 1.0,
    initial_state: Tensor | None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 1,
    reverse: Reverse = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Write to each slot only what is orthogonal to it: a gradient step per token on how well the slots compress it.

        S_t = N(e^{g_t} S_{t-1} + Δ_t);   o_t = scale S_t q_t

    The slots s_i are the columns of S, φ_i = s_i / ‖s_i‖, P_i = I - φ_i φ_iᵀ, and N brings columns to unit length. By
    `objective`, column i of Δ_t is (all from S_{t-1}; the factor 2 of the gradient is part of gamma)

        decode       -gamma k_i P_i (φ k - v) / ‖s_i‖
        encode       -gamma (φ_iᵀ v - k_i) P_i v / ‖s_i‖
        similarity    gamma k_i P_i v / ‖s_i‖
        ttt           gamma k_i (I - ẑ ẑᵀ) v / ‖z‖   with z = S_{t-1} k, ẑ = z / ‖z‖

    and "ttt" has no N. `normalize=False` leaves out N (an ablation: norms then grow). `threshold` is the weight λ_t of
    an l1 norm on the state: before N, entries move towards zero by gamma_t λ_t. The state must be given; with N its
    columns are brought to unit length first. A zero column stays zero until it is written. Tokens with gamma = 0 and
    g = 0 leave the state as it is.

    `chunk_size` is part of the definition: the Δ_t of a chunk of C tokens (counted from where a sequence begins to be
    read) are found from the state before the chunk and added up without N, but o_t is read from N(S_t), and at the end
    of the chunk the state becomes N(S_t). C = 1 is the exact recurrence, sequential in time. C > 1 is an approximation
    whose chunks are matrix products, and takes no threshold. A sequence that is cut at a multiple of C, with the state
    carried over, gives the same numbers.

    Shapes: q, k [B, T, H, M]; v, o [B, T, H, D]; gamma, g, threshold [B, T, H] with g <= 0 (a log); states
    [B, H, D, M]. With `cu_seqlens` [N + 1] (0, the end of each packed segment) B is 1 and states are [N, H, D, M]. With
    `reverse` sequences are read from their last token to their first: the initial state is the one behind the last
    token and the final state that at the first. With reverse="second_half" the second half of the rows of the batch is
    read so, and the first half forward. Arithmetic and state are float32, or float64 for float64 inputs; o has v's
    dtype. Returns (o, final state or None).

    Raises ValueError for inputs that do not fit and for a backend that cannot run them. The values of `cu_seqlens` are
    checked by the torch and reference backends; the triton backend does not wait to read them.

    Source: Karami and Mirrokni 2025, "Lattice: Learning to Efficiently Compress the Memory", eq. 7, 10 and 12
    (objectives), 14 (N), 16 (g), 18 (threshold) and 19 (ttt); chunks from a frozen state follow the mini-batches of Sun
    et al. 2024, "Learning to (Learn at Test Time)", section 2.4.
    """
    _check_objective("orthogonal_recurrence", objective)
    check_chunk_size("orthogonal_recurrence", chunk_size)
    if threshold is not None and chunk_size > 1:
        raise ValueError(f"orthogonal_recurrence: threshold needs chunk_size=1, the exact form, not {chunk_size}")
    sizes = check_tensors(
        "orthogonal_recurrence",
        {
            "q": (q, "B T H M"),
            "k": (k, "B T H M"),
            "v": (v, "B T H D"),
            "gamma": (gamma, "B T H"),
            "g": (g, "B T H"),
            "threshold": (threshold, "B T H"),
            "initial_state": (initial_state, "S H D M"),
        },
        cu_seqlens,
    ) | {"C": chunk_size}
    check_reverse("orthogonal_recurrence", reverse, sizes["B"], cu_seqlens)
    if initial_state is None:
        raise ValueError("orthogonal_recurrence: initial_state is None, but must hold the first slots, its columns")
    dtype = call_dtype(v, q, k, gamma, g, threshold, initial_state)
    mixed = is_mixed(v, gamma, g)
    call = Call(q.device, dtype, cu_seqlens is not None, is_exporting(), sizes, reverse=reverse, mixed=mixed)
    run = select("orthogonal_recurrence", backend, call)
    return run(
        q,
        k,
        v,
        gamma,
        objective=objective,
        g=g,
        normalize=normalize,
        threshold=threshold,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
        reverse=reverse,
    )


def orthogonal_recurrence_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    state: Tensor,
    *,
    objective: str = "decode",
    g: Tensor | None = None,
    normalize: bool = True,
    threshold: Tensor | None = None,
    scale: float = 1.0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """One token of the exact `orthogonal_recurrence`: q, k [B, H, M]; v [B, H, D]; gamma, g, threshold [B, H].

    Returns o [B, H, D] in v's dtype and the next state [B, H, D, M], in the state's own dtype.

    Raises ValueError for tensors that do not fit and for a backend that cannot run them: the triton backend has no
    gradient.
    """
    _check_objective("orthogonal_recurrence_step", objective)
    run = select_step(
        "orthogonal_recurrence",
        backend,
        {
            "q": (q, "B H M"),
            "k": (k, "B H M"),
            "v": (v, "B H D"),
            "gamma": (gamma, "B H"),
            "g": (g, "B H"),
            "threshold": (threshold, "B H"),
            "state": (state, "B H D M"),
        },
    )
    return run(q, k, v, gamma, state, objective=objective, g=g, normalize=normalize, threshold=threshold, scale=scale)


def _check_objective(op: str, objective: str) -> None:
    if objective not in OBJECTIVES:
        raise ValueError(f"{op}: objective is {objective!r}, but must be one of {', '.join(OBJECTIVES)}")
