"""Gated slot attention."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import Self

from longseq.arguments import takes_also
from longseq.blocks.precision import at_least_float32
from longseq.mixers.base import ScanOptions
from longseq.mixers.heads import repeat_groups
from longseq.mixers.registry import register
from longseq.mixers.slots import SlotMixer


class ConstantGate(nn.Module):
    """Logits of forget gates that are the same for every token, `[H, M]`."""

    no_weight_decay_names = ("logits",)

    def __init__(self, num_heads: int, num_slots: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.empty(num_heads, num_slots))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the logits from a normal distribution: slots with equal gates would stay equal for ever."""
        nn.init.normal_(self.logits)

    def forward(self) -> Tensor:
        """Return the logits. Hooks run in calls only, such as those that prune."""
        return self.logits


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
        data_dependent_gate: False replaces W_α x by a learned number for each slot (an ablation of the paper).
        feature_map: φ, one of silu, relu, relu_squared, identity.
        activation: f: softmax over the slots, or the elementwise identity, silu, relu or relu_squared (ablations, table
            2).
        scale: the factor of the scores. Neither the paper nor its code has one; 1/√K is usual for softmax.

    Source: Gated Slot Attention for Efficient Linear-Time Sequence Modeling (Zhang et al., 2024), equations 6, 8 and 9.
    """

    paper = "GSA (arXiv:2409.07146), section 3"
    operations = ("slot_attention",)

    @takes_also(SlotMixer, without=("gate_width", "value_map"))
    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        num_slots: int = 64,
        gate_temperature: float = 8.0,
        data_dependent_gate: bool = True,
        **options: Any,
    ) -> None:
        gate_width = (num_kv_heads or num_heads) * num_slots if data_dependent_gate else 0
        heads: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "num_slots": num_slots}
        super().__init__(d_model, gate_width=gate_width, value_map="silu", **heads, **options)
        self.gate_temperature = gate_temperature
        self.gate = None if data_dependent_gate else ConstantGate(self.num_kv_heads, num_slots)

    def write(self, logits: Tensor, normalizer: Tensor | None, options: ScanOptions) -> tuple[Tensor, None, None]:
        g, _, _ = self.write_step(logits, None)
        return g if options.mask is None else g * options.mask[..., None, None], None, None

    def write_pair(self, backward: Self, logits: Tensor, mask: Tensor | None) -> tuple[Tensor, None]:
        options = ScanOptions(mask=mask)
        g, _, _ = self.write(logits, None, options)
        return torch.cat((g, g if self.gate is None else backward.write(logits, None, options)[0])), None

    def write_step(self, logits: Tensor, normalizer: Tensor | None) -> tuple[Tensor, None, None]:
        shape = (*logits.shape[:-1], self.num_kv_heads, self.num_slots)
        gate = logits.reshape(shape) if self.gate is None else at_least_float32(self.gate()).expand(shape)
        g = functional.logsigmoid(gate) / self.gate_temperature
        return repeat_groups(g, self.num_heads), None, None
