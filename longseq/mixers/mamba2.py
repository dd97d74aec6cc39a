"""Mamba-2's layer: a state space with one decay for each head, which makes it a gated linear attention."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import Self

from longseq.blocks.convolution import ShortConvolution
from longseq.blocks.linear import AlignedLinear
from longseq.blocks.norm import RMSNorm
from longseq.blocks.pairs import stack_pair
from longseq.blocks.precision import at_least_float32
from longseq.kernels import silu_product
from longseq.kernels.reading import halves
from longseq.mixers.base import ALL_TOKENS, Device, ScanOptions, memory_dtype, required
from longseq.mixers.gated_linear import GatedLinearMixer, recurrence_flops
from longseq.mixers.heads import choose_heads
from longseq.mixers.registry import register
from longseq.mixers.states import ConvolvedState
from longseq.mixers.step_size import draw_decay_rates, draw_step_bias, step_size


@register("mamba2")
class Mamba2(GatedLinearMixer[ConvolvedState]):
    """State space duality: a scalar decay for each head, input and output maps shared by groups of heads.

        z, x, B, C, dt = in_proj(u);  x, B, C = SiLU(conv(x, B, C));  Δ = softplus(dt + dt_bias)
        S ← exp(−Δ exp(A_log)) S + B (Δ x)ᵀ;   y = out_proj(RMSNorm((Sᵀ C + D x) ⊙ SiLU(z)))

    The I = expand · d_model channels are H heads of P = head_dim; the memory has N = state_size numbers for each
    channel. The H / G heads of a group share B and C, and the norm is over a group's channels.

    Args:
        head_dim: P; by default 64 (32, ... where 64 does not divide I).
        n_groups: G, a divisor of H.
        dt_min, dt_max: range of the initial step sizes softplus(dt_bias).

    Source: Transformers are SSMs (Dao and Gu, 2024), section 7.
    """

    paper = "Mamba-2 (arXiv:2405.21060), section 7"
    operations = ("short_convolution", "linear_attention")
    no_weight_decay_names = ("A_log", "dt_bias", "D")

    def __init__(
        self,
        d_model: int,
        *,
        expand: int = 2,
        head_dim: int | None = None,
        state_size: int = 128,
        n_groups: int = 1,
        convolution_width: int = 4,
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
        self.dt_min = dt_min
        self.dt_max = dt_max
        self.norm_eps = norm_eps
        self.mixed_width = self.inner + 2 * n_groups * state_size
        self.in_proj = AlignedLinear(d_model, self.inner + self.mixed_width + self.num_heads, bias=False)
        self.convolution = ShortConvolution(self.mixed_width, convolution_width, bias=True, backend=backend)
        self.A_log = nn.Parameter(torch.empty(self.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads))
        self.D = nn.Parameter(torch.empty(self.num_heads))
        self.norm = GroupRMSNorm(n_groups, self.inner, eps=norm_eps, backend=backend)
        self.out_proj = nn.Linear(self.inner, d_model, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        draw_decay_rates(self.A_log)
        draw_step_bias(self.dt_bias, self.dt_min, self.dt_max)
        self.D.fill_(1.0)

    def scan(
        self, projected: Tensor, state: ConvolvedState | None = None, options: ScanOptions = ALL_TOKENS
    ) -> tuple[Tensor, ConvolvedState | None]:
        convolution, memory = (None, None) if state is None else state
        z, mixed, rate = self._split(projected)
        mixed, convolution = self.convolution(mixed, convolution, **options._asdict())
        x, key, query = self._heads(mixed)
        v, g = self._discretise(x, rate, self.A_log, self.dt_bias)
        y, memory = self.recur(query, key, v, g, memory, options)
        last = ConvolvedState(required(convolution), required(memory)) if options.output_final_state else None
        return self._read_out(y, x, z), last

    def scan_pair(self, backward: Self, projected: Tensor, mask: Tensor | None = None) -> Tensor:
        z, mixed, rate = self._split(projected)
        x, key, query = self._heads(self.convolution.convolve_pair(backward.convolution, mixed, mask))
        A_log, dt_bias = stack_pair(self.A_log, backward.A_log), stack_pair(self.dt_bias, backward.dt_bias)
        v, g = self._discretise(x.unflatten(0, (2, -1)), rate, A_log[:, None, None], dt_bias[:, None, None])
        y, _ = self.recur(query, key, v.flatten(0, 1), g.flatten(0, 1), None, ScanOptions.of_pair(mask))
        (ahead, behind), (x, x_behind) = halves(y), halves(x)
        return self._read_out(ahead, x, z) + backward._read_out(behind, x_behind, z)

    def scan_step(self, projected: Tensor, state: ConvolvedState) -> tuple[Tensor, ConvolvedState]:
        z, mixed, rate = self._split(projected)
        mixed, convolution = self.convolution.step(mixed, required(state.convolution))
        x, key, query = self._heads(mixed)
        v, g = self._discretise(x, rate, self.A_log, self.dt_bias)
        y, memory = self.recur_step(query, key, v, g, state.memory)
        return self._read_out(y, x, z), ConvolvedState(convolution, memory)

    def initial_state(self, batch: int, device: Device = None, dtype: torch.dtype | None = None) -> ConvolvedState:
        shape = (batch, self.num_heads, self.state_size, self.head_dim)
        memory = torch.zeros(shape, device=device, dtype=memory_dtype(dtype))
        return ConvolvedState(self.convolution.initial_state(batch, device, memory.dtype), memory)

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z, mixed, rate = projected.split([self.inner, self.mixed_width, self.num_heads], dim=-1)
        return z, mixed, rate

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x `[..., H, P]`, and the keys B and queries C `[..., G, N]`."""
        group = self.n_groups * self.state_size
        x, key, query = mixed.split([self.inner, group, group], dim=-1)
        key, query = (y.unflatten(-1, (self.n_groups, self.state_size)) for y in (key, query))
        return x.unflatten(-1, (self.num_heads, self.head_dim)), key, query

    def _discretise(self, x: Tensor, rate: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        """Δ x `[..., H, P]` and the log decay `[..., H]`."""
        step = step_size(rate, dt_bias)
        return (step.unsqueeze(-1) * x).to(x.dtype), -at_least_float32(A_log).exp() * step

    def _read_out(self, y: Tensor, x: Tensor, z: Tensor) -> Tensor:
        weight = self.D.repeat_interleave(self.head_dim, dim=0)
        y, x = y.flatten(-2), x.flatten(-2)
        return self.norm(silu_product(y, z, skip=x, skip_weight=weight, backend=self.local_backend))

    def scan_flops(self, tokens: int) -> int:
        recurrence = recurrence_flops(self.num_heads, self.state_size, self.head_dim)
        return tokens * (recurrence + 4 * self.inner)


class GroupRMSNorm(RMSNorm):
    """RMS norm over each of `groups` equal parts of the channels, with a weight for every channel."""

    def __init__(self, groups: int, channels: int, *, eps: float, backend: str) -> None:
        super().__init__(channels, eps=eps, backend=backend)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        if self.groups == 1:
            return super().forward(x)
        parts = x.unflatten(-1, (self.groups, -1))
        return functional.rms_norm(parts, parts.shape[-1:], None, self.eps).flatten(-2) * self.weight.to(x.dtype)
