"""A feature map of each head's channels, with or without a norm."""

from typing import Any

import torch
from torch import Tensor

from longseq.kernels.devices import triton_reasons, width_reasons
from longseq.kernels.dispatch import Backend, Call, is_exporting, register_local, select
from longseq.kernels.head_features import TRITON_WIDTH, check_features
from longseq.kernels.map_features.features import map_features_torch

__all__ = ["map_features"]


def _triton_reasons(call: Call) -> list[str]:
    return triton_reasons(call) + width_reasons(call, TRITON_WIDTH, "K")


# Imported in the call, because importing this package must not import Triton; an import statement, because
# torch.compile follows one.
def _map_features_triton(*args: Any, **kwargs: Any) -> Tensor:
    from longseq.kernels.map_features.triton_map import map_features_triton

    return map_features_triton(*args, **kwargs)


register_local(
    "map_features",
    Backend("triton", _map_features_triton, _triton_reasons),
    Backend("torch", map_features_torch),
)


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

    Raises ValueError for an unknown map or norm and for a backend that cannot run.
    """
    check_features(feature_map, "l2" if norm is None else norm)
    call = Call(x.device, x.dtype, exporting=is_exporting(), sizes={"H": x.shape[-2], "K": x.shape[-1]})
    run = select("map_features", backend, call)
    return run(x, feature_map=feature_map, norm=norm, scale=scale, dtype=x.dtype if dtype is None else dtype)
