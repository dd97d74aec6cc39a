"""BaseConv: a convolution as long as the sequence, gated by a projection of the token."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longseq.blocks.linear import UpcastLinear
from longseq.blocks.packing import pack_rows, rows_of, unpack_rows
from longseq.blocks.precision import at_least_float32
from longseq.kernels.precision import without_autocast
from longseq.mixers.base import ALL_TOKENS, Device, Mixer, ScanOptions, required
from longseq.mixers.long_convolution import Reading, convolution_flops
from longseq.mixers.registry import register

LOWEST_BAND = 1e-4  # the one frequency in the inputs of filters


class BaseConvState(NamedTuple):
    """All tokens so far, `[B, S, d_model]`: the `length [B]` real ones in the order of reading, and then zeros."""

    inputs: Tensor
    length: Tensor


@register("baseconv")
class BaseConv(Mixer[BaseConvState]):
    """A causal convolution as long as the sequence, times a projection of the token.

        y = (W u + b_1) ⊙ (h ∗ u + b_2)

    The filter is a small network of the distance:

        h(distance) = A ReLU(B (t, cos s, −sin s) + c) + d;   t = distance / (max_length − 1)
        s = 2π · 1e-4 · distance / max_length

    In the models of the paper, every second layer has a short filter of three taps instead. The published code differs:
    it adds u to y and to h ∗ u, and has no b_2. There is no output projection. The state keeps all tokens, and the time
    of a step grows with their number.

    Args:
        max_length: the number of tokens over which t runs from 0 to 1, at least 2. It does not depend on the input, so
            that parts of a sequence see the same filter. Longer sequences continue with t > 1.
        filter_width: channels of the network's hidden layer.

    Source: Zoology: Measuring and Improving Recall in Efficient Language Models (Arora et al., 2023), section 4.1; the
    implicit filter is from the published code.
    """

    paper = "BaseConv (arXiv:2312.04927), section 4.1"
    reads_backwards = True
    growing_state = True
    no_weight_decay_names = ("bias",)

    def __init__(self, d_model: int, *, max_length: int = 2048, filter_width: int = 16, backend: str = "auto") -> None:
        super().__init__(d_model, backend=backend)
        self.max_length = max_length
        self.in_proj = nn.Linear(d_model, d_model)
        self.out_proj = None
        self.bias = nn.Parameter(torch.empty(d_model))
        self.filter = ImplicitFilter(d_model, filter_width, max_length)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.bias.zero_()
        self.filter.reset_parameters()  # an initialisation of the whole model may have changed them

    def project_in(self, x: Tensor) -> Tensor:
        gate = super().project_in(x)
        return torch.cat((x.to(gate.dtype), gate), -1)

    def project_out(self, y: Tensor) -> Tensor:
        return y

    def scan(
        self, projected: Tensor, state: BaseConvState | None = None, options: ScanOptions = ALL_TOKENS
    ) -> tuple[Tensor, BaseConvState | None]:
        packing, mask, reverse, output_final_state = options
        x, gate = projected.chunk(2, dim=-1)
        if packing is not None:
            x, mask = unpack_rows(x, packing), rows_of(packing)
        past, before = (None, None) if state is None else state
        reading = Reading.of(x, before, mask, reverse)
        row = reading.join(x, past)
        y = reading.convolve(row, self.filter(row.shape[1], at_least_float32(row)))
        if packing is not None:
            y = pack_rows(y, packing)
        last = BaseConvState(reading.keep(row), reading.length) if output_final_state else None
        return gate * (y + self.bias).to(gate.dtype), last

    def scan_step(self, projected: Tensor, state: BaseConvState) -> tuple[Tensor, BaseConvState]:
        y, following = self.scan(projected.unsqueeze(1), state)
        return y.squeeze(1), required(following)

    def initial_state(self, batch: int, device: Device = None, dtype: torch.dtype | None = None) -> BaseConvState:
        inputs = torch.zeros(batch, 0, self.d_model, device=device, dtype=dtype)
        return BaseConvState(inputs, torch.zeros(batch, dtype=torch.long, device=device))

    def scan_flops(self, tokens: int) -> int:
        return self.d_model * (convolution_flops(tokens) + 2 * tokens)


class ImplicitFilter(nn.Module):
    """A filter `[L, channels]` as a function of the distance: a network with one hidden layer."""

    def __init__(self, channels: int, width: int, max_length: int) -> None:
        super().__init__()
        self.max_length = max_length
        self.hidden = UpcastLinear(3, width)
        self.out = UpcastLinear(width, channels)

    def reset_parameters(self) -> None:
        """Draw the layers as torch does."""
        self.hidden.reset_parameters()
        self.out.reset_parameters()

    def forward(self, length: int, like: Tensor) -> Tensor:
        """Evaluate the filter at the distances 0 ... `length` - 1, with the type and on the device of a tensor."""
        with without_autocast(like):  # offloaded weights have no device here
            distance = torch.arange(length, device=like.device, dtype=like.dtype).unsqueeze(-1)
            angle = 2 * math.pi * LOWEST_BAND * distance / self.max_length
            h = torch.cat([distance / (self.max_length - 1), angle.cos(), -angle.sin()], -1)
            return self.out(self.hidden(h).relu())
