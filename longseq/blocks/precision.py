"""Computations that half precision is too coarse for."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """Widen half-precision tensors to float32: residuals, gates and normalisers lose their small differences there."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def product_dtype(weight: Tensor) -> torch.dtype:
    """The type in which a layer with this weight computes its products: autocast's, or else the weight's own."""
    device_type = weight.device.type
    if weight.dtype != torch.float32 or device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return weight.dtype
    return torch.get_autocast_dtype(device_type)
