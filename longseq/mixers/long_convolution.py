"""Convolutions as long as the sequence, for sequences that come in parts, with padding or packed."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from longseq.blocks.packing import front_places, gather_tokens, scatter_tokens
from longseq.kernels.dispatch import is_exporting
from longseq.kernels.precision import without_autocast
from longseq.kernels.reading import Reverse, turn


class Reading(NamedTuple):
    """The places of a call's tokens among all tokens so far.

    Attributes:
        reverse: the direction in which the tokens are read.
        real: `[B, T]`, True at real tokens; None if all are real.
        place: `[B, T]`, the index of each token among those so far, in the order of reading. None if the sequences
            begin here and have no padding.
        length: `[B]`, the number of real tokens so far, including this call's.
    """

    reverse: Reverse
    real: Tensor | None
    place: Tensor | None
    length: Tensor

    @classmethod
    def of(cls, x: Tensor, before: Tensor | None, mask: Tensor | None, reverse: Reverse) -> Reading:
        """Place tokens `x [B, T, ...]` behind the `before [B]` tokens of earlier calls, if any."""
        if before is None and mask is None:
            return cls(reverse, None, None, torch.full((x.shape[0],), x.shape[1], device=x.device))
        real = torch.ones_like(x[..., 0], dtype=torch.bool) if mask is None else mask
        start = real.new_zeros(real.shape[0], dtype=torch.long) if before is None else before
        place = turn(front_places(turn(real, reverse), start), reverse)
        return cls(reverse, real, place, start + real.sum(1))

    def join(self, x: Tensor, past: Tensor | None) -> Tensor:
        """Append tokens `x [B, T, D]` to `past [B, P, D]` without gaps: `[B, P + T, D]`, in reading order if placed."""
        if self.place is None:
            return x
        x = x if self.real is None else x * self.real.unsqueeze(-1)
        past = x.new_zeros(x.shape[0], 0, x.shape[2]) if past is None else past.to(x.dtype)
        return scatter_tokens(x, self.place, functional.pad(past, (0, 0, 0, x.shape[1])))

    def convolve(self, row: Tensor, filters: Tensor) -> Tensor:
        """Convolve a row of `join` with `filters [L, D]`; returns the outputs of the call's tokens, `[B, T, D]`."""
        if self.place is None:
            return long_convolution(row, filters, self.reverse)
        return gather_tokens(long_convolution(row, filters), self.place)

    def keep(self, row: Tensor) -> Tensor:
        """A row of `join` in the order of reading, for the state."""
        return turn(row, self.reverse) if self.place is None else row


def long_convolution(x: Tensor, filters: Tensor, reverse: Reverse = False) -> Tensor:
    """Causal convolution of each channel of `x [B, L, D]` with `filters [L, D]`, in the type of the filters.

    With `reverse` a token sees the later ones. Computed by Fourier transforms of twice the length, but in exported
    graphs by a convolution with L taps: the Fourier transforms of ONNX runtimes have errors of 1e-4.
    """
    length = x.shape[1]
    if not is_exporting() and x.numel() == 0:  # transforms of no points do not exist
        return x.to(filters.dtype) * filters[:length]
    with without_autocast(x):
        x = x.to(filters.dtype)
        if is_exporting():
            window = functional.pad(x.mT, (0, length - 1) if reverse else (length - 1, 0))
            taps = filters if reverse else filters.flip(0)
            return functional.conv1d(window, taps.mT.unsqueeze(1), groups=filters.shape[1]).mT
        response = torch.fft.rfft(filters, n=2 * length, dim=0)
        spectrum = torch.fft.rfft(x, n=2 * length, dim=1) * (response.conj() if reverse else response)
        return torch.fft.irfft(spectrum, n=2 * length, dim=1)[:, :length]


def convolution_flops(tokens: int) -> int:
    """Count the floating-point operations of `long_convolution` for one channel of one sequence."""
    # Three transforms of twice the length, and six operations for each product of complex numbers.
    transform = 5 * 2 * tokens * math.ceil(math.log2(2 * tokens))
    return 3 * transform + 6 * tokens
