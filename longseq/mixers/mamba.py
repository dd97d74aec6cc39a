"""Mamba's selective state space layer."""

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from longseq.arguments import takes_also
from longseq.blocks.pairs import stack_pair
from longseq.blocks.precision import at_least_float32
from longseq.kernels import selective_scan, selective_scan_step
from longseq.mixers.base import ScanOptions
from longseq.mixers.registry import register
from longseq.mixers.selective import SelectiveMixer
from longseq.mixers.step_size import draw_step_bias, step_size


@register("mamba")
class Mamba(SelectiveMixer):
    """A diagonal state space whose step size and input and output maps depend on the token.

        Δ = softplus(rate + b);   S ← exp(Δ A) ⊙ S + (Δ x) ⊗ B;   y = S C;   A = −exp(A_log)

    The memory is `[B, I, N]` with I = expand · d_model channels and N = state_size. The initial steps are uniform on a
    log scale between `dt_min` and `dt_max`, and initially A_n = −n.

    Source: Mamba: Linear-Time Sequence Modeling with Selective State Spaces (Gu and Dao, 2023), algorithm 2 and
    section 3.6.
    """

    paper = "Mamba (arXiv:2312.00752), algorithm 2"
    operations = ("short_convolution", "selective_scan")
    no_weight_decay_names = ("A_log", "rate_bias")

    @takes_also(SelectiveMixer, without=("rates", "rate_bias"))
    def __init__(self, d_model: int, *, dt_min: float = 0.001, dt_max: float = 0.1, **options: Any) -> None:
        super().__init__(d_model, rate_bias=False, **options)
        self.dt_min = dt_min
        self.dt_max = dt_max
        self.rate_bias = nn.Parameter(torch.empty(self.inner))
        self.A_log = nn.Parameter(torch.empty(self.inner, self.state_size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.A_log.copy_(torch.arange(1, self.state_size + 1).log().expand_as(self.A_log))
        bound = self.rate_rank**-0.5
        self.rate_proj.weight.uniform_(-bound, bound)
        draw_step_bias(self.rate_bias, self.dt_min, self.dt_max)

    def recur(
        self, x: Tensor, rate: Tensor, key: Tensor, query: Tensor, memory: Tensor | None, options: ScanOptions
    ) -> tuple[Tensor, Tensor | None]:
        step = step_size(rate, self.rate_bias)
        step = step if options.mask is None else step * options.mask.unsqueeze(-1)
        call = self.call_options(options)
        return selective_scan(x, step, _rates(self.A_log), key, query, initial_state=memory, **call)

    def recur_pair(
        self, backward: Self, x: Tensor, rate: Tensor, key: Tensor, query: Tensor, options: ScanOptions
    ) -> Tensor:
        bias, A_log = stack_pair(self.rate_bias, backward.rate_bias), stack_pair(self.A_log, backward.A_log)
        step = step_size(rate.unflatten(0, (2, -1)), bias[:, None, None]).flatten(0, 1)
        step = step if options.mask is None else step * options.mask.unsqueeze(-1)
        return selective_scan(x, step, _rates(A_log), key, query, **self.call_options(options))[0]

    def recur_step(self, x: Tensor, rate: Tensor, key: Tensor, query: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        delta = step_size(rate, self.rate_bias)
        return selective_scan_step(x, delta, _rates(self.A_log), key, query, memory, backend=self.step_backend)


def _rates(A_log: Tensor) -> Tensor:
    """A = −exp(A_log), in float32 at least: bfloat16 would change the decay rates by up to 0.4 %."""
    return -at_least_float32(A_log).exp()
