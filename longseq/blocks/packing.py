"""Sequences of different lengths in one tensor: padded rows, packed rows, and real tokens moved to the front."""

import torch
from torch import Tensor

from longseq.kernels.packing import Packing


def unpack_rows(x: Tensor, packing: Packing) -> Tensor:
    """Give each packed sequence its own row: `x [1, T, ...]` becomes `[N, L, ...]`, zero-padded to the longest."""
    real, place = packing.once("rows", lambda: _find_rows(packing))
    if packing.tokens == 0:
        return x.new_zeros(*real.shape, *x.shape[2:]) + x.sum()  # zero: x still gets a gradient
    return x[0, place].masked_fill(~_expand(real, x), 0)


def rows_of(packing: Packing) -> Tensor:
    """A mask `[N, L]` of the real tokens of the rows from `unpack_rows`."""
    return packing.once("rows", lambda: _find_rows(packing))[0]


def pack_rows(rows: Tensor, packing: Packing) -> Tensor:
    """Put rows `[N, L, ...]` end to end: `[1, T, ...]`, the inverse of `unpack_rows`."""
    return rows[packing.sequence, packing.positions].unsqueeze(0)


def _find_rows(packing: Packing) -> tuple[Tensor, Tensor]:
    place = torch.arange(packing.longest, device=packing.cu_seqlens.device)
    real = place < packing.lengths[:, None]
    return real, (packing.cu_seqlens[:-1, None] + place).clamp_max(max(packing.tokens - 1, 0))


def last_tokens(x: Tensor, packing: Packing, count: int) -> Tensor:
    """Return the last tokens of each sequence of `x [1, T, ...]`: `[N, count, ...]`, with zeros in front of fewer."""
    place = packing.cu_seqlens[1:, None] - count + torch.arange(count, device=x.device)
    real = place >= packing.cu_seqlens[:-1, None]
    if packing.tokens == 0:
        return x.new_zeros(packing.count, count, *x.shape[2:])
    return x[0, place.clamp(0, packing.tokens - 1)].masked_fill(~_expand(real, x), 0)


def front_places(real: Tensor, start: Tensor | None = None) -> Tensor:
    """The new places of tokens `[B, T]`, from `start [B]` or 0 on, when those that are `real` move to the front."""
    count = real.long().cumsum(1)
    others = (~real).long().cumsum(1)
    place = torch.where(real, count, count[:, -1:] + others) - 1
    return place if start is None else place + start[:, None]


def scatter_tokens(x: Tensor, place: Tensor, slots: Tensor | None = None) -> Tensor:
    """Put token t of row b of `x [B, T, ...]` at `place[b, t]` of `slots [B, S, ...]`, by default T of them."""
    slots = torch.zeros_like(x) if slots is None else slots
    return slots.scatter(1, _expand(place, x), x)


def gather_tokens(x: Tensor, place: Tensor) -> Tensor:
    """Read `x [B, S, ...]` at `place [B, T]`: `[B, T, ...]`, the inverse of `scatter_tokens`."""
    return x.gather(1, _expand(place, x))


def _expand(place: Tensor, x: Tensor) -> Tensor:
    """Repeat `place [B, T]` over the further dimensions of `x`."""
    return place.view(*place.shape, *[1] * (x.dim() - 2)).expand(*place.shape, *x.shape[2:])
