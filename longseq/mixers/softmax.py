"""What the mixers with softmax attention share: heads, grouped keys, rotary positions, the keys and values kept."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from longseq.blocks.rotary import count_positions, rotary_angles, rotate_pairs
from longseq.kernels.packing import Packing, pack_like
from longseq.mixers.base import Mixer
from longseq.mixers.heads import choose_heads


class KeyValueState(NamedTuple):
    """Keys, as they were compared (turned, where positions are rotary), and values `[B, S, G, D]` of earlier tokens.

    `length [B]` counts the real tokens so far, and so is the position of the next one.
    """

    key: Tensor
    value: Tensor
    length: Tensor


class SoftmaxMixer(Mixer):
    """Shared frame of the mixers with softmax attention; a subclass decides which tokens a token sees.

    H query heads and G = num_kv_heads heads of keys and values, each read by H/G query heads; `in_proj` gives queries,
    keys and values, in this order.

    Sources: Attention Is All You Need (Vaswani et al., 2017), section 3.2; grouped queries as in GQA (Ainslie et al.,
    2023), section 2.2; rotary positions as in RoFormer (Su et al., 2021), equation 34.
    """

    supports_noncausal = True
    recomputable = False

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int | None,
        head_dim: int | None,
        num_kv_heads: int | None,
        causal: bool,
        qkv_bias: bool,
        rotary: bool,
        rotary_base: float,
        backend: str,
    ) -> None:
        if backend not in ("auto", "torch", "varlen"):
            raise ValueError(
                f"attention runs on torch's scaled_dot_product_attention, not on backend={backend!r}; use auto or "
                "torch, or varlen for torch's varlen_attn over packed sequences"
            )
        super().__init__(d_model, backend=backend)
        self.num_heads, self.head_dim = choose_heads(d_model, num_heads, head_dim, preferred=64)
        self.num_kv_heads = self.num_heads if num_kv_heads is None else num_kv_heads
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={num_kv_heads} does not divide the {self.num_heads} query heads; choose a divisor"
            )
        if rotary and self.head_dim % 2:
            raise ValueError(f"rotary=True turns pairs of channels, not head_dim={self.head_dim}; choose an even one")
        self.causal = causal
        self.rotary = rotary
        self.rotary_base = rotary_base
        self.in_proj = nn.Linear(d_model, (self.num_heads + 2 * self.num_kv_heads) * self.head_dim, bias=qkv_bias)
        self.out_proj = nn.Linear(d_model, d_model)

    def scan(
        self,
        projected: Tensor,
        state: Any = None,
        *,
        cu_seqlens: Tensor | Packing | None = None,
        mask: Tensor | None = None,
        output_final_state: bool = True,
    ) -> tuple[Tensor, KeyValueState | None]:
        if state is not None and not self.causal:
            raise ValueError("non-causal attention has no state to continue from; build it with causal=True")
        packing = pack_like(cu_seqlens, projected)
        positions, length = None, None
        if self.causal or self.rotary:  # else nobody asks for them
            start = None if state is None else state.length
            positions, length = count_positions(projected, start, cu_seqlens=packing, mask=mask)
        q, k, v = self._heads(projected, positions, packing if state is None else None)
        o, kept = self._attend(q, k, v, state, packing, mask, output_final_state and self.causal)
        if kept is None:
            return o.flatten(-2), None
        assert length is not None
        return o.flatten(-2), KeyValueState(*kept, length)

    def scan_step(self, projected: Tensor, state: Any) -> tuple[Tensor, KeyValueState | None]:
        if not self.causal:
            raise ValueError("non-causal attention cannot run token by token; build it with causal=True")
        y, state = self.scan(projected.unsqueeze(1), state)
        return y.squeeze(1), state

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: KeyValueState | None,
        packing: Packing | None,
        mask: Tensor | None,
        keep: bool,
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Attend with `q [B, T, H, D]` and `k, v [B, T, G, D]`: `[B, T, H, D]`, and keys and values if any are kept."""
        raise NotImplementedError

    def _heads(
        self, projected: Tensor, positions: Tensor | None, packing: Packing | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = projected.unflatten(-1, (self.num_heads + 2 * self.num_kv_heads, self.head_dim))
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=-2)
        if self.rotary:
            places, base = positions, self.rotary_base
            assert places is not None
            if packing is None:
                angles = rotary_angles(q, places, base)
            else:  # from the first token of each sequence: the same in all layers
                key = ("rotary", self.head_dim, base, q.dtype)
                angles = packing.once(key, lambda: rotary_angles(q, places, base))
            q, k = (rotate_pairs(x, *angles) for x in (q, k))
        return q, k, v
