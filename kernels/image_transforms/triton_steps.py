"""Colour operations and small warps of a batch of images: a step of every image at once, whatever its kind."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from longseq.kernels.image_transforms.colour import blur
from longseq.kernels.image_transforms.parameters import KINDS, NUMBERS, ImageSteps
from longseq.kernels.triton_launch import launch_options

PIXELS = 1024  # of a program

TABLE = tl.constexpr(KINDS.index("table"))
AUTO_CONTRAST = tl.constexpr(KINDS.index("auto_contrast"))
EQUALIZE = tl.constexpr(KINDS.index("equalize"))
CONTRAST = tl.constexpr(KINDS.index("contrast"))
COLOR = tl.constexpr(KINDS.index("color"))
SHARPNESS = tl.constexpr(KINDS.index("sharpness"))
BILINEAR = tl.constexpr(KINDS.index("bilinear"))  # those behind it are warps
BICUBIC = tl.constexpr(KINDS.index("bicubic"))  # those behind it are bicubic
STEP_NUMBERS = tl.constexpr(NUMBERS)


@triton.jit
def _grey(red, green, blue):
    """Pillow's conversion to grey, in 65,536ths (ITU-R 601-2)."""
    return (red * 19595 + green * 38470 + blue * 7471 + 32768) >> 16


@triton.jit
def _blend(first, second, factor):
    """Pillow's `Image.blend`, which rounds down: (1 - factor) * first + factor * second."""
    mixed = (second - first).to(tl.float32) * factor + first.to(tl.float32)
    return tl.floor(tl.minimum(tl.maximum(mixed, 0.0), 255.0)).to(tl.uint8)


@triton.jit
def _load(at, mask):
    return tl.load(at, mask=mask, other=0).to(tl.int32)


@triton.jit(do_not_specialize=["plane"])
def count_values(images, kinds, counts, plane, PIXELS: tl.constexpr):
    """How many pixels have each value: `counts` [B, 4, 256], of three channels and of grey, where a table needs it."""
    image = tl.program_id(0).to(tl.int64)
    kind = tl.load(kinds + image)
    if (kind == AUTO_CONTRAST) | (kind == EQUALIZE) | (kind == CONTRAST):
        pixel = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
        mask = pixel < plane
        at = images + image * 3 * plane + pixel
        red, green, blue = _load(at, mask), _load(at + plane, mask), _load(at + 2 * plane, mask)
        values = tl.arange(0, 256)
        # Pixels behind the last one count as 0.
        behind = tl.where(values == 0, tl.sum((pixel >= plane).to(tl.int32), 0), 0)
        places = counts + image * 1024 + values
        if kind == CONTRAST:
            # The grey of a pixel behind the last one is 0 as well.
            tl.atomic_add(places + 768, tl.histogram(_grey(red, green, blue), 256) - behind)
        else:
            tl.atomic_add(places, tl.histogram(red, 256) - behind)
            tl.atomic_add(places + 256, tl.histogram(green, 256) - behind)
            tl.atomic_add(places + 512, tl.histogram(blue, 256) - behind)


