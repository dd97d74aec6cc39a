"""Computations that half precision is too coarse for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def at_least_float32(x: Tensor) -> Tensor:
    """Widen half precision to float32: residuals, gates and normalisers would lose small differences."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class KeepsFloat32(nn.Module):
    """A module whose parameters stay in float32 when the model around it is converted to half precision.

    `model.to(torch.bfloat16)`, `half()` and the like only move them. The module's results multiply their rounding
    errors. A subclass makes its parameters in `parameter_dtype()`.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KeepsFloat32:
        # torch converts and moves the parameters of each module by this method.
        def without_rounding(tensor: Tensor) -> Tensor:
            converted = fn(tensor)
            rounds = converted.dtype.itemsize < torch.float32.itemsize <= tensor.dtype.itemsize
            return tensor.to(converted.device, torch.float32) if rounds else converted

        super()._apply(without_rounding, recurse)  # type: ignore[no-untyped-call]
        return self


def parameter_dtype() -> torch.dtype:
    """The type of new parameters that are not to be rounded: torch's default type, and at least float32."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


def product_dtype(weight: Tensor) -> torch.dtype:
    """The type in which a layer with this weight computes its products: autocast's, or else the weight's own."""
    device_type = weight.device.type
    if weight.dtype != torch.float32 or device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return weight.dtype
    return torch.get_autocast_dtype(device_type)
