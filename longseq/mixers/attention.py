"""Softmax attention, the baseline."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from longseq.blocks.packing import gather_tokens, unpack_rows
from longseq.kernels.packed_attention import packed_attention
from longseq.kernels.packed_attention.attend import attend
from longseq.kernels.packing import Packing
from longseq.mixers.registry import register
from longseq.mixers.softmax import KeyValueState, SoftmaxMixer


@register("attention")
class Attention(SoftmaxMixer):
    """Multi-head softmax attention; by default as in the Vision Transformer: biases, scale 1/√head_dim, no positions.

    The state keeps the keys and values of all tokens. Where a batch holds sequences of different lengths, real entries
    stand left of the unused ones.

    Args:
        num_heads, head_dim: either or neither; by default heads of 64 channels (32, ... where 64 does not divide).
        num_kv_heads: heads of keys and values, a divisor of num_heads; by default as many as of queries.
        causal: each token sees itself and its past; without it every token sees all, `state` and `step` have no
            meaning, and they are refused.
        qkv_bias: biases of the query, key and value projections; the output projection always has them.
        rotary, rotary_base: turn queries and keys by their positions, and the base of the angles.

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
        rotary: bool = False,
        rotary_base: float = 10000.0,
        backend: str = "auto",
    ) -> None:
        super().__init__(
            d_model,
            num_heads=num_heads,
            head_dim=head_dim,
            num_kv_heads=num_kv_heads,
            causal=causal,
            qkv_bias=qkv_bias,
            rotary=rotary,
            rotary_base=rotary_base,
            backend=backend,
        )

    def initial_state(self, batch: int, device: Any = None, dtype: Any = None) -> KeyValueState:
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
        """Attend to a carried state and to the call's own tokens, of which `mask` tells the real ones."""
        batch, tokens = q.shape[:2]
        past = self.initial_state(batch, k.device, k.dtype) if state is None else state
        real = torch.ones(batch, tokens, dtype=torch.bool, device=k.device) if mask is None else mask
        slots = torch.arange(past.key.shape[1], device=k.device)
        seen = torch.cat([slots < past.length[:, None], real], dim=1)  # [B, P + T]
        causal = torch.ones(tokens, tokens, dtype=torch.bool, device=k.device).tril()
        causal = functional.pad(causal, (slots.numel(), 0), value=True)  # [T, P + T]
        allowed = seen.unsqueeze(1) & causal
        if mask is not None:
            # A padded query may see nothing real; let it see itself, so that its undefined output is finite.
            allowed = allowed | functional.pad(_own(mask), (slots.numel(), 0))
        key, value = torch.cat([past.key.to(k.dtype), k], dim=1), torch.cat([past.value.to(v.dtype), v], dim=1)
        order = (~seen).to(torch.uint8).argsort(dim=1, stable=True)
        return attend(q, key, value, allowed), gather_tokens(key, order), gather_tokens(value, order)

    def _continue_packed(
        self, q: Tensor, k: Tensor, v: Tensor, state: KeyValueState, packing: Packing
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same for packed sequences, one after the other: no mask is larger than one of them needs."""
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
        return 4 * pairs * self.d_model


def _own(mask: Tensor) -> Tensor:
    """Mark the pairs of a token with itself: `[T, T]`."""
    return torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