@triton.jit(do_not_specialize=["plane"])
def make_tables(kinds, values, given, counts, tables, plane):
    """The tables [B, 3, 256] of one step, from counts of values."""
    image = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1)
    kind = tl.load(kinds + image)
    value = tl.arange(0, 256)
    table = value
    if kind == TABLE:
        table = tl.load(given + image * 256 + value).to(tl.int32)
    elif kind == CONTRAST:
        # Values move away from the mean grey of the image, or towards it.
        count = tl.load(counts + (image * 4 + 3) * 256 + value)
        total = tl.sum(count.to(tl.int64) * value, 0)
        mean = ((2 * total + plane) // (2 * plane)).to(tl.int32)  # rounded, halves up
        factor = tl.load(values + image * STEP_NUMBERS).to(tl.float32)
        table = _blend(mean, value, factor).to(tl.int32)
    elif (kind == AUTO_CONTRAST) | (kind == EQUALIZE):
        count = tl.load(counts + (image * 4 + channel) * 256 + value)
        low = tl.min(tl.where(count > 0, value, 255), 0)
        high = tl.max(tl.where(count > 0, value, 0), 0)
        if kind == AUTO_CONTRAST:
            # The darkest value of a channel becomes 0, and the brightest 255.
            scale = 255.0 / tl.maximum(high - low, 1).to(tl.float64)
            stretched = value.to(tl.float64) * scale - low.to(tl.float64) * scale
            stretched = tl.minimum(tl.maximum(stretched, 0.0), 255.0).to(tl.int32)
            table = tl.where(high > low, stretched, value)
        else:
            # About as many pixels get each value.
            last = tl.sum(tl.where(value == high, count, 0), 0)
            step = (plane - last) // 255
            before = tl.cumsum(count, 0) - count
            table = tl.where(step > 0, tl.minimum((step // 2 + before) // tl.maximum(step, 1), 255), value)
    tl.store(tables + (image * 3 + channel) * 256 + value, table.to(tl.uint8))


@triton.jit
def _look(channel, x, y, S):
    """Pixels as float32; those beyond the border are the border's own."""
    x = tl.minimum(tl.maximum(x, 0), S - 1)
    y = tl.minimum(tl.maximum(y, 0), S - 1)
    return tl.load(channel + y * S + x).to(tl.float32)


@triton.jit
def _between(one, two, three, four, part):
    """Pillow's cubic interpolation in warps, which is Keys' with a = -1."""
    third = -one + two - three + four
    second = 2.0 * (one - two) + three - four
    return two + part * ((three - one) + part * (second + part * third))


@triton.jit
def _cubic_row(channel, x, y, part, S):
    return _between(
        _look(channel, x - 1, y, S), _look(channel, x, y, S),
        _look(channel, x + 1, y, S), _look(channel, x + 2, y, S), part,
    )  # fmt: skip


@triton.jit
def _linear_row(channel, x, y, part, S):
    left = _look(channel, x, y, S)
    return left + (_look(channel, x + 1, y, S) - left) * part


@triton.jit
def _smooth(channel, x, y, mask, S):
    """Pillow's filter SMOOTH: the centre has the weight 5, its eight neighbours 1; the border stays."""
    total = 4 * tl.load(channel + y * S + x, mask=mask, other=0).to(tl.int32)
    is_inner = mask & (x > 0) & (x < S - 1) & (y > 0) & (y < S - 1)
    for number in tl.static_range(9):
        at = channel + (y + number // 3 - 1) * S + x + number % 3 - 1
        total += tl.load(at, mask=is_inner, other=0).to(tl.int32)
    return tl.where(is_inner, (2 * total + 13) // 26, total // 4)


@triton.jit(do_not_specialize=["S", "red_fill", "green_fill", "blue_fill"])
def apply_step(
    images, kinds, values, tables, results, S, red_fill, green_fill, blue_fill, PIXELS: tl.constexpr
):  # fmt: skip
    """One step of each image: `images` [B, 3, S, S] -> `results`."""
    image = tl.program_id(0).to(tl.int64)
    kind = tl.load(kinds + image)
    plane = S * S
    pixel = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    mask = pixel < plane
    images += image * 3 * plane
    results += image * 3 * plane + pixel
    values += image * STEP_NUMBERS
    y = pixel // S
    x = pixel - y * S
    if kind >= BILINEAR:
        column = x.to(tl.float64) + 0.5
        row = y.to(tl.float64) + 0.5
        from_x = tl.load(values) * column + tl.load(values + 1) * row + tl.load(values + 2)
        from_y = tl.load(values + 3) * column + tl.load(values + 4) * row + tl.load(values + 5)
        size = S.to(tl.float64)
        is_inside = mask & (from_x >= 0.0) & (from_x < size) & (from_y >= 0.0) & (from_y < size)
        from_x = tl.where(is_inside, from_x, 0.5) - 0.5
        from_y = tl.where(is_inside, from_y, 0.5) - 0.5
        left, top = tl.floor(from_x), tl.floor(from_y)
        right_of, below = (from_x - left).to(tl.float32), (from_y - top).to(tl.float32)
        x, y = left.to(tl.int32), top.to(tl.int32)
        for channel in tl.static_range(3):
            at = images + channel * plane
            if kind >= BICUBIC:
                found = _between(
                    _cubic_row(at, x, y - 1, right_of, S), _cubic_row(at, x, y, right_of, S),
                    _cubic_row(at, x, y + 1, right_of, S), _cubic_row(at, x, y + 2, right_of, S), below,
                )  # fmt: skip
            else:
                upper = _linear_row(at, x, y, right_of, S)
                found = upper + (_linear_row(at, x, y + 1, right_of, S) - upper) * below
            found = tl.floor(tl.minimum(tl.maximum(found, 0.0), 255.0))
            fill = red_fill
            if channel == 1:
                fill = green_fill
            if channel == 2:
                fill = blue_fill
            tl.store(results + channel * plane, tl.where(is_inside, found, fill).to(tl.uint8), mask=mask)
    elif kind == SHARPNESS:
        factor = tl.load(values).to(tl.float32)
        for channel in tl.static_range(3):
            at = images + channel * plane
            sharpened = _blend(_smooth(at, x, y, mask, S), _load(at + pixel, mask), factor)
            tl.store(results + channel * plane, sharpened, mask=mask)
    else:
        red, green = _load(images + pixel, mask), _load(images + plane + pixel, mask)
        blue = _load(images + 2 * plane + pixel, mask)
        new_red, new_green, new_blue = red.to(tl.uint8), green.to(tl.uint8), blue.to(tl.uint8)
        if kind == COLOR:
            factor = tl.load(values).to(tl.float32)
            grey = _grey(red, green, blue)
            new_red, new_green = _blend(grey, red, factor), _blend(grey, green, factor)
            new_blue = _blend(grey, blue, factor)
        elif (kind == TABLE) | (kind == AUTO_CONTRAST) | (kind == EQUALIZE) | (kind == CONTRAST):
            tables += image * 768
            new_red, new_green = tl.load(tables + red), tl.load(tables + 256 + green)
            new_blue = tl.load(tables + 512 + blue)
        tl.store(results, new_red, mask=mask)
        tl.store(results + plane, new_green, mask=mask)
        tl.store(results + 2 * plane, new_blue, mask=mask)


def image_steps_triton(images: Tensor, steps: ImageSteps, fill: Sequence[float]) -> Tensor:
    """`image_steps` in four kernels for each step; torch blurs."""
    turns, count = steps.kinds.shape
    if not turns or not count:
        return images
    size, device = images.shape[-1], images.device
    plane = size * size
    on_device = (part.to(device) for part in steps)
    images = images.contiguous()
    pieces, options = triton.cdiv(plane, PIXELS), launch_options(4, fused=False)
    with torch.cuda.device_of(images):  # Triton launches on the current device
        for host_kinds, host_values, kinds, values, given in zip(*steps[:2], *on_device, strict=True):
            counts = torch.zeros(count, 4, 256, dtype=torch.int32, device=device)
            tables = torch.empty(count, 3, 256, dtype=torch.uint8, device=device)
            results = torch.empty_like(images)
            count_values[(count, pieces)](images, kinds, counts, plane, PIXELS=PIXELS, **options)
            make_tables[(count, 3)](kinds, values, given, counts, tables, plane, **options)
            apply_step[(count, pieces)](
                images, kinds, values, tables, results, size, *map(float, fill), PIXELS=PIXELS, **options
            )
            blurred = (host_kinds == KINDS.index("blur")).nonzero()[:, 0]
            if len(blurred):
                numbers = blurred.to(device)
                results[numbers] = blur(images[numbers], host_values[blurred], fill)
            images = results
    return images
