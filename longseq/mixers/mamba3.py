"""Mamba-3 with one input and one output for each head (SISO): a complex state, discretised by the trapezoidal rule."""

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from longseq.blocks.linear import AlignedLinear
from longseq.blocks.norm import RMSNorm
from longseq.blocks.precision import at_least_float32
from longseq.blocks.token_shift import latest_token, previous_tokens
from longseq.kernels import linear_attention, linear_attention_step, silu_product
from longseq.kernels.dispatch import is_exporting
from longseq.kernels.packing import Packing
from longseq.mixers.base import ALL_TOKENS, Device, Mixer, ScanOptions, memory_dtype, required
from longseq.mixers.gated_linear import recurrence_flops
from longseq.mixers.heads import choose_heads
from longseq.mixers.registry import register
from longseq.mixers.step_size import draw_step_bias, step_size

LEAST_RATE = 1e-4
CIRCLE = 2 * math.pi
CHUNK = 64  # tokens whose angles are added up before they are reduced to a circle


class Mamba3State(NamedTuple):
    """The angles `[B, H, N / 4]`, the memory `[B, H, N, P]`, and b `[B, H, N]` and x `[B, H, P]` of the last token."""

    phase: Tensor
    memory: Tensor
    key: Tensor
    value: Tensor


class _Inputs(NamedTuple):
    """The inputs of the recurrence, `[..., H]` and `[..., H, D]`: x, B, C, Δ, log α, (1 − σ(λ)) Δ and π tanh(θ) Δ."""

    x: Tensor
    b: Tensor
    c: Tensor
    step: Tensor
    g: Tensor
    delta: Tensor
    turn: Tensor


