"""Root-mean-square norm that follows its input's dtype."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` whose weight is cast to the input's dtype.

    Under autocast the input is bfloat16 while the weight stays float32; torch's fused kernel, which accumulates in
    float32 either way, takes them only in one dtype.
    """

    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else self.weight.to(x.dtype)
        return functional.rms_norm(x, self.normalized_shape, weight, self.eps)
