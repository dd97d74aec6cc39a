"""DeltaNet: linear attention whose memory follows the delta rule."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Self

from longseq.blocks.convolution import ShortConvolution
from longseq.blocks.hooks import is_replaceable
from longseq.blocks.linear import AlignedLinear, project_padded
from longseq.blocks.norm import RMSNorm
from longseq.blocks.pairs import repeat_rows
from longseq.blocks.precision import at_least_float32
from longseq.kernels import delta_rule, delta_rule_step, head_features
from longseq.kernels.head_features import check_features
from longseq.kernels.packing import Packing
from longseq.kernels.reading import Reverse
from longseq.mixers.base import Mixer, memory_dtype, required
from longseq.mixers.heads import choose_heads
from longseq.mixers.measures import mean_norm, saturation, token_mean
from longseq.mixers.registry import register


class DeltaNetState(NamedTuple):
    """The convolution's last inputs `[B, 3 d_model, W - 1]` (None without convolution), the memory `[B, H, K, K]`."""

    convolution: Tensor | None
    memory: Tensor


@register("deltanet")
class DeltaNet(Mixer[DeltaNetState]):
    """Multi-head delta rule with normalised keys.

        q, k, v = conv(W x);  q, k = normalise(φ(q)), normalise(φ(k));  v = SiLU(v);  β = sigmoid(W_β x)
        S ← S + β k (v − Sᵀ k)ᵀ;   y = W_o RMSNorm(Sᵀ q / √K)

    v has SiLU for every φ, and q the scale 1/√K, as in the published code; the paper gives activations of q and k only,
    and no scale. RMSNorm does not cancel the scale where outputs are as small as its eps: over 128 random tokens,
    layers of 512 channels in heads of 128 with initial weights differ by a quarter with and without the scale.

    Args:
        num_heads, head_dim: give at most one; by default heads of 128 channels (64, ... where 128 does not divide).
        convolution_width: taps of the short convolution on q, k and v; 0 leaves it out (an ablation of the paper).
        feature_map: φ, one of silu, relu, elu_plus_one, identity.
        key_norm: l2 or l1, with 1e-6 under the root (see `longseq.kernels.head_features`). The delta rule is stable
            only with keys of norm at most one. For l1, the published code divides by the sum, not by the sum of
            magnitudes.
        negative_eigenvalues: β in (0, 2), so that the transition matrix I − β k kᵀ can have a negative eigenvalue.

    Source: Parallelizing Linear Transformers with the Delta Rule over Sequence Length (Yang et al., 2024), section 3.3.
    """

    paper = "DeltaNet (arXiv:2406.06484), section 3.3"
    operations = ("convolved_features", "delta_rule")
    reads_backwards = True
    reads_pairs = True
    revision = 2  # the first had no 1/√K

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        convolution_width: int = 4,
        feature_map: str = "silu",
        key_norm: str = "l2",
        negative_eigenvalues: bool = False,
        norm_eps: float = 1e-5,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, backend=backend)
        check_features(feature_map, key_norm)
        self.num_heads, self.head_dim = choose_heads(d_model, num_heads, head_dim, preferred=128)
        self.feature_map = feature_map
        self.key_norm = key_norm
        self.negative_eigenvalues = negative_eigenvalues
        self.in_proj = AlignedLinear(d_model, 3 * d_model + self.num_heads, bias=False)
        self.convolution = (
            ShortConvolution(3 * d_model, convolution_width, activation=None, backend=backend)
            if convolution_width != 0
            else None
        )
        self.norm = RMSNorm(self.head_dim, eps=norm_eps, backend=backend)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)

    def project_in(self, x: Tensor) -> Tensor:
        return super().project_in(x) if self.in_proj is None else project_padded(self.in_proj, x)

    def scan(
        self,
        projected: Tensor,
        state: DeltaNetState | None = None,
        *,
        cu_seqlens: Tensor | Packing | None = None,
        mask: Tensor | None = None,
        reverse: Reverse = False,
        output_final_state: bool = True,
    ) -> tuple[Tensor, DeltaNetState | None]:
        convolution, memory = (None, None) if state is None else state
        options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "mask": mask, "reverse": reverse}
        options["output_final_state"] = output_final_state
        if self.convolution is not None and is_replaceable(self.convolution, ShortConvolution):
            features, convolution = self.convolution.features(projected, convolution, **options, **self._options)
        else:
            mixed, logits = self._split(projected)
            if self.convolution is not None:
                mixed, convolution = self.convolution(mixed, convolution, **options)
            features = self._features(mixed, logits)
        o, memory = self._recur(features, memory, cu_seqlens, mask, reverse, output_final_state)
        return self.norm(o).flatten(-2), DeltaNetState(convolution, required(memory)) if output_final_state else None

    def scan_pair(self, backward: Self, projected: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.convolution is None:
            mixed, logits = self._split(projected)
            features = self._features(repeat_rows(mixed), logits)
        else:
            features = self.convolution.features_pair(
                required(backward.convolution), projected, mask=mask, **self._options
            )
        o, _ = self._recur(features, None, None, repeat_rows(mask), "second_half")
        return self.norm.norm_pair(backward.norm, o).flatten(-2)

    def _recur(
        self, features: tuple[Tensor, ...], memory: Tensor | None, cu_seqlens: Tensor | Packing | None,
        mask: Tensor | None, reverse: Reverse, keep: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """The recurrence over q, k, v and β: the outputs `[B, T, H, K]` and the last memory."""
        q, k, v, beta = features
        beta = self._scale(beta)
        self.observe("gate_saturation", lambda: saturation(beta / 2 if self.negative_eigenvalues else beta, mask))
        self.observe("key_write_norm", lambda: token_mean(beta * at_least_float32(k).square().sum(-1), mask))
        o, memory = delta_rule(
            q,
            k,
            v,
            beta if mask is None else beta * mask.unsqueeze(-1),
            scale=self.head_dim**-0.5,
            initial_state=memory,
            output_final_state=self.needs_state(keep),
            cu_seqlens=cu_seqlens,
            reverse=reverse,
            backend=self.backend,
        )
        self.observe("state_norm", lambda: mean_norm(memory))
        return o, memory

    def scan_step(self, projected: Tensor, state: DeltaNetState) -> tuple[Tensor, DeltaNetState]:
        convolution, memory = state
        mixed, logits = self._split(projected)
        if self.convolution is not None:
            mixed, convolution = self.convolution.step(mixed, required(convolution))
        q, k, v, beta = self._features(mixed, logits)
        o, memory = delta_rule_step(
            q, k, v, self._scale(beta), memory, scale=self.head_dim**-0.5, backend=self.step_backend
        )
        return self.norm(o).flatten(-2), DeltaNetState(convolution, memory)

    def initial_state(
        self, batch: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> DeltaNetState:
        dtype = memory_dtype(dtype)
        convolution = None if self.convolution is None else self.convolution.initial_state(batch, device, dtype)
        shape = (batch, self.num_heads, self.head_dim, self.head_dim)
        return DeltaNetState(convolution, torch.zeros(shape, device=device, dtype=dtype))

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs of the convolution `[..., 3 d_model]`, and W_β x `[..., H]`."""
        widths = [3 * self.d_model, self.num_heads]
        mixed, logits, _ = projected.split([*widths, projected.shape[-1] - sum(widths)], dim=-1)
        return mixed, logits

    @property
    def _options(self) -> dict[str, Any]:
        """The options of `head_features`."""
        return {
            "num_heads": self.num_heads,
            "key_dim": self.head_dim,
            "feature_map": self.feature_map,
            "key_norm": self.key_norm,
        }

    def _features(self, mixed: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
        return head_features(mixed, logits=logits, backend=self.local_backend, **self._options)

    def _scale(self, beta: Tensor) -> Tensor:
        return 2 * beta if self.negative_eigenvalues else beta

    def scan_flops(self, tokens: int) -> int:
        # Reading at the key, writing there and reading at the query take 2 K V each.
        recurrence = 6 * self.d_model * self.head_dim
        convolution = 0 if self.convolution is None else self.convolution.flops(tokens)
        return tokens * recurrence + convolution
