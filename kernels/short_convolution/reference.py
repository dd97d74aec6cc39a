"""The short convolution as a loop over tokens: the definition that every other form is compared with."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longseq.kernels.reading import Reverse, half, run_each_way, turn
from longseq.kernels.recurrence import Sequences, run_recurrence, run_segments


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
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    mask: Tensor | None,
    reverse: Reverse,
) -> tuple[Tensor, Tensor | None]:
    """`short_convolution`, one token at a time."""
    if weight.dim() == 3:
        return convolve_each_way(
            short_convolution_reference, x, weight, bias, initial_state,
            activation=activation, output_final_state=output_final_state, cu_seqlens=None, mask=mask,
        )  # fmt: skip
    mask = None if mask is None or mask.numel() == 0 else turn(mask, reverse)

    def recurrence(sequences: Sequences, state: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = sequences
        outputs = []
        for t in range(x.shape[1]):
            y_t, next_state = short_convolution_step_torch(x[:, t], weight, state, bias, activation=activation)
            if mask is not None:
                real = mask[:, t, None]
                y_t, next_state = torch.where(real, y_t, 0), torch.where(real[..., None], next_state, state)
            outputs.append(y_t)
            state = next_state
        return torch.stack(outputs, dim=1), state

    return run_recurrence(
        recurrence,
        (x,),
        initial_state,
        (weight.shape[0], weight.shape[1] - 1),
        output_dtype=x.dtype,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        unpack=run_segments,
        reverse=reverse,
    )


def convolve_each_way(
    convolve: Callable[..., tuple[Tensor, Tensor | None]],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Convolve x once forward and once backward, each with its own weight, by a form for one weight."""
    return run_each_way(
        lambda i: convolve(
            x,
            weight[i],
            None if bias is None else bias[i],
            initial_state=None if initial_state is None else half(initial_state, i),
            reverse=bool(i),
            **options,
        )
    )
