"""Crops and resizes images of any sizes in three kernels: the weights of the filters, rows, and then columns."""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from longseq.kernels.image_transforms.parameters import Geometries
from longseq.kernels.image_transforms.resizing import FILTERS
from longseq.kernels.triton_launch import launch_options, next_power_of_2

NAMES = tuple(FILTERS)  # a kernel knows a filter by its number
# Rows and columns of the block of a program.
ROWS, COLUMNS = 8, 64
# Numbers of an image: its address, the first of its rows between the passes, box (4), resized sizes (2), own sizes (2).
HEAD = tl.constexpr(10)


@triton.jit
def _filter(x, FILTER: tl.constexpr):
    """The weight of a pixel at the distance x, in pixels of the smaller of the two images."""
    away = tl.abs(x)
    weight = tl.where((x > -0.5) & (x <= 0.5), 1.0, 0.0).to(tl.float64)  # box
    if FILTER == 2:  # a triangle
        weight = tl.maximum(1.0 - away, 0.0)
    if FILTER == 4:  # Keys' cubic convolution (1981) with a = -1/2
        near = (1.5 * away - 2.5) * away * away + 1.0
        far = ((-0.5 * away + 2.5) * away - 4.0) * away + 2.0
        weight = tl.where(away < 1.0, near, tl.where(away < 2.0, far, 0.0))
    if FILTER == 3 or FILTER == 5:
        angle = tl.where(away == 0.0, 1.0, away) * 3.141592653589793
        peak = tl.where(away == 0.0, 1.0, tl.sin(angle) / angle)
        if FILTER == 3:
            weight = tl.where(away < 1.0, peak * (0.54 + 0.46 * tl.cos(angle)), 0.0)
            weight = tl.where(away == 0.0, 1.0, weight)
        else:
            third = angle / 3.0
            weight = tl.where(away < 3.0, peak * tl.where(away == 0.0, 1.0, tl.sin(third) / third), 0.0)
    return weight


@triton.jit(do_not_specialize=["S", "TAPS"])
def weigh(heads, centres, firsts, taps, weights, S, TAPS, SUPPORT, FILTER: tl.constexpr, BLOCK: tl.constexpr):
    """The first pixel and the weights of the pixels that each picked row (axis 0) or column (axis 1) sums.

    `centres` [n, 2, S] are places in the box, below 0 for black; `firsts` [n, 2, S], `taps` [n, 2], `weights`
    [n, 2, TAPS, S]. See Pillow's Resample.c.
    """
    image = tl.program_id(0).to(tl.int64)
    axis = tl.program_id(1)
    line = image * 2 + axis
    length = tl.load(heads + image * HEAD + 4 + axis)
    resized = tl.load(heads + image * HEAD + 6 + axis)
    scale = length.to(tl.float64) / resized.to(tl.float64)
    blur = tl.maximum(scale, 1.0)
    reach = blur * SUPPORT
    number = (2 * tl.ceil(reach) + 1).to(tl.int32)
    if FILTER == 0:
        number = 1
    tl.store(taps + line, number)
    for start in range(0, S, BLOCK):
        place = start + tl.arange(0, BLOCK)
        centre = tl.load(centres + line * S + place, mask=place < S, other=-1.0)
        if FILTER == 0:
            first = tl.floor(centre)
            end = first + 1.0
        else:
            first = tl.maximum(tl.floor(centre - reach + 0.5), 0.0)
            end = tl.minimum(tl.floor(centre + reach + 0.5), length.to(tl.float64))
        total = tl.zeros((BLOCK,), tl.float64)
        for tap in range(number):
            weight = tl.full((BLOCK,), 1.0, tl.float64)
            if FILTER != 0:
                weight = _filter((first + tap - centre + 0.5) / blur, FILTER)
            total += tl.where(first + tap < end, weight, 0.0)
        for tap in range(number):
            weight = tl.full((BLOCK,), 1.0, tl.float64)
            if FILTER != 0:
                weight = _filter((first + tap - centre + 0.5) / blur, FILTER)
            weight = tl.where((first + tap < end) & (centre >= 0.0), weight / tl.where(total == 0.0, 1.0, total), 0.0)
            tl.store(weights + (line * TAPS + tap) * S + place, weight.to(tl.float32), mask=place < S)
        tl.store(firsts + line * S + place, tl.maximum(first, 0.0).to(tl.int32), mask=place < S)


@triton.jit
def _rounded(x):
    # Pillow rounds halves up.
    return tl.minimum(tl.maximum(tl.floor(x + 0.5), 0.0), 255.0).to(tl.uint8)


