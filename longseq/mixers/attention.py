"""Softmax attention, the baseline, and what the mixers with softmax attention share."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from longseq.arguments import check_choice
from longseq.blocks.norm import RMSNorm
from longseq.blocks.packing import front_places, scatter_tokens, unpack_rows
from longseq.blocks.rotary import check_rotary, count_positions, rotate_pairs, shared_angles
from longseq.kernels.dispatch import is_exporting
from longseq.kernels.packed_attention import packed_attention
from longseq.kernels.packed_attention.attend import attend, attend_filled
from longseq.kernels.packing import Packing
from longseq.mixers.base import ALL_TOKENS, Device, Mixer, ScanOptions, required
from longseq.mixers.heads import check_groups, choose_heads
from longseq.mixers.registry import register

QK_NORMS = ("none", "head", "all")
Heads = tuple[Tensor, Tensor, Tensor]  # queries [B, T, H, D], keys and values [B, T, G, D]


class KeyValueState(NamedTuple):
    """Keys, rotated if rotary, and values `[B, S, G, D]`; `length [B]` counts the real tokens so far."""

    key: Tensor
    value: Tensor
    length: Tensor


class KeyValueCache(NamedTuple):
    """Keys and values `[B, S, G, D]` with room for S tokens; `length [B]` counts the real tokens so far.

    Made from a `KeyValueState` by `Mixer.preallocate`, and turned back by `Mixer.trim`. Attention keeps token p at slot
    p, window attention at slot p mod S, where S is the window.

    A step writes into the tensors of the given state, and its result shares them: clone the state
    (`map_state(torch.clone, state)`) to continue it in two ways. While gradients are recorded, and in exported graphs,
    a step writes into copies.
    """

    key: Tensor
    value: Tensor
    length: Tensor


class SoftmaxAttention(Mixer[KeyValueState | KeyValueCache]):
    """Base of the mixers with softmax attention; a subclass decides which tokens a token sees.

    Each of the G = num_kv_heads heads of keys and values serves H/G of the H query heads. `in_proj` computes queries,
    keys and values, in this order.

    Sources: Attention Is All You Need (Vaswani et al., 2017), section 3.2; grouped queries as in GQA (Ainslie et al.,
    2023), section 2.2; rotary positions as in RoFormer (Su et al., 2021), equation 34.
    """

    own_backends = ("varlen",)
    supports_noncausal = True
    recomputable = False
    preallocates = True

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
        super().__init__(d_model, backend=backend)
        # Both together choose another width than d_model, as in Qwen3.
        width = d_model if num_heads is None or head_dim is None else num_heads * head_dim
        self.num_heads, self.head_dim = choose_heads(width, num_heads, head_dim, preferred=64)
        self.num_kv_heads = check_groups(self.num_heads, num_kv_heads)
        check_choice("qk_norm", qk_norm, QK_NORMS)
        check_rotary(rotary_scaling)
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
        self, projected: Tensor, state: KeyValueState | KeyValueCache | None = None, options: ScanOptions = ALL_TOKENS
    ) -> tuple[Tensor, KeyValueState | KeyValueCache | None]:
        if state is not None and not self.causal:
            raise ValueError("non-causal attention has no state to continue from; build it with causal=True")
        if isinstance(state, KeyValueCache):
            y, last = self.scan(projected, self._listed(state), options)
            if last is None:
                return y, None
            return y, self._cached(KeyValueState(*last), state.key.shape[1], state.key.dtype)
        packing, mask, _, output_final_state = options
        positions, length = None, None
        if self.causal or self.rotary:  # nothing else reads positions
            start = None if state is None else state.length
            positions, length = count_positions(projected, start, cu_seqlens=packing, mask=mask)
        heads = self._heads(projected, positions, packing if state is None else None)
        o, kept = self._attend(heads, state, packing, mask, output_final_state and self.causal)
        if kept is None:
            return o.flatten(-2), None
        assert length is not None
        return o.flatten(-2), KeyValueState(*kept, length)

    def scan_step(
        self, projected: Tensor, state: KeyValueState | KeyValueCache
    ) -> tuple[Tensor, KeyValueState | KeyValueCache]:
        if not self.causal:
            raise ValueError("non-causal attention cannot run token by token; build it with causal=True")
        if isinstance(state, KeyValueCache):
            return self._step_in_cache(projected, state)
        y, last = self.scan(projected.unsqueeze(1), state)
        assert last is not None
        return y.squeeze(1), last

    def _step_in_cache(self, projected: Tensor, cache: KeyValueCache) -> tuple[Tensor, KeyValueCache]:
        """Write one token's key and value and attend to all in the cache, without waiting for the device."""
        place = self._place(cache)
        q, k, v = self._heads(projected.unsqueeze(1), cache.length[:, None], None)
        key, value = _write(cache.key, place, k), _write(cache.value, place, v)
        # Slots are filled in order: the first ones hold tokens, and all of them in a full window.
        real = torch.arange(key.shape[1], device=key.device) <= cache.length[:, None]
        # The queries of one head of keys count as its tokens, so that no head is copied.
        q = q.unflatten(2, (self.num_kv_heads, -1)).squeeze(1).transpose(1, 2)  # [B, H / G, G, D]
        o = attend(q, key.to(q.dtype), value.to(q.dtype), real.unsqueeze(1))
        return o.transpose(1, 2).flatten(1), KeyValueCache(key, value, cache.length + 1)

    def trim(self, state: KeyValueState | KeyValueCache) -> KeyValueState:
        return self._listed(state) if isinstance(state, KeyValueCache) else state

    def _place(self, cache: KeyValueCache) -> Tensor:
        """The slots `[B]` of the next token."""
        raise NotImplementedError

    def _listed(self, cache: KeyValueCache) -> KeyValueState:
        """A cache as the state that `scan` reads; it may share the cache's tensors."""
        raise NotImplementedError

    def _cached(self, state: KeyValueState, slots: int, dtype: torch.dtype) -> KeyValueCache:
        """A new cache of so many slots with the tokens of a state; ValueError if they do not fit."""
        raise NotImplementedError

    def _attend(
        self, heads: Heads, state: KeyValueState | None, packing: Packing | None, mask: Tensor | None, keep: bool
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Attend within `heads`: outputs `[B, T, H, D]`, and keys and values if any are kept."""
        raise NotImplementedError

    def _heads(self, projected: Tensor, positions: Tensor | None, packing: Packing | None) -> Heads:
        heads = projected.unflatten(-1, (self.num_heads + 2 * self.num_kv_heads, self.head_dim))
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=-2)
        if self.qk_norm == "head":
            q, k = required(self.q_norm)(q), required(self.k_norm)(k)
        elif self.qk_norm == "all":
            q = required(self.q_norm)(q.flatten(-2)).unflatten(-1, (self.num_heads, -1))
            k = required(self.k_norm)(k.flatten(-2)).unflatten(-1, (self.num_kv_heads, -1))
        if self.rotary:
            angles = shared_angles(q, required(positions), self.rotary_base, self.rotary_scaling, packing)
            q, k = (rotate_pairs(x, *angles) for x in (q, k))
        return q, k, v


@register("attention")
class Attention(SoftmaxAttention):
    """Multi-head softmax attention; by default as in the Vision Transformer: biases, scale 1/√head_dim, no positions.

    The state keeps the keys and values of all tokens and grows with each call. In each of its rows the real entries
    come first. `preallocate` gives it room for a known number of tokens, which steps fill in place; a token beyond is
    an error (ValueError on a CPU, torch's check of the index on a GPU).

    Args:
        num_heads, head_dim: by default heads of 64 channels (32, ... where 64 does not divide). One of them decides the
            other; both together may make the heads wider or narrower than d_model.
        num_kv_heads: heads of keys and values, a divisor of num_heads; by default num_heads.
        causal: each token sees itself and the tokens before it. False: every token sees all; `state` and `step` are
            refused.
        qkv_bias, out_bias: biases of the query, key and value projections, and of the output projection.
        rotary, rotary_base: rotate queries and keys by their positions, and the base of the angles.
        rotary_scaling: stretches the angles to longer contexts (see `longseq.blocks.rotary.check_rotary`), or None.
        qk_norm: RMS norm of queries and keys, before they are rotated: none, head (over each head, as in Qwen3) or all
            (over all heads, as in OLMo 2), with `norm_eps`.

    With rotary positions and without biases it is the attention of Llama (Touvron et al., 2023), which papers on linear
    attention call Transformer++ (`mixer=transformer_plus_plus`).

    Source: Attention Is All You Need (Vaswani et al., 2017), section 3.2; grouped queries: GQA (Ainslie et al., 2023).
    """

    paper = "Softmax attention (arXiv:1706.03762), section 3.2"
    growing_state = True

    def initial_state(self, batch: int, device: Device = None, dtype: torch.dtype | None = None) -> KeyValueState:
        empty = torch.zeros(batch, 0, self.num_kv_heads, self.head_dim, device=device, dtype=dtype)
        return KeyValueState(empty, empty, torch.zeros(batch, dtype=torch.long, device=device))

    def scan(
        self, projected: Tensor, state: KeyValueState | KeyValueCache | None = None, options: ScanOptions = ALL_TOKENS
    ) -> tuple[Tensor, KeyValueState | KeyValueCache | None]:
        if is_exporting() and isinstance(state, KeyValueCache) and options.mask is None:
            return self._read_on(projected, state)
        return super().scan(projected, state, options)

    def _read_on(self, projected: Tensor, cache: KeyValueCache) -> tuple[Tensor, KeyValueCache]:
        """`scan` in exported graphs: writes into the cache, which fails without room, and reads its filled slots."""
        place, length = count_positions(projected, cache.length)
        q, k, v = self._heads(projected, place, None)
        rows = torch.arange(place.shape[0], device=place.device).unsqueeze(1)
        key, value = (
            slots.index_put((rows, place), x.to(slots.dtype)) for slots, x in ((cache.key, k), (cache.value, v))
        )
        o = attend_filled(q, key.to(q.dtype), value.to(q.dtype), place)
        return o.flatten(-2), KeyValueCache(key, value, length)

    def preallocate(self, state: KeyValueState | KeyValueCache, max_length: int) -> KeyValueCache:
        if isinstance(state, KeyValueCache) and state.key.shape[1] >= max_length:
            return state
        return self._cached(KeyValueState(*state), max_length, state.key.dtype)

    def trim(self, state: KeyValueState | KeyValueCache) -> KeyValueState:
        longest = int(state.length.max())
        return KeyValueState(state.key[:, :longest].clone(), state.value[:, :longest].clone(), state.length)

    def room(self, state: KeyValueState | KeyValueCache) -> int | None:
        return state.key.shape[1] - int(state.length.max()) if isinstance(state, KeyValueCache) else None

    def _place(self, cache: KeyValueCache) -> Tensor:
        _check_room(cache.length + 1, cache.key.shape[1])
        return cache.length

    def _listed(self, cache: KeyValueCache) -> KeyValueState:
        return KeyValueState(*cache)

    def _cached(self, state: KeyValueState, slots: int, dtype: torch.dtype) -> KeyValueCache:
        if state.key.shape[1] > slots or state.key.is_cpu:
            _check_room(state.length, slots, wait=True)
        key, value = (_resize(x, slots, dtype) for x in (state.key, state.value))
        length = state.length
        if is_exporting():
            # The check above is no part of a graph. Reading at the length fails in a graph if it is above the slots.
            length = length + torch.zeros(slots + 1, dtype=length.dtype, device=length.device)[length]
        return KeyValueCache(key, value, length)

    def _attend(
        self, heads: Heads, state: KeyValueState | None, packing: Packing | None, mask: Tensor | None, keep: bool
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        q, k, v = heads
        if packing is not None and state is not None:
            o, key, value = self._continue_packed(heads, state, packing)
        elif packing is not None:
            o = packed_attention(q, k, v, packing, causal=self.causal, backend=self.backend)
            key, value = (unpack_rows(x, packing) for x in (k, v)) if keep else (k, v)
        elif not self.causal:
            if mask is not None:  # a padded token sees itself, so that its output is finite
                mask = mask.unsqueeze(1) | torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
            o, key, value = attend(q, k, v, mask), k, v
        elif state is None and mask is None:
            o, key, value = attend(q, k, v, causal=True), k, v
        else:
            o, key, value = self._continue(heads, state, mask)
        return o, (key, value) if keep else None

    def _continue(
        self, heads: Heads, state: KeyValueState | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attend to a state's keys and values and to the call's own tokens, of which `mask` marks the real ones."""
        q, k, v = heads
        batch, tokens = q.shape[:2]
        past = Attention.initial_state(self, batch, k.device, k.dtype) if state is None else state
        real = torch.ones(batch, tokens, dtype=torch.bool, device=k.device) if mask is None else mask
        # Real tokens follow the tokens of the state, which may hold fewer than it counted; padding comes last. A token
        # sees the slots up to its own, so that the undefined output of padding is finite.
        place = front_places(real, past.length.clamp(max=past.key.shape[1]))
        key, value = (
            scatter_tokens(x, place, functional.pad(kept.to(x.dtype), (0, 0, 0, 0, 0, tokens)))
            for x, kept in ((k, past.key), (v, past.value))
        )
        slots = torch.arange(past.key.shape[1] + tokens, device=k.device)
        return attend(q, key, value, slots <= place.unsqueeze(-1)), key, value

    def _continue_packed(self, heads: Heads, state: KeyValueState, packing: Packing) -> tuple[Tensor, Tensor, Tensor]:
        """`_continue` for packed sequences, one after the other, so that no mask is larger than one sequence needs."""
        outputs, keys, values = [], [], []
        for row, (start, end) in enumerate(pairwise(packing.bounds)):
            own = KeyValueState(*(part[row : row + 1] for part in state))
            q, k, v = (x[:, start:end] for x in heads)
            o, key, value = self._continue((q, k, v), own, None)
            missing = (0, 0, 0, 0, 0, packing.longest - (end - start))
            outputs.append(o)
            keys.append(functional.pad(key, missing))
            values.append(functional.pad(value, missing))
        return torch.cat(outputs, dim=1), torch.cat(keys), torch.cat(values)

    def scan_flops(self, tokens: int) -> int:
        pairs = tokens * (tokens + 1) // 2 if self.causal else tokens * tokens
        return 4 * pairs * self.num_heads * self.head_dim


def _write(slots: Tensor, place: Tensor, x: Tensor) -> Tensor:
    """Write one token `x [B, 1, G, D]` at `place [B]` of `slots [B, S, G, D]`."""
    x = x.to(slots.dtype)
    index = place.view(-1, 1, 1, 1).expand_as(x)
    if torch.is_grad_enabled() or is_exporting():
        return slots.scatter(1, index, x)
    return slots.scatter_(1, index, x)


def _resize(x: Tensor, slots: int, dtype: torch.dtype) -> Tensor:
    """Copy `x [B, S, G, D]` to `slots` slots: new ones are zero, and those beyond are cut off."""
    kept = x[:, :slots].to(dtype)
    if kept.shape[1] == slots:
        return kept.clone()
    return functional.pad(kept, (0, 0, 0, 0, 0, slots - kept.shape[1]))


def _check_room(needed: Tensor, slots: int, wait: bool = False) -> None:
    """Raise ValueError if a row needs more tokens than slots; on a GPU only if the caller can wait for it."""
    if is_exporting() or torch.compiler.is_compiling() or not (needed.is_cpu or wait):
        return
    if needed.numel() and int(needed.max()) > slots:
        longest = int(needed.max())
        raise ValueError(f"a sequence of {longest} tokens does not fit into a cache that was preallocated for {slots}")
