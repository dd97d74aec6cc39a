"""Sequences of different lengths in one tensor: padded rows, packed rows, and real tokens moved to the front."""

from __future__ import annotations

import torch
from torch import Tensor


def unpack_rows(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Give each packed sequence a row of its own: `x [1, T, ...]` becomes `[N, L, ...]`, zeros behind the shorter ones.

    `cu_seqlens [N + 1]` holds the borders; L is the longest length. `x[0]` is the result at `rows_of(cu_seqlens)`.
    """
    real = rows_of(cu_seqlens.to(x.device))
    return x.new_zeros(*real.shape, *x.shape[2:]).masked_scatter(_expand(real, x), x[0])


def rows_of(cu_seqlens: Tensor) -> Tensor:
    """Mark the real tokens `[N, L]` of the rows that `unpack_rows` makes."""
    lengths = cu_seqlens.diff()
    longest = int(lengths.max()) if lengths.numel() else 0
    return torch.arange(longest, device=cu_seqlens.device) < lengths[:, None]


def front_places(real: Tensor, start: Tensor | None = None) -> Tensor:
    """Where the tokens of `real [B, T]` go when the real ones move to the front in their order, the others behind them.

    With `start [B]` the first place of each row is not 0 but that.
    """
    count = real.long().cumsum(1)
    others = (~real).long().cumsum(1)
    place = torch.where(real, count, count[:, -1:] + others) - 1
    return place if start is None else place + start[:, None]


def move(x: Tensor, place: Tensor, slots: Tensor | None = None) -> Tensor:
    """Put token t of row b of `x [B, T, ...]` at `place[b, t]` of `slots [B, S, ...]`, by default T of them."""
    slots = torch.zeros_like(x) if slots is None else slots
    return slots.scatter(1, _expand(place, x), x)


def pick(x: Tensor, place: Tensor) -> Tensor:
    """Read `x [B, S, ...]` at `place [B, T]`: `[B, T, ...]`, what undoes `move`."""
    return x.gather(1, _expand(place, x))


def _expand(place: Tensor, x: Tensor) -> Tensor:
    """Repeat `place [B, T]` over the further dimensions of `x`."""
    return place.view(*place.shape, *[1] * (x.dim() - 2)).expand(*place.shape, *x.shape[2:])
