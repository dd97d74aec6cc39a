"""Gated linear attention: a decay of its own for each key channel."""

from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import Self

from longseq.blocks.linear import project_pair
from longseq.blocks.norm import RMSNorm
from longseq.blocks.pairs import repeat_rows
from longseq.blocks.precision import at_least_float32
from longseq.mixers.base import ScanOptions
from longseq.mixers.gated_linear import GatedMemoryMixer, recurrence_flops
from longseq.mixers.heads import FEATURE_MAPS, check_groups, choose_heads, repeat_groups
from longseq.mixers.registry import register


@register("gla")
class GatedLinearAttention(GatedMemoryMixer):
    """Linear attention whose forget gates depend on the token, one for each key channel.

        q, k = φ(W x);   v = W_v x;   g = log sigmoid(W₂ W₁ x + b) / τ
        S ← Diag(exp(g)) S + k vᵀ;   y = W_o (RMSNorm(Sᵀ q / √K) ⊙ SiLU(W_r x))

    RMSNorm, the scale 1/√K and W_r without a bias follow the published code.

    Args:
        num_heads: the number of heads.
        num_kv_heads: heads of keys, values and decays, a divisor of num_heads; by default num_heads.
        expand_k, expand_v: widths of all queries and of all outputs of heads, relative to `d_model`.
        feature_map: φ, one of identity (the paper's), relu (for weights of a transformer, see `longseq convert`), silu,
            relu_squared.
        output_gate: multiply by SiLU(W_r x); without it the layer has no W_r.
        gate_rank: width of W₁ x.
        gate_temperature: τ, which keeps the gates near 1 at the start of training.

    Source: Gated Linear Attention Transformers with Hardware-Efficient Training (Yang et al., 2023), equations 3 and 4
    and section 4.4.
    """

    paper = "GLA (arXiv:2312.06635), section 4.4"

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        gate_rank: int = 16,
        gate_temperature: float = 16.0,
        feature_map: str = "identity",
        output_gate: bool = True,
        norm_eps: float = 1e-5,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, backend=backend)
        self.key_width = round(expand_k * d_model)
        self.value_width = round(expand_v * d_model)
        self.num_heads, self.key_dim = choose_heads(self.key_width, num_heads, None, preferred=1)
        self.scale = self.key_dim**-0.5
        _, self.value_dim = choose_heads(self.value_width, num_heads, None, preferred=1)
        self.num_kv_heads = check_groups(self.num_heads, num_kv_heads)
        self.gate_rank = gate_rank
        self.gate_temperature = gate_temperature
        self.feature_map = feature_map
        self.output_gate = output_gate
        # queries, keys, values, the output gate, W₁ x
        keys, values = self.num_kv_heads * self.key_dim, self.num_kv_heads * self.value_dim
        self.widths = [self.key_width, keys, values, self.value_width if output_gate else 0, gate_rank]
        self.in_proj = nn.Linear(d_model, sum(self.widths), bias=False)
        self.decay_proj = nn.Linear(gate_rank, keys)
        self.norm = RMSNorm(self.value_dim, eps=norm_eps, backend=backend)
        self.out_proj = nn.Linear(self.value_width, d_model, bias=False)

    def scan_pair(self, backward: Self, projected: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v, gate, rank = self._split(projected)
        q, k, v = repeat_rows(q), repeat_rows(k), repeat_rows(v)
        g = self._log_decay(project_pair(self.decay_proj, backward.decay_proj, rank.expand(2, *rank.shape)))
        o, _ = self.recur(q, k, v, g, None, ScanOptions.of_pair(mask))
        return self.read_out_pair(backward, o, gate)

    def split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        q, k, v, gate, rank = self._split(projected)
        return q, k, v, self._log_decay(self.decay_proj(rank)), gate

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        q, k, v, gate, rank = projected.split(self.widths, dim=-1)
        q, k = (FEATURE_MAPS[self.feature_map](x) for x in (q, k))
        k, v = (repeat_groups(x.unflatten(-1, (self.num_kv_heads, -1)), self.num_heads) for x in (k, v))
        return q.unflatten(-1, (self.num_heads, -1)), k, v, gate, rank

    def _log_decay(self, logits: Tensor) -> Tensor:
        """g `[..., H, K]` of W₂ W₁ x + b."""
        g = functional.logsigmoid(at_least_float32(logits)) / self.gate_temperature
        return repeat_groups(g.unflatten(-1, (self.num_kv_heads, -1)), self.num_heads)

    def scan_flops(self, tokens: int) -> int:
        recurrence = recurrence_flops(self.num_heads, self.key_dim, self.value_dim)
        gate = 2 * self.value_width if self.output_gate else 0
        return tokens * (recurrence + gate)
