"""The random parameters of a sample's transforms, drawn without its pixels: exactly those of `training_transform`.

The draws run timm's and torchvision's own code with stand-ins for the image. So the same seeds give the same crop,
flips, colour operations and erased pixels, whoever then applies them (see `longseq.tasks.image.batched`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from timm.data import auto_augment
from timm.data.transforms import RandomResizedCropAndInterpolation
from torchvision import transforms

from longseq.tasks.image.info import DataInfo
from longseq.tasks.image.transforms import (
    Augmentation,
    evaluation_transform,
    list_operations,
    posterize,
    training_steps,
)

Size = tuple[int, int]  # height, width

_OUTSIDE = -1  # a row or column of padding
_LONGEST = 2**15 - 1  # rows and columns are picked by numbers of 16 bits

# Operations that change each value of a pixel for itself: a table of 256 values holds them, made by the operation.
_RAMP = Image.frombytes("L", (256, 1), bytes(range(256)))
_TABLES = (
    *(auto_augment.invert, auto_augment.solarize, auto_augment.solarize_add, auto_augment.brightness),
    *(auto_augment.posterize, posterize),
)
_BY_FACTOR = {auto_augment.color: "color", auto_augment.contrast: "contrast", auto_augment.sharpness: "sharpness"}
_ALONE = (
    *(auto_augment.auto_contrast, auto_augment.equalize, auto_augment.desaturate),
    *(auto_augment.gaussian_blur, auto_augment.gaussian_blur_rand),
)
_SHEARS_AND_SHIFTS: dict[Any, Callable[[int, float], tuple[float, ...]]] = {
    auto_augment.shear_x: lambda size, factor: (1, factor, 0, 0, 1, 0),
    auto_augment.shear_y: lambda size, factor: (1, 0, 0, factor, 1, 0),
    auto_augment.translate_x_abs: lambda size, pixels: (1, 0, pixels, 0, 1, 0),
    auto_augment.translate_y_abs: lambda size, pixels: (1, 0, 0, 0, 1, pixels),
    auto_augment.translate_x_rel: lambda size, part: (1, 0, part * size, 0, 1, 0),
    auto_augment.translate_y_rel: lambda size, part: (1, 0, 0, 0, 1, part * size),
}


class Geometry(NamedTuple):
    """How an image becomes [S, S]: a box of it is resized, and rows and columns of the result are picked.

    `box` is (top, left, height, width) in the image. `rows` and `columns` [S] number those of the resized box, -1 a
    black one.
    """

    box: tuple[int, int, int, int]
    resized: Size
    rows: np.ndarray
    columns: np.ndarray


class Step(NamedTuple):
    """One colour operation or small warp: its kind, as in `longseq.tasks.image.batched`, and its numbers."""

    kind: str
    values: tuple[float, ...] = ()
    table: bytes = b""


class Erased(NamedTuple):
    """Where pixels are erased (bool [S, S]), and the values that replace them (uint8, in the order of channel, row,
    column)."""

    where: np.ndarray
    values: np.ndarray


class Draw(NamedTuple):
    """All parameters of one sample; `geometry` is None for an image that is cropped and resized already."""

    geometry: Geometry | None
    steps: list[Step]
    erased: Erased | None


class TrainingDraws:
    """Draws the parameters of `training_transform` from the generators that `seed_everything` seeds.

    ValueError for an augmentation that has no batched form.
    """

    def __init__(self, info: DataInfo, augmentation: Augmentation) -> None:
        if found := _find_other_cut(info):
            raise ValueError(f"{found} has no batched form")
        self.size = info.side
        self.channels = info.in_chans
        self.mode, self.geometry, colour, self.erasing = training_steps(info, augmentation)
        self.colour = [_ColourDraws(operation, info.side) for operation in colour]
        self.fill = _find_fill(colour)
        self.inner_channels = 1 if self.mode.mode == "L" else 3  # of the image between crop and erasing

    def __call__(self, size: Size) -> Draw:
        """The parameters for an image of (height, width)."""
        return Draw(self._geometry(size), *self._after_geometry())

    def takes(self, size: Size) -> bool:
        """True if an image of (height, width) has a geometry; none is for one that is too long after resizing."""
        first = self.geometry[0]
        return isinstance(first, RandomResizedCropAndInterpolation) or max(_resized(size, first)) <= _LONGEST

    def crop(self, image: Image.Image) -> tuple[Image.Image, Draw]:
        """The image after crop and flips, [S, S], and the parameters of the rest."""
        return transforms.Compose([self.mode, *self.geometry])(image), Draw(None, *self._after_geometry())

    def _after_geometry(self) -> tuple[list[Step], Erased | None]:
        steps = [step for operation in self.colour for step in operation()]
        drawn = None if self.erasing is None else self.erasing.draw((self.channels, self.size, self.size))
        if drawn is None:
            return steps, None
        where, values = drawn
        return steps, Erased(where.numpy(), values[:, where].numpy().reshape(-1))

    def _geometry(self, size: Size) -> Geometry:
        first = self.geometry[0]
        if isinstance(first, RandomResizedCropAndInterpolation):
            stand_in = torch.empty(1, *size, device="meta")
            box = first.get_params(stand_in, first.scale, first.ratio)
            found = Geometry(box, (self.size, self.size), np.arange(self.size), np.arange(self.size))
            flips = self.geometry[1:]
        else:
            found = self._cropped(size)
            flips = self.geometry[2:]
        for flip in flips:
            if torch.rand(1) < flip.p:
                if isinstance(flip, transforms.RandomHorizontalFlip):
                    found = found._replace(columns=found.columns[::-1])
                else:
                    found = found._replace(rows=found.rows[::-1])
        return found

    def _cropped(self, size: Size) -> Geometry:
        """The whole image, resized, and a square of it, at random or in the centre."""
        resize, cut = self.geometry[:2]
        resized = _resized(size, resize)
        if isinstance(cut, transforms.CenterCrop):
            return _centred(size, resized, self.size)
        padding = cut.padding or 0
        rows, columns = (_padded(length, padding, cut.padding_mode) for length in resized)
        top, left, _, _ = cut.get_params(torch.empty(1, len(rows), len(columns), device="meta"), cut.size)
        return Geometry((0, 0, *size), resized, rows[top : top + self.size], columns[left : left + self.size])


class EvaluationDraws:
    """The parameters of `evaluation_transform`. ValueError for another cut than that of a square in the centre."""

    def __init__(self, info: DataInfo) -> None:
        if found := _find_other_cut(info):
            raise ValueError(f"data.decode=gpu: {found} has no batched form; give data.decode=cpu")
        self.size = info.side
        self.mode, self.resize, self.cut, _ = evaluation_transform(info).transforms
        self.inner_channels = info.in_chans

    def __call__(self, size: Size) -> Draw:
        """The parameters for an image of (height, width)."""
        return Draw(_centred(size, _resized(size, self.resize), self.size), [], None)

    def takes(self, size: Size) -> bool:
        """True if an image of (height, width) has a geometry; none is for one that is too long after resizing."""
        return max(_resized(size, self.resize)) <= _LONGEST

    def crop(self, image: Image.Image) -> tuple[Image.Image, Draw]:
        """The image after resizing and cropping, [S, S], and the parameters of the rest: none."""
        return self.cut(self.resize(self.mode(image))), Draw(None, [], None)


class _ColourDraws:
    """One colour transform of timm or torchvision; a call draws its steps."""

    def __init__(self, operation: Any, size: int) -> None:
        self.operation, self.size = operation, size
        if isinstance(operation, (auto_augment.RandAugment, auto_augment.AutoAugment)):
            for one in list_operations(operation):
                _require_batched_form(one)
                one.aug_fn = _Note(one.aug_fn, size)  # type: ignore[assignment]
        elif not isinstance(operation, transforms.ColorJitter) or operation.hue is not None:
            raise ValueError(f"{type(operation).__name__} has no batched form")

    def __call__(self) -> list[Step]:
        if not isinstance(self.operation, transforms.ColorJitter):
            return self.operation([])
        jitter: Any = self.operation
        order, *factors, _ = jitter.get_params(jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)
        functions = (auto_augment.brightness, auto_augment.contrast, auto_augment.color)
        found = [(functions[number], factors[number]) for number in order.tolist() if number < len(functions)]
        steps = [_step(function, self.size, factor) for function, factor in found if factor is not None]
        return [step for step in steps if step is not None]


def _find_other_cut(info: DataInfo) -> str | None:
    """What asks for another cut than that of a square in the centre, None where nothing does."""
    if info.crop_mode != "center":
        return f"crop_mode={info.crop_mode}"
    height, width = info.sides
    return None if height == width else f"img_size={[height, width]}"


def _find_fill(colour: list[Any]) -> tuple[int, ...]:
    """The colour with which timm's warps fill the corners: the data's mean."""
    fills = [one.kwargs["fillcolor"] for operation in colour for one in list_operations(operation)]
    return fills[0] if fills else (0, 0, 0)


class _Note:
    """Takes the place of a function of an image: adds to a list what would have been done."""

    def __init__(self, function: Any, size: int) -> None:
        self.function, self.size = function, size

    def __call__(self, noted: list[Step], *arguments: Any, **options: Any) -> list[Step]:
        step = _step(self.function, self.size, *arguments, **options)
        return noted if step is None else [*noted, step]


def _step(function: Any, size: int, *values: Any, **options: Any) -> Step | None:
    """The step that does what `function(image, *values, **options)` does to an image [size, size]; None: nothing."""
    if function in _TABLES:
        return Step("table", table=function(_RAMP, *values, **options).tobytes())
    if function in _BY_FACTOR:
        return Step(_BY_FACTOR[function], (float(values[0]),))
    if function is auto_augment.auto_contrast:
        return Step("auto_contrast")
    if function is auto_augment.equalize:
        return Step("equalize")
    if function is auto_augment.desaturate:
        return Step("color", (min(1.0, max(0.0, 1.0 - values[0])),))
    if function is auto_augment.gaussian_blur:
        return Step("blur", (float(values[0]),)) if values[0] else None
    if function is auto_augment.gaussian_blur_rand:
        return Step("blur", (random.uniform(0.1, 2.0 * values[0]),))
    resample: Any = options["resample"]
    if isinstance(resample, (list, tuple)):
        resample = random.choice(resample)
    if function is auto_augment.rotate:
        if values[0] % 360 == 0:
            return None
        return Step(resample.name.lower(), _rotation(values[0], size))
    matrix = _SHEARS_AND_SHIFTS[function](size, values[0])
    moves = "in_rows" if matrix[3:] == (0, 1, 0) else "in_columns"
    return Step(f"{resample.name.lower()}_{moves}", tuple(float(value) for value in matrix))


def _require_batched_form(operation: auto_augment.AugmentOp) -> None:
    """Raise ValueError for an operation of timm that `_step` does not know."""
    function, resample = operation.aug_fn, operation.kwargs["resample"]
    if function in _SHEARS_AND_SHIFTS or function is auto_augment.rotate:
        for one in resample if isinstance(resample, (list, tuple)) else [resample]:
            if one not in (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC):
                raise ValueError(f"{operation.name} with data.interpolation={one.name.lower()} has no batched form")
    elif function not in (*_TABLES, *_BY_FACTOR, *_ALONE):
        raise ValueError(f"{operation.name} has no batched form")


def _rotation(degrees: float, size: int) -> tuple[float, ...]:
    """The matrix of Pillow's `Image.rotate`, from pixels of the result to those of the image."""
    angle = -math.radians(degrees % 360.0)
    cosine, sine, centre = round(math.cos(angle), 15), round(math.sin(angle), 15), size / 2
    left = cosine * -centre + sine * -centre + centre
    top = round(-math.sin(angle), 15) * -centre + cosine * -centre + centre
    return (cosine, sine, left, round(-math.sin(angle), 15), cosine, top)


def _resized(size: Size, resize: transforms.Resize) -> Size:
    """The size after torchvision's resizing of the short side."""
    height, width = size
    short = resize.size if isinstance(resize.size, int) else resize.size[0]
    if height >= width:
        return int(short * height / width), short
    return short, int(short * width / height)


def _centred(size: Size, resized: Size, length: int) -> Geometry:
    """The centre [length, length] of the resized image, with black around an image that is smaller."""
    rows, columns = (_centre(side, length) for side in resized)
    return Geometry((0, 0, *size), resized, rows, columns)


def _centre(side: int, length: int) -> np.ndarray:
    before = (length - side) // 2 if length > side else 0
    start = round(max(side - length, 0) / 2) - before
    found = np.arange(start, start + length)
    return np.where((found >= 0) & (found < side), found, _OUTSIDE)


def _padded(length: int, padding: int, mode: str) -> np.ndarray:
    """The row of the image for each row of the padded image."""
    if mode == "constant":
        return np.pad(np.arange(length), padding, constant_values=_OUTSIDE)
    return np.pad(np.arange(length), padding, mode=mode)  # type: ignore[call-overload]
