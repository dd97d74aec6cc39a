"""Gated DeltaNet: the delta rule with a memory that decays."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Self

from longseq.blocks.convolution import ShortConvolution
from longseq.blocks.hooks import is_replaceable
from longseq.blocks.linear import AlignedLinear, project_padded
from longseq.blocks.norm import RMSNorm
from longseq.blocks.pairs import repeat_rows, stack_pair
from longseq.blocks.precision import at_least_float32
from longseq.kernels import delta_rule, delta_rule_step, head_features, silu_product
from longseq.kernels.head_features import check_features
from longseq.kernels.packing import Packing
from longseq.kernels.reading import Reverse
from longseq.mixers.base import Mixer, memory_dtype, required
from longseq.mixers.heads import choose_heads, largest_heads
from longseq.mixers.measures import mean_norm, saturation, token_mean
from longseq.mixers.registry import register
from longseq.mixers.step_size import draw_decay_rates, draw_step_bias, step_size


class GatedDeltaNetState(NamedTuple):
    """The convolution's last inputs `[B, C, W - 1]` (None without convolution) and the memory `[B, H, K, V]`.

    C counts the channels of queries, keys and values together, H the heads of values.
    """

    convolution: Tensor | None
    memory: Tensor


@register("gated_deltanet")
class GatedDeltaNet(Mixer[GatedDeltaNetState]):
    """Multi-head delta rule with Mamba-2's decay for each head and a gated output.

        q, k, v = conv(W x);  q, k = normalise(φ(q)), normalise(φ(k));  v = SiLU(v);  β = sigmoid(W_β x)
        g = −exp(A_log) softplus(W_a x + dt_bias)
        S ← exp(g) S;   S ← S + β k (v − Sᵀ k)ᵀ;   y = W_o (RMSNorm(Sᵀ q / √K) ⊙ SiLU(W_g x))

    With the default widths, the projections have 6 d_model² parameters, as those of Mamba-2. The scale 1/√K is that of
    the published code. That code draws exp(A_log) from [0, 16]; here it is drawn from [1, 16].

    Args:
        num_heads, head_dim: of the keys; give at most one. By default the largest heads of at most 128 channels that
            divide the width of the keys.
        num_value_heads: heads of values, step sizes and decays, a multiple of num_heads, so that heads of keys serve
            several (as in Qwen3-Next); by default as many as of keys.
        expand_k: width of all keys relative to `d_model`.
        expand_v: channels of a head's values relative to those of its keys.
        convolution_width: taps of the short convolution on q, k and v; 0 leaves it out (an ablation of the paper).
        feature_map: φ, one of silu, relu, elu_plus_one, identity.
        key_norm: l2 or l1, with 1e-6 under the root (see `longseq.kernels.head_features`). The delta rule is stable
            only with keys of norm at most one.
        output_gate: multiply by SiLU(W_g x); without it the layer has no W_g (an ablation of the paper).
        dt_min, dt_max: range of the initial step sizes softplus(dt_bias).

    Source: Gated Delta Networks: Improving Mamba2 with Delta Rule (Yang, Kautz and Hatamizadeh, 2024), equation 10 and
    section 3.4; initial decays as in Mamba-2.
    """

    paper = "Gated DeltaNet (arXiv:2412.06464), section 3.4"
    operations = ("convolved_features", "delta_rule")
    reads_backwards = True
    reads_pairs = True
    no_weight_decay_names = ("A_log", "dt_bias")
    revision = 2  # the first had no 1/√K

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
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        norm_eps: float = 1e-5,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, backend=backend)
        check_features(feature_map, key_norm)
        self.key_width = round(expand_k * d_model)
        if num_heads is None and head_dim is None:
            head_dim = largest_heads(self.key_width, 128)
        self.num_heads, self.key_dim = choose_heads(self.key_width, num_heads, head_dim, preferred=128)
        self.value_dim = round(expand_v * self.key_dim)
        self.num_value_heads = self.num_heads if num_value_heads is None else num_value_heads
        self.value_width = self.num_value_heads * self.value_dim
        self.feature_map = feature_map
        self.key_norm = key_norm
        self.output_gate = output_gate
        self.dt_min = dt_min
        self.dt_max = dt_max
        self.mixed_width = 2 * self.key_width + self.value_width
        # the inputs of the features, the logits of the decay, the output gate
        heads = self.num_value_heads
        self.widths = [self.mixed_width + heads, heads, self.value_width if output_gate else 0]
        self.in_proj = AlignedLinear(d_model, sum(self.widths), bias=False)
        self.convolution = (
            ShortConvolution(self.mixed_width, convolution_width, activation=None, backend=backend)
            if convolution_width != 0
            else None
        )
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.norm = RMSNorm(self.value_dim, eps=norm_eps, backend=backend)
        self.out_proj = nn.Linear(self.value_width, d_model, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        draw_decay_rates(self.A_log)
        draw_step_bias(self.dt_bias, self.dt_min, self.dt_max)

    def project_in(self, x: Tensor) -> Tensor:
        return super().project_in(x) if self.in_proj is None else project_padded(self.in_proj, x)

    def scan(
        self,
        projected: Tensor,
        state: GatedDeltaNetState | None = None,
        *,
        cu_seqlens: Tensor | Packing | None = None,
        mask: Tensor | None = None,
        reverse: Reverse = False,
        output_final_state: bool = True,
    ) -> tuple[Tensor, GatedDeltaNetState | None]:
        convolution, memory = (None, None) if state is None else state
        mixed, rate, gate = self._split(projected)
        g = _log_decay(rate, self.A_log, self.dt_bias)
        options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "mask": mask, "reverse": reverse}
        options["output_final_state"] = output_final_state
        if self.convolution is not None and is_replaceable(self.convolution, ShortConvolution):
            features, convolution = self.convolution.features(mixed, convolution, **options, **self._options)
            features = self._share(features, self._split_logits(mixed)[1])
        else:
            mixed, logits = self._split_logits(mixed)
            if self.convolution is not None:
                mixed, convolution = self.convolution(mixed, convolution, **options)
            features = self._features(mixed, logits)
        o, memory = self._recur(features, g, memory, cu_seqlens, mask, reverse, output_final_state)
        y = self._gate(self.norm(o), gate)
        return y, GatedDeltaNetState(convolution, required(memory)) if output_final_state else None

    def scan_pair(self, backward: Self, projected: Tensor, mask: Tensor | None = None) -> Tensor:
        mixed, rate, gate = self._split(projected)
        A_log, dt_bias = stack_pair(self.A_log, backward.A_log), stack_pair(self.dt_bias, backward.dt_bias)
        g = _log_decay(rate, A_log[:, None, None], dt_bias[:, None, None]).flatten(0, 1)
        if self.convolution is None:
            mixed, logits = self._split_logits(mixed)
            features = self._features(repeat_rows(mixed), logits)
        else:
            features = self.convolution.features_pair(required(backward.convolution), mixed, mask=mask, **self._options)
            features = self._share(features, self._split_logits(mixed)[1])
        o, _ = self._recur(features, g, None, None, repeat_rows(mask), "second_half")
        return self._gate(self.norm.norm_pair(backward.norm, o), gate)

    def _recur(
        self, features: tuple[Tensor, ...], g: Tensor, memory: Tensor | None, cu_seqlens: Tensor | Packing | None,
        mask: Tensor | None, reverse: Reverse, keep: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """The recurrence over q, k, v and β: the outputs `[B, T, H, V]` and the last memory."""
        q, k, v, beta = features
        self.observe("gate_saturation", lambda: saturation(torch.stack([beta, g.exp()], dim=-1), mask))
        self.observe("key_write_norm", lambda: token_mean(beta * at_least_float32(k).square().sum(-1), mask))
        real = None if mask is None else mask.unsqueeze(-1)
        o, memory = delta_rule(
            q,
            k,
            v,
            beta if real is None else beta * real,
            g=g if real is None else g * real,
            scale=self.key_dim**-0.5,
            initial_state=memory,
            output_final_state=self.needs_state(keep),
            cu_seqlens=cu_seqlens,
            reverse=reverse,
            backend=self.backend,
        )
        self.observe("state_norm", lambda: mean_norm(memory))
        return o, memory

    def scan_step(self, projected: Tensor, state: GatedDeltaNetState) -> tuple[Tensor, GatedDeltaNetState]:
        convolution, memory = state
        mixed, rate, gate = self._split(projected)
        g = _log_decay(rate, self.A_log, self.dt_bias)
        mixed, logits = self._split_logits(mixed)
        if self.convolution is not None:
            mixed, convolution = self.convolution.step(mixed, required(convolution))
        q, k, v, beta = self._features(mixed, logits)
        o, memory = delta_rule_step(q, k, v, beta, memory, g=g, scale=self.key_dim**-0.5, backend=self.step_backend)
        return self._gate(self.norm(o), gate), GatedDeltaNetState(convolution, memory)

    def initial_state(
        self, batch: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> GatedDeltaNetState:
        dtype = memory_dtype(dtype)
        convolution = None if self.convolution is None else self.convolution.initial_state(batch, device, dtype)
        shape = (batch, self.num_value_heads, self.key_dim, self.value_dim)
        return GatedDeltaNetState(convolution, torch.zeros(shape, device=device, dtype=dtype))

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs of the features `[..., C + H]`, W_a x `[..., H]`, and the output gate `[..., H V]` (empty without
        one).
        """
        mixed, rate, gate, _ = projected.split([*self.widths, projected.shape[-1] - sum(self.widths)], dim=-1)
        return mixed, rate, gate

    def _split_logits(self, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs of the convolution `[..., C]`, and W_β x `[..., H]`."""
        mixed, logits = mixed.split([self.mixed_width, self.num_value_heads], dim=-1)
        return mixed, logits

    @property
    def _options(self) -> dict[str, Any]:
        """The options of `head_features`."""
        return {
            "num_heads": self.num_heads,
            "key_dim": self.key_dim,
            "feature_map": self.feature_map,
            "key_norm": self.key_norm,
        }

    def _features(self, mixed: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
        some = logits[..., : self.num_heads]  # as many as the operation has heads; `_share` takes all
        features = head_features(mixed, logits=some, backend=self.local_backend, **self._options)
        return self._share(features, logits)

    def _share(self, features: tuple[Tensor, ...], logits: Tensor) -> tuple[Tensor, ...]:
        """q, k, v and β of the heads of values, from features whose values are cut into the heads of keys."""
        times = self.num_value_heads // self.num_heads
        if times == 1:
            return features
        q, k, v, _ = features
        beta = at_least_float32(logits).sigmoid()
        q, k = (x.repeat_interleave(times, dim=-2) for x in (q, k))
        v = v.unflatten(-1, (times, -1)).flatten(-3, -2)
        return q, k, v, beta if beta.shape[0] == v.shape[0] else repeat_rows(beta)

    def _gate(self, y: Tensor, gate: Tensor) -> Tensor:
        y = y.flatten(-2)
        return silu_product(y, gate, backend=self.local_backend) if self.output_gate else y

    def scan_flops(self, tokens: int) -> int:
        # For each head, the decay takes K V; reading at the key, writing there and reading at the query take 2 K V
        # each.
        recurrence = 7 * self.num_value_heads * self.key_dim * self.value_dim
        gate = 2 * self.value_width if self.output_gate else 0
        convolution = 0 if self.convolution is None else self.convolution.flops(tokens)
        return tokens * (recurrence + gate) + convolution


def _log_decay(rate: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """The log decay g `[..., H]`."""
    return -at_least_float32(A_log).exp() * step_size(rate, dt_bias)
