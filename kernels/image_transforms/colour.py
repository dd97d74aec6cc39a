"""Colour operations and small warps of a batch of images, by torch: those of each image, kind by kind.

The numbers are Pillow's enhancements and warps, rounded to 8 bits after each operation as Pillow does it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from longseq.kernels.image_transforms.arithmetic import grey_of, rounded, weighted
from longseq.kernels.image_transforms.parameters import KINDS, ImageSteps

_SMOOTH_CENTRE, _SMOOTH_SUM = 5, 13  # of Pillow's filter SMOOTH, whose other eight weights are 1
_BLUR_PASSES = 3  # box blurs that Pillow takes for a Gaussian one


def image_steps_torch(images: Tensor, steps: ImageSteps, fill: Sequence[float]) -> Tensor:
    """`image_steps` in place: the first steps of all images together, kind by kind, then the second ones, and so on."""
    for kinds, values, tables in zip(*steps, strict=True):
        members = {name: (kinds == code).nonzero()[:, 0] for code, name in enumerate(KINDS)}
        found = [(name, members[name]) for name in _TABLES if len(members[name])]
        if found:
            numbers = torch.cat([of_kind for _, of_kind in found]).to(images.device)
            made = [_make_tables(name, images[of.to(images.device)], values[of], tables[of]) for name, of in found]
            images[numbers] = _look_up(images[numbers], torch.cat(made))
        for name, operation in _OPERATIONS.items():
            if len(members[name]):
                numbers = members[name].to(images.device)
                images[numbers] = operation(images[numbers], values[members[name]], fill)
    return images


# Operations that give each value of a channel another one, by a table of 256 values.
_TABLES = ("table", "auto_contrast", "equalize", "contrast")


def _look_up(images: Tensor, tables: Tensor) -> Tensor:
    """images uint8 [n, 3, S, S], tables uint8 [n, 3, 256]."""
    return tables.gather(2, images.flatten(2).long()).view_as(images)


def _make_tables(kind: str, images: Tensor, values: Tensor, tables: Tensor) -> Tensor:
    """The tables uint8 [n, 3, 256] of n images and their steps of one kind of `_TABLES`."""
    if kind == "table":
        return tables.to(images.device)[:, None].expand(-1, 3, -1)
    return _FIND_TABLES[kind](images, values[:, :1].to(images.device, torch.float32)).to(torch.uint8)


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
    grey = grey_of(images.float(), 1).flatten(1)  # [n, S * S]
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


def _color(images: Tensor, values: Tensor, fill: Sequence[float]) -> Tensor:
    """Pillow's `ImageEnhance.Color`: 0 is grey, 1 the image."""
    pixels = images.float()
    return _blend(grey_of(pixels, 1), pixels, _factor(values, images)).to(torch.uint8)


def _sharpness(images: Tensor, values: Tensor, fill: Sequence[float]) -> Tensor:
    """Pillow's `ImageEnhance.Sharpness`: 0 is smoothed by 3 x 3 pixels, 1 the image, 2 sharpened."""
    pixels = images.float()
    smooth = pixels.clone()
    if min(pixels.shape[2:]) > 2:
        three = pixels[..., :-2] + pixels[..., 1:-1] + pixels[..., 2:]
        nine = three[:, :, :-2] + three[:, :, 1:-1] + three[:, :, 2:]
        centre = pixels[:, :, 1:-1, 1:-1]
        smooth[:, :, 1:-1, 1:-1] = ((nine + (_SMOOTH_CENTRE - 1) * centre) / _SMOOTH_SUM + 0.5).floor_()
    return _blend(smooth, pixels, _factor(values, images)).to(torch.uint8)


def blur(images: Tensor, values: Tensor, fill: Sequence[float]) -> Tensor:
    """Pillow's `ImageFilter.GaussianBlur`: three box blurs along rows and three along columns (BoxBlur.c)."""
    size = images.shape[-1]
    box = _box_radius(values[:, :1])  # [n, 1]
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
            pixels = rounded(weighted(pixels.flatten(1, 2), matrix)).view(pixels.shape)
        pixels = pixels.transpose(2, 3).contiguous()
    return pixels.to(torch.uint8)


def _box_radius(sigma: Tensor) -> Tensor:
    """The radius of the box blur that, three times over, is like a Gaussian one (Gwosdek et al. 2011)."""
    variance = sigma * sigma / _BLUR_PASSES
    whole = ((torch.sqrt(12 * variance + 1) - 1) / 2).floor()
    part = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance)
    return whole + part / (6 * (variance - (whole + 1) * (whole + 1)))


def _warp(cubic: bool, across: bool, down: bool) -> Callable[[Tensor, Tensor, Sequence[float]], Tensor]:
    """Pillow's `Image.transform` by an affine matrix, which moves pixels along rows (`across`), columns, or both."""

    def warp(images: Tensor, matrices: Tensor, fill: Sequence[float]) -> Tensor:
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


_OPERATIONS: dict[str, Callable[[Tensor, Tensor, Sequence[float]], Tensor]] = {
    "color": _color,
    "sharpness": _sharpness,
    "blur": blur,
    **{
        f"{name}{suffix}": _warp(name == "bicubic", across, down)
        for name in ("bilinear", "bicubic")
        for suffix, across, down in (("", True, True), ("_in_rows", True, False), ("_in_columns", False, True))
    },
}
