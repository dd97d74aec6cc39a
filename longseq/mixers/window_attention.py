"""Softmax attention over a sliding window."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from longseq.arguments import takes_also
from longseq.blocks.packing import front_places, gather_tokens, last_tokens, scatter_tokens
from longseq.kernels.dispatch import Call, is_exporting
from longseq.kernels.packed_attention import packed_attention, varlen
from longseq.kernels.packed_attention.attend import attend_blocks, attend_nearby, attend_window
from longseq.kernels.packing import Packing
from longseq.kernels.recurrence import Sequences, run_padded, run_recurrence
from longseq.mixers.attention import Heads, KeyValueCache, KeyValueState, SoftmaxAttention
from longseq.mixers.base import Device, activation_dtype, memory_dtype, required
from longseq.mixers.registry import register


@register("window_attention")
class WindowAttention(SoftmaxAttention):
    """Multi-head softmax attention in which a token sees itself and the `window` - 1 tokens before it.

    The state keeps the last `window` - 1 keys and values, the latest one last, with zeros in front if there are fewer.
    Time and memory of a pass grow with the number of tokens times the window. `preallocate` turns the state into a ring
    of `window` keys and values in the type of the weights, in which a step overwrites the oldest one.

    Args:
        window: tokens that a token sees, itself included.
        causal: False lets a token also see the `window` - 1 tokens after it; `state` and `step` are then refused.
        num_heads, head_dim, num_kv_heads, qkv_bias, out_bias, rotary, rotary_base, rotary_scaling, qk_norm: as in
            `Attention`.

    Source: Longformer (Beltagy et al., 2020), section 3.1. Griffin (De et al., 2024), sections 2.3 and 3.1, has the
    causal form with window=1024 and num_kv_heads=1 between recurrent layers; the hybrids of DeltaNet follow it.
    """

    paper = "Sliding-window attention (arXiv:2004.05150), section 3.1"

    @takes_also(SoftmaxAttention)
    def __init__(
        self, d_model: int, *, window: int = 1024, qkv_bias: bool = False, rotary: bool = True, **options: Any
    ) -> None:
        super().__init__(d_model, qkv_bias=qkv_bias, rotary=rotary, **options)
        self.window = window

    def initial_state(self, batch: int, device: Device = None, dtype: torch.dtype | None = None) -> KeyValueState:
        shape = (batch, self.window - 1, self.num_kv_heads, self.head_dim)
        empty = torch.zeros(shape, device=device, dtype=memory_dtype(dtype))
        return KeyValueState(empty, empty, torch.zeros(batch, dtype=torch.long, device=device))

    def preallocate(self, state: KeyValueState | KeyValueCache, max_length: int) -> KeyValueCache:
        if isinstance(state, KeyValueCache):
            return state
        return self._cached(state, self.window, activation_dtype(required(self.out_proj), state.key.device))

    def _place(self, cache: KeyValueCache) -> Tensor:
        return cache.length % self.window

    def _listed(self, cache: KeyValueCache) -> KeyValueState:
        position = cache.length[:, None] + torch.arange(1 - self.window, 0, device=cache.length.device)
        real = (position >= 0)[:, :, None, None]
        key, value = (
            gather_tokens(x, position % self.window).to(memory_dtype(x.dtype)).masked_fill(~real, 0)
            for x in (cache.key, cache.value)
        )
        return KeyValueState(key, value, cache.length)

    def _cached(self, state: KeyValueState, slots: int, dtype: torch.dtype) -> KeyValueCache:
        # The slot that the next token will take is behind the latest one; where tokens are missing, it holds a zero.
        position = state.length[:, None] + torch.arange(-slots, 0, device=state.length.device)
        key, value = (
            scatter_tokens(functional.pad(x, (0, 0, 0, 0, 1, 0)).to(dtype), position % slots)
            for x in (state.key, state.value)
        )
        return KeyValueCache(key, value, state.length)

    def _attend(
        self, heads: Heads, state: KeyValueState | None, packing: Packing | None, mask: Tensor | None, keep: bool
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        q, k, v = heads
        if packing is not None and state is None:
            o = packed_attention(q, k, v, packing, causal=self.causal, window=self.window, backend=self.backend)
            if not keep:
                return o, None
            key, value = (last_tokens(x, packing, self.window - 1).to(memory_dtype(x.dtype)) for x in (k, v))
            return o, (key, value)
        if _known(q.shape[1]) and state is None and mask is None:
            if q.shape[1] > self.window and self._reads_rows_packed(q):
                o = self._attend_end_to_end(q, k, v)
            else:
                o = attend_nearby(q, k, v, self.window, self.causal)
            return o, (self._latest(k), self._latest(v)) if keep else None
        if packing is not None:
            # True at all tokens; the tokens that unpacking adds are padding.
            mask = torch.ones(q.shape[:2], dtype=torch.bool, device=q.device)
        o, kept = run_recurrence(
            self._attend_rows,
            (q, k, v, mask),
            state,
            lambda rows, dtype: WindowAttention.initial_state(self, rows, q.device, dtype),
            output_dtype=v.dtype,
            output_final_state=True,
            cu_seqlens=packing,
            unpack=run_padded,
        )
        return o, (kept.key, kept.value) if keep else None

    def _reads_rows_packed(self, q: Tensor) -> bool:
        """Whether torch's fused kernel over packed rows can run, which needs no mask."""
        if self.backend == "torch" or is_exporting():
            return False
        return not varlen.reasons(Call(q.device, q.dtype, packed=True, sizes={"D": q.shape[-1]}))

    def _attend_end_to_end(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend within each row, with the rows as packed sequences."""
        rows, tokens = q.shape[:2]
        borders = torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32, device=q.device)
        packing = Packing(borders, rows * tokens, max_seqlen=tokens)
        q, k, v = (x.flatten(0, 1).unsqueeze(0) for x in (q, k, v))
        o = packed_attention(q, k, v, packing, causal=self.causal, window=self.window, backend=self.backend)
        return o.squeeze(0).unflatten(0, (rows, tokens))

    def _latest(self, x: Tensor) -> Tensor:
        """The last `window` - 1 of the tokens `x [B, T, G, D]`, in the type of the state."""
        x = functional.pad(x, (0, 0, 0, 0, self.window - 1, 0))
        return x[:, x.shape[1] - self.window + 1 :].to(memory_dtype(x.dtype))

    def _attend_rows(self, sequences: Sequences, state: KeyValueState) -> tuple[Tensor, KeyValueState]:
        """Attend within each row: queries, keys, values, and a mask of the real tokens (or None)."""
        q, k, v, real = sequences
        batch, tokens = q.shape[:2]
        past = self.window - 1
        count = torch.full((batch,), tokens, device=q.device)
        place = None
        if real is not None:
            place, count = front_places(real), real.sum(1)
            q, k, v = (scatter_tokens(x, place) for x in (q, k, v))
        key, value = (torch.cat([kept.to(x.dtype), x], dim=1) for kept, x in ((state.key, k), (state.value, v)))
        after = 0 if self.causal else past
        key, value = (functional.pad(x, (0, 0, 0, 0, 0, after)) for x in (key, value))
        first = (past - state.length).clamp_min(0)
        if _known(tokens):
            o = attend_blocks(q, key, value, first, past + count, past, after)
        else:
            # At least two blocks: a number of blocks that could be one would be a condition, too.
            reach = past + 1 + after
            o = attend_window(q, key, value, first, past + count, past, after, reach, (tokens + 2 * reach - 1) // reach)
        latest = count[:, None] + torch.arange(past, device=q.device)
        kept_key, kept_value = (gather_tokens(x, latest).to(state.key.dtype) for x in (key, value))
        return o if place is None else gather_tokens(o, place), KeyValueState(
            kept_key, kept_value, state.length + count
        )

    def scan_flops(self, tokens: int) -> int:
        beyond = max(tokens - self.window, 0)
        pairs = tokens * (tokens + 1) // 2 - beyond * (beyond + 1) // 2
        if not self.causal:
            pairs = 2 * pairs - tokens
        return 4 * pairs * self.num_heads * self.head_dim


def _known(tokens: int) -> bool:
    """True if a number of tokens can be compared; comparing a symbolic one would add a condition to the export."""
    return torch.jit.is_tracing() or isinstance(tokens, int)
