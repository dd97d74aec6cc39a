"""Longhorn without the diagonal approximation."""

from typing import Any

from torch import Tensor

from longseq.arguments import takes_also
from longseq.blocks.precision import at_least_float32
from longseq.kernels import delta_rule, delta_rule_step
from longseq.mixers.base import ScanOptions
from longseq.mixers.heads import choose_heads
from longseq.mixers.registry import register
from longseq.mixers.selective import SelectiveMixer


@register("longhorn_exact")
class LonghornExact(SelectiveMixer):
    """Online associative recall in closed form, with the full state transition and one rate for each head.

        ε = β / (1 + β kᵀk);   S ← (I − ε k kᵀ) S + ε k xᵀ;   y = Sᵀ q;   β = sigmoid(rate)

    The full transition is a delta rule: the channels of a head share their rate, and all heads share k and q, as in the
    diagonal form. The memory is `[B, H, N, P]` with H heads of P = head_dim channels and N = state_size.

    Source: Longhorn: State Space Models are Amortized Online Learners (Liu et al., 2024), equation 6.
    """

    paper = "Longhorn (arXiv:2407.14207), equation 6"
    operations = ("short_convolution", "delta_rule")
    flops_per_entry = 6  # reading at the key, writing there and reading at the query

    @takes_also(SelectiveMixer, without=("rates", "rate_bias"))
    def __init__(self, d_model: int, *, expand: int = 2, head_dim: int | None = None, **options: Any) -> None:
        num_heads, head_dim = choose_heads(expand * d_model, None, head_dim, preferred=64)
        super().__init__(d_model, expand=expand, rates=num_heads, **options)
        self.num_heads = num_heads
        self.head_dim = head_dim

    def recur(
        self, x: Tensor, rate: Tensor, key: Tensor, query: Tensor, memory: Tensor | None, options: ScanOptions
    ) -> tuple[Tensor, Tensor | None]:
        strength = self._strength(key, rate)
        if options.mask is not None:
            strength = strength * options.mask.unsqueeze(-1)
        query, key, x = self._to_heads(query), self._to_heads(key), x.unflatten(-1, (self.num_heads, self.head_dim))
        y, final = delta_rule(query, key, x, strength, initial_state=memory, **self.call_options(options))
        return y.flatten(-2), final

    def recur_step(self, x: Tensor, rate: Tensor, key: Tensor, query: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        x = x.unflatten(-1, (self.num_heads, self.head_dim))
        strength = self._strength(key, rate)
        query, key = self._to_heads(query), self._to_heads(key)
        y, memory = delta_rule_step(query, key, x, memory, strength, backend=self.step_backend)
        return y.flatten(-2), memory

    @property
    def memory_shape(self) -> tuple[int, ...]:
        return self.num_heads, self.state_size, self.head_dim

    def _strength(self, key: Tensor, rate: Tensor) -> Tensor:
        """ε of equation 6, `[..., H]`: one write strength for each head."""
        key = at_least_float32(key)
        beta = at_least_float32(rate).sigmoid()
        return beta / (1 + beta * key.square().sum(-1, keepdim=True))

    def _to_heads(self, key: Tensor) -> Tensor:
        return key.unsqueeze(-2).expand(*key.shape[:-1], self.num_heads, self.state_size)
