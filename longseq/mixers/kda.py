"""Kimi Delta Attention and Gated DeltaNet-2: the delta rule with a decay for each key channel."""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Self

from longseq.blocks.convolution import ShortConvolution
from longseq.blocks.linear import AlignedLinear
from longseq.blocks.norm import RMSNorm
from longseq.blocks.pairs import repeat_rows, stack_pair
from longseq.kernels import log_decay
from longseq.kernels.reading import halves
from longseq.mixers.deltanet import DeltaMixer
from longseq.mixers.heads import choose_heads
from longseq.mixers.registry import register
from longseq.mixers.step_size import draw_decay_rates, draw_step_bias


@register("kda")
class KDA(DeltaMixer):
    """Kimi Delta Attention: a gate for each key channel, made by a low-rank map, and a gated output.

        q, k, v = SiLU(conv(W x));  q, k = q / ‖q‖, k / ‖k‖;  β = sigmoid(W_β x);  z = W_f2 W_f1 x + dt_bias
        g = −exp(A_log) softplus(z)     or, with a bound,     g = gate_bound · sigmoid(exp(A_log) z)
        S ← Diag(exp(g)) S;   S ← S + β k (v − Sᵀ k)ᵀ;   y = W_o (RMSNorm(Sᵀ q / √K) ⊙ sigmoid(W_g2 W_g1 x + b))

    The low-rank maps have the rank of a head's values. The gate with a bound is not the other one cut off there:
    weights of one form fail with the other. exp(A_log) starts uniform in [1, 16], and with a bound at 1, because larger
    values would saturate most of the sigmoids for good.

    Args:
        num_heads, head_dim: of the keys; give at most one; by default heads of 128 channels (64, ... where 128 does not
            divide).
        num_value_heads: heads of values and of their gates, a multiple of num_heads; by default num_heads.
        expand_k: width of all keys relative to `d_model` (16/9 in Kimi Linear 48B).
        expand_v: channels of a head's values relative to those of its keys.
        gate_bound: the lowest log decay, −5 in Kimi K3; None: the gate of Kimi Linear.
        output_gate: low_rank, as above; full: sigmoid(W_g x), as in Kimi K3.
        convolution_width, negative_eigenvalues: as in `DeltaNet`.
        dt_min, dt_max: range of the initial step sizes softplus(dt_bias).

    Source: Kimi Linear: An Expressive, Efficient Attention Architecture (Kimi Team, 2025), equations 1 and 8 to 10.
    """

    paper = "Kimi Linear (arXiv:2510.26692), section 3"
    no_weight_decay_names = ("A_log", "dt_bias")

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        num_value_heads: int | None = None,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        convolution_width: int = 4,
        gate_bound: float | None = None,
        output_gate: Literal["low_rank", "full"] = "low_rank",
        negative_eigenvalues: bool = False,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        norm_eps: float = 1e-5,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, feature_map="silu", key_norm="l2", backend=backend)
        self.key_width = round(expand_k * d_model)
        self.num_heads, self.head_dim = choose_heads(self.key_width, num_heads, head_dim, preferred=128)
        self.key_dim = self.head_dim
        self.num_value_heads = self.num_heads if num_value_heads is None else num_value_heads
        self.value_dim = round(expand_v * self.key_dim)
        self.gate_bound = gate_bound
        self.output_gate = output_gate
        self.negative_eigenvalues = negative_eigenvalues
        self.dt_min = dt_min
        self.dt_max = dt_max
        keys, values = self.num_value_heads * self.key_dim, self.num_value_heads * self.value_dim
        self.mixed_width = 2 * self.key_width + values
        self.widths = [
            *self._strength_widths(),
            self.value_dim,
            self.value_dim if output_gate == "low_rank" else values,
        ]
        self.in_proj = AlignedLinear(d_model, self.mixed_width + sum(self.widths), bias=False)
        self.convolution = ShortConvolution.of_width(self.mixed_width, convolution_width, backend)
        self.decay_proj = nn.Linear(self.value_dim, keys, bias=False)
        self.gate_proj = nn.Linear(self.value_dim, values) if output_gate == "low_rank" else None
        self.A_log = nn.Parameter(torch.empty(self.num_value_heads))
        self.dt_bias = nn.Parameter(torch.empty(keys))
        self.norm = RMSNorm(self.value_dim, eps=norm_eps, backend=backend)
        self.out_proj = nn.Linear(values, d_model, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        draw_step_bias(self.dt_bias, self.dt_min, self.dt_max)
        if self.gate_bound is None:
            draw_decay_rates(self.A_log)
        else:
            self.A_log.zero_()

    def _strength_widths(self) -> list[int]:
        """The channels of the projection behind those of the convolution: the logits of β."""
        return [self.num_value_heads]

    def _split(self, projected: Tensor) -> tuple[Tensor, Any, Tensor]:
        """The inputs of the features, those of the strengths and of the decay, and that of the output gate."""
        used = self.mixed_width + sum(self.widths)
        parts = projected[..., self.mixed_width : used].split(self.widths, dim=-1)
        return projected, parts[:-1], parts[-1]

    def _log_decay(self, rate: Any, backend: str) -> Tensor:
        return self._decay(self.decay_proj(rate[-1]), self.A_log, self.dt_bias, backend)

    def _log_decay_pair(self, backward: Self, rate: Any) -> Tensor:
        z = torch.cat((self.decay_proj(rate[-1]), backward.decay_proj(rate[-1])))
        A_log, dt_bias = stack_pair(self.A_log, backward.A_log), stack_pair(self.dt_bias, backward.dt_bias)
        return self._decay(z, A_log, dt_bias, self.local_backend)

    def _decay(self, z: Tensor, A_log: Tensor, dt_bias: Tensor, backend: str) -> Tensor:
        z, dt_bias = (x.unflatten(-1, (-1, self.key_dim)) for x in (z, dt_bias))
        return log_decay(z, A_log, dt_bias, bound=self.gate_bound, backend=backend)

    def _read_out_pair(self, backward: Self, o: Tensor, gate: Tensor) -> Tensor:
        ahead, behind = halves(o)
        return self._read_out(ahead, gate) + backward._read_out(behind, gate)

    def _gate(self, y: Tensor, gate: Tensor) -> Tensor:
        return y * (gate if self.gate_proj is None else self.gate_proj(gate)).sigmoid()

    def scan_flops(self, tokens: int) -> int:
        return super().scan_flops(tokens) + tokens * 2 * self.num_value_heads * self.value_dim


@register("gdn2")
class GatedDeltaNet2(KDA):
    """Gated DeltaNet-2: Kimi Delta Attention with an erase gate for each key channel and a write gate for each value.

        b = sigmoid(W_b x), w = sigmoid(W_w x)       S ← Diag(exp(g)) S;   S ← S + k (w ⊙ v − Sᵀ (b ⊙ k))ᵀ

    in place of β; all else is as in `KDA`. Equal gates b = w = β give KDA. With changing b the transitions can lengthen
    the state, although the spectral radius of each is at most 1. `negative_eigenvalues` doubles b, not w. The output
    gate is a sigmoid, as in flash-linear-attention; the authors' layer has SiLU.

    Source: Gated DeltaNet-2 (NVIDIA, 2026).
    """

    paper = "Gated DeltaNet-2 (NVIDIA, 2026)"

    def _strength_widths(self) -> list[int]:
        """The logits of b and w. The first ones of b are also in the place of the logits of β, which is not used."""
        return [self.num_value_heads * self.key_dim, self.num_value_heads * self.value_dim]

    def _write(self, features: tuple[Tensor, ...], rate: Any, g: Tensor | None) -> dict[str, Any]:
        q, k, v, _ = features
        b, w = (
            x.unflatten(-1, (self.num_value_heads, -1)).sigmoid()
            for x in (rate[:2] if rate[0].shape[0] == k.shape[0] else map(repeat_rows, rate[:2]))
        )
        return {"q": q, "k": (2 * b if self.negative_eigenvalues else b) * k, "v": w * v, "write_key": k}
