"""Matrices that start at zero, as RWKV-7's output projection does, would hide what a layer computes."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def without_zeros(model: Model) -> Model:
    """Fill the model's matrices of zeros with small random numbers, the same in every call."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and not parameter.any():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model
