"""Queries, keys, values and write strengths of the delta rule, after a short convolution."""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from longseq.kernels.convolved_features.features import convolved_features_torch
from longseq.kernels.dispatch import Call, is_exporting
from longseq.kernels.head_features import TRITON_WIDTH, check_features, count_values
from longseq.kernels.operation import operation
from longseq.kernels.packing import Packing
from longseq.kernels.reading import Reverse
from longseq.kernels.short_convolution import judge_convolution, short_convolution
from longseq.kernels.short_convolution.reference import short_convolution_reference


def _judge(
    op: str, x: Tensor, weight: Tensor, num_heads: int, key_dim: int, feature_map: str, key_norm: str,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, mask: Tensor | None, reverse: Reverse, **_: Any,
) -> Call:  # fmt: skip
    check_features(feature_map, key_norm)
    call = judge_convolution(op, x, weight, None, initial_state, cu_seqlens, mask, reverse, "B T I")
    channels = call.sizes["D"]
    values = count_values(op, channels, num_heads, key_dim)
    if not is_exporting() and call.sizes["I"] < channels + num_heads:
        raise ValueError(
            f"{op}: x has {call.sizes['I']} channels, fewer than the {channels} of weight and a logit per head"
        )
    # With a state or a mask other kernels run: those of the two separate operations.
    kind = "" if initial_state is None and mask is None else "composed"
    return replace(call, sizes={**call.sizes, "H": num_heads, "K": key_dim, "V": values}, kind=kind)


@operation(
    _judge,
    triton="triton_features",
    limits={"K V": TRITON_WIDTH},
    torch=partial(convolved_features_torch, partial(short_convolution, backend="torch")),
    reference=partial(convolved_features_torch, short_convolution_reference),
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
    cu_seqlens: Tensor | Packing | None = None,
    mask: Tensor | None = None,
    reverse: Reverse = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Convolve the channels of queries, keys and values, and take the features of heads from them, in one operation.

        z_t = Σ_j weight[:, j] ⊙ x_{t-W+1+j},   j = 0 ... W-1
        q, k, v = z;   q = φ(q) / ‖φ(q)‖;   k = φ(k) / ‖φ(k)‖;   v = SiLU(v);   β = sigmoid(logits)

    This is `short_convolution`, where the state, `cu_seqlens`, `mask` and `reverse` are described, and then
    `head_features`, where `feature_map` φ and `key_norm` are. Where `mask` is False, q, k and v are the features of
    z = 0. There is no one-token form: use `short_convolution_step` and `head_features`.

    Shapes: x [B, T, C + H + any], in this order the C = 2 H K + H V channels that are convolved, the H = `num_heads`
    logits, which are not, and others, which are ignored; weight [C, W]; q, k [B, T, H, K] with K = `key_dim`; v [B, T,
    H, V]; β [B, T, H]; states [B, C, W-1]. With weight [2, C, W] and reverse="second_half" q, k, v, β and the states
    have 2 B rows. q, k and v have x's dtype; arithmetic, β and state are float32, or float64 for float64 inputs.
    Returns (q, k, v, β, final state or None).
    """
