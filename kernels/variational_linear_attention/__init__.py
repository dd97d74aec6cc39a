"""Variational linear attention: a delta rule whose write direction follows what was written before."""

from typing import Any

from torch import Tensor

from longseq.kernels.checks import check_chunk_size, check_parts, check_tensors
from longseq.kernels.delta_rule import TRITON_WIDTH
from longseq.kernels.devices import width_reasons
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
from longseq.kernels.recursive_least_squares import check_refresh, check_steps, inverse_reasons, mask_tokens
from longseq.kernels.steps import register_steps, select_step
from longseq.kernels.variational_linear_attention.chunk import variational_linear_attention_chunk
from longseq.kernels.variational_linear_attention.reference import (
    VariationalState,
    variational_linear_attention_reference,
    variational_linear_attention_step_torch,
)

__all__ = ["variational_linear_attention", "variational_linear_attention_step"]


def _triton_reasons(call: Call) -> list[str]:
    return inverse_reasons(call) + width_reasons(call, TRITON_WIDTH, "V")


# Imported in the call, because importing this package must not import Triton; an import statement, because
# torch.compile follows one.
def _variational_linear_attention_triton(*args: Any, **kwargs: Any) -> tuple[Tensor, VariationalState | None]:
    from longseq.kernels.variational_linear_attention.triton_variational import variational_linear_attention_triton

    return variational_linear_attention_triton(*args, **kwargs)


register(
    "variational_linear_attention",
    Backend("triton", _variational_linear_attention_triton, _triton_reasons),
    Backend("torch", variational_linear_attention_chunk, unpacking_reasons),
    Backend("reference", variational_linear_attention_reference, loop_reasons),
)


def _variational_linear_attention_step_triton(*args: Any, **kwargs: Any) -> tuple[Tensor, VariationalState]:
    from longseq.kernels.variational_linear_attention.triton_step import variational_linear_attention_step_triton

    return variational_linear_attention_step_triton(*args, **kwargs)


register_steps(
    "variational_linear_attention",
    variational_linear_attention_step_torch,
    _variational_linear_attention_step_triton,
    "K",
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
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    reverse: Reverse = False,
    backend: str = "auto",
) -> tuple[Tensor, VariationalState | None]:
    """Replace what a key reads, written along the directions that earlier tokens have used least.

        A_t as in `recursive_least_squares` of u;   k̂_t = k_t / ‖k_t‖;   α̂_t = A_t k̂_t / ‖A_t k̂_t‖
        S_t = S_{t-1} + α̂_t (v_t - S_{t-1}ᵀ k̂_t)ᵀ;   z_t = z_{t-1} + k_t;   o_t = S_tᵀ q_t / max(z_tᵀ q_t, eps)

    q and k are the features φ(.), which should not be negative where the normaliser is used; u is the finished penalty
    direction. Ablations: u None keeps A as it is; `normalize_key` and `normalize_alpha` False leave out a division (no
    α normalisation is VLAv2, which diverges where A is large); `normalizer` False leaves out that by z_tᵀ q_t. Tokens
    that `mask` leaves out do not touch the state, and their outputs are not defined.

    The transition I - α̂ k̂ᵀ has spectral radius 1: its eigenvalues are 1 and 1 - c with c = α̂ᵀ k̂ in (0, 1] because A is
    positive definite. Its spectral norm is 1 only for c = 1: σ² = (3 - 2c + sqrt((3 - 2c)² - 4 (1 - c)²)) / 2, so that
    σ = 1.09 at c = 0.9 and 1.618 at c = 0. The paper's Proposition 2 claims 1 for all unit vectors, and does not hold.

    Shapes: q, k, u [B, T, H, K]; v, o [B, T, H, V]; mask [B, T], True at real tokens; states (S [B, H, K, V],
    A [B, H, K, K], z [B, H, K], steps [B] int64), at first zero but for A = I / lambda0. With `cu_seqlens` [N + 1] (0,
    the end of each packed segment) B is 1 and states have one row for each segment. With `reverse` sequences are read
    from their last token to their first: the initial state is the one behind the last token and the final state that at
    the first. With reverse="second_half" the second half of the rows of the batch is read so, and the first half
    forward. Arithmetic and state are float32, or float64 for float64 inputs; o has v's dtype. `chunk_size`, a power of
    two, changes speed and memory but not the result. Returns (o, final state or None).

    Raises ValueError for inputs that do not fit and for a backend that cannot run them.

    Source: Pandey and Singh 2026, "Variational Linear Attention", Algorithm 1.
    """
    op = "variational_linear_attention"
    check_chunk_size(op, chunk_size, power_of_two=True)
    check_refresh(op, lambda0, refresh_period, refresh)
    S, A, z, steps = check_parts(op, initial_state, "S", "A", "z", "steps")
    sizes = check_tensors(
        op,
        {
            "q": (q, "B T H K"),
            "k": (k, "B T H K"),
            "v": (v, "B T H V"),
            "u": (u, "B T H K"),
            "initial_state[0]": (S, "S H K V"),
            "initial_state[1]": (A, "S H K K"),
            "initial_state[2]": (z, "S H K"),
        },
        cu_seqlens,
        mask=mask,
    )
    check_steps(op, "initial_state[3]", steps, S)
    check_reverse(op, reverse, sizes["B"], cu_seqlens)
    dtype = call_dtype(v, q, k, u, S, A, z)
    mixed = is_mixed(v, u)
    call = Call(q.device, dtype, cu_seqlens is not None, is_exporting(), sizes, reverse=reverse, mixed=mixed)
    run = select(op, backend, call)
    count, (k, v, u) = mask_tokens(mask, k, v, u)
    return run(
        q,
        k,
        v,
        u,
        count=count,
        lambda0=lambda0,
        refresh_period=refresh_period,
        refresh=refresh,
        eps=eps,
        normalize_key=normalize_key,
        normalize_alpha=normalize_alpha,
        normalizer=normalizer,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
        reverse=reverse,
    )


def variational_linear_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor | None = None,
    *,
    state: VariationalState,
    lambda0: float = 0.1,
    refresh_period: int | None = 20,
    refresh: float = 1e-3,
    eps: float = 1e-4,
    normalize_key: bool = True,
    normalize_alpha: bool = True,
    normalizer: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, VariationalState]:
    """One token of `variational_linear_attention`: q, k, u [B, H, K]; v [B, H, V]; state (S, A, z, steps).

    Returns o [B, H, V] in v's dtype and the next state, in the state's own dtype. `lambda0` has no meaning here: a step
    brings its state.

    Raises ValueError for tensors that do not fit and for a backend that cannot run them: the triton backend has no
    gradient.
    """
    op = "variational_linear_attention_step"
    check_refresh(op, lambda0, refresh_period, refresh)
    S, A, z, steps = check_parts(op, state, "S", "A", "z", "steps", name="state")
    run = select_step(
        "variational_linear_attention",
        backend,
        {
            "q": (q, "B H K"),
            "k": (k, "B H K"),
            "v": (v, "B H V"),
            "u": (u, "B H K"),
            "state[0]": (S, "B H K V"),
            "state[1]": (A, "B H K K"),
            "state[2]": (z, "B H K"),
        },
    )
    check_steps(op, "state[3]", steps, S)
    return run(
        q,
        k,
        v,
        u,
        state=state,
        refresh_period=refresh_period,
        refresh=refresh,
        eps=eps,
        normalize_key=normalize_key,
        normalize_alpha=normalize_alpha,
        normalizer=normalizer,
    )
