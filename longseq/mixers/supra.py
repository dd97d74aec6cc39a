"""SUPRA: retention with a learned feature map, into which attention is converted."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import Self

from longseq.arguments import takes_also
from longseq.blocks.precision import at_least_float32
from longseq.blocks.rotary import count_positions
from longseq.mixers.base import ScanOptions
from longseq.mixers.registry import register
from longseq.mixers.retnet import RetNet


@register("supra")
class Supra(RetNet):
    """Linear attention in place of softmax attention, with the projections of a transformer.

        q, k = rotary(φ(W x));   S ← γ S + k vᵀ;   y = W_o GroupNorm(Sᵀ q / √K);   φ(x) = ReLU(A x + b)

    A reads the queries of all heads together. Keys use the same A and b, or their own if they have fewer heads than
    queries. The norm, which replaces the sum of attention weights, centres each head's values, divides them by their
    standard deviation, and has no parameters.

    As in the published models, γ_h = exp(−2^{−8 h / H}) for the heads h = 1, ..., H, where H is a power of two.
    Otherwise the first heads have the decays for the largest power of two below H, and the others every second decay
    for twice as many heads. RetNet decays more slowly. As in the published code, A starts like torch's linear layers, b
    at zero.

    Args:
        num_heads, head_dim, num_kv_heads, rotary_base, rotary_scaling: as in `RetNet`.
        norm_eps: eps of the norm.

    Source: Linearizing Large Language Models (Mercat et al., 2024), section 3, and its published code.
    """

    paper = "SUPRA (arXiv:2405.06640), section 3"

    @takes_also(RetNet, without=("expand_v", "feature_map", "output_gate"))
    def __init__(self, d_model: int, *, norm_eps: float = 1e-5, **options: Any) -> None:
        super().__init__(d_model, expand_v=1.0, feature_map="relu", output_gate=False, **options)
        self.norm = CentredNorm(norm_eps)
        queries, keys, *_ = self.widths
        self.query_map = nn.Linear(queries, queries)
        self.key_map = nn.Linear(keys, keys) if keys < queries else None

    def scan_pair(self, backward: Self, projected: Tensor, mask: Tensor | None = None) -> Tensor:
        both = zip(self._split(projected), backward._split(projected), strict=True)
        q, k, v, gate = map(torch.cat, both)
        options = ScanOptions.of_pair(mask)
        positions, _ = count_positions(v, mask=options.mask, reverse=options.reverse)
        q, k, g = self._place(q, k, positions)
        o, _ = self.recur(q, k, v, g, None, options)
        return self.read_out_pair(backward, o, gate)

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, rest = projected.split([*self.widths[:2], sum(self.widths[2:])], dim=-1)
        key_map = self.query_map if self.key_map is None else self.key_map
        return super()._split(torch.cat((self.query_map(q), key_map(k), rest), -1))

    def _log_decays(self, head: Tensor) -> Tensor:
        power = 1 << (self.num_heads.bit_length() - 1)
        exponent = torch.where(head < power, (head + 1) / power, (2 * (head - power) + 1) / (2 * power))
        return -torch.exp2(-8 * exponent)

    def scan_flops(self, tokens: int) -> int:
        again = 0 if self.key_map is not None else 2 * tokens * self.widths[1] ** 2  # the keys' A is the queries'
        return super().scan_flops(tokens) + again


class CentredNorm(nn.Module):
    """Layer norm over the last dimension, without parameters; the output has the input's type."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(at_least_float32(x), x.shape[-1:], eps=self.eps).to(x.dtype)

    def norm_pair(self, backward: Self, x: Tensor) -> Tensor:
        """The sum of the norms of both halves of x `[2 B, ...]`."""
        return self(x).unflatten(0, (2, -1)).sum(0)
