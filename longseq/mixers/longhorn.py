"""Longhorn with the diagonal approximation of its paper."""

from typing import Any

from torch import Tensor
from typing_extensions import Self

from longseq.arguments import takes_also
from longseq.blocks.pairs import stack_pair
from longseq.kernels import longhorn_pair, longhorn_scan, longhorn_scan_step
from longseq.kernels.diagonal_scan import TRITON_ENTRIES
from longseq.kernels.longhorn_pair import TRITON_RANKS
from longseq.mixers.base import ScanOptions, required
from longseq.mixers.registry import register
from longseq.mixers.selective import SelectiveMixer


@register("longhorn")
class Longhorn(SelectiveMixer):
    """Online associative recall in closed form, with the diagonal of the state transition.

        ε = β / (1 + β kᵀk);   S ← (1 − ε ⊗ k²) ⊙ S + (ε ⊙ x) ⊗ k;   y = S q;   β = sigmoid(rate)

    The memory is `[B, I, N]` with I = expand · d_model channels and N = state_size.

    Source: Longhorn: State Space Models are Amortized Online Learners (Liu et al., 2024), algorithm 1 and equation 7.
    """

    paper = "Longhorn (arXiv:2407.14207), equation 7"
    operations = ("short_convolution", "longhorn_scan")

    @takes_also(SelectiveMixer, without=("rates", "rate_bias"))
    def __init__(self, d_model: int, **options: Any) -> None:
        super().__init__(d_model, **options)

    def scan_pair(self, backward: Self, projected: Tensor, mask: Tensor | None = None) -> Tensor:
        is_wide = self.rate_rank > TRITON_RANKS or self.state_size > TRITON_ENTRIES
        if mask is not None or self.backend == "reference" or is_wide:
            return super().scan_pair(backward, projected, mask)
        convolution, rate = self.convolution, self.rate_proj
        other, other_rate = backward.convolution, backward.rate_proj
        return longhorn_pair(
            projected,
            stack_pair(convolution.weight, other.weight),
            stack_pair(required(convolution.bias), required(other.bias)),
            stack_pair(self.x_proj.weight, backward.x_proj.weight),
            stack_pair(rate.weight, other_rate.weight),
            stack_pair(rate.bias, other_rate.bias),
            stack_pair(self.D, backward.D),
            backend=self.local_backend,
        )

    def recur(
        self, x: Tensor, rate: Tensor, key: Tensor, query: Tensor, memory: Tensor | None, options: ScanOptions
    ) -> tuple[Tensor, Tensor | None]:
        beta = rate.sigmoid()  # in the logits' type: their own rounding is the larger error
        strength = beta if options.mask is None else beta * options.mask.unsqueeze(-1)
        return longhorn_scan(x, query, key, strength, initial_state=memory, **self.call_options(options))

    def recur_step(self, x: Tensor, rate: Tensor, key: Tensor, query: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        beta = rate.sigmoid()
        return longhorn_scan_step(x, query, key, beta, memory, backend=self.step_backend)
