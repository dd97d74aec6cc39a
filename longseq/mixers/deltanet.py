"""DeltaNet: linear attention whose memory follows the delta rule. Also the layer that it shares with Gated DeltaNet."""

from typing import Any, ClassVar

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
from longseq.kernels.reading import halves
from longseq.mixers.base import ALL_TOKENS, Device, Mixer, ScanOptions, memory_dtype, required
from longseq.mixers.heads import choose_heads
from longseq.mixers.registry import register
from longseq.mixers.states import ConvolvedState


class DeltaMixer(Mixer[ConvolvedState]):
    """Base of DeltaNet, Gated DeltaNet and the layers that follow from them.

        q, k, v = conv(W x);  q, k = normalise(φ(q)), normalise(φ(k));  v = SiLU(v);  β = sigmoid(W_β x)
        S ← exp(g) S;   S ← S + β k (v − Sᵀ k)ᵀ;   y = gate(RMSNorm(Sᵀ q / √K))

    The defaults are a layer without decay (g = 0) and gate. A subclass creates `in_proj`, `convolution`, `norm` and
    `out_proj`, sets the attributes below, and may make other arguments of `delta_rule` in `_write`.

    Attributes:
        num_heads, key_dim: heads of keys, and K.
        num_value_heads, value_dim: heads of values, and V.
        mixed_width: C, the channels that the convolution reads.
        negative_eigenvalues: β in (0, 2).
        steps: the number of writes of a token.
        fused_features: q, k, v and β are those of `convolved_features`; False: `_features` makes others.
    """

    operations: ClassVar[tuple[str, ...]] = ("convolved_features", "delta_rule")
    fused_features: ClassVar[bool] = True
    reads_backwards: ClassVar[bool] = True
    reads_pairs: ClassVar[bool] = True

    num_heads: int
    key_dim: int
    num_value_heads: int
    value_dim: int
    mixed_width: int
    convolution: ShortConvolution | None
    norm: RMSNorm
    negative_eigenvalues: bool = False
    steps: int = 1

    def __init__(self, d_model: int, *, feature_map: str, key_norm: str, backend: str) -> None:
        super().__init__(d_model, backend=backend)
        check_features(feature_map, key_norm)
        self.feature_map = feature_map
        self.key_norm = key_norm

    def project_in(self, x: Tensor) -> Tensor:
        return super().project_in(x) if self.in_proj is None else project_padded(self.in_proj, x)

    def scan(
        self, projected: Tensor, state: ConvolvedState | None = None, options: ScanOptions = ALL_TOKENS
    ) -> tuple[Tensor, ConvolvedState | None]:
        convolution, memory = (None, None) if state is None else state
        mixed, rate, gate = self._split(projected)
        reading = options._asdict()
        if self.fused_features and self.convolution is not None and is_replaceable(self.convolution, ShortConvolution):
            features, convolution = self.convolution.features(mixed, convolution, **reading, **self._options)
            features = self._share(features, self._split_logits(mixed)[1])
        else:
            inputs, logits = self._split_logits(mixed)
            if self.convolution is not None:
                inputs, convolution = self.convolution(inputs, convolution, **reading)
            features = self._features(inputs, logits)
        g = self._log_decay(rate, self.local_backend)
        o, memory = self._recur(self._write(features, rate, g), g, memory, options)
        last = ConvolvedState(convolution, required(memory)) if options.output_final_state else None
        return self._read_out(o, gate), last

    def scan_pair(self, backward: Self, projected: Tensor, mask: Tensor | None = None) -> Tensor:
        mixed, rate, gate = self._split(projected)
        inputs, logits = self._split_logits(mixed)
        if self.fused_features and self.convolution is not None:
            features = self.convolution.features_pair(required(backward.convolution), mixed, mask=mask, **self._options)
            features = self._share(features, logits)
        else:
            ahead = behind = inputs
            if self.convolution is not None:
                ahead, behind = halves(self.convolution.convolve_pair(required(backward.convolution), inputs, mask))
            both = zip(self._features(ahead, logits), backward._features(behind, logits), strict=True)
            features = tuple(map(torch.cat, both))
        g = self._log_decay_pair(backward, rate)
        o, _ = self._recur(self._write(features, rate, g), g, None, ScanOptions.of_pair(mask))
        return self._read_out_pair(backward, o, gate)

    def _recur(
        self, call: dict[str, Any], g: Tensor | None, memory: Tensor | None, options: ScanOptions
    ) -> tuple[Tensor, Tensor | None]:
        """Run the recurrence over the arguments of `_write`; returns the outputs `[B, T, H, V]` and the last memory."""
        mask = options.mask
        if mask is not None:
            erased = "beta" if "beta" in call else "write_key"
            call[erased], g = _hide(call[erased], mask), None if g is None else _hide(g, mask)
        call |= self.call_options(options)
        o, memory = delta_rule(**call, g=g, scale=self.key_dim**-0.5, initial_state=memory)
        return o, memory

    def scan_step(self, projected: Tensor, state: ConvolvedState) -> tuple[Tensor, ConvolvedState]:
        convolution, memory = state
        mixed, rate, gate = self._split(projected)
        inputs, logits = self._split_logits(mixed)
        if self.convolution is not None:
            inputs, convolution = self.convolution.step(inputs, required(convolution))
        g = self._log_decay(rate, "torch")
        o, memory = self._recur_step(self._write(self._features(inputs, logits), rate, g), g, memory)
        return self._read_out(o, gate), ConvolvedState(convolution, memory)

    def initial_state(self, batch: int, device: Device = None, dtype: torch.dtype | None = None) -> ConvolvedState:
        dtype = memory_dtype(dtype)
        convolution = None if self.convolution is None else self.convolution.initial_state(batch, device, dtype)
        shape = (batch, self.num_value_heads, self.key_dim, self.value_dim)
        return ConvolvedState(convolution, torch.zeros(shape, device=device, dtype=dtype))

    def _split(self, projected: Tensor) -> tuple[Tensor, Any, Any]:
        """The inputs of the features `[..., C + H + ...]`, and of the decay and the gate (None without)."""
        return projected, None, None

    def _split_logits(self, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs of the convolution `[..., C]`, and W_β x `[..., H]`."""
        widths = [self.mixed_width, self.num_value_heads * self.steps]
        inputs, logits, _ = mixed.split([*widths, mixed.shape[-1] - sum(widths)], dim=-1)
        return inputs, logits

    @property
    def _options(self) -> dict[str, Any]:
        """The options of `head_features`."""
        return {
            "num_heads": self.num_heads,
            "key_dim": self.key_dim,
            "feature_map": self.feature_map,
            "key_norm": self.key_norm,
        }

    def _features(self, inputs: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
        some = logits[..., : self.num_heads]  # as many as the operation has heads; `_share` takes all
        features = head_features(inputs, logits=some, backend=self.local_backend, **self._options)
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

    def _recur_step(self, call: dict[str, Any], g: Tensor | None, memory: Tensor) -> tuple[Tensor, Tensor]:
        return delta_rule_step(**call, state=memory, g=g, scale=self.key_dim**-0.5, backend=self.step_backend)

    def _write(self, features: tuple[Tensor, ...], rate: Any, g: Tensor | None) -> dict[str, Any]:
        """The arguments of `delta_rule` from q, k, v and β."""
        q, k, v, beta = features
        return {"q": q, "k": k, "v": v, "beta": 2 * beta if self.negative_eigenvalues else beta}

    def _log_decay(self, rate: Any, backend: str) -> Tensor | None:
        """g `[..., H]` or `[..., H, K]`; None without a decay."""
        return None

    def _log_decay_pair(self, backward: Self, rate: Any) -> Tensor | None:
        """g of this mixer and of `backward`, one after the other: 2 B rows."""
        return None

    def _read_out(self, o: Tensor, gate: Any) -> Tensor:
        return self._gate(self.norm(o).flatten(-2), gate)

    def _read_out_pair(self, backward: Self, o: Tensor, gate: Any) -> Tensor:
        """The sum of both mixers' outputs, from o `[2 B, T, H, V]`."""
        return self._gate(self.norm.norm_pair(backward.norm, o).flatten(-2), gate)

    def _gate(self, y: Tensor, gate: Any) -> Tensor:
        return y

    def scan_flops(self, tokens: int) -> int:
        # For each head, reading at the key, writing there and reading at the query take 2 K V each, and a decay K V.
        operations = 6 if type(self)._log_decay is DeltaMixer._log_decay else 7
        return tokens * operations * self.num_value_heads * self.key_dim * self.value_dim


def _hide(x: Tensor, mask: Tensor) -> Tensor:
    """x `[B, T, ...]` with zeros at padding."""
    return x * mask.view(mask.shape + (1,) * (x.dim() - 2))


@register("deltanet")
class DeltaNet(DeltaMixer):
    """Multi-head delta rule with normalised keys.

        q, k, v = conv(W x);  q, k = normalise(φ(q)), normalise(φ(k));  v = SiLU(v);  β = sigmoid(W_β x)
        S ← S + β k (v − Sᵀ k)ᵀ;   y = W_o RMSNorm(Sᵀ q / √K)

    As in the published code, v has SiLU for every φ, and q has the scale 1/√K; the paper has neither. RMSNorm does not
    cancel the scale where outputs are as small as its eps: over 128 random tokens, layers of 512 channels in heads of
    128 with initial weights differ by a quarter with and without the scale.

    Args:
        num_heads, head_dim: give at most one; by default heads of 128 channels (64, ... where 128 does not divide).
        convolution_width: taps of the short convolution on q, k and v; 0 leaves it out (an ablation of the paper).
        feature_map: φ, one of silu, relu, elu_plus_one, identity.
        key_norm: l2 or l1, with 1e-6 under the root (see `longseq.kernels.head_features`). The delta rule is stable
            only for keys of norm at most one. For l1, the published code divides by the sum instead of the sum of
            magnitudes.
        negative_eigenvalues: β in (0, 2), so that the transition matrix I − β k kᵀ can have a negative eigenvalue.

    Source: Parallelizing Linear Transformers with the Delta Rule over Sequence Length (Yang et al., 2024), section 3.3.
    """

    paper = "DeltaNet (arXiv:2406.06484), section 3.3"

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
        super().__init__(d_model, feature_map=feature_map, key_norm=key_norm, backend=backend)
        self.num_heads, self.head_dim = choose_heads(d_model, num_heads, head_dim, preferred=128)
        self.num_value_heads, self.key_dim, self.value_dim = self.num_heads, self.head_dim, self.head_dim
        self.negative_eigenvalues = negative_eigenvalues
        self.mixed_width = 3 * d_model
        self.in_proj = AlignedLinear(d_model, 3 * d_model + self.num_heads, bias=False)
        self.convolution = ShortConvolution.of_width(self.mixed_width, convolution_width, backend)
        self.norm = RMSNorm(self.head_dim, eps=norm_eps, backend=backend)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)
