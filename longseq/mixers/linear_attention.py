"""Linear attention with a positive feature map."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import Self

from longseq.blocks.pairs import repeat_rows
from longseq.blocks.precision import at_least_float32
from longseq.kernels import linear_attention, linear_attention_step, map_features
from longseq.mixers.base import ALL_TOKENS, Device, Mixer, ScanOptions, memory_dtype, required
from longseq.mixers.heads import choose_heads
from longseq.mixers.registry import register
from longseq.mixers.states import MemoryState


@register("linear_attention")
class LinearAttention(Mixer[MemoryState]):
    """Causal linear attention with φ = ELU + 1.

        S ← S + φ(k) vᵀ;   z ← z + φ(k);   y = W_o (Sᵀ φ(q) / zᵀ φ(q))

    Args:
        num_heads, head_dim: give at most one; by default heads of 64 channels (32, ... where 64 does not divide).
        normalizer: divide by zᵀ φ(q). Without it the output grows with the sequence.

    Source: Transformers are RNNs (Katharopoulos et al., 2020), equations 16 to 20.
    """

    paper = "Linear attention (arXiv:2006.16236), equations 16 to 20"
    operations = ("linear_attention",)
    reads_backwards = True
    reads_pairs = True

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        normalizer: bool = True,
        eps: float = 1e-6,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, backend=backend)
        self.num_heads, self.head_dim = choose_heads(d_model, num_heads, head_dim, preferred=64)
        self.key_dim = self.head_dim
        self.normalizer = normalizer
        self.eps = eps
        self.in_proj = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)

    def scan(
        self, projected: Tensor, state: MemoryState | None = None, options: ScanOptions = ALL_TOKENS
    ) -> tuple[Tensor, MemoryState | None]:
        q, k, v = self._features(projected)
        if options.mask is not None:
            k = k * options.mask[..., None, None]
        memory = None if state is None else state.memory
        o, memory = linear_attention(q, k, v, initial_state=memory, **self.call_options(options))
        y = self._normalise(o).flatten(-2).to(projected.dtype)
        return y, MemoryState(required(memory)) if options.output_final_state else None

    def scan_pair(self, backward: Self, projected: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self._features(projected)
        if mask is not None:
            k = k * mask[..., None, None]
        q, k, v = repeat_rows(q), repeat_rows(k), repeat_rows(v)
        o, _ = linear_attention(q, k, v, reverse="second_half", backend=self.backend)
        return self._normalise(o).unflatten(0, (2, -1)).sum(0).flatten(-2).to(projected.dtype)

    def scan_step(self, projected: Tensor, state: MemoryState) -> tuple[Tensor, MemoryState]:
        o, memory = linear_attention_step(*self._features(projected), state.memory, backend=self.step_backend)
        return self._normalise(o).flatten(-2).to(projected.dtype), MemoryState(memory)

    def initial_state(self, batch: int, device: Device = None, dtype: torch.dtype | None = None) -> MemoryState:
        shape = (batch, self.num_heads, self.key_dim, self.head_dim + int(self.normalizer))
        return MemoryState(torch.zeros(shape, device=device, dtype=memory_dtype(dtype)))

    def _features(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = projected.unflatten(-1, (3 * self.num_heads, self.head_dim)).chunk(3, dim=-2)
        dtype = torch.promote_types(projected.dtype, torch.float32)
        q, k = (map_features(x, feature_map="elu_plus_one", dtype=dtype, backend=self.local_backend) for x in (q, k))
        if self.normalizer:
            # A value channel of ones sums the keys: one pass computes numerator and denominator.
            v = functional.pad(at_least_float32(v), (0, 1), value=1.0)
        return q, k, v

    def _normalise(self, o: Tensor) -> Tensor:
        if not self.normalizer:
            return o
        return o[..., :-1] / o[..., -1:].clamp_min(self.eps)

    def scan_flops(self, tokens: int) -> int:
        # Writing at the key and reading at the query take 2 K V each.
        return 4 * tokens * self.num_heads * self.key_dim * (self.head_dim + int(self.normalizer))
