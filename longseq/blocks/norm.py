"""Norms whose input and weights may have different types, as in autocast and half-precision models."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from longseq.blocks.pairs import stack_pair
from longseq.blocks.precision import product_dtype
from longseq.blocks.traces import whole_in_traces
from longseq.kernels.add_norm import add_norm
from longseq.kernels.dispatch import backend_of_local
from longseq.kernels.precision import without_autocast


class UpcastGroupNorm(nn.GroupNorm):
    """`nn.GroupNorm` that computes in the type of its input, whatever the type of its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        with without_autocast(x):
            return functional.group_norm(x, self.num_groups, weight, bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` over the last dimension, for a weight of any type; the output has the input's type."""

    eps: float

    def __init__(self, width: int, eps: float = 1e-5, *, backend: str = "auto") -> None:
        super().__init__(width, eps=eps)
        self.backend = backend_of_local(backend)

    @whole_in_traces
    def forward(self, x: Tensor) -> Tensor:
        return add_norm(x, self.weight, eps=self.eps, backend=self.backend)[1]

    def norm_pair(self, backward: RMSNorm, x: Tensor) -> Tensor:
        """Sum of the norms of both halves of x `[2 B, ...]`, the first by this layer and the second by `backward`."""
        weight = stack_pair(self.weight, backward.weight)
        return add_norm(x, weight, eps=self.eps, backend=self.backend)[1]


class ResidualRMSNorm(RMSNorm):
    """RMS norm of a residual in float32; the result has autocast's type, or else the weight's."""

    @whole_in_traces
    def forward(self, x: Tensor, branch: Tensor | None = None) -> Any:
        """Normalise x; or, with a branch, return x + branch and its norm."""
        dtype = product_dtype(self.weight)
        total, y = add_norm(x, self.weight, branch=branch, eps=self.eps, dtype=dtype, backend=self.backend)
        return y if branch is None else (total, y)


class ResidualLayerNorm(nn.LayerNorm):
    """Layer norm of a residual in float32; the result has autocast's type, or else the weight's."""

    def __init__(self, width: int, eps: float = 1e-5, *, backend: str = "auto") -> None:
        super().__init__(width, eps=eps)
        self.backend = backend_of_local(backend)

    @whole_in_traces
    def forward(self, x: Tensor, branch: Tensor | None = None) -> Any:
        """Normalise x; or, with a branch, return x + branch and its norm."""
        options: dict[str, Any] = {"eps": self.eps, "dtype": product_dtype(self.weight), "backend": self.backend}
        total, y = add_norm(x, self.weight, bias=self.bias, branch=branch, centred=True, **options)
        return y if branch is None else (total, y)


def add_and_norm(norm: nn.Module, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
    """x + branch and its norm; one operation if the norm is one of this module."""
    if isinstance(norm, (ResidualRMSNorm, ResidualLayerNorm)):
        total, y = norm(x, branch)
        return total, y
    total = x + branch
    return total, norm(total)
