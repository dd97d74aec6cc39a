"""Based's linear attention, whose feature map is the Taylor series of the exponential."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from longseq.arguments import takes_also
from longseq.blocks.precision import at_least_float32
from longseq.mixers.linear_attention import LinearAttention
from longseq.mixers.registry import register


@register("based")
class Based(LinearAttention):
    """Causal linear attention whose weights are the second-order Taylor series of softmax attention's.

        φ(q)ᵀ φ(k) = 1 + s + s²/2,  s = qᵀ k / √F;   S ← S + φ(k) vᵀ;   z ← z + φ(k);   y = W_o (Sᵀ φ(q) / zᵀ φ(q))

    q and k have F = feature_dim channels in each head; the weights are at least 1/2. The paper's feature map has both
    x_i x_j and x_j x_i; here they are one feature, times √2: the same weights from 1 + F + F (F + 1) / 2 features. The
    paper alternates this layer with sliding windows (mixer window_attention) and gated short convolutions (not in
    longseq).

    Args:
        feature_dim: F.
        num_heads, head_dim: of the values; give at most one. By default heads of 64 channels (32, ... where 64 does not
            divide).

    Source: Simple Linear Attention Language Models Balance the Recall-Throughput Tradeoff (Arora et al., 2024), section
    4.
    """

    paper = "Based (arXiv:2402.18668), section 4"

    @takes_also(LinearAttention, without=("normalizer",))
    def __init__(self, d_model: int, *, feature_dim: int = 16, eps: float = 1e-12, **options: Any) -> None:
        super().__init__(d_model, eps=eps, **options)
        self.feature_dim = feature_dim
        self.key_dim = 1 + feature_dim + feature_dim * (feature_dim + 1) // 2
        self.in_proj = nn.Linear(d_model, 2 * self.num_heads * feature_dim + d_model, bias=False)

    def _features(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys = self.num_heads * self.feature_dim
        q, k, v = projected.split([keys, keys, self.d_model], dim=-1)
        q, k = (taylor_features(x.unflatten(-1, (self.num_heads, self.feature_dim))) for x in (q, k))
        v = at_least_float32(v.unflatten(-1, (self.num_heads, self.head_dim)))
        return q, k, functional.pad(v, (0, 1), value=1.0)


def taylor_features(x: Tensor) -> Tensor:
    """Map `x [..., F]` to features `[..., 1 + F + F (F + 1) / 2]` with φ(x)ᵀ φ(y) = 1 + s + s²/2, s = xᵀ y / √F."""
    x = at_least_float32(x) * x.shape[-1] ** -0.25
    pairs = [x[..., i : i + 1] * x[..., i + 1 :] for i in range(x.shape[-1] - 1)]
    return torch.cat([torch.ones_like(x[..., :1]), x, x.square() / math.sqrt(2), *pairs], dim=-1)
