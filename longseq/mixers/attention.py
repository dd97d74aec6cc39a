"""Softmax attention, the baseline, and what the mixers with softmax attention share."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from longseq.blocks.norm import RMSNorm
from longseq.blocks.packing import gather_tokens, unpack_rows
from longseq.blocks.rotary import check_rotary_scaling, count_positions, rotary_angles, rotate_pairs
from longseq.kernels.packed_attention import packed_attention
from longseq.kernels.packed_attention.attend import attend
from longseq.kernels.packing import Packing, pack_like
from longseq.mixers.base import Mixer, required
from longseq.mixers.heads import check_groups, choose_heads
from longseq.mixers.registry import register

QK_NORMS = ("none", "head", "all")


class KeyValueState(NamedTuple):
    """Keys and values `[B, S, G, D]` of earlier tokens; with rotary positions, the keys are stored rotated.

    `length [B]` counts the real tokens so far, and is thus the position of the next token.
    """

    key: Tensor
    value: Tensor
    length: Tensor


class SoftmaxAttention(Mixer[KeyValueState]):
    """Base of the mixers with softmax attention; a subclass decides which tokens a token sees.

    There are H query heads, and G = num_kv_heads heads of keys and values, each for H/G query heads. `in_proj` computes
    queries, keys and values, in this order.

    Sources: Attention Is All You Need (Vaswani et al., 2017), section 3.2; grouped queries as in GQA (Ainslie et al.,
    2023), section 2.2; rotary positions as in RoFormer (Su et al., 2021), equation 34.
    """

    supports_noncausal = True
    recomputable = False
    arguments_before: ClassVar[Mapping[str, Any]] = {
        "out_bias": True,
        "rotary_scaling": None,
        "qk_norm": "none",
        "norm_eps": 1e-5,
    }

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int | None,
        head_dim: int | None,
        num_kv_heads: int | None,
        causal: bool,
        qkv_bias: bool,
        out_bias: bool,
        rotary: bool,
        rotary_base: float,
        rotary_scaling: Mapping[str, Any] | None,
        qk_norm: str,
        norm_eps: float,
        backend: str,
    ) -> None:
        if backend not in ("auto", "torch", "varlen"):
            raise ValueError(
                f"attention runs on torch's scaled_dot_product_attention, not on backend={backend!r}; use auto or "
                "torch, or varlen for torch's varlen_attn over packed sequences"
            )
        super().__init__(d_model, backend=backend)
        # Both together choose another width than d_model, as in Qwen3.
        width = d_model if num_heads is None or head_dim is None else num_heads * head_dim
        self.num_heads, self.head_dim = choose_heads(width, num_heads, head_dim, preferred=64)
        self.num_kv_heads = check_groups(self.num_heads, num_kv_heads)
        if rotary and self.head_dim % 2:
            raise ValueError(f"rotary=True turns pairs of channels, not head_dim={self.head_dim}; choose an even one")
        if qk_norm not in QK_NORMS:
            raise ValueError(f"qk_norm={qk_norm!r} is not one of {', '.join(QK_NORMS)}")
        check_rotary_scaling(rotary_scaling)
        self.causal = causal
        self.rotary = rotary
        self.rotary_base = rotary_base
        self.rotary_scaling = dict(rotary_scaling or {})
        self.qk_norm = qk_norm
        self.in_proj = nn.Linear(d_model, (self.num_heads + 2 * self.num_kv_heads) * self.head_dim, bias=qkv_bias)
        self.out_proj = nn.Linear(width, d_model, bias=out_bias)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if qk_norm != "none":
            heads = (1, 1) if qk_norm == "head" else (self.num_heads, self.num_kv_heads)
            options: dict[str, Any] = {"eps": norm_eps, "backend": "torch" if backend == "torch" else "auto"}
            self.q_norm, self.k_norm = (RMSNorm(count * self.head_dim, **options) for count in heads)

    def scan(
        self,
        projected: Tensor,
        state: KeyValueState | None = None,
        *,
        cu_seqlens: Tensor | Packing | None = None,
        mask: Tensor | None = None,
        output_final_state: bool = True,
    ) -> tuple[Tensor, KeyValueState | None]:
        if state is not None and not self.causal:
            raise ValueError("non-causal attention has no state to continue from; build it with causal=True")
        packing = pack_like(cu_seqlens, projected)
        positions, length = None, None
        if self.causal or self.rotary:  # nothing else reads positions
            start = None if state is None else state.length
            positions, length = count_positions(projected, start, cu_seqlens=packing, mask=mask)
        q, k, v = self._heads(projected, positions, packing if state is None else None)
        o, kept = self._attend(q, k, v, state, packing, mask, output_final_state and self.causal)
        if kept is None:
            return o.flatten(-2), None
        assert length is not None
        return o.flatten(-2), KeyValueState(*kept, length)

    def scan_step(self, projected: Tensor, state: KeyValueState) -> tuple[Tensor, KeyValueState]:
        if not self.causal:
            raise ValueError("non-causal attention cannot run token by token; build it with causal=True")
        y, following = self.scan(projected.unsqueeze(1), state)
        return y.squeeze(1), required(following)

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
        if self.qk_norm == "head":
            q, k = required(self.q_norm)(q), required(self.k_norm)(k)
        elif self.qk_norm == "all":
            q = required(self.q_norm)(q.flatten(-2)).unflatten(-1, (self.num_heads, -1))
            k = required(self.k_norm)(k.flatten(-2)).unflatten(-1, (self.num_kv_heads, -1))
        if self.rotary:
            places, base, scaling = required(positions), self.rotary_base, self.rotary_scaling
            if packing is None:
                angles = rotary_angles(q, places, base, scaling)
            else:  # positions in each sequence, the same in all layers
                key = ("rotary", self.head_dim, base, *scaling.items(), q.dtype)
                angles = packing.once(key, lambda: rotary_angles(q, places, base, scaling))
            q, k = (rotate_pairs(x, *angles) for x in (q, k))
        return q, k, v


@register("attention")
class Attention(SoftmaxAttention):
    """Multi-head softmax attention; by default as in the Vision Transformer: biases, scale 1/√head_dim, no positions.

    The state keeps the keys and values of all tokens. If a batch has sequences of different lengths, each row of the
    state begins with the real entries; the unused ones follow.

    Args:
        num_heads, head_dim: by default heads of 64 channels (32, ... where 64 does not divide). One of them decides the
            other; both together may make the heads wider or narrower than d_model.
        num_kv_heads: heads of keys and values, a divisor of num_heads; by default as many as of queries.
        causal: each token sees itself and the tokens before it. False: every token sees all tokens; `state` and `step`
            are then refused.
        qkv_bias, out_bias: biases of the query, key and value projections, and of the output projection.
        rotary, rotary_base: whether queries and keys are rotated by their positions, and the base of the angles.
        rotary_scaling: how the angles are stretched to longer contexts (see
            `longseq.blocks.rotary.check_rotary_scaling`), or None.
        qk_norm: RMS norm of queries and keys, before they are rotated: none, head (over each head, as in Qwen3) or all
            (over all heads, as in OLMo 2), with `norm_eps`.

    With rotary positions and without biases it is the attention of Llama (Touvron et al., 2023), the baseline that the
    papers on linear attention call Transformer++ (`mixer=transformer_plus_plus`).

    Source: Attention Is All You Need (Vaswani et al., 2017), section 3.2; grouped queries: GQA (Ainslie et al., 2023).
    """

    paper = "Softmax attention (arXiv:1706.03762), section 3.2"
    growing_state = True

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        causal: bool = True,
        qkv_bias: bool = True,
        out_bias: bool = True,
        rotary: bool = False,
        rotary_base: float = 10000.0,
        rotary_scaling: Mapping[str, Any] | None = None,
        qk_norm: str = "none",
        norm_eps: float = 1e-5,
        backend: str = "auto",
    ) -> None:
        super().__init__(
            d_model,
            num_heads=num_heads,
            head_dim=head_dim,
            num_kv_heads=num_kv_heads,
            causal=causal,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            rotary=rotary,
            rotary_base=rotary_base,
            rotary_scaling=rotary_scaling,
            qk_norm=qk_norm,
            norm_eps=norm_eps,
            backend=backend,
        )

    def initial_state(
        self, batch: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> KeyValueState:
        empty = torch.zeros(batch, 0, self.num_kv_heads, self.head_dim, device=device, dtype=dtype)
        return KeyValueState(empty, empty, torch.zeros(batch, dtype=torch.long, device=device))

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
        if packing is not None and state is not None:
            o, key, value = self._continue_packed(q, k, v, state, packing)
        elif packing is not None:
            o = packed_attention(q, k, v, packing, causal=self.causal, backend=self.backend)
            key, value = (unpack_rows(x, packing) for x in (k, v)) if keep else (k, v)
        elif not self.causal:
            o, key, value = attend(q, k, v, None if mask is None else mask.unsqueeze(1) | _own(mask)), k, v
        elif state is None and mask is None:
            o, key, value = attend(q, k, v, causal=True), k, v
        else:
            o, key, value = self._continue(q, k, v, state, mask)
        return o, (key, value) if keep else None

    def _continue(
        self, q: Tensor, k: Tensor, v: Tensor, state: KeyValueState | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attend to a state's keys and values and to the call's own tokens, of which `mask` marks the real ones."""
        batch, tokens = q.shape[:2]
        past = self.initial_state(batch, k.device, k.dtype) if state is None else state
        real = torch.ones(batch, tokens, dtype=torch.bool, device=k.device) if mask is None else mask
        slots = torch.arange(past.key.shape[1], device=k.device)
        seen = torch.cat([slots < past.length[:, None], real], dim=1)  # [B, P + T]
        causal = torch.ones(tokens, tokens, dtype=torch.bool, device=k.device).tril()
        causal = functional.pad(causal, (slots.numel(), 0), value=True)  # [T, P + T]
        allowed = seen.unsqueeze(1) & causal
        if mask is not None:
            # A padded query may see no real token. It sees itself, so that its undefined output is finite.
            allowed = allowed | functional.pad(_own(mask), (slots.numel(), 0))
        key, value = torch.cat([past.key.to(k.dtype), k], dim=1), torch.cat([past.value.to(v.dtype), v], dim=1)
        order = (~seen).to(torch.uint8).argsort(dim=1, stable=True)
        return attend(q, key, value, allowed), gather_tokens(key, order), gather_tokens(value, order)

    def _continue_packed(
        self, q: Tensor, k: Tensor, v: Tensor, state: KeyValueState, packing: Packing
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`_continue` for packed sequences, one after the other, so that no mask is larger than one sequence needs."""
        outputs, keys, values = [], [], []
        for row, (start, end) in enumerate(pairwise(packing.bounds)):
            own = KeyValueState(*(part[row : row + 1] for part in state))
            query, key, value = (x[:, start:end] for x in (q, k, v))
            o, key, value = self._continue(query, key, value, own, None)
            missing = (0, 0, 0, 0, 0, packing.longest - (end - start))
            outputs.append(o)
            keys.append(functional.pad(key, missing))
            values.append(functional.pad(value, missing))
        return torch.cat(outputs, dim=1), torch.cat(keys), torch.cat(values)

    def scan_flops(self, tokens: int) -> int:
        pairs = tokens * (tokens + 1) // 2 if self.causal else tokens * tokens
        return 4 * pairs * self.num_heads * self.head_dim


def _own(mask: Tensor) -> Tensor:
    """Mark the pairs of a token with itself: `[T, T]`."""
    return torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
