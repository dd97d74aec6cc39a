"""Softmax attention, the baseline."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from longseq.mixers.base import Mixer
from longseq.mixers.heads import choose_heads
from longseq.mixers.registry import register


class AttentionState(NamedTuple):
    """The keys and values of all tokens so far, `[B, H, T, K]` each. The one state here that grows with T.

    `length [B]` counts the real tokens; where a batch holds sequences of different lengths, real entries stand left
    of the unused ones.
    """

    key: Tensor
    value: Tensor
    length: Tensor


@register("attention")
class Attention(Mixer):
    """Multi-head softmax attention as in the Vision Transformer: biases, scale 1/√head_dim, no positions of its own.

    Args:
        num_heads, head_dim: either or neither; by default heads of 64 channels (32, ... where 64 does not divide).
        causal: each token sees itself and its past; without it every token sees all, `state` and `step` have no
            meaning, and they are refused.
        qkv_bias: biases of the query, key and value projections.

    Source: Attention Is All You Need (Vaswani et al., 2017), section 3.2.
    """

    paper = "Softmax attention (arXiv:1706.03762), section 3.2"
    supports_noncausal = True

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = True,
        qkv_bias: bool = True,
        backend: str = "auto",
    ) -> None:
        if backend not in ("auto", "torch"):
            raise ValueError(f"attention runs on torch's scaled_dot_product_attention, not on backend={backend!r}")
        super().__init__(d_model, backend=backend)
        self.num_heads, self.head_dim = choose_heads(d_model, num_heads, head_dim, preferred=64)
        self.causal = causal
        self.in_proj = nn.Linear(d_model, 3 * d_model, bias=qkv_bias)
        self.out_proj = nn.Linear(d_model, d_model)

    def scan(
        self, projected: Tensor, state: Any = None, *, cu_seqlens: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, AttentionState | None]:
        q, k, v = self._heads(projected)  # [B, H, T, K]
        cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(q.device)
        if not self.causal:
            if state is not None:
                raise ValueError("non-causal attention has no state to continue from; build it with causal=True")
            allowed = None
            if cu_seqlens is not None:
                allowed = _same_segment(cu_seqlens, q.shape[2])
            elif mask is not None:
                allowed = mask[:, None, None, :]
            return self._attend(q, k, v, allowed), None
        if cu_seqlens is not None:
            return self._packed(q, k, v, state, cu_seqlens)
        if state is None and mask is None:
            o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            length = torch.full((q.shape[0],), q.shape[2], device=q.device)
            return o.transpose(1, 2).flatten(-2), AttentionState(k, v, length)
        return self._continued(q, k, v, state, mask)

    def scan_step(self, projected: Tensor, state: Any) -> tuple[Tensor, AttentionState]:
        if not self.causal:
            raise ValueError("non-causal attention cannot run token by token; build it with causal=True")
        y, state = self.scan(projected.unsqueeze(1), state)
        return y.squeeze(1), state

    def initial_state(self, batch: int, device: Any = None, dtype: Any = None) -> AttentionState:
        empty = torch.zeros(batch, self.num_heads, 0, self.head_dim, device=device, dtype=dtype)
        return AttentionState(empty, empty, torch.zeros(batch, dtype=torch.long, device=device))

    def _heads(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = projected.unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> Tensor:
        o = functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return o.transpose(1, 2).flatten(-2)

    def _continued(
        self, q: Tensor, k: Tensor, v: Tensor, state: AttentionState | None, mask: Tensor | None
    ) -> tuple[Tensor, AttentionState]:
        """Attend to a carried state and to the call's own tokens, of which `mask` tells the real ones."""
        batch, tokens = q.shape[0], q.shape[2]
        past = self.initial_state(batch, k.device, k.dtype) if state is None else state
        real = torch.ones(batch, tokens, dtype=torch.bool, device=k.device) if mask is None else mask
        slots = torch.arange(past.key.shape[2], device=k.device)
        seen = torch.cat([slots < past.length[:, None], real], dim=1)  # [B, P + T]
        causal = torch.ones(tokens, tokens, dtype=torch.bool, device=k.device).tril()
        causal = functional.pad(causal, (slots.numel(), 0), value=True)  # [T, P + T]
        key, value = torch.cat([past.key, k], dim=2), torch.cat([past.value, v], dim=2)
        allowed = seen[:, None, None, :] & causal
        if mask is not None:
            # A padded query may see nothing real; let it see itself, so that its undefined output is finite.
            allowed = allowed | functional.pad(torch.eye(tokens, dtype=torch.bool, device=k.device), (slots.numel(), 0))
        o = self._attend(q, key, value, allowed)
        length = past.length + real.sum(1)
        order = (~seen).to(torch.uint8).argsort(dim=1, stable=True)[:, None, :, None].expand_as(key)
        return o, AttentionState(key.gather(2, order), value.gather(2, order), length)

    def _packed(
        self, q: Tensor, k: Tensor, v: Tensor, state: AttentionState | None, cu_seqlens: Tensor
    ) -> tuple[Tensor, AttentionState]:
        """Unpack to one row a sequence, attend, and pack again."""
        lengths = cu_seqlens.diff()
        longest = int(lengths.max()) if lengths.numel() else 0
        real = torch.arange(longest, device=q.device) < lengths[:, None]  # [N, L]
        unpacked = []
        for x in (q, k, v):
            rows = x.new_zeros(real.shape[0], longest, self.num_heads, self.head_dim)
            rows[real] = x[0].transpose(0, 1)
            unpacked.append(rows.transpose(1, 2))
        o, state = self._continued(unpacked[0], unpacked[1], unpacked[2], state, real)
        return o[real].unsqueeze(0), state

    def scan_flops(self, tokens: int) -> int:
        pairs = tokens * (tokens + 1) // 2 if self.causal else tokens * tokens
        return 4 * pairs * self.d_model


def _same_segment(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Mark the pairs of tokens that belong to one sequence: `[T, T]`."""
    segment = torch.bucketize(torch.arange(tokens, device=cu_seqlens.device), cu_seqlens[1:], right=True)
    return segment[:, None] == segment[None, :]
