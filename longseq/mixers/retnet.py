"""RetNet: linear attention with a constant decay for each head and rotary positions."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Self

from longseq.blocks.norm import RMSNorm
from longseq.blocks.pairs import repeat_rows
from longseq.blocks.rotary import check_rotary, count_positions, rotate_pairs, shared_angles
from longseq.kernels.packing import Packing
from longseq.mixers.base import ALL_TOKENS, Device, ScanOptions, memory_dtype, required
from longseq.mixers.gated_linear import GatedLinearMixer, recurrence_flops
from longseq.mixers.heads import FEATURE_MAPS, check_groups, choose_heads, repeat_groups
from longseq.mixers.registry import register


class RetNetState(NamedTuple):
    """The memory `[B, H, K, V]`, and the position of the next token as whole numbers `[B]`."""

    memory: Tensor
    position: Tensor


@register("retnet")
class RetNet(GatedLinearMixer[RetNetState]):
    """Multi-scale retention.

        q, k = rotary(φ(W x));   S ← γ S + k vᵀ;   y = W_o (RMSNorm(Sᵀ q / √K) ⊙ SiLU(W_g x));   γ_h = 1 − 2^{−5−h}

    for the heads h = 0, 1, ...; the norm is over each head's values. Left out are the additional decay of xPos, and the
    paper's factors on scores and memory, which the norm would cancel.

    Args:
        num_heads, head_dim: of the keys. By default heads of 256 channels (128, ... where 256 does not divide). One of
            them decides the other; both together may make the heads wider or narrower than d_model. head_dim is even.
        num_kv_heads: heads of keys and values, a divisor of num_heads; by default num_heads.
        expand_v: channels of a head's values relative to those of its keys.
        rotary_base: the slowest pair of channels turns once in about 2π · rotary_base tokens.
        rotary_scaling: stretches the angles to longer contexts (see `longseq.blocks.rotary.check_rotary`), or None.
        feature_map: φ, one of identity (the paper's), relu (for weights of a transformer, see `longseq convert`), silu,
            relu_squared.
        output_gate: multiply by SiLU(W_g x); without it the layer has no W_g.

    Source: Retentive Network: A Successor to Transformer for Large Language Models (Sun et al., 2023), equations 6 to
    8.
    """

    paper = "RetNet (arXiv:2307.08621), equations 6 to 8"

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        expand_v: float = 2.0,
        rotary_base: float = 10000.0,
        rotary_scaling: Mapping[str, Any] | None = None,
        feature_map: str = "identity",
        output_gate: bool = True,
        norm_eps: float = 1e-5,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, backend=backend)
        check_rotary(rotary_scaling)
        width = d_model if num_heads is None or head_dim is None else num_heads * head_dim
        self.num_heads, self.key_dim = choose_heads(width, num_heads, head_dim, preferred=256)
        self.scale = self.key_dim**-0.5
        self.num_kv_heads = check_groups(self.num_heads, num_kv_heads)
        self.value_dim = round(expand_v * self.key_dim)
        self.rotary_base = rotary_base
        self.rotary_scaling = dict(rotary_scaling or {})
        self.feature_map = feature_map
        self.output_gate = output_gate
        values = self.num_heads * self.value_dim
        # queries, keys, values, the output gate
        groups = [self.num_kv_heads * self.key_dim, self.num_kv_heads * self.value_dim]
        self.widths = [width, *groups, values if output_gate else 0]
        self.in_proj = nn.Linear(d_model, sum(self.widths), bias=False)
        self.norm = RMSNorm(self.value_dim, eps=norm_eps, backend=backend)
        self.out_proj = nn.Linear(values, d_model, bias=False)

    def scan(
        self, projected: Tensor, state: RetNetState | None = None, options: ScanOptions = ALL_TOKENS
    ) -> tuple[Tensor, RetNetState | None]:
        memory, start = (None, None) if state is None else state
        packing, mask, reverse, _ = options
        positions, following = count_positions(projected, start, cu_seqlens=packing, mask=mask, reverse=reverse)
        q, k, v, gate = self._split(projected)
        q, k, g = self._place(q, k, positions, None if start is not None or reverse else packing)
        o, memory = self.recur(q, k, v, g, memory, options)
        last = RetNetState(required(memory), following) if options.output_final_state else None
        return self.read_out(o, gate), last

    def scan_pair(self, backward: Self, projected: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v, gate = self._split(projected)
        v, options = repeat_rows(v), ScanOptions.of_pair(mask)
        positions, _ = count_positions(v, mask=options.mask, reverse=options.reverse)
        q, k, g = self._place(repeat_rows(q), repeat_rows(k), positions)
        o, _ = self.recur(q, k, v, g, None, options)
        return self.read_out_pair(backward, o, gate)

    def scan_step(self, projected: Tensor, state: RetNetState) -> tuple[Tensor, RetNetState]:
        q, k, v, gate = self._split(projected)
        q, k, g = self._place(q, k, state.position)
        o, memory = self.recur_step(q, k, v, g, state.memory)
        return self.read_out(o, gate), RetNetState(memory, state.position + 1)

    def initial_state(self, batch: int, device: Device = None, dtype: torch.dtype | None = None) -> RetNetState:
        shape = (batch, self.num_heads, self.key_dim, self.value_dim)
        memory = torch.zeros(shape, device=device, dtype=memory_dtype(dtype))
        return RetNetState(memory, torch.zeros(batch, device=device, dtype=torch.long))

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v, gate = projected.split(self.widths, dim=-1)
        q, k = (FEATURE_MAPS[self.feature_map](x) for x in (q, k))
        k, v = (repeat_groups(x.unflatten(-1, (self.num_kv_heads, -1)), self.num_heads) for x in (k, v))
        return q.unflatten(-1, (self.num_heads, -1)), k, v, gate

    def _place(
        self, q: Tensor, k: Tensor, positions: Tensor, packing: Packing | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys rotated by their positions, and the log decay `[..., H]`."""
        angles = shared_angles(q, positions, self.rotary_base, self.rotary_scaling, packing)
        head = torch.arange(self.num_heads, device=q.device, dtype=memory_dtype(q.dtype))
        g = self._log_decays(head).expand(*q.shape[:-1])
        return rotate_pairs(q, *angles), rotate_pairs(k, *angles), g

    def _log_decays(self, head: Tensor) -> Tensor:
        """log γ of the heads of these numbers."""
        return torch.log1p(-torch.exp2(-5 - head))

    def scan_flops(self, tokens: int) -> int:
        rotary = 6 * self.num_heads * self.key_dim  # queries and keys, three operations for each channel
        recurrence = recurrence_flops(self.num_heads, self.key_dim, self.value_dim)
        gate = 2 * self.num_heads * self.value_dim if self.output_gate else 0
        return tokens * (rotary + recurrence + gate)
