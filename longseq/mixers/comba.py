"""Comba: the gated delta rule as a controlled system, with feedback of the state and of the output."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from longseq.arguments import takes_also
from longseq.blocks.precision import at_least_float32
from longseq.kernels.head_features.features import unit_torch
from longseq.mixers.gated_deltanet import GatedDeltaNet
from longseq.mixers.heads import repeat_groups
from longseq.mixers.registry import register


@register("comba")
class Comba(GatedDeltaNet):
    """Gated delta rule that reads the state before its decay, with a key of its own that also corrects the query.

        q, k, v = SiLU(conv(W x));  p = sigmoid(decay) k;  q = q − D p;  q, k, p = q / ‖q‖, k / ‖k‖, p / ‖p‖
        S ← exp(g) S + β k (v − Sᵀ p)ᵀ (S before the decay);   y = W_o (RMSNorm(Sᵀ q / √K) ⊙ sigmoid(W_g x))

    β, g and the widths are as in `GatedDeltaNet`. Because p is normalised, as in the published code, `decay` only
    changes the query. With β up to 2, a read before the decay could double the state at each token:
    `negative_eigenvalues` therefore means β = (1 + exp(g)) sigmoid(W_β x), which keeps the spectral radius at 1.

    Args:
        correction: the initial D, 0.02 for small models.

    Source: Comba: Improving Bilinear RNNs with Closed-loop Control (Hu et al., 2025), section 3.
    """

    paper = "Comba (arXiv:2506.02475), section 3"
    operations = ("short_convolution", "delta_rule")
    fused_features = False
    no_weight_decay_names = ("A_log", "dt_bias", "D")

    @takes_also(GatedDeltaNet, without=("feature_map", "key_norm"))
    def __init__(self, d_model: int, *, correction: float = 1.0, **options: Any) -> None:
        self.correction = correction
        super().__init__(d_model, **options)
        self.decay = nn.Parameter(torch.ones(self.num_heads))
        self.D = nn.Parameter(torch.full((self.num_heads,), correction))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "D"):
            nn.init.ones_(self.decay)
            nn.init.constant_(self.D, self.correction)

    def _features(self, inputs: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
        """q, k, v, β and p of each head of values."""
        q, k, v = functional.silu(inputs).split([self.key_width, self.key_width, self.value_width], dim=-1)
        q, k = (at_least_float32(x).unflatten(-1, (self.num_heads, -1)) for x in (q, k))
        p = self.decay.sigmoid().unsqueeze(-1) * k
        q = q - self.D.unsqueeze(-1) * p
        q, k, p = (repeat_groups(unit_torch(x, "l2").to(inputs.dtype), self.num_value_heads) for x in (q, k, p))
        return q, k, v.unflatten(-1, (self.num_value_heads, -1)), at_least_float32(logits).sigmoid(), p

    def _write(self, features: tuple[Tensor, ...], rate: Any, g: Any) -> dict[str, Any]:
        q, k, v, beta, p = features
        if self.negative_eigenvalues:
            beta = beta * (1 + g.exp())
        return {"q": q, "k": p, "v": v, "beta": beta, "write_key": k, "read_before_decay": True}

    def _gate(self, y: Tensor, gate: Tensor) -> Tensor:
        return y * gate.sigmoid() if self.output_gate else y
