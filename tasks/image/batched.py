"""Transforms of a whole batch of images on one device, with parameters of their own for each image.

The numbers are Pillow's: its antialiased resizing, its enhancements and its warps, rounded to 8 bits after each
operation as Pillow does it. So a batch has the pixels of `training_transform` and `evaluation_transform`, up to single
levels. The operations are torch's, for any device.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longseq.tasks.image.draws import Draw, Step

# The most values of padded images that are resized at a time: it bounds the memory that a batch takes, whatever the
# size of its images. In float32 this is 128 MiB, and about as much again for results.
_MOST_VALUES = 1 << 25

# Pillow's conversion to grey, in 65,536ths (ITU-R 601-2).
_GREY = (19595.0, 38470.0, 7471.0)

_SMOOTH_CENTRE, _SMOOTH_SUM = 5, 13  # of Pillow's filter SMOOTH, whose other eight weights are 1
_BLUR_PASSES = 3  # box blurs that Pillow takes for a Gaussian one


class Geometries(NamedTuple):
    """`longseq.tasks.image.draws.Geometry` of each image: [B, 4], [B, 2], [B, S], [B, S], on the host."""

    box: Tensor
    resized: Tensor
    rows: Tensor
    columns: Tensor


class Draws(NamedTuple):
    """The parameters of a batch. Geometries are of the samples in `resized`, which come as images of any size; the
    others are cropped already. `erased` numbers the samples with erased pixels: `where` bool [K, S, S], and `values`
    of all of them in a row."""

    geometries: Geometries
    resized: list[int]
    steps: list[list[Step]]
    erased: list[int]
    where: Tensor
    values: Tensor


def stack_draws(draws: Sequence[Draw], size: int) -> Draws:
    """The parameters of a batch from those of its samples."""
    resized = [number for number, draw in enumerate(draws) if draw.geometry is not None]
    geometries = [draw.geometry for draw in draws if draw.geometry is not None]
    places = np.array([[g.rows, g.columns] for g in geometries], dtype=np.int16).reshape(-1, 2, size)
    erased = [(number, draw.erased) for number, draw in enumerate(draws) if draw.erased is not None]
    where = np.stack([one.where for _, one in erased]) if erased else np.zeros((0, size, size), dtype=bool)
    values = np.concatenate([one.values for _, one in erased]) if erased else np.zeros(0, dtype=np.uint8)
    return Draws(
        Geometries(
            torch.tensor([g.box for g in geometries], dtype=torch.int32).view(-1, 4),
            torch.tensor([g.resized for g in geometries], dtype=torch.int32).view(-1, 2),
            torch.from_numpy(places[:, 0].copy()),
            torch.from_numpy(places[:, 1].copy()),
        ),
        resized,
        [draw.steps for draw in draws],
        [number for number, _ in erased],
        torch.from_numpy(where),
        torch.from_numpy(values),
    )


def resize(
    images: Sequence[Tensor],
    geometries: Geometries,
    size: int,
    *,
    channels: int = 3,
    interpolation: str = "bicubic",
    exact: bool = True,
    most_values: int = _MOST_VALUES,
) -> Tensor:
    """Crop and resize images uint8 [3, H, W] of any sizes, each by its geometry -> uint8 [B, channels, size, size].

    A result is two matrix products with its box: down @ (box @ across), where the matrices hold the weights of Pillow's
    antialiased filters. Boxes of similar height are padded to one size and multiplied together, at most `most_values`
    at a time. `channels` = 1 makes images grey first. With exact=False a GPU multiplies in float16, which is faster and
    differs by a level here and there.
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
            block = _grey(block, 2)
        of_chunk = Geometries(*(values[chunk] for values in geometries))
        across = _weights(of_chunk.box[:, 3], of_chunk.resized[:, 1], of_chunk.columns, width, interpolation, device)
        down = _weights(of_chunk.box[:, 2], of_chunk.resized[:, 0], of_chunk.rows, height, interpolation, device)
        block = _rounded(_weighted(block.flatten(1, 2), across.transpose(1, 2)))  # [n, H * C, S]
        block = block.view(len(chunk), height, channels * size).transpose(1, 2)
        block = _rounded(_weighted(block, down.transpose(1, 2)))  # [n, C * S, S], columns before rows
        result[chunk] = block.view(len(chunk), channels, size, size).transpose(2, 3).to(torch.uint8)
    return result


