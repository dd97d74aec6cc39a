"""Softmax attention over all tokens or over a window of them, with as many key heads as query heads or fewer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


@torch.jit.script_if_tracing
def attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None = None, causal: bool = False) -> Tensor:
    """Softmax attention with scale 1/√D: `q, o [B, T, H, D]`; `k, v [B, S, G, D]`, each of G heads read by H/G queries.

    `allowed`, `[T, S]` or `[B, T, S]`, is True at the keys that a query sees. With `causal` (S = T) a query sees its
    own token and earlier ones.
    """
    if allowed is not None and allowed.dim() == 3:
        allowed = allowed.unsqueeze(1)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    grouped = k.shape[1] != q.shape[1]
    if grouped and allowed is not None:
        # No fused kernel takes grouped keys together with a mask, and the unfused one holds all T S scores.
        share = q.shape[1] // k.shape[1]
        k, v, grouped = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1), False
    o = functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=causal, enable_gqa=grouped)
    return o.transpose(1, 2)


@torch.jit.script_if_tracing
def attend_filled(q: Tensor, k: Tensor, v: Tensor, place: Tensor) -> Tensor:
    """`attend` in which a query at slot p of `place [B, T]` sees the slots 0 to p; later slots than any p are not read.

    On a GPU this waits for `place`.
    """
    # The padding serves an empty batch; `int` in place of `item` would need the values when a graph is exported.
    end = (functional.pad(place.flatten(), (0, 1)).max() + 1).item()
    if not torch.jit.is_scripting():
        torch._check(end > 0)
    slots = torch.arange(end, device=q.device)
    k, v = k.narrow(1, 0, end), v.narrow(1, 0, end)  # type: ignore[arg-type]
    return attend(q, k, v, slots <= place.unsqueeze(-1))


@torch.jit.script_if_tracing
def attend_nearby(q: Tensor, k: Tensor, v: Tensor, window: int, causal: bool, lengths: Tensor | None = None) -> Tensor:
    """`attend` in which a token sees itself and the `window` - 1 tokens before it, and without `causal` those after.

    With `lengths` [B], shorter rows end in padding, which no real token sees; then T is longer than the window.
    """
    batch, tokens = q.shape[:2]
    if tokens <= window:
        return attend(q, k, v, None, causal)
    before = window - 1
    after = 0 if causal else before
    k = functional.pad(k, (0, 0, 0, 0, before, after))
    v = functional.pad(v, (0, 0, 0, 0, before, after))
    first = torch.full((batch,), before, device=q.device)
    end = first + tokens if lengths is None else first + lengths
    return attend_blocks(q, k, v, first, end, before, after)


@torch.jit.script_if_tracing
def attend_blocks(q: Tensor, k: Tensor, v: Tensor, first: Tensor, end: Tensor, before: int, after: int) -> Tensor:
    """`attend_window` in as many blocks as the tokens need, also where a trace fixes everything outside scripts."""
    tokens = q.shape[1]
    block = min(tokens, before + 1 + after)
    return attend_window(q, k, v, first, end, before, after, block, (tokens + block - 1) // block)


@torch.jit.script_if_tracing
def attend_window(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, end: Tensor, before: int, after: int, block: int, blocks: int
) -> Tensor:
    """Attention in which query t sees the slots t to t + before + after, of which slot t + before is its own token.

    Only slots from `first` on and before `end` are seen. A query without any such slot sees its own.

    The queries are split into `blocks` blocks of `block` queries, T or more in all. Each block takes the keys that any
    of its queries sees. With blocks as long as the window, time and memory are proportional to T times the window.

    Shapes: q, o [B, T, H, D]; k, v [B, before + T + after, G, D], G a divisor of H; first, end [B].
    """
    batch, tokens, heads, width = q.shape
    missing = blocks * block - tokens
    span = before + block + after
    q = functional.pad(q, (0, 0, 0, 0, 0, missing)).reshape(batch * blocks, block, heads, width)
    k = functional.pad(k, (0, 0, 0, 0, 0, missing)).unfold(1, span, block).flatten(0, 1).permute(0, 3, 1, 2)
    v = functional.pad(v, (0, 0, 0, 0, 0, missing)).unfold(1, span, block).flatten(0, 1).permute(0, 3, 1, 2)

    query = torch.arange(block, device=q.device).unsqueeze(1)
    slot = torch.arange(span, device=q.device).unsqueeze(0)
    near = (slot >= query) & (slot <= query + before + after)
    place = block * torch.arange(blocks, device=q.device).unsqueeze(1) + slot  # [blocks, span]
    kept = (place >= first[:, None, None]) & (place < end[:, None, None])  # [B, blocks, span]
    allowed = near & kept.flatten(0, 1).unsqueeze(1) | (slot == query + before)
    return attend(q, k, v, allowed).reshape(batch, blocks * block, heads, width)[:, :tokens]
