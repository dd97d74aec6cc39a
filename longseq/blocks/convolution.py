"""The short causal convolution that the recurrent mixers put before their recurrence."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from longseq.blocks.hooks import is_replaceable, step_by_call
from longseq.blocks.pairs import stack_pair
from longseq.kernels import convolved_features, short_convolution, short_convolution_step
from longseq.kernels.dispatch import backend_of_step
from longseq.kernels.packing import Packing
from longseq.kernels.reading import Reverse
from longseq.state import Device


class ShortConvolution(nn.Module):
    """Depthwise causal convolution over `width` tokens; the state `[B, channels, width - 1]` has the last inputs."""

    def __init__(
        self,
        channels: int,
        width: int = 4,
        *,
        activation: str | None = "silu",
        bias: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.channels = channels
        self.width = width
        self.activation = activation
        self.backend = backend
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    @classmethod
    def of_width(cls, channels: int, width: int, backend: str) -> ShortConvolution | None:
        """A convolution without activation and bias; None for width 0."""
        return None if width == 0 else cls(channels, width, activation=None, backend=backend)

    def reset_parameters(self) -> None:
        """Draw the taps as `nn.Conv1d` does: uniform in ±1/sqrt(width)."""
        bound = 1 / math.sqrt(self.width)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        *,
        cu_seqlens: Tensor | Packing | None = None,
        mask: Tensor | None = None,
        reverse: Reverse = False,
        output_final_state: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Convolve `x [B, T, channels]`; returns the same shape and, if wanted, the state after the last real token.

        With `reverse` the taps see later tokens; the given state comes after the last token, the returned one before
        the first. "second_half" does so in the second half of the rows.
        """
        options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "mask": mask, "reverse": reverse, "backend": self.backend}
        options |= {"activation": self.activation, "output_final_state": output_final_state}
        return short_convolution(x, self.weight, self.bias, initial_state=state, **options)

    def convolve_pair(self, backward: ShortConvolution, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Convolve `x [B, T, channels]` forward by this layer and backward by another one: `[2 B, T, channels]`."""
        weight, bias = stack_pair(self.weight, backward.weight), stack_pair(self.bias, backward.bias)
        options: dict[str, Any] = {"activation": self.activation, "reverse": "second_half", "backend": self.backend}
        return short_convolution(x, weight, bias, mask=mask, **options)[0]

    def features(
        self, x: Tensor, state: Tensor | None = None, **options: Any
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """q, k, v and β of `x [B, T, channels + H + ...]`, and if wanted the state after the last real token.

        The options are those of `convolved_features`, which includes this layer, without activation and bias.
        """
        assert self.activation is self.bias is None
        *features, state = convolved_features(x, self.weight, initial_state=state, backend=self.backend, **options)
        return tuple(features), state

    def features_pair(self, backward: ShortConvolution, x: Tensor, **options: Any) -> tuple[Tensor, ...]:
        """q, k, v and β of x read forward by this layer and backward by another one: 2 B rows."""
        assert self.activation is self.bias is None
        weight = stack_pair(self.weight, backward.weight)
        *features, _ = convolved_features(x, weight, reverse="second_half", backend=self.backend, **options)
        return tuple(features)

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve one more token `x [B, channels]`."""
        if not is_replaceable(self, ShortConvolution):
            return step_by_call(self, x, state)
        backend = backend_of_step(self.backend)
        return short_convolution_step(x, self.weight, state, self.bias, activation=self.activation, backend=backend)

    def initial_state(self, batch: int, device: Device = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return zeros `[batch, channels, width - 1]`."""
        return torch.zeros(batch, self.channels, self.width - 1, device=device, dtype=dtype)

    def flops(self, tokens: int) -> int:
        """Count the floating-point operations over one sequence."""
        return 2 * tokens * self.channels * self.width

    def extra_repr(self) -> str:
        return f"{self.channels}, width={self.width}, activation={self.activation!r}, bias={self.bias is not None}"
