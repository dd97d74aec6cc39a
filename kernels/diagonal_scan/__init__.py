"""Diagonal scans h_t = a_t h_{t-1} + b_t over a state [D, N]: Longhorn's and Mamba's."""

from torch import Tensor

from longseq.kernels.diagonal_scan.chunk import longhorn_scan_chunk, selective_scan_chunk
from longseq.kernels.diagonal_scan.reference import longhorn_scan_step_torch, selective_scan_step_torch
from longseq.kernels.operation import Recurrence, operation, step
from longseq.kernels.packing import Packing
from longseq.kernels.reading import Reverse

TRITON_ENTRIES = 64  # of a row of the state, which is held in registers

_LONGHORN = Recurrence(
    {"x": "B T D", "q": "B T N", "k": "B T N", "beta": "B T D", "initial_state": "S D N"}, values="x"
)
_SELECTIVE = Recurrence(
    {"x": "B T D", "delta": "B T D", "A": "D N | P D N", "B": "B T N", "C": "B T N", "initial_state": "S D N"},
    values="x",
    mixed=("delta", "A"),
)


@operation(
    _LONGHORN.judge,
    triton="triton_scan",
    limits={"N": TRITON_ENTRIES},
    torch=longhorn_scan_chunk,
    reference=_LONGHORN.loop(longhorn_scan_step_torch),
)
def longhorn_scan(
    x: Tensor,
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    reverse: Reverse = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Learn x online from the key k: each channel solves a least-squares step in closed form, diagonalised.

        epsilon_t = beta_t / (1 + beta_t k_tᵀk_t)
        S_t = (1 - epsilon_t ⊗ k_t²) ⊙ S_{t-1} + (epsilon_t ⊙ x_t) ⊗ k_t;   o_t = S_t q_t

    With beta >= 0 the decay lies in (0, 1] whatever the keys, as long as their squares are finite: below 1e18 in
    float32. Tokens with beta = 0 leave the state as it is.

    Shapes: x, beta, o [B, T, D]; q, k [B, T, N], shared by the channels; states [B, D, N].

    Packing, direction, precision, inf and NaN: see `longseq.kernels`.

    Returns (o, final state or None).

    Source: Liu et al. 2024, "Longhorn: State Space Models are Amortized Online Learners", eq. 7.
    """


@operation(
    _SELECTIVE.judge,
    triton="triton_scan",
    limits={"N": TRITON_ENTRIES},
    torch=selective_scan_chunk,
    reference=_SELECTIVE.loop(selective_scan_step_torch),
)
def selective_scan(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    reverse: Reverse = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Mamba's state space model with input-dependent step sizes.

        S_t = exp(delta_t ⊗ 1 ⊙ A) ⊙ S_{t-1} + (delta_t ⊙ x_t) ⊗ B_t;   o_t = S_t C_t

    Tokens with delta = 0 leave the state as it is, also where A is -inf (which gives NaN there in the Triton kernels).
    The skip connection D x and the gate are left to the caller.

    Shapes: x, delta, o [B, T, D] with delta >= 0; A [D, N] with A <= 0; B, C [B, T, N], shared by the channels; states
    [B, D, N].

    Packing, direction, precision, inf and NaN: see `longseq.kernels`. With reverse="second_half" A may be
    [2, D, N], one for each half of the rows.

    Returns (o, final state or None).

    Source: Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", Algorithm 2, with the
    authors' simplification delta B of the discretised B.
    """


@step(_LONGHORN, torch=longhorn_scan_step_torch, held=("N",))
def longhorn_scan_step(
    x: Tensor, q: Tensor, k: Tensor, beta: Tensor, state: Tensor, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """One token of `longhorn_scan`: x, beta [B, D]; q, k [B, N]; state [B, D, N].

    Returns o [B, D] in x's dtype and the next state, in the state's own dtype.
    """


@step(_SELECTIVE, torch=selective_scan_step_torch, held=("N",))
def selective_scan_step(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """One token of `selective_scan`: x, delta [B, D]; A [D, N]; B, C [B, N]; state [B, D, N].

    Returns o [B, D] in x's dtype and the next state, in the state's own dtype.
    """
