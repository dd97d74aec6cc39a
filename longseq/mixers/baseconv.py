"""BaseConv: a long or a short convolution, gated by a projection of the token."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longseq.arguments import check_choice
from longseq.blocks.convolution import ShortConvolution
from longseq.blocks.linear import UpcastLinear
from longseq.blocks.packing import pack_rows, rows_of, unpack_rows
from longseq.blocks.precision import at_least_float32
from longseq.kernels.precision import without_autocast
from longseq.mixers.base import ALL_TOKENS, Device, Mixer, ScanOptions, memory_dtype
from longseq.mixers.long_convolution import Reading, convolution_flops
from longseq.mixers.registry import register

FILTERS = ("implicit", "short")
LOWEST_BAND = 1e-4  # the one frequency in the inputs of implicit filters


class BaseConvState(NamedTuple):
    """All tokens so far, `[B, S, d_model]`: the `length [B]` real ones in the order of reading, and then zeros."""

    inputs: Tensor
    length: Tensor


class ShortBaseConvState(NamedTuple):
    """The last inputs of a short filter, oldest first: `[B, d_model, convolution_width - 1]`."""

    convolution: Tensor


@register("baseconv")
class BaseConv(Mixer[BaseConvState | ShortBaseConvState]):
    """A causal convolution, as long as the sequence or short, times a projection of the token.

        y = (W u + b_1) ⊙ (h ∗ u + b_2)

    The implicit filter is a small network of the distance:

        h(distance) = A ReLU(B (t, cos s, −sin s) + c) + d;   t = distance / (max_length − 1)
        s = 2π · 1e-4 · distance / max_length

    The short filter has a learned number for each channel and each distance below `convolution_width`. In the models of
    the paper, every second layer has a short filter of three taps: `mixer_options={"filter": ["short", "implicit"]}`.

    The published code differs: it adds u to y, and u to h ∗ u for implicit filters, whose convolutions have no b_2. Its
    b_2 of short filters starts at random, here at 0.

    There is no output projection. With an implicit filter the state keeps all tokens, and the time of a step grows with
    their number; with a short filter the state has a constant size.

    Args:
        filter: "implicit" or "short".
        convolution_width: taps of a short filter.
        max_length: the number of tokens over which t runs from 0 to 1, at least 2. It does not depend on the input, so
            that parts of a sequence see the same filter. Longer sequences continue with t > 1.
        filter_width: channels of the network's hidden layer.

    Source: Zoology: Measuring and Improving Recall in Efficient Language Models (Arora et al., 2023), section 4.1; the
    implicit filter is from the published code.
    """

    paper = "BaseConv (arXiv:2312.04927), section 4.1"
    own_backends = ("triton", "reference")  # of a short filter
    options_in_turn = ("filter",)
    reads_backwards = True
    growing_state = True
    no_weight_decay_names = ("bias",)

    def __init__(
        self,
        d_model: int,
        *,
        filter: str = "implicit",
        convolution_width: int = 3,
        max_length: int = 2048,
        filter_width: int = 16,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, backend=backend)
        check_choice("filter", filter, FILTERS)
        if filter != "short" and backend not in ("auto", "torch"):
            raise ValueError(f"filter={filter!r} has no backend {backend!r}")
        self.max_length = max_length
        self.in_proj = nn.Linear(d_model, d_model)
        self.out_proj = None
        self.bias = nn.Parameter(torch.empty(d_model))
        self.filter: ImplicitFilter | ShortConvolution
        if filter == "short":
            self.filter = ShortConvolution(d_model, convolution_width, activation=None, backend=backend)
            self.growing_state = False
        else:
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
        self,
        projected: Tensor,
        state: BaseConvState | ShortBaseConvState | None = None,
        options: ScanOptions = ALL_TOKENS,
    ) -> tuple[Tensor, BaseConvState | ShortBaseConvState | None]:
        x, gate = projected.chunk(2, dim=-1)
        following: BaseConvState | ShortBaseConvState | None
        if isinstance(self.filter, ShortConvolution):
            past = None if state is None else state[0]
            y, last = self.filter(x, past, **options._asdict())
            following = None if last is None else ShortBaseConvState(last)
        else:
            assert state is None or isinstance(state, BaseConvState)
            y, following = self._convolve(x, self.filter, state, options)
        return self._gate(y, gate), following if options.output_final_state else None

    def _convolve(
        self, x: Tensor, filters: ImplicitFilter, state: BaseConvState | None, options: ScanOptions
    ) -> tuple[Tensor, BaseConvState]:
        """Convolve tokens `[B, T, d_model]` with an implicit filter."""
        packing, mask, reverse, _ = options
        if packing is not None:
            x, mask = unpack_rows(x, packing), rows_of(packing)
        past, before = (None, None) if state is None else state
        reading = Reading.of(x, before, mask, reverse)
        row = reading.join(x, past)
        y = reading.convolve(row, filters(row.shape[1], at_least_float32(row)))
        if packing is not None:
            y = pack_rows(y, packing)
        return y, BaseConvState(reading.keep(row), reading.length)

    def _gate(self, y: Tensor, gate: Tensor) -> Tensor:
        return gate * (y + self.bias).to(gate.dtype)

    def scan_step(
        self, projected: Tensor, state: BaseConvState | ShortBaseConvState
    ) -> tuple[Tensor, BaseConvState | ShortBaseConvState]:
        if isinstance(self.filter, ShortConvolution):
            x, gate = projected.chunk(2, dim=-1)
            y, last = self.filter.step(x, state[0])
            return self._gate(y, gate), ShortBaseConvState(last)
        y, following = self.scan(projected.unsqueeze(1), state)
        assert following is not None
        return y.squeeze(1), following

    def initial_state(
        self, batch: int, device: Device = None, dtype: torch.dtype | None = None
    ) -> BaseConvState | ShortBaseConvState:
        if isinstance(self.filter, ShortConvolution):
            return ShortBaseConvState(self.filter.initial_state(batch, device, memory_dtype(dtype)))
        inputs = torch.zeros(batch, 0, self.d_model, device=device, dtype=dtype)
        return BaseConvState(inputs, torch.zeros(batch, dtype=torch.long, device=device))

    def scan_flops(self, tokens: int) -> int:
        long = 0 if isinstance(self.filter, ShortConvolution) else self.d_model * convolution_flops(tokens)
        return long + 2 * self.d_model * tokens


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
