"""Where half precision is too coarse."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """Widen half-precision tensors to float32: residuals, gates and normalisers lose their small differences there."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
