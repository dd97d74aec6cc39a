"""Training images for a device to decode and augment: workers read the files and draw the parameters.

The draws run timm's and torchvision's own code on stand-ins for the image. So a seed gives the crop, flips, colour
operations and erased pixels of `training_transform`, whoever applies them.
"""

from __future__ import annotations

import io
import math
import random
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from PIL import Image
from timm.data import auto_augment
from timm.data.transforms import RandomResizedCropAndInterpolation
from torch import Tensor
from torchvision import transforms

from longseq.tasks.data.labels import LabelError
from longseq.tasks.data.loader import UNREADABLE, Batch, Failure
from longseq.tasks.data.sampler import SampleIndex
from longseq.tasks.image.config import Augmentation
from longseq.tasks.image.datasets import TrainingBatches, as_targets, read_or_failure
from longseq.tasks.image.decoding import decode, find_jpeg_size, first_line
from longseq.tasks.image.info import DataInfo
from longseq.tasks.image.sources import Split
from longseq.tasks.image.transforms import list_operations, training_steps

# The operations of `longseq.tasks.image.device`; an affine one covers rotation, shear and translation.
KINDS = (
    *("none", "affine", "brightness", "contrast", "color", "sharpness", "posterize", "solarize", "solarize_add"),
    *("auto_contrast", "equalize", "gaussian_blur"),
)
NUMBERS = 6  # of an operation: an affine map has as many


class Geometry(NamedTuple):
    """How an image becomes [S, S]: its `box` (top, left, height, width) is resized to `resized` (height, width), of
    which a square is cut out that begins at `corner` (top, left), maybe outside; then it is mirrored.
    """

    box: tuple[int, int, int, int]
    resized: tuple[int, int]
    corner: tuple[int, int] = (0, 0)
    flips: tuple[bool, bool] = (False, False)  # of the rows, and of the columns


Step = tuple[str, tuple[float, ...]]


class Draw(NamedTuple):
    """The parameters of one image; `erased` is as of `PixelErasing.draw`."""

    geometry: Geometry
    steps: list[Step]
    erased: tuple[Tensor, Tensor] | None


class TrainingDraws:
    """Draws the parameters of `training_transform` from the generators that `seed_everything` seeds.

    ValueError for an augmentation that has no batched form, such as AugMix.
    """

    def __init__(self, info: DataInfo, augmentation: Augmentation) -> None:
        self.size, self.channels = info.side, info.in_chans
        _, self.geometry, self.colour, self.erasing = training_steps(info, augmentation)
        for transform in self.colour:
            if isinstance(transform, (auto_augment.RandAugment, auto_augment.AutoAugment)):
                for operation in list_operations(transform):
                    operation.aug_fn = partial(note, operation.aug_fn.__name__, info.side)  # type: ignore[assignment]
            elif not isinstance(transform, transforms.ColorJitter):
                raise ValueError(f"{type(transform).__name__} needs data.decode=cpu")

    def __call__(self, size: tuple[int, int]) -> Draw:
        """The parameters for an image of (height, width)."""
        geometry = self._geometry(size)
        steps: list[Step] = []
        for transform in self.colour:
            steps = _jitter(transform, steps) if isinstance(transform, transforms.ColorJitter) else transform(steps)
        erased = None if self.erasing is None else self.erasing.draw((self.channels, self.size, self.size))
        return Draw(geometry, steps, erased)

    def _geometry(self, size: tuple[int, int]) -> Geometry:
        first, *flips = self.geometry
        if isinstance(first, RandomResizedCropAndInterpolation):
            stand_in = torch.empty(1, *size, device="meta")
            found = Geometry(first.get_params(stand_in, first.scale, first.ratio), (self.size, self.size))
        else:
            cut, *flips = flips
            height, width = _resized(size, first)
            if isinstance(cut, transforms.RandomCrop):
                padding: Any = cut.padding or 0
                stand_in = torch.empty(1, height + 2 * padding, width + 2 * padding, device="meta")
                top, left = (number - padding for number in cut.get_params(stand_in, cut.size)[:2])
            else:
                top, left = (_centre(side, self.size) for side in (height, width))
            found = Geometry((0, 0, *size), (height, width), (top, left))
        mirrored = {type(flip): bool(torch.rand(1) < flip.p) for flip in flips}
        rows, columns = mirrored.get(transforms.RandomVerticalFlip), mirrored.get(transforms.RandomHorizontalFlip)
        return found._replace(flips=(bool(rows), bool(columns)))


