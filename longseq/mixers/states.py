"""The states of mixers that keep one memory; B sequences are the leading dimension of every tensor."""

from typing import NamedTuple

from torch import Tensor


class MemoryState(NamedTuple):
    """The memory `[B, H, K, V]`."""

    memory: Tensor


class ConvolvedState(NamedTuple):
    """The last inputs of the short convolution `[B, C, W - 1]`, None without one, and the memory."""

    convolution: Tensor | None
    memory: Tensor


class ShiftedState(NamedTuple):
    """The last token `[B, d_model, 1]` and the memory `[B, H, K, K]`."""

    shift: Tensor
    memory: Tensor
