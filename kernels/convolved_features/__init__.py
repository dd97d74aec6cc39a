"""What the delta rule reads: queries, keys and values after a short convolution, and how strongly to write."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from longseq.kernels.convolved_features.features import convolved_features_reference, convolved_features_torch
from longseq.kernels.devices import triton_reasons, width_reasons
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
from longseq.kernels.head_features import TRITON_WIDTH, check_features
from longseq.kernels.precision import call_dtype, is_mixed
from longseq.kernels.reading import Reverse
from longseq.kernels.short_convolution import check_convolution

__all__ = ["convolved_features"]


def _triton_reasons(call: Call) -> list[str]:
    return triton_reasons(call) + width_reasons(call, TRITON_WIDTH, "K", "V")


# Imported in the call, because importing this package must not import Triton; an import statement, because
# torch.compile follows one.
def _convolved_features_triton(*args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
    from longseq.kernels.convolved_features.triton_features import convolved_features_triton

    return convolved_features_triton(*args, **kwargs)


register(
    "convolved_features",
    Backend("triton", _convolved_features_triton, _triton_reasons),
    Backend("torch", convolved_features_torch, unpacking_reasons),
    Backend("reference", convolved_features_reference, loop_reasons),
)


def convolved_features(
    x: Tensor,
    weight: Tensor,
    *,
    num_heads: int,
    key_dim: int,
    feature_map: str = "silu",
    key_norm: str = "l2",
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    reverse: Reverse = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Convolve the channels of queries, keys and values, and take the features of heads from them, in one operation.

        z_t = Σ_j weight[:, j] ⊙ x_{t-W+1+j},   j = 0 ... W-1
        q, k, v = z;   q = φ(q) / ‖φ(q)‖;   k = φ(k) / ‖φ(k)‖;   v = SiLU(v);   β = sigmoid(logits)

    This is `short_convolution`, where the state, `cu_seqlens`, `mask` and `reverse` are described, and then
    `head_features`, where `feature_map` φ and `key_norm` are. Where `mask` is False, q, k and v are the features of
    z = 0. One token has no operation of its own: it takes those two.

    Shapes: x [B, T, C + H + any], in this order the C = 2 H K + H V channels that are convolved, the H = `num_heads`
    logits, which are not, and others, which are ignored; weight [C, W]; q, k [B, T, H, K] with K = `key_dim`; v [B, T,
    H, V]; β [B, T, H]; states [B, C, W-1]. With weight [2, C, W] and reverse="second_half" q, k, v, β and the states
    have 2 B rows. q, k and v have x's dtype; arithmetic, β and state are float32, or float64 for float64 inputs.
    Returns (q, k, v, β, final state or None).

    Raises ValueError for inputs that do not fit and for a backend that cannot run them.
    """
    run = _choose(
        x, weight, num_heads, key_dim, feature_map, key_norm, initial_state, cu_seqlens, mask, reverse, backend
    )
    return run(
        x,
        weight,
        num_heads=num_heads,
        key_dim=key_dim,
        feature_map=feature_map,
        key_norm=key_norm,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        mask=mask,
        reverse=reverse,
    )


@remembered("convolved_features")
def _choose(
    x: Tensor, weight: Tensor, num_heads: int, key_dim: int, feature_map: str, key_norm: str,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, mask: Tensor | None, reverse: Reverse, backend: str,
) -> Callable[..., Any]:  # fmt: skip
    check_features(feature_map, key_norm)
    own = weight.dim() == 3
    sizes = check_convolution(
        "convolved_features",
        {
            "x": (x, "B T P"),
            "weight": (weight, "R C W" if own else "C W"),
            "initial_state": (initial_state, "2B C W-1" if own else "S C W-1"),
        },
        cu_seqlens,
        mask,
        reverse,
    )
    values = sizes["C"] - 2 * num_heads * key_dim
    if not is_exporting():
        _check_channels(sizes["P"], sizes["C"], values, num_heads, key_dim)
    sizes = {**sizes, "H": num_heads, "K": key_dim, "V": values // num_heads}
    dtype, mixed = call_dtype(x, initial_state), is_mixed(x, weight)
    # A state or a mask leads to other kernels: those of the two operations.
    kind = "" if initial_state is None and mask is None else "composed"
    call = Call(x.device, dtype, cu_seqlens is not None, is_exporting(), sizes, reverse=reverse, mixed=mixed, kind=kind)
    return select("convolved_features", backend, call)


def _check_channels(given: int, convolved: int, values: int, num_heads: int, key_dim: int) -> None:
    if min(num_heads, key_dim) < 1 or values < num_heads or values % num_heads:
        raise ValueError(
            f"convolved_features: weight has {convolved} channels, which num_heads={num_heads} with key_dim={key_dim} "
            "do not share out: give 2 H K and a multiple of H"
        )
    if given < convolved + num_heads:
        raise ValueError(
            f"convolved_features: x has {given} channels, but must have the {convolved} of weight and "
            f"num_heads={num_heads} logits"
        )
