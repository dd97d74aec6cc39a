"""A feature map of each head's channels, with or without a norm."""

from typing import Any

import torch
from torch import Tensor

from longseq.kernels.checks import check_scale
from longseq.kernels.dispatch import Call, is_exporting
from longseq.kernels.head_features import TRITON_WIDTH, check_features
from longseq.kernels.head_features.features import FEATURE_MAPS, unit_torch
from longseq.kernels.operation import operation
from longseq.kernels.precision import compute_dtype, without_autocast


def _judge(op: str, x: Tensor, feature_map: str, norm: str | None, scale: float, **_: Any) -> Call:
    check_scale(op, scale)
    check_features(feature_map, "l2" if norm is None else norm)
    return Call(x.device, x.dtype, exporting=is_exporting(), sizes={"H": x.shape[-2], "K": x.shape[-1]})


def map_features_torch(
    x: Tensor, *, feature_map: str, norm: str | None, scale: float, dtype: torch.dtype | None
) -> Tensor:
    """`map_features` by torch's own functions."""
    with without_autocast(x):
        y = FEATURE_MAPS[feature_map](x.to(compute_dtype(x)))
        if norm is not None:
            y = unit_torch(y, norm)
        return (y if scale == 1.0 else scale * y).to(dtype or x.dtype)


@operation(_judge, triton="triton_map", limits={"K": TRITON_WIDTH}, torch=map_features_torch)
def map_features(
    x: Tensor,
    *,
    feature_map: str = "identity",
    norm: str | None = None,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """Features of each head: y = scale φ(x), or scale φ(x) / ‖φ(x)‖.

    φ is `feature_map`: silu, relu, elu_plus_one or identity. `norm` is l2, l1 or None, with 1e-6 under the root, as in
    `head_features`.

    Shapes: x, y [..., H, K]. Arithmetic is float32, or float64 for float64 inputs; y has `dtype`, by default
    that of x.
    """
