"""The time mixing of RWKV-7 (Goose)."""

import math
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Self

from longseq.blocks.norm import UpcastGroupNorm
from longseq.blocks.precision import at_least_float32
from longseq.blocks.token_shift import previous_tokens, previous_tokens_pair
from longseq.kernels import delta_rule, delta_rule_step
from longseq.kernels.reading import halves
from longseq.mixers.base import ALL_TOKENS, Device, Mixer, ScanOptions, add_readings, memory_dtype, required
from longseq.mixers.heads import choose_heads
from longseq.mixers.registry import register
from longseq.mixers.states import ShiftedState

LOWEST = -math.exp(-0.5)  # log decay


class _Inputs(NamedTuple):
    """r, k̂, v, a ⊙ k̂, k̃ and the log decay of tokens, `[..., H, K]`, and the gate `[..., d_model]`."""

    r: Tensor
    read: Tensor
    v: Tensor
    erase: Tensor
    write: Tensor
    g: Tensor
    gate: Tensor


@register("rwkv7")
class RWKV7(Mixer[ShiftedState]):
    """A generalised delta rule: decays and strengths for each channel, and different keys to erase and to write.

        x_□ = x_t + μ_□ ⊙ (x_{t−1} − x_t)                                                     □ in r, w, k, v, a, g
        r, k, v = W_r x_r, W_k x_k, W_v x_v;   w = exp(−e^{−1/2} sigmoid(w0 + tanh(x_w A_w) B_w))
        a = sigmoid(a0 + x_a A_a B_a);   k̂ = k ⊙ k_k / ‖k ⊙ k_k‖;   k̃ = k ⊙ (1 + (a − 1) ⊙ k_a)
        S_t = Diag(w) S_{t−1} − (a ⊙ k̂) (S_{t−1}ᵀ k̂)ᵀ + k̃ vᵀ;   o_t = S_tᵀ r
        y = W_o ((GroupNorm(o) + (r · (r_k ⊙ k̃)) v) ⊙ sigmoid(x_g A_g) B_g)

    In a model, the values of its first RWKV-7 layer enter all later ones: v ← v + (v_first − v) ⊙ sigmoid(v0 + x_v A_v
    B_v), in each order of reading those of the same order. They pass from block to block (see `Mixer`); a layer by
    itself has none.

    Two tokens are mixed before they are projected, with the consequences described for `RWKV4`. Initial values are
    those of the published code: W_o and the A_□ are zero, others depend on the layer's place in the model (a layer by
    itself has those of the middle). As there, only W_r, W_k, W_v and W_o have weight decay, and w0 learns at
    twice the rate.

    Args:
        num_heads, head_dim: give at most one; by default heads of 64 channels (32, ... where 64 does not divide).
        decay_rank, rate_rank, value_rank, gate_rank: widths of the low-rank terms of w, a, v and the gate; by default
            c √d_model, rounded to a positive multiple of 32, for c = 2.5, 2.5, 1.7 and 5.
        value_residual: whether the values of the first layer enter the others.
        negative_eigenvalues: (1 + w) a in place of a in the recurrence. More would let the state grow without bound,
            because it is read before its decay.
        norm_eps: eps of the norm over each head's output.

    Source: RWKV-7 "Goose" with Expressive Dynamic State Evolution (Peng et al., 2025), section 4, and its published
    code RWKV-LM.
    """

    paper = "RWKV-7 (arXiv:2503.14456), section 4"
    operations = ("short_convolution", "delta_rule")
    reads_backwards = True
    reads_pairs = True
    no_weight_decay_names = (
        *("mix", "key_scale", "key_rate", "bonus"),
        *(f"{term}_{part}" for term in ("decay", "rate", "value") for part in ("base", "down", "up")),
        *("gate_down", "gate_up"),
    )
    learning_rate_scales: ClassVar[Mapping[str, float]] = {"decay_base": 2.0}

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        decay_rank: int | None = None,
        rate_rank: int | None = None,
        value_rank: int | None = None,
        gate_rank: int | None = None,
        value_residual: bool = True,
        negative_eigenvalues: bool = False,
        norm_eps: float = 64e-5,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, backend=backend)
        self.num_heads, self.head_dim = choose_heads(d_model, num_heads, head_dim, preferred=64)
        ranks = ((decay_rank, 2.5), (rate_rank, 2.5), (value_rank, 1.7), (gate_rank, 5.0))
        self.decay_rank, self.rate_rank, self.value_rank, self.gate_rank = (
            max(32, 32 * round(factor * math.sqrt(d_model) / 32)) if rank is None else rank for rank, factor in ranks
        )
        self.value_residual = value_residual
        self.negative_eigenvalues = negative_eigenvalues
        self.layer: int | None = None
        self.layers = 1
        self.in_proj = None
        self.mix = nn.Parameter(torch.empty(6, d_model))  # of r, w, k, v, a and the gate
        self.decay_base, self.rate_base = (nn.Parameter(torch.empty(d_model)) for _ in range(2))
        self.decay_down, self.decay_up = self._low_rank(self.decay_rank)
        self.rate_down, self.rate_up = self._low_rank(self.rate_rank)
        self.gate_down, self.gate_up = self._low_rank(self.gate_rank)
        for name in ("value_base", "value_down", "value_up"):
            self.register_parameter(name, None)
        self.receptance, self.key, self.value = (nn.Linear(d_model, d_model, bias=False) for _ in range(3))
        self.key_scale, self.key_rate = (nn.Parameter(torch.empty(d_model)) for _ in range(2))
        self.bonus = nn.Parameter(torch.empty(self.num_heads, self.head_dim))
        self.norm = UpcastGroupNorm(self.num_heads, d_model, eps=norm_eps)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)
        self.reset_parameters()

    def place_in_model(self, layer: int, layers: int) -> None:
        self.layer, self.layers = layer, layers
        self.makes_values = self.value_residual and layer == 0 and layers > 1
        self.reads_values = self.value_residual and layer > 0
        if self.reads_values:
            self.value_base = nn.Parameter(torch.empty_like(self.rate_base))
            self.value_down, self.value_up = self._low_rank(self.value_rank)

    def _low_rank(self, rank: int) -> tuple[nn.Parameter, nn.Parameter]:
        D, new = self.d_model, self.mix.new_empty
        return nn.Parameter(new(D, rank)), nn.Parameter(new(rank, D))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        D, device = self.d_model, self.mix.device
        depth = rest = share = 0.5
        if self.layer is not None:
            depth = self.layer / max(self.layers - 1, 1)
            rest, share = 1 - self.layer / self.layers, (1 + self.layer) / self.layers
        place = torch.arange(D, device=device) / D
        exponents = torch.tensor([0.2, 0.9, 0.7, 0.7, 0.9, 0.2], device=device)
        self.mix.copy_(1 - place ** (rest * exponents[:, None]))
        ends = torch.linspace(0, 1, D, device=device)
        zigzag = torch.linspace(-1, 1, self.head_dim, device=device).repeat(self.num_heads)
        zigzag = zigzag * zigzag.abs()
        self.decay_base.copy_(6 * ends ** (1 + depth**0.3) - 5.5 + 2.5 * zigzag)
        self.rate_base.copy_(0.4 * (ends - 0.5) + 0.3 * zigzag - 0.19)
        self.key_scale.copy_(0.71 - 0.1 * (ends - 0.5))
        self.key_rate.fill_(1.02)
        self.bonus.fill_(-0.04)
        nn.init.constant_(self.norm.weight, share**0.7)
        nn.init.zeros_(self.norm.bias)
        for term in ("decay", "rate", "value", "gate"):
            down, up = getattr(self, f"{term}_down"), getattr(self, f"{term}_up")
            if down is not None:
                down.zero_()
                _draw_orthogonal(up, 0.1 * math.sqrt(max(1, up.shape[0] / D)))
        if self.reads_values:
            self.value_base.copy_(0.73 - 0.4 * (ends - 0.5))
        for layer, gain in ((self.receptance, 1.0), (self.key, 0.1), (self.value, 1.0)):
            _draw_orthogonal(layer.weight, gain)
        if self.out_proj is not None:
            self.out_proj.weight.zero_()

    def project_in(self, x: Tensor) -> Tensor:
        return x

    def project_out(self, y: Tensor) -> Tensor:
        if not self.makes_values:
            return super().project_out(y)
        y, values = y.split([self.d_model, y.shape[-1] - self.d_model], dim=-1)
        return torch.cat((super().project_out(y), values), dim=-1)

    def scan(
        self, projected: Tensor, state: ShiftedState | None = None, options: ScanOptions = ALL_TOKENS
    ) -> tuple[Tensor, ShiftedState | None]:
        shift, memory = (None, None) if state is None else state
        x, *first = projected.split(self.d_model, dim=-1)
        mask = options.mask
        previous, latest = previous_tokens(x, shift, **self.call_options(options), mask=mask)
        inputs = self._project(x, previous, *first)
        o, memory = self._recur(inputs, memory, options)
        last = ShiftedState(required(latest), required(memory)) if options.output_final_state else None
        return self._read_out(o, inputs), last

    def scan_pair(self, backward: Self, projected: Tensor, mask: Tensor | None = None) -> Tensor:
        x, *firsts = projected.split(self.d_model, dim=-1)
        options = ScanOptions.of_pair(mask)
        previous = halves(previous_tokens_pair(x, mask=mask, backend=self.backend))
        pair = (self, backward)
        tokens = [
            mixer._project(x, own, first)
            for mixer, own, first in zip(pair, previous, firsts or (None, None), strict=True)
        ]
        inputs = _Inputs(*map(torch.cat, zip(*tokens, strict=True)))
        o, _ = self._recur(inputs, None, options)
        readings = [mixer._read_out(own, each) for mixer, own, each in zip(pair, halves(o), tokens, strict=True)]
        return add_readings(readings, self.d_model)

    def scan_step(self, projected: Tensor, state: ShiftedState) -> tuple[Tensor, ShiftedState]:
        x, *first = projected.split(self.d_model, dim=-1)
        inputs = self._project(x, state.shift.squeeze(-1).to(x.dtype), *first)
        r, read, v, erase, write, g, _ = inputs
        o, memory = delta_rule_step(
            r, read, v, state.memory, write_key=erase, value_key=write, g=g, read_before_decay=True,
            backend=self.step_backend,
        )  # fmt: skip
        return self._read_out(o, inputs), ShiftedState(x.to(state.shift.dtype).unsqueeze(-1), memory)

    def initial_state(self, batch: int, device: Device = None, dtype: torch.dtype | None = None) -> ShiftedState:
        dtype = memory_dtype(dtype)
        memory = torch.zeros(batch, self.num_heads, self.head_dim, self.head_dim, device=device, dtype=dtype)
        return ShiftedState(torch.zeros(batch, self.d_model, 1, device=device, dtype=dtype), memory)

    def _project(self, x: Tensor, previous: Tensor, first: Tensor | None = None) -> _Inputs:
        change = previous - x
        for_r, for_decay, for_k, for_v, for_rate, for_gate = (
            torch.addcmul(x, change, amount) for amount in self.mix.to(x.dtype).unbind()
        )
        r, k, v = self.receptance(for_r), self.key(for_k), self.value(for_v)
        decay = torch.tanh(for_decay @ self.decay_down) @ self.decay_up
        g = LOWEST * (self.decay_base + at_least_float32(decay)).sigmoid()
        rate = for_rate @ self.rate_down @ self.rate_up
        rate = (self.rate_base.to(rate.dtype) + rate).sigmoid()
        if first is not None:
            amount = for_v @ self.value_down @ self.value_up
            v = torch.lerp(v, first.to(v.dtype), (self.value_base.to(amount.dtype) + amount).sigmoid())
        read = (k * self.key_scale.to(k.dtype)).unflatten(-1, (self.num_heads, -1))
        # The norm is not rounded: a key that is too long would let the state grow.
        wide = torch.promote_types(read.dtype, torch.float32)
        read = read / torch.linalg.vector_norm(read, dim=-1, keepdim=True, dtype=wide).clamp_min(1e-12)
        write = k * (1 + (rate - 1) * self.key_rate.to(k.dtype))
        strength = rate * (1 + g.exp()) if self.negative_eigenvalues else rate
        r, v, write, g, strength = (
            part.unflatten(-1, (self.num_heads, self.head_dim)) for part in (r, v, write, g, strength)
        )
        gate = (for_gate @ self.gate_down).sigmoid() @ self.gate_up
        return _Inputs(r, read.to(r.dtype), v, (strength * read).to(r.dtype), write.to(r.dtype), g, gate)

    def _recur(self, inputs: _Inputs, memory: Tensor | None, options: ScanOptions) -> tuple[Tensor, Tensor | None]:
        r, read, v, erase, write, g, _ = inputs
        if options.mask is not None:
            erase, write, g = (part * options.mask[..., None, None] for part in (erase, write, g))
        return delta_rule(
            r, read, v, write_key=erase, value_key=write, g=g, read_before_decay=True, initial_state=memory,
            **self.call_options(options),
        )  # fmt: skip

    def _read_out(self, o: Tensor, inputs: _Inputs) -> Tensor:
        """Normalise each head, add the bonus of the current token, and gate."""
        r, write, v, gate = inputs.r, inputs.write, inputs.v, inputs.gate
        bonus = (r * self.bonus.to(r.dtype) * write).sum(-1, keepdim=True) * v
        normed = self.norm(o.flatten(-2).flatten(0, -2)).view(gate.shape)
        y = (normed + bonus.flatten(-2)).to(gate.dtype) * gate
        return torch.cat((y, inputs.v.flatten(-2)), dim=-1) if self.makes_values else y

    def scan_flops(self, tokens: int) -> int:
        terms = (self.decay_down, self.rate_down, self.value_down, self.gate_down)
        low_rank = sum(2 * down.numel() for down in terms if down is not None)
        # The decay takes K V; reading, erasing, writing and reading at r take 2 K V each.
        return tokens * (2 * low_rank + 9 * self.d_model * self.head_dim)


def _draw_orthogonal(weight: Tensor, gain: float) -> None:
    """Draw an orthogonal matrix, in float32: torch has no decomposition of half precision."""
    weight.copy_(nn.init.orthogonal_(torch.empty_like(weight, dtype=torch.float32), gain))