def apply_steps(images: Tensor, steps: Sequence[Sequence[Step]], fill: Sequence[int]) -> None:
    """Apply the colour operations and warps of each image in place, uint8 [B, 3, S, S]; warps fill with `fill`.

    The first steps of all images are done together, operation by operation, then the second ones, and so on.
    """
    for turn in range(max((len(own) for own in steps), default=0)):
        kinds: dict[str, list[tuple[int, Step]]] = defaultdict(list)
        for number, own in enumerate(steps):
            if turn < len(own):
                kinds[own[turn].kind].append((number, own[turn]))
        by_table = [(kind, *one) for kind in _TABLES for one in kinds.pop(kind, [])]
        if by_table:
            numbers = torch.tensor([number for _, number, _ in by_table], device=images.device)
            chosen = images[numbers]
            images[numbers] = _look_up(chosen, _make_tables(chosen, [(kind, step) for kind, _, step in by_table]))
        for kind, members in kinds.items():
            numbers = torch.tensor([number for number, _ in members], device=images.device)
            values = torch.tensor([step.values for _, step in members], dtype=torch.float64)  # on the host
            images[numbers] = _OPERATIONS[kind](images[numbers], values, fill)


def to_grey(images: Tensor) -> Tensor:
    """uint8 [B, 3, H, W] -> uint8 [B, 1, H, W], as Pillow converts RGB to L."""
    return _grey(images.float(), 1).to(torch.uint8)


def erase(images: Tensor, draws: Draws) -> None:
    """Replace the erased pixels in place, uint8 [B, C, S, S]."""
    if draws.erased:
        numbers = torch.tensor(draws.erased, device=images.device)
        chosen = images[numbers]
        where = draws.where.to(images.device)[:, None].expand_as(chosen)
        images[numbers] = chosen.masked_scatter_(where, draws.values.to(images.device))


