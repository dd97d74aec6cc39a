"""Rotary positions: queries and keys rotated by an angle proportional to their positions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from longseq.blocks.precision import at_least_float32
from longseq.kernels.packing import Packing, pack_like
from longseq.kernels.reading import Reverse, halves


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
    return rotate_pairs(x, *rotary_angles(x, positions, base))


def rotary_angles(x: Tensor, positions: Tensor, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[..., 1, D/2]` of the angles of `apply_rotary`; only the width and the type of `x` matter."""
    half = x.shape[-1] // 2
    if 2 * half != x.shape[-1]:
        raise ValueError(f"rotary positions turn pairs of channels, not {x.shape[-1]}; choose an even head dimension")
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    channel = torch.arange(half, device=x.device, dtype=dtype)
    angle = (positions.to(dtype).unsqueeze(-1) * base ** (-channel / half)).unsqueeze(-2)
    return angle.cos(), angle.sin()


def rotate_pairs(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the pairs of channels of `x` by the angles of `rotary_angles`."""
    first, second = at_least_float32(x).chunk(2, dim=-1)
    turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    return turned.to(x.dtype)


def count_positions(
    x: Tensor,
    start: Tensor | None = None,
    *,
    cu_seqlens: Tensor | Packing | None = None,
    mask: Tensor | None = None,
    reverse: Reverse = False,
) -> tuple[Tensor, Tensor]:
    """Number the tokens of each sequence, as `Mixer.forward` takes them, in the order in which they are read.

    Args:
        x: `[B, T, ...]`, read for its sizes and device.
        start: `[B]` whole numbers, the position of the token of each sequence that is read first; 0 where left out.
            `[N]` when packed.
        cu_seqlens: `[N + 1]`, borders of packed sequences, or their `Packing`; each one counts from its own start.
        mask: `[B, T]`, True at real tokens of rows that are not packed; the others do not count.
        reverse: True counts from the last token of each sequence; "second_half" does so in that half of the rows.

    Returns:
        Positions `[B, T]` and the position that follows the token of each sequence that is read last: `[B]`, or `[N]`
        when packed.

    Raises:
        ValueError: `cu_seqlens` does not cut one row of T tokens into segments.
    """
    batch, tokens = x.shape[:2]
    packing = pack_like(cu_seqlens, x)
    if packing is not None:
        assert mask is None, "packed sequences have no padding"
        count, lengths = packing.positions, packing.lengths
        if reverse:
            count = lengths[packing.sequence] - 1 - count
        if start is None:
            return count.unsqueeze(0), lengths
        return (count + start[packing.sequence]).unsqueeze(0), lengths + start
    if mask is None:
        before = torch.arange(tokens + 1, device=x.device).expand(batch, -1)
    else:
        before = functional.pad(mask.long().cumsum(1), (1, 0))
    total = before[:, -1]
    count = total[:, None] - before[:, 1:] if reverse else before[:, :-1]
    if reverse == "second_half":
        count = torch.cat((halves(before[:, :-1])[0], halves(count)[1]))
    start = before.new_zeros(batch) if start is None else start
    return count + start[:, None], total + start
