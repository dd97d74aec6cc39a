"""Hyena: long convolutions, whose filters are functions of the distance, between elementwise gates."""

import math
import struct
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longseq.blocks.convolution import ShortConvolution
from longseq.blocks.linear import UpcastLinear
from longseq.blocks.packing import pack_rows, rows_of, unpack_rows
from longseq.blocks.precision import KeepsFloat32, at_least_float32, parameter_dtype
from longseq.kernels.dispatch import is_exporting
from longseq.kernels.precision import without_autocast
from longseq.mixers.base import ALL_TOKENS, Device, Mixer, ScanOptions, memory_dtype, required
from longseq.mixers.long_convolution import Reading, convolution_flops
from longseq.mixers.registry import register

LOWEST_BAND = 1e-4  # the lowest frequency in the inputs of filters

# 2π as a sum of two float32 numbers: torch's ONNX exporter rounds constants to float32, even in float64 arithmetic.
_TURN: float = struct.unpack("f", struct.pack("f", 2 * math.pi))[0]
_REST = 2 * math.pi - _TURN


class HyenaState(NamedTuple):
    """The last inputs of the short convolution `[B, (N + 1) d_model, W - 1]`, and all inputs of the long ones so far.

    `inputs [B, S, N - 1, d_model]` holds the `length [B]` real tokens in the order of reading, then zeros.
    """

    convolution: Tensor
    inputs: Tensor
    length: Tensor


@register("hyena")
class Hyena(Mixer[HyenaState]):
    """Causal convolutions as long as the sequence, with elementwise gates between them.

        x⁰, ..., x^{N−1}, v = conv(W_in u);   z ← h ∗ (x ⊙ z) + D x ⊙ z  for x = x^{N−1}, ..., x¹;   y = W_out (x⁰ ⊙ z)

    starting from z = v. The first of the N convolutions is the short one, as in the published code. The other N - 1
    have implicit filters: a small network f with sines as activations, times an exponential window

        h_c(t) = (e^{−α_c t} + window_bias) f_c(t, cos 2πbs, −sin 2πbs)
        t = distance / (max_length − 1),  s = distance / max_length

    where b is spread evenly from 1e-4 to filter_bands − 1. The rates α_c increase with the channel: the window of the
    first channel falls to 1/100 at t = `slow_decay`, that of the last at t = `fast_decay`. For orders above 2, the N -
    1 filters of a channel have neighbouring rates. The published code also trains the inputs of f.

    The filters' parameters stay in float32 in models of half precision (see `ImplicitFilter`). The state keeps all
    inputs, and the time of a step grows with their number.

    Args:
        order: N.
        convolution_width: taps of the short convolution.
        max_length: the number of tokens over which t runs from 0 to 1, at least 2. It does not depend on the input, so
            that parts of a sequence see the same filter; longer sequences continue beyond t = 1. The default is the
            context length of the paper's language models.
        filter_width, filter_depth: channels and linear layers of the network f.
        filter_bands: the number of frequencies b.
        sine_frequency: the initial factor in the sine after each hidden layer, learned for each channel.
        fast_decay, slow_decay: t at which the window of the last channel and that of the first fall to 1/100.
        window_bias: the lower bound of the windows; 0 in the published configuration for The Pile.

    Source: Hyena Hierarchy: Towards Larger Convolutional Language Models (Poli et al., 2023), section 3; the sizes of f
    are those of the published configuration for The Pile.
    """

    paper = "Hyena (arXiv:2302.10866), section 3"
    operations = ("short_convolution",)
    reads_backwards = True
    growing_state = True

    def __init__(
        self,
        d_model: int,
        *,
        order: int = 2,
        convolution_width: int = 3,
        max_length: int = 2048,
        filter_width: int = 64,
        filter_depth: int = 4,
        filter_bands: int = 16,
        sine_frequency: float = 14.0,
        fast_decay: float = 0.3,
        slow_decay: float = 1.5,
        window_bias: float = 0.05,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, backend=backend)
        self.order = order
        self.max_length = max_length
        self.in_proj = nn.Linear(d_model, (order + 1) * d_model)
        self.convolution = ShortConvolution(
            (order + 1) * d_model, convolution_width, activation=None, bias=True, backend=backend
        )
        self.filter = ImplicitFilter(
            (order - 1) * d_model,
            width=filter_width,
            depth=filter_depth,
            bands=filter_bands,
            frequency=sine_frequency,
            decays=(fast_decay, slow_decay),
            bias=window_bias,
        )
        self.out_proj = nn.Linear(d_model, d_model)

    def reset_parameters(self) -> None:
        self.filter.reset_parameters()  # an initialisation of the whole model may have changed them

    def scan(
        self, projected: Tensor, state: HyenaState | None = None, options: ScanOptions = ALL_TOKENS
    ) -> tuple[Tensor, HyenaState | None]:
        packing, mask, reverse, output_final_state = options
        past = None if state is None else state.convolution
        mixed, convolution = self.convolution(projected, past, **options._asdict())
        if packing is not None:
            mixed, mask = unpack_rows(mixed, packing), rows_of(packing)
        reading = Reading.of(mixed, None if state is None else state.length, mask, reverse)
        y, inputs = self._convolve(mixed, None if state is None else state.inputs, reading)
        if packing is not None:
            y = pack_rows(y, packing)
        if not output_final_state:
            return y, None
        kept = torch.stack([reading.keep(row) for row in inputs], dim=2)
        return y, HyenaState(required(convolution), kept, reading.length)

    def scan_step(self, projected: Tensor, state: HyenaState) -> tuple[Tensor, HyenaState]:
        y, following = self.scan(projected.unsqueeze(1), state)
        return y.squeeze(1), required(following)

    def initial_state(self, batch: int, device: Device = None, dtype: torch.dtype | None = None) -> HyenaState:
        convolution = self.convolution.initial_state(batch, device, memory_dtype(dtype))
        inputs = torch.zeros(batch, 0, self.order - 1, self.d_model, device=device, dtype=dtype)
        return HyenaState(convolution, inputs, torch.zeros(batch, dtype=torch.long, device=device))

    def _convolve(self, mixed: Tensor, past: Tensor | None, reading: Reading) -> tuple[Tensor, list[Tensor]]:
        """Gate and convolve `mixed [B, T, (N + 1) d_model]` after `past [B, P, N - 1, d_model]`: outputs and inputs."""
        *gates, z = mixed.chunk(self.order + 1, dim=-1)
        length = z.shape[1] if past is None else past.shape[1] + z.shape[1]
        # The filters of a channel, one for each long convolution, are adjacent.
        filters, skips = self.filter(length, self.max_length, at_least_float32(z))
        filters = filters.unflatten(-1, (self.d_model, -1))
        skips = skips.unflatten(-1, (self.d_model, -1)).unbind(-1)
        inputs = []
        for index, gate in enumerate(reversed(gates[1:])):
            own = gate * z
            row = reading.join(own, None if past is None else past[:, :, index])
            inputs.append(row)
            z = reading.convolve(row, filters[..., index])
            z = (z + skips[index] * own).to(own.dtype)
        return gates[0] * z, inputs

    def scan_flops(self, tokens: int) -> int:
        # Each channel of a convolution has a gate, a skip and their sum.
        return (self.order - 1) * self.d_model * (convolution_flops(tokens) + 3 * tokens)


