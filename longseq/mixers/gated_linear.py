"""What the mixers with gated linear attention share: the recurrence with masks, and the output."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from longseq.kernels import linear_attention, linear_attention_step, silu_product
from longseq.mixers.base import ALL_TOKENS, Device, Mixer, ScanOptions, memory_dtype, required
from longseq.mixers.states import MemoryState
from longseq.state import StateT


class GatedLinearMixer(Mixer[StateT]):
    """Base of GLA, HGRN2, RetNet, SUPRA and Mamba-2: keys written to a decaying memory.

    S ← exp(g) S + k vᵀ;   o = scale Sᵀ q;   g ≤ 0, one for each head or for each key channel
    """

    operations: ClassVar[tuple[str, ...]] = ("linear_attention",)
    reads_backwards: ClassVar[bool] = True
    reads_pairs: ClassVar[bool] = True

    scale: float = 1.0
    norm: Any  # over the last dimension, with `norm_pair` as in `longseq.blocks.norm.RMSNorm`
    output_gate: bool = True

    def recur(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, memory: Tensor | None, options: ScanOptions
    ) -> tuple[Tensor, Tensor | None]:
        """Run `q, k [B, T, G, K]`, `v [B, T, H, V]`, `g [B, T, H]` or `[B, T, H, K]` through the recurrence.

        Returns `[B, T, H, V]`, and the last memory if the options ask for it.
        """
        mask = options.mask
        if mask is not None:
            k, g = k * mask[..., None, None], g * mask.reshape(*mask.shape, *[1] * (g.dim() - 2))
        o, final = linear_attention(q, k, v, g=g, scale=self.scale, initial_state=memory, **self.call_options(options))
        return o, final

    def recur_step(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Run one token; the shapes are those of `recur` without T."""
        return linear_attention_step(q, k, v, memory, g=g, scale=self.scale, backend=self.step_backend)

    def read_out(self, o: Tensor, gate: Tensor) -> Tensor:
        """Norm `o [..., H, V]` per head, join the heads and multiply by SiLU of `gate [..., H V]`, if there is one."""
        return self._multiply(self.norm(o).flatten(-2), gate)

    def read_out_pair(self, backward: Self, o: Tensor, gate: Tensor) -> Tensor:
        """The sum of `read_out` over both halves of the rows `o [2 B, ...]`; the second takes `backward`'s norm."""
        return self._multiply(self.norm.norm_pair(backward.norm, o).flatten(-2), gate)

    def _multiply(self, y: Tensor, gate: Tensor) -> Tensor:
        return silu_product(y, gate, backend=self.local_backend) if self.output_gate else y


class GatedMemoryMixer(GatedLinearMixer[MemoryState]):
    """Base of GLA and HGRN2, whose state is the memory; `split` computes the inputs of the recurrence."""

    num_heads: int
    key_dim: int
    value_dim: int

    def split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k `[..., H, K]`, v `[..., H, V]`, g `[..., H, K]`, and the output gate `[..., H V]`, maybe empty."""
        raise NotImplementedError

    def scan(
        self, projected: Tensor, state: MemoryState | None = None, options: ScanOptions = ALL_TOKENS
    ) -> tuple[Tensor, MemoryState | None]:
        q, k, v, g, gate = self.split(projected)
        memory = None if state is None else state.memory
        o, memory = self.recur(q, k, v, g, memory, options)
        return self.read_out(o, gate), MemoryState(required(memory)) if options.output_final_state else None

    def scan_step(self, projected: Tensor, state: MemoryState) -> tuple[Tensor, MemoryState]:
        q, k, v, g, gate = self.split(projected)
        o, memory = self.recur_step(q, k, v, g, state.memory)
        return self.read_out(o, gate), MemoryState(memory)

    def initial_state(self, batch: int, device: Device = None, dtype: torch.dtype | None = None) -> MemoryState:
        shape = (batch, self.num_heads, self.key_dim, self.value_dim)
        return MemoryState(torch.zeros(shape, device=device, dtype=memory_dtype(dtype)))


def recurrence_flops(heads: int, key_dim: int, value_dim: int) -> int:
    """The operations of one token: for each head, the decay takes K V, writing and reading take 2 K V each."""
    return 5 * heads * key_dim * value_dim
