"""The short convolution as a loop over tokens: the definition that every other form is compared with."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longseq.kernels.reading import run_each_way
from longseq.kernels.recurrence import run_tokens


def short_convolution_step_torch(
    x: Tensor, weight: Tensor, state: Tensor, bias: Tensor | None = None, *, activation: str | None = None
) -> tuple[Tensor, Tensor]:
    """`short_convolution_step` in torch: differentiable, in the state's precision."""
    dtype = state.dtype
    window = torch.cat((state, x.to(dtype)[..., None]), dim=-1)  # [B, D, W]
    # OpenVINO 2026.4 computes the sum wrongly in rows after the first if it gives up the axis and a bias follows.
    y = (window * weight.to(dtype)).sum(-1, keepdim=True).squeeze(-1)
    if bias is not None:
        y = y + bias.to(dtype)
    if activation == "silu":
        y = F.silu(y)
    return y.to(x.dtype), window[..., 1:]


def short_convolution_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str | None, mask: Tensor | None, **call: Any
) -> tuple[Tensor, Tensor | None]:
    """`short_convolution`, one token at a time; `call` is for `run_recurrence`."""
    if weight.dim() == 3:
        own = {"weight": weight, "bias": bias}
        return run_each_way(short_convolution_reference, own, {}, x=x, activation=activation, mask=mask, **call)

    def step(token: list[Any], state: Tensor) -> tuple[Tensor, Tensor]:
        x_t, real = token
        y, after = short_convolution_step_torch(x_t, weight, state, bias, activation=activation)
        if real is not None:
            y, after = torch.where(real[:, None], y, 0), torch.where(real[:, None, None], after, state)
        return y, after

    shape = weight.shape[0], weight.shape[1] - 1
    return run_tokens(step, (x, mask), state_shape=shape, output_dtype=x.dtype, **call)