@triton.jit(do_not_specialize=["S", "TAPS"])
def resize_across(heads, firsts, taps, weights, between, S, TAPS, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Resizes the rows of the boxes: `between` [all rows of all boxes, 3, S]."""
    image = tl.program_id(0).to(tl.int64)
    head = heads + image * HEAD
    height = tl.load(head + 4)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(1) * ROWS < height:
        own_width = tl.load(head + 9)
        plane = tl.load(head + 8) * own_width
        box = tl.load(head) + tl.load(head + 2) * own_width + tl.load(head + 3)
        pixels = box.to(tl.pointer_type(tl.uint8)) + (row.to(tl.int64) * own_width)[:, None]
        width = tl.load(head + 5).to(tl.int32)
        line = image * 2 + 1
        number = tl.load(taps + line)
        results = between + (tl.load(head + 1) + row.to(tl.int64))[:, None] * 3 * S
        in_box = (row < height)[:, None]
        for start in range(0, S, COLUMNS):
            place = start + tl.arange(0, COLUMNS)
            first = tl.load(firsts + line * S + place, mask=place < S, other=0)
            red = tl.zeros((ROWS, COLUMNS), tl.float32)
            green = tl.zeros((ROWS, COLUMNS), tl.float32)
            blue = tl.zeros((ROWS, COLUMNS), tl.float32)
            for tap in range(number):
                weight = tl.load(weights + (line * TAPS + tap) * S + place, mask=place < S, other=0.0)[None, :]
                at = pixels + tl.minimum(first + tap, width - 1)[None, :]
                red += tl.load(at, mask=in_box, other=0).to(tl.float32) * weight
                green += tl.load(at + plane, mask=in_box, other=0).to(tl.float32) * weight
                blue += tl.load(at + 2 * plane, mask=in_box, other=0).to(tl.float32) * weight
            mask = in_box & (place < S)[None, :]
            tl.store(results + place[None, :], _rounded(red), mask=mask)
            tl.store(results + S + place[None, :], _rounded(green), mask=mask)
            tl.store(results + 2 * S + place[None, :], _rounded(blue), mask=mask)


@triton.jit(do_not_specialize=["S", "TAPS"])
def resize_down(heads, firsts, taps, weights, between, result, S, TAPS, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Resizes the columns of `between`, and picks the rows of the result [n, 3, S, S]."""
    image = tl.program_id(0).to(tl.int64)
    height = tl.load(heads + image * HEAD + 4).to(tl.int32)
    start = between + tl.load(heads + image * HEAD + 1) * 3 * S
    line = image * 2
    number = tl.load(taps + line)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    first = tl.load(firsts + line * S + row, mask=row < S, other=0)
    # The rows of `between` have all three channels, beside each other.
    for begin in range(0, 3 * S, COLUMNS):
        place = begin + tl.arange(0, COLUMNS)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        mask = (row < S)[:, None] & (place < 3 * S)[None, :]
        for tap in range(number):
            weight = tl.load(weights + (line * TAPS + tap) * S + row, mask=row < S, other=0.0)[:, None]
            at = tl.minimum(first + tap, height - 1).to(tl.int64)[:, None] * 3 * S + place[None, :]
            total += tl.load(start + at, mask=mask, other=0).to(tl.float32) * weight
        channel = place // S
        at = ((image * 3 + channel)[None, :] * S + row[:, None]) * S + (place - channel * S)[None, :]
        tl.store(result + at, _rounded(total), mask=mask)


def image_resize_triton(
    images: Sequence[Tensor], geometries: Geometries, size: int, channels: int, interpolation: str, exact: bool
) -> Tensor:
    """`image_resize` of three channels, always in float32."""
    count, device = len(images), images[0].device
    images = [image.contiguous() for image in images]
    heights = geometries.box[:, 2].long()
    heads = torch.empty(count, HEAD.value, dtype=torch.int64)
    heads[:, 0] = torch.tensor([image.data_ptr() for image in images])
    heads[:, 1] = heights.cumsum(0) - heights
    heads[:, 2:6] = geometries.box
    heads[:, 6:8] = geometries.resized
    heads[:, 8:] = torch.tensor([image.shape[1:] for image in images])
    scales = geometries.box[:, 2:].double() / geometries.resized
    # Whether a pixel belongs to a box filter may hang on the last bit, so the kernel has no product that it could fuse.
    places = torch.stack([geometries.rows, geometries.columns], 1).to(device)
    centres = (places.double() + 0.5) * scales.to(device)[..., None]
    support = FILTERS[interpolation].support
    most = 2 * math.ceil(support * max(float(scales.max()), 1.0)) + 1
    firsts = torch.empty(count, 2, size, dtype=torch.int32, device=device)
    taps = torch.empty(count, 2, dtype=torch.int32, device=device)
    weights = torch.empty(count, 2, most, size, dtype=torch.float32, device=device)
    between = torch.empty(int(heights.sum()), 3, size, dtype=torch.uint8, device=device)
    result = torch.empty(count, 3, size, size, dtype=torch.uint8, device=device)
    found = heads.to(device), firsts, taps, weights
    block = min(next_power_of_2(size), 128)
    with torch.cuda.device_of(result):  # Triton launches on the current device
        weigh[(count, 2)](
            found[0], centres, firsts, taps, weights, size, most, support,
            FILTER=NAMES.index(interpolation), BLOCK=block, **launch_options(4),
        )  # fmt: skip
        resize_across[(count, triton.cdiv(int(heights.max()), ROWS))](
            *found, between, size, most, ROWS=ROWS, COLUMNS=COLUMNS, **launch_options(4)
        )
        resize_down[(count, triton.cdiv(size, ROWS))](
            *found, between, result, size, most, ROWS=ROWS, COLUMNS=COLUMNS, **launch_options(4)
        )
    return result
