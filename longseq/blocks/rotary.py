"""Rotary positions: queries and keys rotated by an angle proportional to their positions."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from longseq.blocks.precision import at_least_float32
from longseq.kernels.packing import Packing, pack_like
from longseq.kernels.reading import Reverse, halves


def rotary_angles(
    x: Tensor, positions: Tensor, base: float = 10000.0, scaling: Mapping[str, Any] | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[..., 1, D/2]` of the angles p · base^{-2i/D} for tokens at positions p.

    Args:
        x: `[B, T, H, D]` or one token `[B, H, D]`, D even; only its width and type matter.
        positions: `[B, T]` or `[T]`, or `[B]` for one token; whole numbers of any type.
        scaling: stretches the angles to longer contexts (see `check_rotary`).

    Source: RoFormer (Su et al., 2021), equation 34, with the two halves of the channels paired as in Llama.
    """
    half = x.shape[-1] // 2
    if 2 * half != x.shape[-1]:
        raise ValueError(f"rotary positions need an even head dimension, not {x.shape[-1]}")
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    channel = torch.arange(half, device=x.device, dtype=dtype)
    frequencies, magnitude = base ** (-channel / half), 1.0
    if scaling:
        frequencies, magnitude = _SCALINGS[scaling["rope_type"]](frequencies, base, scaling)
    angle = (positions.to(dtype).unsqueeze(-1) * frequencies).unsqueeze(-2)
    cosine, sine = angle.cos(), angle.sin()
    return (cosine, sine) if magnitude == 1 else (cosine * magnitude, sine * magnitude)


def shared_angles(
    x: Tensor, positions: Tensor, base: float, scaling: Mapping[str, Any], packing: Packing | None
) -> tuple[Tensor, Tensor]:
    """`rotary_angles`, once for all layers of packed sequences that begin here; `packing` is None for other tokens."""
    if packing is None:
        return rotary_angles(x, positions, base, scaling)
    key = ("rotary", x.shape[-1], base, *scaling.items(), x.dtype)
    return packing.once(key, lambda: rotary_angles(x, positions, base, scaling))


def check_rotary(scaling: Mapping[str, Any] | None) -> None:
    """Raise ValueError for a `scaling` that `rotary_angles` does not know, or keys that it would ignore.

    The keys are those of transformers' config.json:

    rope_type: linear (all angles divided by `factor`; Chen et al., 2023), llama3 (slow pairs only; Llama 3.1), or yarn
        (YaRN; Peng et al., 2023, section 3, with the factor of the scores on both queries and keys).
    factor: how much longer the context becomes.
    original_max_position_embeddings: of llama3 and yarn: the context of the training.
    low_freq_factor, high_freq_factor: of llama3: a pair that turns less often in that context is slow, one that turns
        more often is fast.
    beta_fast, beta_slow, truncate, attention_factor, mscale, mscale_all_dim: of yarn; all may be left out.
    """
    if not scaling:
        return
    known = _SCALING_KEYS.get(scaling.get("rope_type", ""))
    if known is None or not {*scaling} <= {"rope_type", *known}:
        raise ValueError(f"rotary_scaling={dict(scaling)} has another rope_type or other keys")


def _scale_linearly(frequencies: Tensor, base: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    return frequencies / scaling["factor"], 1.0


def _scale_as_llama(frequencies: Tensor, base: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    fast = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - fast) * frequencies / scaling["factor"] + fast * frequencies, 1.0


def _scale_as_yarn(frequencies: Tensor, base: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    half, factor = len(frequencies), scaling["factor"]
    context = scaling["original_max_position_embeddings"]

    def channel_of(turns: float) -> float:
        return half * math.log(context / (turns * 2 * math.pi)) / math.log(base)

    first, last = channel_of(scaling.get("beta_fast") or 32), channel_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    channel = torch.arange(half, device=frequencies.device, dtype=frequencies.dtype)
    slow = ((channel - first) / (last - first or 0.001)).clamp(0, 1)
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        scores, all_scores = scaling.get("mscale"), scaling.get("mscale_all_dim")
        both = scores and all_scores
        magnitude = _magnitude(factor, scores) / _magnitude(factor, all_scores) if both else _magnitude(factor, 1.0)
    return slow * frequencies / factor + (1 - slow) * frequencies, magnitude


def _magnitude(factor: float, weight: float | None) -> float:
    return 1.0 if factor <= 1 else 0.1 * (weight or 1.0) * math.log(factor) + 1.0


_Scaling = Callable[[Tensor, float, Mapping[str, Any]], tuple[Tensor, float]]
_SCALINGS: dict[str, _Scaling] = {"linear": _scale_linearly, "llama3": _scale_as_llama, "yarn": _scale_as_yarn}
_SCALING_KEYS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
        *("truncate", "attention_factor", "mscale", "mscale_all_dim"),
    ),
}


def rotate_pairs(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate each pair of channels (x_i, x_{i + D/2}) by the angles of `rotary_angles`.

    Angles and products are float32, or float64 for float64; the result has the type of `x`.
    """
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
    """Number the tokens of each sequence in the order in which they are read.

    Args:
        x: `[B, T, ...]`, read for its sizes and device.
        start: `[B]`, or `[N]` when packed: the position of the first token that is read; by default 0.
        cu_seqlens: `[N + 1]`, borders of packed sequences, or their `Packing`.
        mask: `[B, T]`, True at real tokens of rows that are not packed; the others do not count.
        reverse: True counts from the last token of each sequence; "second_half" does so in that half of the rows.

    Returns:
        Positions `[B, T]`, and the position after the last token that is read: `[B]`, or `[N]` when packed.
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
