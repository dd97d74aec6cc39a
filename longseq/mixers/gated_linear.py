"""What the mixers with gated linear attention share: the recurrence with masks, and the output."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor
from typing_extensions import Self

from longseq.kernels import linear_attention, linear_attention_step, silu_product
from longseq.kernels.packing import Packing
from longseq.kernels.reading import Reverse
from longseq.mixers.base import Mixer
from longseq.mixers.measures import mean_norm, saturation
from longseq.state import StateT


class MemoryState(NamedTuple):
    """The memory `[B, H, K, V]`."""

    memory: Tensor


class HeadNorm(Protocol):
    """A norm over the last dimension, and the sum of such norms of two layers that read in both directions."""

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise x."""

    def norm_pair(self, backward: Any, x: Tensor) -> Tensor:
        """The sum of the norms of both halves of x `[2 B, ...]`, the second by `backward`."""


class GatedLinearMixer(Mixer[StateT]):
    """Base of GLA, HGRN2, RetNet, SUPRA and Mamba-2: keys written to a decaying memory.

    S ← exp(g) S + k vᵀ;   o = scale Sᵀ q;   g ≤ 0, one for each head or for each key channel
    """

    operations: ClassVar[tuple[str, ...]] = ("linear_attention",)
    reads_backwards: ClassVar[bool] = True
    reads_pairs: ClassVar[bool] = True

    norm: HeadNorm
    output_gate: bool = True

    def recur(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        memory: Tensor | None,
        cu_seqlens: Tensor | Packing | None,
        mask: Tensor | None,
        *,
        scale: float = 1.0,
        reverse: Reverse = False,
        keep: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Run `q, k [B, T, H, K]`, `v [B, T, H, V]`, `g [B, T, H]` or `[B, T, H, K]` through the recurrence.

        Returns `[B, T, H, V]`, and the last memory with `keep` or where a callback watches.
        """
        self.observe("gate_saturation", lambda: saturation(g.exp(), mask))
        if mask is not None:
            k = k * mask[..., None, None]
        o, final = linear_attention(
            q,
            k,
            v,
            g=g if mask is None else g * mask.reshape(*mask.shape, *[1] * (g.dim() - 2)),
            scale=scale,
            initial_state=memory,
            output_final_state=self.needs_state(keep),
            cu_seqlens=cu_seqlens,
            reverse=reverse,
            backend=self.backend,
        )
        self.observe("state_norm", lambda: mean_norm(final))
        return o, final

    def recur_step(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, memory: Tensor, *, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Run one token; the shapes are those of `recur` without T."""
        return linear_attention_step(q, k, v, memory, g=g, scale=scale, backend=self.step_backend)

    def read_out(self, o: Tensor, gate: Tensor) -> Tensor:
        """Norm `o [..., H, V]` per head, join the heads and multiply by SiLU of `gate [..., H V]`, if there is one."""
        return self._multiply(self.norm(o).flatten(-2), gate)

    def read_out_pair(self, backward: Self, o: Tensor, gate: Tensor) -> Tensor:
        """The sum of `read_out` over both halves of the rows `o [2 B, ...]`; the second half uses the norm of
        `backward`.
        """
        return self._multiply(self.norm.norm_pair(backward.norm, o).flatten(-2), gate)

    def _multiply(self, y: Tensor, gate: Tensor) -> Tensor:
        return silu_product(y, gate, backend=self.local_backend) if self.output_gate else y


def recurrence_flops(heads: int, key_dim: int, value_dim: int) -> int:
    """The operations of one token: for each head, the decay takes K V, writing and reading take 2 K V each."""
    return 5 * heads * key_dim * value_dim
