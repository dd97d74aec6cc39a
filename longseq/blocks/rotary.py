"""Rotary positions: queries and keys turned by an angle in proportion to where they stand."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from longseq.blocks.precision import at_least_float32
from longseq.kernels.reading import Reverse, halves
from longseq.kernels.recurrence import segment_bounds


def apply_rotary(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """Turn each pair of channels (x_i, x_{i + D/2}) of a token at position p by the angle p · base^{-2i/D}.

    Products of a query and a key so turned depend on the distance of their positions alone.

    Args:
        x: `[B, T, H, D]` or one token `[B, H, D]`, D even.
        positions: `[B, T]` or `[T]`, or `[B]` for one token; whole numbers of any type.

    Returns:
        The shape and type of `x`; angles and products are float32, or float64 for float64.

    Source: RoFormer (Su et al., 2021), equation 34, with the two halves of the channels paired as in Llama.
    """
    half = x.shape[-1] // 2
    if 2 * half != x.shape[-1]:
        raise ValueError(f"rotary positions turn pairs of channels, not {x.shape[-1]}; choose an even head dimension")
    wide = at_least_float32(x)
    channel = torch.arange(half, device=x.device, dtype=wide.dtype)
    angle = (positions.to(wide.dtype).unsqueeze(-1) * base ** (-channel / half)).unsqueeze(-2)  # [..., 1, D/2]
    cosine, sine = angle.cos(), angle.sin()
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    return turned.to(x.dtype)


def count_positions(
    x: Tensor,
    start: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    reverse: Reverse = False,
) -> tuple[Tensor, Tensor]:
    """Number the tokens of each sequence, as `Mixer.forward` takes them, in the order in which they are read.

    Args:
        x: `[B, T, ...]`, read for its sizes and device.
        start: `[B]` whole numbers, the position of the token of each sequence that is read first; 0 where left out.
            `[N]` when packed.
        cu_seqlens: `[N + 1]`, borders of packed sequences; each one counts from its own start.
        mask: `[B, T]`, True at real tokens; the others do not count.
        reverse: True counts from the last token of each sequence; "second_half" does so in that half of the rows.

    Returns:
        Positions `[B, T]` and the position that follows the token of each sequence that is read last: `[B]`, or `[N]`
        when packed.

    Raises:
        ValueError: `cu_seqlens` does not cut one row of T tokens into segments.
    """
    batch, tokens = x.shape[:2]
    if mask is None:
        before = torch.arange(tokens + 1, device=x.device).expand(batch, -1)
    else:
        before = functional.pad(mask.long().cumsum(1), (1, 0))
    if cu_seqlens is None:
        total = before[:, -1]
        count = total[:, None] - before[:, 1:] if reverse else before[:, :-1]
        if reverse == "second_half":
            count = torch.cat((halves(before[:, :-1])[0], halves(count)[1]))
        start = before.new_zeros(batch) if start is None else start
        return count + start[:, None], total + start
    if batch != 1:
        raise ValueError(
            f"cu_seqlens needs a batch of 1, but there are {batch} rows; concatenate the sequences along time"
        )
    segment_bounds(cu_seqlens, tokens)  # a border beyond the tokens is an index at which a GPU stops for good
    cu_seqlens = cu_seqlens.to(x.device)
    borders = before[0, cu_seqlens]
    start = torch.zeros_like(borders[1:]) if start is None else start
    segment = torch.bucketize(torch.arange(tokens, device=x.device), cu_seqlens[1:], right=True)
    if reverse:
        count = (borders[1:] + start)[segment] - before[0, 1:]
    else:
        count = (start - borders[:-1])[segment] + before[0, :-1]
    return count.unsqueeze(0), borders.diff() + start