def _resized(size: tuple[int, int], resize: transforms.Resize) -> tuple[int, int]:
    """The (height, width) after torchvision's resizing of the short side."""
    height, width = size
    short = resize.size if isinstance(resize.size, int) else resize.size[0]
    if height >= width:
        return int(short * height / width), short
    return short, int(short * width / height)


def _centre(side: int, size: int) -> int:
    """Where torchvision's centre of `size` pixels begins."""
    return round((side - size) / 2) if side > size else -((size - side) // 2)


def _jitter(jitter: Any, steps: list[Step]) -> list[Step]:
    order, *factors, _ = jitter.get_params(jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)
    names = ("brightness", "contrast", "color")
    chosen = [number for number in order.tolist() if number < len(names) and factors[number] is not None]
    return [*steps, *((names[number], (float(factors[number]),)) for number in chosen)]


def note(name: str, size: int, steps: list[Step], *values: Any, **options: Any) -> list[Step]:
    """Takes the place of timm's function `name` of an image [size, size]: adds to the steps what it would do."""
    amount = float(values[0]) if values else 0.0
    if name == "invert":
        return [*steps, ("solarize", (0.0,))]
    if name == "desaturate":
        return [*steps, ("color", (min(1.0, max(0.0, 1.0 - amount)),))]
    if name == "gaussian_blur_rand":
        return [*steps, ("gaussian_blur", (random.uniform(0.1, 2.0 * amount),))]
    if name in KINDS:
        return [*steps, (name, (amount,))]
    if isinstance(options["resample"], list | tuple):
        random.choice(options["resample"])  # as timm, whose later draws depend on it; here all are bilinear
    return [*steps, ("affine", _affine(name, size, amount))]


def _affine(name: str, size: int, amount: float) -> tuple[float, ...]:
    """Pillow's (a, b, c, d, e, f): the pixel (x, y) of the result is (ax + by + c, dx + ey + f) of the image."""
    if name == "rotate":
        cosine, sine, centre = math.cos(math.radians(amount)), -math.sin(math.radians(amount)), size / 2
        return cosine, sine, centre * (1 - cosine - sine), -sine, cosine, centre * (1 - cosine + sine)
    shift = amount * size if name.endswith("rel") else amount
    maps = {
        "shear_x": (1.0, amount, 0.0, 0.0, 1.0, 0.0),
        "shear_y": (1.0, 0.0, 0.0, amount, 1.0, 0.0),
        "translate_x": (1.0, 0.0, shift, 0.0, 1.0, 0.0),
        "translate_y": (1.0, 0.0, 0.0, 0.0, 1.0, shift),
    }
    return maps[name.removesuffix("_rel").removesuffix("_abs")]


class EncodedFile(NamedTuple):
    """The bytes of a JPEG file that a device decodes, or of the RGB pixels [H, W, 3] of another image."""

    data: bytes
    size: tuple[int, int]  # height, width
    is_jpeg: bool


class EncodedImages(NamedTuple):
    """A batch before decoding: each file once, whatever the number of its repeats.

    `data` uint8 [N]: the files, one after the other. `files` int64 [F, 5]: start, end, height, width, is_jpeg.
    `samples` int64 [B, 14]: file, box (4), resized (2), corner (2), flips (2), and the `SampleIndex` (3).
    `kinds` int64 [n, B] and `numbers` float32 [n, B, 6]: the n-th operation of each image, by its place in `KINDS`.
    `erased` bool [B], `where` bool [K, S, S] and `values` uint8 [M]: which images have erased pixels, which of their
    pixels these are, and what replaces them, in the order of image, channel, row, column.
    """

    data: Tensor
    files: Tensor
    samples: Tensor
    kinds: Tensor
    numbers: Tensor
    erased: Tensor
    where: Tensor
    values: Tensor


def read_encoded(split: Split, position: int) -> tuple[EncodedFile, Any] | Failure:
    """The file at a position of a split and its class, or why it cannot be read."""
    index = int(split.indices[position])
    read_file = getattr(split.source, "read_file", None)
    if read_file is None:
        found = read_or_failure(split, position)
        return found if isinstance(found, Failure) else (_as_pixels(found[0]), found[1])
    try:
        data, target = read_file(index)
        size = find_jpeg_size(data)
        return (_as_pixels(decode(io.BytesIO(data))) if size is None else EncodedFile(data, size, True)), target
    except LabelError as error:
        return Failure(split.source.path(index), str(error), stops=True)
    except UNREADABLE as error:
        return Failure(split.source.path(index), first_line(error))


def _as_pixels(image: Image.Image) -> EncodedFile:
    return EncodedFile(image.convert("RGB").tobytes(), (image.height, image.width), False)


class EncodedTrainingBatches(TrainingBatches):
    """`TrainingBatches` that a `longseq.tasks.image.device.DeviceTransform` finishes: inputs are `EncodedImages`."""

    def __init__(self, split: Split, draws: TrainingDraws, seed: int) -> None:
        super().__init__(split, draws, seed)
        self.size = draws.size
        self.read = read_encoded

    def __getitem__(self, indices: list[SampleIndex]) -> Batch:
        failures: list[Failure] = []
        files: list[EncodedFile] = []
        drawn: list[tuple[int, Draw, Any]] = []
        with isolate_rng(include_cuda=False):
            for file, target in self.samples(indices, failures):
                if not files or file is not files[-1]:  # repeats of a file are neighbours
                    files.append(file)
                drawn.append((len(files) - 1, self.transform(file.size), target))
        return Batch(_pack(files, drawn, indices, self.size), as_targets([one[2] for one in drawn]), failures)


def _pack(
    files: list[EncodedFile], drawn: list[tuple[int, Draw, Any]], indices: list[SampleIndex], size: int
) -> EncodedImages:
    ends = np.cumsum([len(file.data) for file in files]).tolist()
    rows = [(end - len(file.data), end, *file.size, file.is_jpeg) for file, end in zip(files, ends, strict=True)]
    samples = [
        (file, *(number for part in draw.geometry for number in part), *index)
        for (file, draw, _), index in zip(drawn, indices, strict=True)
    ]
    most = max(len(draw.steps) for _, draw, _ in drawn)
    kinds, numbers = torch.zeros(most, len(drawn), dtype=torch.long), torch.zeros(most, len(drawn), NUMBERS)
    for row, (_, draw, _) in enumerate(drawn):
        for turn, (kind, values) in enumerate(draw.steps):
            kinds[turn, row] = KINDS.index(kind)
            numbers[turn, row, : len(values)] = torch.tensor(values)
    erased = [draw.erased for _, draw, _ in drawn if draw.erased is not None]
    return EncodedImages(
        data=torch.from_numpy(np.frombuffer(bytearray().join(file.data for file in files), dtype=np.uint8)),
        files=torch.tensor(rows, dtype=torch.long),
        samples=torch.tensor(samples, dtype=torch.long),
        kinds=kinds,
        numbers=numbers,
        erased=torch.tensor([draw.erased is not None for _, draw, _ in drawn]),
        where=torch.stack([where for where, _ in erased]) if erased else torch.zeros(0, size, size, dtype=torch.bool),
        values=torch.cat([values[:, where].flatten() for where, values in erased] or [torch.zeros(0)]).byte(),
    )