def _largest(boxes: Iterable[list[int]]) -> list[int]:
    """The largest of each number of the boxes, rounded up to a multiple of 8, as tensor cores want matrices."""
    return [-(-max(column) // 8) * 8 for column in zip(*boxes, strict=True)]


def _cut(image: Tensor, box: Sequence[int]) -> Tensor:
    top, left, height, width = box
    return image[:, top : top + height, left : left + width]


def _grey(values: Tensor, dim: int) -> Tensor:
    """Three channels of whole numbers in float32 along `dim` -> one."""
    red, green, blue = values.split(1, dim)
    return ((red * _GREY[0] + green * _GREY[1] + blue * _GREY[2] + 32768) / 65536).floor_()


def _rounded(values: Tensor) -> Tensor:
    # Pillow rounds halves up.
    return values.add_(0.5).floor_().clamp_(0, 255)


def _weighted(pixels: Tensor, weights: Tensor) -> Tensor:
    """pixels @ weights, for pixels of whole numbers up to 255 [n, P, L] and weights [n, L, S].

    TF32, in which a GPU may multiply float32, keeps 11 bits of a number. The pixels need 8; the weights are multiplied
    in two parts, so that nothing is lost.
    """
    if pixels.dtype == torch.float16:
        return pixels @ weights.half()
    if pixels.device.type == "cpu":
        return pixels @ weights
    coarse = weights.half().float()
    return torch.baddbmm(pixels @ coarse, pixels, weights - coarse)


def _weights(
    box: Tensor, resized: Tensor, picked: Tensor, length: int, interpolation: str, device: torch.device
) -> Tensor:
    """The weights [n, S, length] by which each picked place of one axis sums its box (Pillow's Resample.c).

    `box` and `resized` [n] are lengths before and after resizing, `picked` [n, S] the places of the resized axis, or -1
    for black.
    """
    filter_ = _FILTERS[interpolation]
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


_FILTERS = {
    "nearest": _Filter(0.5, None),
    "box": _Filter(0.5, _box),
    "bilinear": _Filter(1.0, _triangle),
    "hamming": _Filter(1.0, _hamming),
    "bicubic": _Filter(2.0, _cubic),
    "lanczos": _Filter(3.0, _lanczos),
}

# Operations that give each value of a channel another one, by a table of 256 values.
_TABLES = ("table", "auto_contrast", "equalize", "contrast")


def _look_up(images: Tensor, tables: Tensor) -> Tensor:
    """images uint8 [n, 3, S, S], tables uint8 [n, 3, 256]."""
    return tables.gather(2, images.flatten(2).long()).view_as(images)


def _make_tables(images: Tensor, steps: Sequence[tuple[str, Step]]) -> Tensor:
    """The tables [n, 3, 256] of steps of the kinds in `_TABLES`, in their order."""
    parts, start = [], 0
    for kind in _TABLES:
        own = [step for name, step in steps if name == kind]
        chosen, start = images[start : start + len(own)], start + len(own)
        if own and kind == "table":
            given = np.frombuffer(b"".join(step.table for step in own), dtype=np.uint8).reshape(-1, 1, 256)
            parts.append(torch.tensor(given, device=images.device).expand(-1, 3, -1))
        elif own:
            factors = torch.tensor([step.values for step in own], device=images.device)
            parts.append(_FIND_TABLES[kind](chosen, factors).to(torch.uint8))
    return torch.cat(parts)


def _auto_contrast_tables(images: Tensor, _: Tensor) -> Tensor:
    """Pillow's `ImageOps.autocontrast`: the darkest value of a channel becomes 0 and the brightest 255."""
    values = torch.arange(256, device=images.device, dtype=torch.float64)
    flat = images.flatten(2)
    low, high = flat.amin(2, keepdim=True).double(), flat.amax(2, keepdim=True).double()
    scale = 255.0 / (high - low).clamp(min=1)
    stretched = (values * scale + -low * scale).trunc().clamp_(0, 255)
    return torch.where(high > low, stretched, values)


def _equalize_tables(images: Tensor, _: Tensor) -> Tensor:
    """Pillow's `ImageOps.equalize`: about as many pixels of a channel get each value."""
    flat = images.flatten(2).flatten(0, 1).long()  # [n * 3, S * S]
    rows = torch.arange(len(flat), device=images.device)[:, None]
    counts = (flat + 256 * rows).flatten().bincount(minlength=256 * len(flat)).view(-1, 256)
    last = counts.gather(1, flat.amax(1, keepdim=True))
    step = (counts.sum(1, keepdim=True) - last) // 255
    before = counts.cumsum(1) - counts
    table = ((step // 2 + before) // step.clamp(min=1)).clamp_(max=255)
    table = torch.where(step > 0, table, torch.arange(256, device=images.device))
    return table.view(*images.shape[:2], 256)


def _contrast_tables(images: Tensor, factors: Tensor) -> Tensor:
    """Pillow's `ImageEnhance.Contrast`: values move away from the mean grey of the image, or towards it."""
    grey = _grey(images.float(), 1).flatten(1)  # [n, S * S]
    mean = (grey.sum(1, keepdim=True, dtype=torch.float64) / grey.shape[1] + 0.5).floor().float()
    values = torch.arange(256, device=images.device, dtype=torch.float32)
    return _blend(mean, values, factors)[:, None].expand(-1, 3, -1)


_FIND_TABLES = {
    "auto_contrast": _auto_contrast_tables,
    "equalize": _equalize_tables,
    "contrast": _contrast_tables,
}


def _blend(first: Tensor, second: Tensor, factor: Tensor) -> Tensor:
    """Pillow's `Image.blend`, which rounds down: (1 - factor) * first + factor * second, of whole numbers."""
    return ((second - first) * factor + first).clamp_(0, 255).floor_()


def _factor(values: Tensor, images: Tensor) -> Tensor:
    return values[:, :1, None, None].to(images.device, torch.float32)


def _color(images: Tensor, values: Tensor, fill: Sequence[int]) -> Tensor:
    """Pillow's `ImageEnhance.Color`: 0 is grey, 1 the image."""
    pixels = images.float()
    return _blend(_grey(pixels, 1), pixels, _factor(values, images)).to(torch.uint8)


def _sharpness(images: Tensor, values: Tensor, fill: Sequence[int]) -> Tensor:
    """Pillow's `ImageEnhance.Sharpness`: 0 is smoothed by 3 x 3 pixels, 1 the image, 2 sharpened."""
    pixels = images.float()
    smooth = pixels.clone()
    if min(pixels.shape[2:]) > 2:
        three = pixels[..., :-2] + pixels[..., 1:-1] + pixels[..., 2:]
        nine = three[:, :, :-2] + three[:, :, 1:-1] + three[:, :, 2:]
        centre = pixels[:, :, 1:-1, 1:-1]
        smooth[:, :, 1:-1, 1:-1] = ((nine + (_SMOOTH_CENTRE - 1) * centre) / _SMOOTH_SUM + 0.5).floor_()
    return _blend(smooth, pixels, _factor(values, images)).to(torch.uint8)


def _blur(images: Tensor, values: Tensor, fill: Sequence[int]) -> Tensor:
    """Pillow's `ImageFilter.GaussianBlur`: three box blurs along rows and three along columns (BoxBlur.c)."""
    size = images.shape[-1]
    box = _box_radius(values)  # [n, 1]
    whole = box.floor()
    inner = (2.0**24 / (box * 2 + 1)).floor()
    outer = ((2.0**24 - (whole * 2 + 1) * inner) / 2).floor()
    away = torch.arange(size)
    line = torch.where(away <= whole, inner, torch.where(away == whole + 1, outer, 0.0)) / 2**24  # [n, S], by distance
    # Beyond the border stands the border's own pixel.
    beyond = line.flip(1).cumsum(1).flip(1).to(images.device, torch.float32)
    matrix = line.to(images.device, torch.float32)[:, (away[:, None] - away).abs().to(images.device)]  # [n, S, S]
    matrix[:, 0] = beyond
    matrix[:, -1] = beyond.flip(1)
    pixels = images.float()
    for _ in ("rows", "columns"):
        for _ in range(_BLUR_PASSES):
            pixels = _rounded(_weighted(pixels.flatten(1, 2), matrix)).view(pixels.shape)
        pixels = pixels.transpose(2, 3).contiguous()
    return pixels.to(torch.uint8)


def _box_radius(sigma: Tensor) -> Tensor:
    """The radius of the box blur that, three times over, is like a Gaussian one (Gwosdek et al. 2011)."""
    variance = sigma * sigma / _BLUR_PASSES
    whole = ((torch.sqrt(12 * variance + 1) - 1) / 2).floor()
    part = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance)
    return whole + part / (6 * (variance - (whole + 1) * (whole + 1)))


def _warp(cubic: bool, across: bool, down: bool) -> Callable[[Tensor, Tensor, Sequence[int]], Tensor]:
    """Pillow's `Image.transform` by an affine matrix, which moves pixels along rows (`across`), columns, or both."""

    def warp(images: Tensor, matrices: Tensor, fill: Sequence[int]) -> Tensor:
        size = images.shape[-1]
        middle = torch.arange(size, device=images.device, dtype=torch.float64) + 0.5
        a, b, c, d, e, f = matrices.to(images.device)[:, :, None, None].unbind(1)
        x = a * middle + b * middle[:, None] + c  # [n, S, S]
        y = d * middle + e * middle[:, None] + f
        inside = (x >= 0) & (x < size) & (y >= 0) & (y < size)
        x, y = x - 0.5, y - 0.5
        left, top = x.floor(), y.floor()
        right_of, below = (x - left).float()[:, None], (y - top).float()[:, None]
        left, top = left.long(), top.long()
        flat = images.flatten(2)

        def look(row: int, column: int) -> Tensor:
            places = (top + row).clamp_(0, size - 1) * size + (left + column).clamp_(0, size - 1)
            return flat.gather(2, places.flatten(1)[:, None].expand(-1, images.shape[1], -1)).view_as(images).float()

        between = _between_four if cubic else _between_two
        offsets = (-1, 0, 1, 2) if cubic else (0, 1)
        lines = [
            between([look(row, column) for column in offsets], right_of) if across else look(row, 0)
            for row in (offsets if down else (0,))
        ]
        pixels = (between(lines, below) if down else lines[0]).clamp_(0, 255).floor_()
        outside = torch.tensor(fill, device=images.device, dtype=torch.float32)[:, None, None]
        return torch.where(inside[:, None], pixels, outside).to(torch.uint8)

    return warp


def _between_two(values: Sequence[Tensor], part: Tensor) -> Tensor:
    return values[0] + (values[1] - values[0]) * part


def _between_four(values: Sequence[Tensor], part: Tensor) -> Tensor:
    """Pillow's cubic interpolation in warps, which is Keys' with a = -1."""
    one, two, three, four = values
    third = -one + two - three + four
    second = 2 * (one - two) + three - four
    return two + part * ((three - one) + part * (second + part * third))


_OPERATIONS: dict[str, Callable[[Tensor, Tensor, Sequence[int]], Tensor]] = {
    "color": _color,
    "sharpness": _sharpness,
    "blur": _blur,
    **{
        f"{name}{suffix}": _warp(name == "bicubic", across, down)
        for name in ("bilinear", "bicubic")
        for suffix, across, down in (("", True, True), ("_in_rows", True, False), ("_in_columns", False, True))
    },
}
