"""BaseConv: a long convolution, gated by a projection of the token."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from longseq.blocks.linear import UpcastLinear
from longseq.blocks.packing import pack_rows, rows_of, unpack_rows
from longseq.blocks.precision import at_least_float32
from longseq.kernels.packing import Packing, pack_like
from longseq.kernels.precision import without_autocast
from longseq.kernels.reading import Reverse
from longseq.mixers.base import Mixer, required
from longseq.mixers.long_convolution import Reading, convolution_flops
from longseq.mixers.registry import register

FILTERS = ("implicit", "explicit")
LOWEST_BAND = 1e-4  # the one frequency in the inputs of implicit filters


class BaseConvState(NamedTuple):
    """All tokens so far, `[B, S, d_model]`: the `length [B]` real ones in the order of reading, and then zeros."""

    inputs: Tensor
    length: Tensor


@register("baseconv")
class BaseConv(Mixer[BaseConvState]):
    """A causal convolution as long as the sequence, times a projection of the token.

        y = (W u + b_1) ⊙ (h ∗ u + b_2)

    The implicit filter is a small network, of the distance alone:

        h(distance) = A ReLU(B (t, cos s, −sin s) + c) + d;   t = distance / (max_length − 1)
        s = 2π · 1e-4 · distance / max_length

    The explicit filter has a learned number for each channel and each distance below `max_length`, and is zero beyond.

    The published code differs: it adds u to y, and u to h ∗ u, and its long convolutions have no b_2. There, explicit
    filters start with the variance 1, here with 1 / max_length, so that h ∗ u does not grow with max_length. In the
    models of the paper every second layer has a convolution of three taps instead, which longseq does not have.

    The layer has no output projection. A token's output depends on all tokens before it. Therefore the state keeps all
    tokens and grows, and the time of a step is proportional to their number.

    Args:
        filter: "implicit" or "explicit".
        max_length: the number of tokens over which t runs from 0 to 1, at least 2, or the number of taps of an explicit
            filter. It is a constant and not the length of the input, so that a filter is the same for a sequence, for
            a part of it and for one token. For longer sequences, implicit filters continue beyond t = 1.
        filter_width: channels of the network's hidden layer.

    Source: Zoology: Measuring and Improving Recall in Efficient Language Models (Arora et al., 2023), section 4.1; the
    implicit filter is that of the published code.
    """

    paper = "BaseConv (arXiv:2312.04927), section 4.1"
    reads_backwards = True
    growing_state = True
    no_weight_decay_names = ("bias",)

    def __init__(
        self,
        d_model: int,
        *,
        filter: str = "implicit",
        max_length: int = 2048,
        filter_width: int = 16,
        backend: str = "auto",
    ) -> None:
        if backend not in ("auto", "torch"):
            raise ValueError(
                f"baseconv runs on torch's Fourier transforms, not on backend={backend!r}; use auto or torch"
            )
        super().__init__(d_model, backend=backend)
        if filter not in FILTERS:
            raise ValueError(f"filter={filter!r} is not one of {', '.join(FILTERS)}")
        if max_length < 2:
            raise ValueError(f"max_length={max_length}: distances are measured in it; at least 2")
        if filter_width < 1:
            raise ValueError(f"filter_width={filter_width}: the network of a filter needs at least one hidden channel")
        self.max_length = max_length
        self.in_proj = nn.Linear(d_model, d_model)
        self.out_proj = None
        self.bias = nn.Parameter(torch.empty(d_model))
        self.filter: ImplicitFilter | ExplicitFilter = (
            ImplicitFilter(d_model, filter_width, max_length)
            if filter == "implicit"
            else ExplicitFilter(d_model, max_length)
        )
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
        self,
        projected: Tensor,
        state: BaseConvState | None = None,
        *,
        cu_seqlens: Tensor | Packing | None = None,
        mask: Tensor | None = None,
        reverse: Reverse = False,
        output_final_state: bool = True,
    ) -> tuple[Tensor, BaseConvState | None]:
        x, gate = projected.chunk(2, dim=-1)
        packing = pack_like(cu_seqlens, projected)
        if packing is not None:
            x, mask = unpack_rows(x, packing), rows_of(packing)
        past, before = (None, None) if state is None else state
        reading = Reading.of(x, before, mask, reverse)
        row = reading.join(x, past)
        y = reading.convolve(row, self.filter(row.shape[1], at_least_float32(x).dtype))
        if packing is not None:
            y = pack_rows(y, packing)
        y = gate * (y + self.bias).to(gate.dtype)
        return y, BaseConvState(reading.keep(row), reading.length) if output_final_state else None

    def scan_step(self, projected: Tensor, state: BaseConvState) -> tuple[Tensor, BaseConvState]:
        y, following = self.scan(projected.unsqueeze(1), state)
        return y.squeeze(1), required(following)

    def initial_state(
        self, batch: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> BaseConvState:
        inputs = torch.zeros(batch, 0, self.d_model, device=device, dtype=dtype)
        return BaseConvState(inputs, torch.zeros(batch, dtype=torch.long, device=device))

    def scan_flops(self, tokens: int) -> int:
        return self.d_model * convolution_flops(tokens) + self.filter.flops(tokens) + 2 * self.d_model * tokens


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

    def forward(self, length: int, dtype: torch.dtype) -> Tensor:
        """Evaluate the filter at the distances 0 ... `length` - 1."""
        with without_autocast(self.out.weight):
            distance = torch.arange(length, device=self.out.weight.device, dtype=dtype).unsqueeze(-1)
            angle = 2 * math.pi * LOWEST_BAND * distance / self.max_length
            h = torch.cat([distance / (self.max_length - 1), angle.cos(), -angle.sin()], -1)
            return self.out(self.hidden(h).relu())

    def flops(self, length: int) -> int:
        """Count the floating-point operations at `length` distances."""
        return 2 * length * (self.hidden.weight.numel() + self.out.weight.numel())


class ExplicitFilter(nn.Module):
    """A filter `[L, channels]` with a learned number for each distance below `max_length`, and zeros beyond."""

    no_weight_decay_names = ("taps",)

    def __init__(self, channels: int, max_length: int) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.empty(max_length, channels))

    def reset_parameters(self) -> None:
        """Draw the taps from a normal distribution whose variances sum to 1."""
        nn.init.normal_(self.taps, std=len(self.taps) ** -0.5)

    def forward(self, length: int, dtype: torch.dtype) -> Tensor:
        """The filter at the distances 0 ... `length` - 1."""
        taps = self.taps[:length].to(dtype)
        return functional.pad(taps, (0, 0, 0, max(length - taps.shape[0], 0)))

    def flops(self, length: int) -> int:
        """A learned number takes no operation."""
        return 0
