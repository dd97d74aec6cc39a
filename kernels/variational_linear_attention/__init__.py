"""Variational linear attention: a delta rule whose write direction depends on the keys written before."""

from torch import Tensor

from longseq.kernels.delta_rule import TRITON_WIDTH
from longseq.kernels.operation import COUNTER, Recurrence, operation, step
from longseq.kernels.packing import Packing
from longseq.kernels.reading import Reverse
from longseq.kernels.recursive_least_squares import TRITON_WIDTH as INVERSE_WIDTH
from longseq.kernels.recursive_least_squares import check_refresh, count_tokens
from longseq.kernels.variational_linear_attention.chunk import variational_linear_attention_chunk
from longseq.kernels.variational_linear_attention.reference import (
    VariationalState,
    counted_step,
    first_state,
    variational_linear_attention_step_torch,
)

_RECURRENCE = Recurrence(
    {
        "q": "B T H K",
        "k": "B T H K",
        "v": "B T H V",
        "u": "B T H K",
        "initial_state": {"S": "S H K V", "A": "S H K K", "z": "S H K", "steps": COUNTER},
    },
    values="v",
    mixed=("u",),
    check=check_refresh,
    power_of_two=True,
)


@operation(
    _RECURRENCE.judge,
    triton="triton_variational",
    limits={"K": INVERSE_WIDTH, "V": TRITON_WIDTH},
    torch=variational_linear_attention_chunk,
    reference=_RECURRENCE.loop(counted_step, first_state),
    prepare=count_tokens,
)
def variational_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor | None = None,
    *,
    lambda0: float = 0.1,
    refresh_period: int | None = 20,
    refresh: float = 1e-3,
    eps: float = 1e-4,
    normalize_key: bool = True,
    normalize_alpha: bool = True,
    normalizer: bool = True,
    mask: Tensor | None = None,
    initial_state: VariationalState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    chunk_size: int = 64,
    reverse: Reverse = False,
    backend: str = "auto",
) -> tuple[Tensor, VariationalState | None]:
    """Replace the value that a key reads, and write along the directions that earlier tokens have used least.

        A_t as in `recursive_least_squares` of u;   k̂_t = k_t / ‖k_t‖;   α̂_t = A_t k̂_t / ‖A_t k̂_t‖
        S_t = S_{t-1} + α̂_t (v_t - S_{t-1}ᵀ k̂_t)ᵀ;   z_t = z_{t-1} + k_t;   o_t = S_tᵀ q_t / max(z_tᵀ q_t, eps)

    q and k are the features φ(.), which should not be negative where the normaliser is used; u is the finished penalty
    direction. Ablations: u None keeps A as it is; `normalize_key` and `normalize_alpha` False leave out a division (no
    α normalisation is VLAv2, which diverges where A is large); `normalizer` False leaves out that by z_tᵀ q_t. Tokens
    that `mask` leaves out do not change the state, and their outputs are not defined.

    The transition I - α̂ k̂ᵀ has spectral radius 1: its eigenvalues are 1 and 1 - c with c = α̂ᵀ k̂ in (0, 1] because A is
    positive definite. Its spectral norm is 1 only for c = 1: σ² = (3 - 2c + sqrt((3 - 2c)² - 4 (1 - c)²)) / 2, so that
    σ = 1.09 at c = 0.9 and 1.618 at c = 0. The paper's Proposition 2 claims 1 for all unit vectors, and does not hold.

    The divisions by ‖k‖ and ‖A k̂‖ are the paper's, without an epsilon, as A k̂ becomes short in long sequences: a vector
    shorter than 1e-12 stays as it is. Shorter keys have larger gradients. Keys that are ELU + 1 of normal numbers are
    never that short; L2-normalise others by `map_features` or `head_features`, whose norm has an epsilon.

    Shapes: q, k, u [B, T, H, K]; v, o [B, T, H, V]; mask [B, T], True at real tokens; states (S [B, H, K, V], A [B, H,
    K, K], z [B, H, K], steps [B] int64), at first zero but for A = I / lambda0.

    Packing, direction, precision, inf and NaN: see `longseq.kernels`. For bfloat16 the triton backend
    multiplies numbers of 11 bits. Where a key is repeated and a v is 100 times or more larger than the others, the
    gradients of u before it are small differences of large numbers: they are off by 0.7 percent, and in one case of ten
    by 2 to 7 percent. The torch backend's are off by 0.2 percent.

    Returns (o, final state or None). `chunk_size` is a power of two.

    Source: Pandey and Singh 2026, "Variational Linear Attention", Algorithm 1.
    """


@step(_RECURRENCE, torch=variational_linear_attention_step_torch, held=("K",))
def variational_linear_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor | None = None,
    *,
    state: VariationalState,
    refresh_period: int | None = 20,
    refresh: float = 1e-3,
    eps: float = 1e-4,
    normalize_key: bool = True,
    normalize_alpha: bool = True,
    normalizer: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, VariationalState]:
    """One token of `variational_linear_attention`: q, k, u [B, H, K]; v [B, H, V]; state (S, A, z, steps).

    Returns o [B, H, V] in v's dtype and the next state, in the state's own dtype.
    """
