"""Crops and resizes images of any sizes, by torch: Pillow's antialiased filters as matrix products.

The numbers are Pillow's, rounded to 8 bits after each of the two passes, up to single levels. Rows come first, as in
earlier versions of Pillow for every shape; see `image_resize`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longseq.kernels.image_transforms.arithmetic import grey_of, rounded, weighted
from longseq.kernels.image_transforms.parameters import Geometries

# The most values of padded images that are resized at a time: it bounds the memory that a batch takes, whatever the
# size of its images. In float32 this is 128 MiB, and about as much again for results.
MOST_VALUES = 1 << 25


def image_resize_torch(
    images: Sequence[Tensor],
    geometries: Geometries,
    size: int,
    channels: int = 3,
    interpolation: str = "bicubic",
    exact: bool = True,
    most_values: int = MOST_VALUES,
) -> Tensor:
    """`image_resize` as two matrix products for each image with its box: down @ (box @ across).

    The matrices hold the weights of the filters. Boxes of similar height are padded to one size and multiplied
    together, at most `most_values` at a time.
    """
    device = images[0].device
    result = torch.empty(len(images), channels, size, size, dtype=torch.uint8, device=device)
    # Grey needs more bits than float16 has.
    dtype = torch.float16 if not exact and device.type == "cuda" and channels == 3 else torch.float32
    boxes = geometries.box.tolist()
    order = sorted(range(len(images)), key=lambda number: boxes[number][2:], reverse=True)
    while order:
        _, _, height, width = _largest(boxes[number] for number in order)
        count = max(1, most_values // (3 * height * width))
        chunk, order = order[:count], order[count:]
        _, _, height, width = _largest(boxes[number] for number in chunk)
        block = torch.zeros(len(chunk), height, 3, width, dtype=dtype, device=device)
        cut = [_cut(images[number], boxes[number]).permute(1, 0, 2) for number in chunk]
        places = [one[: part.shape[0], :, : part.shape[2]] for one, part in zip(block, cut, strict=True)]
        torch._foreach_copy_(places, cut)
        if channels == 1:
            block = grey_of(block, 2)
        of_chunk = Geometries(*(values[chunk] for values in geometries))
        across = _weights(of_chunk.box[:, 3], of_chunk.resized[:, 1], of_chunk.columns, width, interpolation, device)
        down = _weights(of_chunk.box[:, 2], of_chunk.resized[:, 0], of_chunk.rows, height, interpolation, device)
        block = rounded(weighted(block.flatten(1, 2), across.transpose(1, 2)))  # [n, H * C, S]
        block = block.view(len(chunk), height, channels * size).transpose(1, 2)
        block = rounded(weighted(block, down.transpose(1, 2)))  # [n, C * S, S], columns before rows
        result[chunk] = block.view(len(chunk), channels, size, size).transpose(2, 3).to(torch.uint8)
    return result


def _largest(boxes: Iterable[list[int]]) -> list[int]:
    """The largest of each number of the boxes, rounded up to a multiple of 8, as tensor cores want matrices."""
    return [-(-max(column) // 8) * 8 for column in zip(*boxes, strict=True)]


def _cut(image: Tensor, box: Sequence[int]) -> Tensor:
    top, left, height, width = box
    return image[:, top : top + height, left : left + width]


def _weights(
    box: Tensor, resized: Tensor, picked: Tensor, length: int, interpolation: str, device: torch.device
) -> Tensor:
    """The weights [n, S, length] by which each picked place of one axis sums its box (Pillow's Resample.c).

    `box` and `resized` [n] are lengths before and after resizing, `picked` [n, S] the places of the resized axis, or -1
    for black.
    """
    filter_ = FILTERS[interpolation]
    scale = box.double() / resized
    blur = scale.clamp(min=1.0)
    taps = min(length, 2 * math.ceil(filter_.support * float(blur.max())) + 1)
    scale, blur, picked = (values.to(device) for values in (scale[:, None], blur[:, None], picked))
    centre = (picked + 0.5) * scale  # [n, S]
    if filter_.weight is None:  # the nearest pixel
        first = centre.floor()
        end = first + 1
    else:
        first = (centre - filter_.support * blur + 0.5).floor().clamp_(min=0)
        end = torch.minimum((centre + filter_.support * blur + 0.5).floor(), box.to(device)[:, None])
    # All taps of a window lie within the axis, so that no place has two weights.
    places = first.clamp(0, length - taps).long()[..., None] + torch.arange(taps, device=device)  # [n, S, taps]
    inside = (places >= first[..., None]) & (places < end[..., None])
    weights = inside.double()
    if filter_.weight is not None:
        weights *= filter_.weight((places - centre[..., None] + 0.5) / blur[..., None])
        weights /= weights.sum(-1, keepdim=True)
    weights = torch.where(picked[..., None] >= 0, weights, 0.0).float()
    return torch.zeros(*picked.shape, length, device=device).scatter_(2, places, weights)


def _triangle(x: Tensor) -> Tensor:
    return (1 - x.abs()).clamp_(min=0)


def _cubic(x: Tensor) -> Tensor:
    """Keys' cubic convolution (1981) with a = -1/2."""
    x = x.abs()
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


def _lanczos(x: Tensor) -> Tensor:
    return torch.where(x.abs() < 3, torch.sinc(x) * torch.sinc(x / 3), 0.0)


def _box(x: Tensor) -> Tensor:
    return ((x > -0.5) & (x <= 0.5)).to(x.dtype)


def _hamming(x: Tensor) -> Tensor:
    return torch.where(x.abs() < 1, torch.sinc(x) * (0.54 + 0.46 * torch.cos(math.pi * x)), 0.0)


class _Filter(NamedTuple):
    support: float
    weight: Callable[[Tensor], Tensor] | None


FILTERS = {
    "nearest": _Filter(0.5, None),
    "box": _Filter(0.5, _box),
    "bilinear": _Filter(1.0, _triangle),
    "hamming": _Filter(1.0, _hamming),
    "bicubic": _Filter(2.0, _cubic),
    "lanczos": _Filter(3.0, _lanczos),
}
