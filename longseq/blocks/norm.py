"""Norms that take an input of one type and weights of another, as autocast and half-precision models mix them."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` whose weight is cast to the input's type; the output has the input's type.

    Under autocast the input is bfloat16 while the weight stays float32; torch's fused kernel, which accumulates in
    float32 either way, takes them only in one type.
    """

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class ResidualRMSNorm(RMSNorm):
    """RMS norm that reads a residual in float32 and answers in the type of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(self.weight.dtype)


class ResidualLayerNorm(nn.LayerNorm):
    """Layer norm that reads a residual in float32 and answers in the type of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps).to(self.weight.dtype)