class FilterLinear(UpcastLinear):
    """A linear layer of a filter, without weight decay."""

    no_weight_decay_names = ("weight", "bias")


class ImplicitFilter(KeepsFloat32):
    """Filters `[L, channels]` as functions of the distance: a network of sines times an exponential window.

    The sines are computed in float64: each layer multiplies earlier rounding errors by about its frequency, three
    layers by a few thousand. Weights rounded to bfloat16 would change a fresh layer's output by a third or more, so
    they stay in float32 in models of half precision. The result has the requested type.
    """

    no_weight_decay_names = ("frequency", "skip")

    def __init__(
        self,
        channels: int,
        *,
        width: int,
        depth: int,
        bands: int,
        frequency: float,
        decays: tuple[float, float],
        bias: float,
    ) -> None:
        super().__init__()
        self.channels = channels
        self.bands = bands
        self.decays = decays
        self.bias = bias
        self.initial_frequency = frequency
        sizes = [1 + 2 * bands, *[width] * (depth - 1), channels]
        self.layers: Any = nn.ModuleList(
            FilterLinear(before, after, bias=index < depth - 1, dtype=parameter_dtype())
            for index, (before, after) in enumerate(pairwise(sizes))
        )
        self.frequency = nn.Parameter(torch.empty(width, dtype=parameter_dtype()))
        self.skip = nn.Parameter(torch.empty(channels, dtype=parameter_dtype()))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the layers as torch does, and the skips from a normal distribution."""
        for layer in self.layers:
            layer.reset_parameters()
        self.frequency.fill_(self.initial_frequency)
        self.skip.normal_()

    def forward(self, length: int, max_length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """The filters at the distances 0 ... `length` - 1, with the type and device of `like`, and the factors of the
        skips.

        The skips are returned because offloaded weights exist in this call only.
        """
        dtype = like.dtype
        wide = dtype if like.device.type == "mps" else torch.float64  # mps has no float64
        with without_autocast(like):
            distance = torch.arange(length, device=like.device, dtype=wide).unsqueeze(-1)
            time = distance / (max_length - 1)
            bands = torch.linspace(LOWEST_BAND, self.bands - 1, self.bands, device=time.device, dtype=wide)
            turns = distance / max_length
            # The cosine is a sine, because onnxruntime 1.20 to 1.23 has no cosine in float64.
            if is_exporting():
                angle = (turns * _TURN + turns * _REST) * bands
                cosine = torch.sin(angle + _TURN / 4 + _REST / 4)
            else:
                angle = 2 * math.pi * turns * bands
                cosine = torch.sin(angle + math.pi / 2)
            h = torch.cat([time, cosine, -angle.sin()], dim=-1)
            *hidden, last = self.layers
            for layer in hidden:
                h = torch.sin(self.frequency.to(wide) * layer(h))
            time = time.to(dtype)
            return last(h.to(dtype)) * (torch.exp(-time * self._rates(time)) + self.bias), self.skip

    def _rates(self, time: Tensor) -> Tensor:
        """α of each channel, from slow to fast."""
        fast, slow = (math.log(100) / decay for decay in self.decays)
        return torch.linspace(slow, fast, self.channels, device=time.device, dtype=time.dtype)
