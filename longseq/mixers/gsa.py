"""Gated slot attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from longseq.arguments import takes_also
from longseq.mixers.base import ScanOptions
from longseq.mixers.heads import repeat_groups
from longseq.mixers.registry import register
from longseq.mixers.slots import SlotMixer


@register("gsa")
class GatedSlotAttention(SlotMixer):
    """Attention to M slots, each a moving average of keys and of values with its own forget gate.

        q, k = φ(W x);   v = SiLU(W_v x);   α = sigmoid(W_α x)^{1/τ}
        K̃ ← Diag(α) K̃ + (1 − α) kᵀ;   Ṽ ← Diag(α) Ṽ + (1 − α) vᵀ
        y = W_o RMSNorm(SiLU(Ṽᵀ f(scale K̃ q)))

    The norm is over all channels, not over each head. v has SiLU for every φ, as in the published code.

    Args:
        num_heads: of queries; a divisor of `d_model` where `head_dim` is None.
        num_kv_heads: heads of keys, values and slots, a divisor of num_heads; by default num_heads.
        head_dim: channels of a head; by default `d_model` / num_heads.
        num_slots: M, the slots of each head.
        gate_temperature: τ, which keeps α near 1.
        feature_map: φ, one of silu, relu, relu_squared, identity.
        activation: f: softmax over the slots, or the elementwise identity, silu, relu or relu_squared (ablations, table
            2).
        scale: the factor of the scores. Neither the paper nor its code has one; 1/√K is usual for softmax.

    Source: Gated Slot Attention for Efficient Linear-Time Sequence Modeling (Zhang et al., 2024), equations 6, 8 and 9.
    """

    paper = "GSA (arXiv:2409.07146), section 3"
    operations = ("slot_attention",)

    @takes_also(SlotMixer, without=("value_map",))
    def __init__(self, d_model: int, *, gate_temperature: float = 8.0, **options: Any) -> None:
        super().__init__(d_model, value_map="silu", **options)
        self.gate_temperature = gate_temperature

    def decay(self, logits: Tensor, normalizer: Tensor | None, options: ScanOptions) -> tuple[Tensor, None]:
        g, _ = self.decay_step(logits, None)
        return g if options.mask is None else g * options.mask[..., None, None], None

    def decay_step(self, logits: Tensor, normalizer: Tensor | None) -> tuple[Tensor, None]:
        logits = logits.unflatten(-1, (self.num_kv_heads, self.num_slots))
        return repeat_groups(functional.logsigmoid(logits) / self.gate_temperature, self.num_heads), None