@register("mamba3")
class Mamba3(Mixer[Mamba3State]):
    """State space whose inputs and outputs turn by angles that depend on the tokens, without a convolution.

        z, x, B, C, dt, A, λ, θ = W u;  Δ = softplus(dt + dt_bias);  log α = −rate(A) Δ
        φ_t = φ_{t−1} + π tanh(θ) Δ
        b, c = B / rms(B) + bias_B, C / rms(C) + bias_C, whose channel pairs (2 i, 2 i + 1), i < N / 4, turn by φ_t
        h_t = α h_{t−1} + (1 − σ(λ)) Δ α b_{t−1} x_{t−1}ᵀ + σ(λ) Δ b_t x_tᵀ;   y = W_o ((hᵀ c + D x) ⊙ SiLU(z))

    The norms have weights. The I = expand · d_model channels are H heads of P = head_dim; the memory has N = state_size
    numbers for each channel, and the H / G heads of a group share B and C.

    Args:
        head_dim: P; by default 64 (32, ... where 64 does not divide I).
        n_groups: G, a divisor of H.
        rate: rational: 1 + A for A ≥ 0, else 1 / (1 − A); softplus: as in older weights, and in
            flash-linear-attention. It is at least 1e-4.
        dt_min, dt_max: range of the initial step sizes softplus(dt_bias).

    Source: Mamba-3: Improved Sequence Modeling using State Space Principles (Lahoti et al., 2026), section 3.
    """

    paper = "Mamba-3 (arXiv:2603.15569), section 3"
    operations = ("linear_attention",)
    no_weight_decay_names = ("dt_bias", "D")

    def __init__(
        self,
        d_model: int,
        *,
        expand: int = 2,
        head_dim: int | None = None,
        state_size: int = 128,
        n_groups: int = 1,
        rate: Literal["rational", "softplus"] = "rational",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        norm_eps: float = 1e-5,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, backend=backend)
        self.inner = expand * d_model
        self.num_heads, self.head_dim = choose_heads(self.inner, None, head_dim, preferred=64)
        self.state_size = state_size
        self.n_groups = n_groups
        self.rate = rate
        self.dt_min = dt_min
        self.dt_max = dt_max
        group = n_groups * state_size
        self.widths = [self.inner, self.inner, group, group, *3 * [self.num_heads], state_size // 4]
        self.in_proj = AlignedLinear(d_model, sum(self.widths), bias=False)
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads))
        self.D = nn.Parameter(torch.empty(self.num_heads))
        self.B_norm, self.C_norm = (RMSNorm(state_size, eps=norm_eps, backend=backend) for _ in range(2))
        self.B_bias, self.C_bias = (nn.Parameter(torch.empty(self.num_heads, state_size)) for _ in range(2))
        self.out_proj = nn.Linear(self.inner, d_model, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        draw_step_bias(self.dt_bias, self.dt_min, self.dt_max)
        for ones in (self.D, self.B_bias, self.C_bias):
            ones.fill_(1.0)

    def scan(
        self, projected: Tensor, state: Mamba3State | None = None, options: ScanOptions = ALL_TOKENS
    ) -> tuple[Tensor, Mamba3State | None]:
        # With δ_t = (1 − σ) Δ_t, h_t + δ_{t+1} b_t x_tᵀ is a linear attention's memory with keys (σ Δ_t + δ_{t+1}) b_t.
        packing, mask = options.cu_seqlens, options.mask
        z, (x, b, c, step, g, delta, turn) = self._split(projected)
        if mask is not None:
            real = mask.unsqueeze(-1)
            step, g, delta, turn = step * real, g * real, delta * real, turn * real.unsqueeze(-1)
        shift: dict[str, Any] = {"cu_seqlens": packing, "mask": mask, "backend": self.backend}
        later, first = previous_tokens(delta, reverse=True, output_final_state=True, **shift)
        phase = _add_up(turn, None if state is None else state.phase, packing)
        product = (b * c).sum(-1, dtype=later.dtype)  # turns leave it as it is
        b, c = _turn(phase, b, c)
        weight = step - delta + later
        key = b * (weight if mask is None else weight * real).to(b.dtype).unsqueeze(-1)
        memory = None
        if state is not None:
            memory = state.memory + (required(first) * state.key).unsqueeze(-1) * state.value.unsqueeze(-2)
        o, memory = linear_attention(c, key, x, g=g, initial_state=memory, **self.call_options(options))
        o = o - (later * product).unsqueeze(-1) * x
        y = self._read_out(o, x, z)
        if not options.output_final_state:
            return y, None
        rows = projected.shape[0] if packing is None else packing.count
        start = state or Mamba3.initial_state(self, rows, projected.device, projected.dtype)
        pairs = ((phase, start.phase), (b, start.key), (x, start.value))
        phase, key, value = (_latest(part, first, packing, mask) for part, first in pairs)
        return y, Mamba3State(phase, required(memory), key, value)

    def scan_step(self, projected: Tensor, state: Mamba3State) -> tuple[Tensor, Mamba3State]:
        z, (x, b, c, step, g, delta, turn) = self._split(projected)
        phase = (state.phase + turn).remainder(CIRCLE)
        b, c = _turn(phase, b, c)
        memory = state.memory + (delta.unsqueeze(-1) * state.key).unsqueeze(-1) * state.value.unsqueeze(-2)
        key = (step - delta).to(b.dtype).unsqueeze(-1) * b
        o, memory = linear_attention_step(c, key, x, memory, g=g, backend=self.step_backend)
        return self._read_out(o, x, z), Mamba3State(phase, memory, b.to(state.key.dtype), x.to(state.value.dtype))

    def initial_state(self, batch: int, device: Device = None, dtype: torch.dtype | None = None) -> Mamba3State:
        N, P = self.state_size, self.head_dim
        shapes = ((N // 4,), (N, P), (N,), (P,))
        parts = (
            torch.zeros(batch, self.num_heads, *shape, device=device, dtype=memory_dtype(dtype)) for shape in shapes
        )
        return Mamba3State(*parts)

    def _split(self, projected: Tensor) -> tuple[Tensor, _Inputs]:
        z, x, b, c, dt, rate, mix, angle = projected[..., : sum(self.widths)].split(self.widths, dim=-1)
        groups = (self.n_groups, self.state_size)
        b, c = (
            (
                self._pairs_apart(norm(part.unflatten(-1, groups))).unsqueeze(-2)
                + self._pairs_apart(bias).to(part.dtype).unflatten(0, (self.n_groups, -1))
            ).flatten(-3, -2)
            for part, norm, bias in ((b, self.B_norm, self.B_bias), (c, self.C_norm, self.C_bias))
        )
        step, rate, mix, angle = step_size(dt, self.dt_bias), *(at_least_float32(part) for part in (rate, mix, angle))
        return z, _Inputs(
            x.unflatten(-1, (self.num_heads, self.head_dim)),
            b,
            c,
            step,
            -self._rate(rate).clamp_min(LEAST_RATE) * step,
            (1 - mix.sigmoid()) * step,
            math.pi * angle.tanh().unsqueeze(-2) * step.unsqueeze(-1),
        )

    def _pairs_apart(self, x: Tensor) -> Tensor:
        """The channels of `x [..., N]` as `_turn` takes them: the first of each pair, the second, and the others."""
        pairs, others = x.split([self.state_size // 2, self.state_size - self.state_size // 2], dim=-1)
        return torch.cat((*pairs.unflatten(-1, (-1, 2)).unbind(-1), others), dim=-1)

    def _rate(self, rate: Tensor) -> Tensor:
        if self.rate == "softplus":
            return functional.softplus(rate)
        return torch.where(rate >= 0, 1 + rate, 1 / (1 - rate.clamp_max(0)))

    def _read_out(self, o: Tensor, x: Tensor, z: Tensor) -> Tensor:
        weight = self.D.repeat_interleave(self.head_dim, dim=0)
        skip = x.flatten(-2)
        return silu_product(o.flatten(-2).to(x.dtype), z, skip=skip, skip_weight=weight, backend=self.local_backend)

    def scan_flops(self, tokens: int) -> int:
        turns = 2 * 3 * self.num_heads * self.state_size
        recurrence = recurrence_flops(self.num_heads, self.state_size, self.head_dim)
        return tokens * (recurrence + turns + 6 * self.inner)


def _add_up(turn: Tensor, start: Tensor | None, packing: Packing | None) -> Tensor:
    """The angles after each token in [0, 2 π), from the turns `[B, T, H, R]` and the angles before the first."""
    tokens = turn.shape[1]
    chunks = functional.pad(turn, (0, 0, 0, 0, 0, -tokens % CHUNK)).unflatten(1, (-1, CHUNK)).cumsum(2)
    whole = chunks[:, :, -1:].remainder(CIRCLE)
    phase = (chunks + whole.cumsum(1) - whole).flatten(1, 2)[:, :tokens]
    if packing is not None and tokens:
        before = (phase - turn)[0, packing.cu_seqlens[:-1].clamp_max(tokens - 1)]
        phase = phase - before[packing.sequence]
    if start is not None:
        phase = phase + (start.unsqueeze(1) if packing is None else start[packing.sequence])
    return phase.remainder(CIRCLE)


def _turn(phase: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
    """Turn pairs of channels of each `[..., N]` by the angles `[..., R]`: channel i with i + R for i < R."""
    width, dtype = phase.shape[-1], parts[0].dtype
    cos, sin = phase.cos().to(dtype), phase.sin().to(dtype)
    turned = []
    for part in parts:
        first, second, others = part.split([width, width, part.shape[-1] - 2 * width], dim=-1)
        turned.append(torch.cat((first * cos - second * sin, first * sin + second * cos, others), dim=-1))
    return tuple(turned)


def _latest(x: Tensor, start: Tensor, packing: Packing | None, mask: Tensor | None) -> Tensor:
    """The last real token of each sequence of `x [B, T, ...]`, in the type of `start`, which empty ones keep."""
    if not is_exporting() and x.shape[1] == 0:
        return start
    if packing is not None:
        is_empty = (packing.lengths == 0).view(-1, *[1] * (start.dim() - 1))
        return torch.where(is_empty, start, latest_token(x, packing=packing).to(start.dtype))
    if mask is None:
        return x[:, -1].to(start.dtype)
    place = torch.where(mask, torch.arange(1, x.shape[1] + 1, device=x.device), 0).amax(1)
    return torch.cat((start.unsqueeze(1), x.to(start.dtype)), 1)[torch.arange(len(x), device=x.device), place]
