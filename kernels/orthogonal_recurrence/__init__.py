"""The orthogonal state recurrence of Lattice, and TTT's update rule as one of its objectives."""

from typing import Any

from torch import Tensor

from longseq.kernels.devices import ROOMY, longseq_shared_memory
from longseq.kernels.dispatch import Call
from longseq.kernels.operation import Recurrence, operation, step
from longseq.kernels.orthogonal_recurrence.chunk import orthogonal_recurrence_chunk
from longseq.kernels.orthogonal_recurrence.reference import (
    orthogonal_recurrence_reference,
    orthogonal_recurrence_step_torch,
)
from longseq.kernels.packing import Packing
from longseq.kernels.reading import Reverse

OBJECTIVES = ("decode", "encode", "similarity", "ttt")
TRITON_WIDTH = 128  # rows and columns of a state, which is held in registers
TRITON_CHUNK = 64  # tokens
TRITON_NARROW = 64  # rows and columns of a state whose chunks are small on every GPU


def _check(op: str, objective: str, chunk_size: int = 1, initial_state: Any = (), **_: Any) -> None:
    if objective not in OBJECTIVES:
        raise ValueError(f"{op}: objective is {objective!r}, but must be one of {', '.join(OBJECTIVES)}")
    if chunk_size > 1 and objective != "ttt":
        raise ValueError(f"{op}: chunk_size is {chunk_size}, but objective {objective!r} has no chunks: it must be 1")
    if initial_state is None:
        raise ValueError(f"{op}: initial_state is None, but must hold the first slots, its columns")


_RECURRENCE = Recurrence(
    {"q": "B T H M", "k": "B T H M", "v": "B T H D", "gamma": "B T H", "g": "B T H", "initial_state": "S H D M"},
    values="v",
    mixed=("gamma", "g"),
    check=_check,
    kind=lambda chunk_size, **_: "chunks" if chunk_size > 1 else "",
)


def _memory_reasons(call: Call) -> list[str]:
    """The reason against chunks of wide states: their tiles need more shared memory than some GPUs have."""
    memory = longseq_shared_memory(call.device.type, call.device.index)
    chunk, width = call.sizes.get("C", 1), max(call.sizes.get("D", 1), call.sizes.get("M", 1))
    if chunk == 1 or width <= TRITON_NARROW or memory >= ROOMY:
        return []
    return [
        f"chunks of states wider than {TRITON_NARROW} need more than the {memory // 1024} KiB of shared memory of this "
        "GPU (use backend='torch', or chunk_size=1)"
    ]


@operation(
    _RECURRENCE.judge,
    triton="triton_orthogonal",
    limits={"D M": TRITON_WIDTH, "C": TRITON_CHUNK},
    reasons=_memory_reasons,
    torch=orthogonal_recurrence_chunk,
    reference=orthogonal_recurrence_reference,
)
def orthogonal_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    *,
    objective: str = "decode",
    g: Tensor | None = None,
    normalize: bool = True,
    scale: float = 1.0,
    initial_state: Tensor | None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    chunk_size: int = 1,
    reverse: Reverse = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Write to each slot only what is orthogonal to it: one gradient step per token on a compression loss.

        S_t = N(e^{g_t} S_{t-1} + Δ_t);   o_t = scale S_t q_t

    The slots s_i are the columns of S, φ_i = s_i / ‖s_i‖, P_i = I - φ_i φ_iᵀ, and N brings columns to unit length. By
    `objective`, column i of Δ_t is (all from S_{t-1}; the factor 2 of the gradient is part of gamma)

        decode       -gamma k_i P_i (φ k - v) / ‖s_i‖
        encode       -gamma (φ_iᵀ v - k_i) P_i v / ‖s_i‖
        similarity    gamma k_i P_i v / ‖s_i‖
        ttt           gamma k_i (I - ẑ ẑᵀ) v / ‖z‖   with z = S_{t-1} k, ẑ = z / ‖z‖

    and "ttt" has no N. `normalize=False` leaves out N (an ablation: norms then grow). The state must be given; with N
    its columns are brought to unit length first. A zero column stays zero until it is written. Tokens with gamma = 0
    and g = 0 leave the state as it is, and its gradient.

    `chunk_size` is part of the definition, and 1 but for "ttt". There the Δ_t of a chunk of C tokens are found from the
    state before the chunk, which makes it matrix products: these are the mini-batches of TTT. Chunks are counted from
    the token that is read first. A sequence that is cut at a multiple of C, with the state carried over, gives the same
    numbers.

    Shapes: q, k [B, T, H, M]; v, o [B, T, H, D]; gamma, g [B, T, H] with g <= 0 (a log); states [B, H, D, M].

    Packing, direction, precision, inf and NaN: see `longseq.kernels`.

    Rounding: "decode" writes to all slots by one residual, φ k - v. Where gamma ‖k‖² is well above 1, the step
    overshoots, and rounding errors grow with every token: the sooner, the fewer dimensions D the M slots share. Keys of
    length 1 with gamma <= 1 are safe. Relative errors of o in float32, over 256 tokens with random q, k and v, v of
    length 1, gamma = 1/2 and M = 64:

        gamma ‖k‖²    0.5     2       4       8       16
        D = 64        4e-7    4e-7    5e-7    1e-6    4e-3
        D = 16        4e-7    5e-7    8e-7    1e-5    4e-2
        D = 4         4e-7    7e-6    9e-4    7e-1    1

    "encode" and "similarity" stayed below 2e-6 for D of 4 to 64, with gamma up to 1 and ‖k‖² of 1 and of about M.

    Returns (o, final state or None).

    Source: Karami and Mirrokni 2025, "Lattice: Learning to Efficiently Compress the Memory", eq. 7, 10 and 12
    (objectives), 14 (N), 16 (g) and 19 (ttt); mini-batches of Sun et al. 2024, "Learning to (Learn at Test Time)",
    section 2.4.
    """


@step(_RECURRENCE, torch=orthogonal_recurrence_step_torch, held=("D",))
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
    scale: float = 1.0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """One token of the exact `orthogonal_recurrence`: q, k [B, H, M]; v [B, H, D]; gamma, g [B, H].

    Returns o [B, H, D] in v's dtype and the next state [B, H, D, M], in the state's own dtype.
    """
