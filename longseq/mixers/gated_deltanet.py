"""Gated DeltaNet: the delta rule with a memory that decays."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from longseq.blocks.convolution import ShortConvolution
from longseq.blocks.linear import AlignedLinear
from longseq.blocks.norm import RMSNorm
from longseq.blocks.pairs import repeat_rows, stack_pair
from longseq.kernels import log_decay, silu_product
from longseq.mixers.deltanet import DeltaMixer
from longseq.mixers.heads import choose_heads, largest_heads
from longseq.mixers.registry import register
from longseq.mixers.step_size import draw_decay_rates, draw_step_bias


@register("gated_deltanet")
class GatedDeltaNet(DeltaMixer):
    """Multi-head delta rule with Mamba-2's decay for each head and a gated output.

        q, k, v = conv(W x);  q, k = normalise(φ(q)), normalise(φ(k));  v = SiLU(v);  β = sigmoid(W_β x)
        g = −exp(A_log) softplus(W_a x + dt_bias)
        S ← exp(g) S;   S ← S + β k (v − Sᵀ k)ᵀ;   y = W_o (RMSNorm(Sᵀ q / √K) ⊙ SiLU(W_g x))

    With the default widths, the projections have 6 d_model² parameters, as in Mamba-2. The scale 1/√K is from the
    published code. That code draws exp(A_log) from [0, 16]; here it is drawn from [1, 16].

    Args:
        num_heads, head_dim: of the keys; give at most one. By default the largest heads of at most 128 channels that
            divide the width of the keys.
        num_value_heads: heads of values, step sizes and decays, a multiple of num_heads, so that each head of keys
            serves several (as in Qwen3-Next); by default num_heads.
        expand_k: width of all keys relative to `d_model`.
        expand_v: channels of a head's values relative to those of its keys.
        convolution_width, feature_map, key_norm: as in `DeltaNet`.
        output_gate: multiply by SiLU(W_g x); without it the layer has no W_g (an ablation of the paper).
        negative_eigenvalues: as in `DeltaNet`.
        dt_min, dt_max: range of the initial step sizes softplus(dt_bias).

    Source: Gated Delta Networks: Improving Mamba2 with Delta Rule (Yang, Kautz and Hatamizadeh, 2024), equation 10 and
    section 3.4; initial decays as in Mamba-2.
    """

    paper = "Gated DeltaNet (arXiv:2412.06464), section 3.4"
    no_weight_decay_names: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias")

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        num_value_heads: int | None = None,
        expand_k: float = 0.75,
        expand_v: float = 2.0,
        convolution_width: int = 4,
        feature_map: str = "silu",
        key_norm: str = "l2",
        output_gate: bool = True,
        negative_eigenvalues: bool = False,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        norm_eps: float = 1e-5,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, feature_map=feature_map, key_norm=key_norm, backend=backend)
        self.key_width = round(expand_k * d_model)
        if num_heads is None and head_dim is None:
            head_dim = largest_heads(self.key_width, 128)
        self.num_heads, self.key_dim = choose_heads(self.key_width, num_heads, head_dim, preferred=128)
        self.value_dim = round(expand_v * self.key_dim)
        self.num_value_heads = self.num_heads if num_value_heads is None else num_value_heads
        self.value_width = self.num_value_heads * self.value_dim
        self.output_gate = output_gate
        self.negative_eigenvalues = negative_eigenvalues
        self.dt_min = dt_min
        self.dt_max = dt_max
        self.mixed_width = (1 + self.steps) * self.key_width + self.steps * self.value_width
        # the inputs of the features, the logits of the decay, the output gate
        heads = self.num_value_heads
        self.widths = [self.mixed_width + self.steps * heads, heads, self.value_width if output_gate else 0]
        self.in_proj = AlignedLinear(d_model, sum(self.widths), bias=False)
        self.convolution = ShortConvolution.of_width(self.mixed_width, convolution_width, backend)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.norm = RMSNorm(self.value_dim, eps=norm_eps, backend=backend)
        self.out_proj = nn.Linear(self.value_width, d_model, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        draw_decay_rates(self.A_log)
        draw_step_bias(self.dt_bias, self.dt_min, self.dt_max)

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs of the features `[..., C + H]`, W_a x `[..., H]`, and the gate `[..., H V]` or empty."""
        mixed, rate, gate, _ = projected.split([*self.widths, projected.shape[-1] - sum(self.widths)], dim=-1)
        return mixed, rate, gate

    def _log_decay(self, rate: Tensor, backend: str) -> Tensor:
        return log_decay(rate, self.A_log, self.dt_bias, backend=backend)

    def _log_decay_pair(self, backward: Self, rate: Tensor) -> Tensor:
        A_log, bias = stack_pair(self.A_log, backward.A_log), stack_pair(self.dt_bias, backward.dt_bias)
        return log_decay(repeat_rows(rate), A_log, bias, backend=self.local_backend)

    def _gate(self, y: Tensor, gate: Tensor) -> Tensor:
        return silu_product(y, gate, backend=self.local_backend) if self.output_gate else y

    def scan_flops(self, tokens: int) -> int:
        gate = 2 * self.value_width if self.output_gate else 0
        return super().scan_flops(tokens) + tokens * gate
