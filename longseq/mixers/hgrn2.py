"""HGRN2: a gated recurrent network whose forget gate is also its key."""

import math

from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import Self

from longseq.blocks.norm import RMSNorm
from longseq.blocks.pairs import repeat_rows
from longseq.blocks.precision import at_least_float32
from longseq.mixers.base import ScanOptions
from longseq.mixers.gated_linear import GatedMemoryMixer, recurrence_flops
from longseq.mixers.heads import choose_heads
from longseq.mixers.registry import register


@register("hgrn2")
class HGRN2(GatedMemoryMixer):
    """Linear recurrent network with an outer-product state, whose key is one minus the forget gate.

        f = b + (1 − b) sigmoid(W_f x);   S ← Diag(f) S + (1 − f) vᵀ;   y = W_o RMSNorm(Sᵀ SiLU(W_q x) / √K)

    The paper learns b for each channel and layer, as a cumulative softmax over the layers; a mixer does not know the
    other layers, so here b is the constant `lower_bound`. The activations, the scale 1/√K with K channels in a head,
    the norm and projections without biases follow flash-linear-attention; the authors' first code has SiLU(v),
    sigmoid(W_q x), LayerNorm and biases.

    Args:
        num_heads, head_dim: give at most one; by default heads of 128 channels (64, ... where 128 does not divide).
            `head_dim` is the paper's expansion ratio: the state has `head_dim` numbers for each channel.
        lower_bound: b, the smallest forget gate, in [0, 1). Larger values make the state decay more slowly.

    Source: HGRN2: Gated Linear RNNs with State Expansion (Qin et al., 2024), section 3.
    """

    paper = "HGRN2 (arXiv:2404.07904), section 3"

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        lower_bound: float = 0.0,
        norm_eps: float = 1e-5,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, backend=backend)
        self.num_heads, self.head_dim = choose_heads(d_model, num_heads, head_dim, preferred=128)
        self.key_dim = self.value_dim = self.head_dim
        self.scale = self.key_dim**-0.5
        self.lower_bound = lower_bound
        self.in_proj = nn.Linear(d_model, 3 * d_model, bias=False)
        self.norm = RMSNorm(d_model, eps=norm_eps, backend=backend)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)

    def scan_pair(self, backward: Self, projected: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v, g = (repeat_rows(x) for x in self.split(projected)[:4])
        o, _ = self.recur(q, k, v, g, None, ScanOptions.of_pair(mask))
        return self.norm.norm_pair(backward.norm, o.flatten(-2))

    def read_out(self, o: Tensor, gate: Tensor) -> Tensor:
        return self.norm(o.flatten(-2))

    def split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        q, f, v = projected.unflatten(-1, (3 * self.num_heads, self.head_dim)).chunk(3, dim=-2)
        f = at_least_float32(f)
        k = (1 - self.lower_bound) * (-f).sigmoid()
        g = functional.logsigmoid(f)
        if self.lower_bound > 0:
            # log(b + (1 - b) sigmoid(f)), precise near 1 and near b
            g = g - functional.logsigmoid(f - math.log(self.lower_bound))
        return functional.silu(q), k, v, g, projected[..., :0]

    def scan_flops(self, tokens: int) -> int:
        return tokens * recurrence_flops(self.num_heads, self.head_dim, self.head_dim)
