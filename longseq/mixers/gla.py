"""Gated linear attention: a decay of its own for each key channel."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import Self

from longseq.blocks.linear import project_pair
from longseq.blocks.norm import RMSNorm
from longseq.blocks.pairs import repeat_rows
from longseq.blocks.precision import at_least_float32
from longseq.kernels.packing import Packing
from longseq.kernels.reading import Reverse
from longseq.mixers.base import memory_dtype, required
from longseq.mixers.gated_linear import GatedLinearMixer, MemoryState, recurrence_flops
from longseq.mixers.heads import choose_heads, expand_width
from longseq.mixers.registry import register


@register("gla")
class GatedLinearAttention(GatedLinearMixer[MemoryState]):
    """Linear attention whose forget gates depend on the token, one for each key channel.

        q, k, v = W x;   g = log sigmoid(W₂ W₁ x + b) / τ
        S ← Diag(exp(g)) S + k vᵀ;   y = W_o (RMSNorm(Sᵀ q / √K) ⊙ SiLU(W_r x))

    RMSNorm, the scale 1/√K and W_r without a bias are those of the published code.

    Args:
        num_heads: the number of heads, of keys and of values.
        expand_k, expand_v: widths of all keys and of all values, relative to `d_model`.
        gate_rank: width of W₁ x.
        gate_temperature: τ, which keeps the gates near 1 at the start of training.

    Source: Gated Linear Attention Transformers with Hardware-Efficient Training (Yang et al., 2023), equations 3 and 4
    and section 4.4.
    """

    paper = "GLA (arXiv:2312.06635), section 4.4"

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int = 4,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        gate_rank: int = 16,
        gate_temperature: float = 16.0,
        norm_eps: float = 1e-5,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, backend=backend)
        if gate_rank < 1 or gate_temperature <= 0:
            raise ValueError(f"gate_rank={gate_rank}, gate_temperature={gate_temperature}: both must be positive")
        self.key_width = expand_width(d_model, expand_k, "expand_k")
        self.value_width = expand_width(d_model, expand_v, "expand_v")
        self.num_heads, self.key_dim = choose_heads(self.key_width, num_heads, None, preferred=1)
        _, self.value_dim = choose_heads(self.value_width, num_heads, None, preferred=1)
        self.gate_rank = gate_rank
        self.gate_temperature = gate_temperature
        self.in_proj = nn.Linear(d_model, 2 * self.key_width + 2 * self.value_width + gate_rank, bias=False)
        self.decay_proj = nn.Linear(gate_rank, self.key_width)
        self.norm = RMSNorm(self.value_dim, eps=norm_eps, backend=backend)
        self.out_proj = nn.Linear(self.value_width, d_model, bias=False)

    def scan(
        self,
        projected: Tensor,
        state: MemoryState | None = None,
        *,
        cu_seqlens: Tensor | Packing | None = None,
        mask: Tensor | None = None,
        reverse: Reverse = False,
        output_final_state: bool = True,
    ) -> tuple[Tensor, MemoryState | None]:
        q, k, v, gate, rank = self._split(projected)
        g = self._log_decay(self.decay_proj(rank))
        memory = None if state is None else state.memory
        o, memory = self.recur(
            q, k, v, g, memory, cu_seqlens, mask, scale=self.key_dim**-0.5, reverse=reverse, keep=output_final_state
        )
        return self.read_out(o, gate), MemoryState(required(memory)) if output_final_state else None

    def scan_pair(self, backward: Self, projected: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v, gate, rank = self._split(projected)
        g = self._log_decay(project_pair(self.decay_proj, backward.decay_proj, rank.expand(2, *rank.shape)))
        o, _ = self.recur(
            repeat_rows(q),
            repeat_rows(k),
            repeat_rows(v),
            g,
            None,
            None,
            repeat_rows(mask),
            scale=self.key_dim**-0.5,
            reverse="second_half",
        )
        return self.read_out_pair(backward, o, gate)

    def scan_step(self, projected: Tensor, state: MemoryState) -> tuple[Tensor, MemoryState]:
        q, k, v, gate, rank = self._split(projected)
        g = self._log_decay(self.decay_proj(rank))
        o, memory = self.recur_step(q, k, v, g, state.memory, scale=self.key_dim**-0.5)
        return self.read_out(o, gate), MemoryState(memory)

    def initial_state(
        self, batch: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> MemoryState:
        shape = (batch, self.num_heads, self.key_dim, self.value_dim)
        return MemoryState(torch.zeros(shape, device=device, dtype=memory_dtype(dtype)))

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        keys, values = self.key_width, self.value_width
        q, k, v, gate, rank = projected.split([keys, keys, values, values, self.gate_rank], dim=-1)
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)) for x in (q, k, v))
        return q, k, v, gate, rank

    def _log_decay(self, logits: Tensor) -> Tensor:
        """g `[..., H, K]` of W₂ W₁ x + b."""
        g = functional.logsigmoid(at_least_float32(logits)) / self.gate_temperature
        return g.unflatten(-1, (self.num_heads, -1))

    def scan_flops(self, tokens: int) -> int:
        decay = 2 * self.gate_rank * self.key_width
        recurrence = recurrence_flops(self.num_heads, self.key_dim, self.value_dim)
        return tokens * (decay + recurrence + 2 * self.value_width)
