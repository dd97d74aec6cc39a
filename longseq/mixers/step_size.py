"""Step sizes of discretised state spaces, Δ = softplus(rate + bias), and their initial values."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from longseq.blocks.precision import at_least_float32


@torch.no_grad()
def draw_step_bias(bias: nn.Parameter, dt_min: float, dt_max: float) -> None:
    """Set `bias` so that softplus(bias) is uniform on a log scale between `dt_min` and `dt_max`."""
    step = torch.empty_like(bias).uniform_(math.log(dt_min), math.log(dt_max)).exp()
    bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus


@torch.no_grad()
def draw_decay_rates(A_log: nn.Parameter) -> None:
    """Draw Mamba-2's decay rates, one for each head: exp(A_log) is uniform in [1, 16]."""
    A_log.uniform_(1, 16).log_()


def step_size(rate: Tensor, bias: Tensor) -> Tensor:
    """Δ = softplus(rate + bias), in float32 at least."""
    return functional.softplus(at_least_float32(rate) + bias)
