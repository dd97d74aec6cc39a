"""Decoding and augmentation of training images on a device: nvJPEG, then plain torch on whole batches.

Data workers read the files and draw the parameters. The draws run timm's and torchvision's own code on stand-ins for
the image: a seed gives the crop, flips, colour operations and erased pixels of `training_transform`.
"""

import io
import math
import random
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from PIL import Image
from timm.data import auto_augment
from timm.data.transforms import RandomResizedCropAndInterpolation
from torch import Tensor
from torch.nn import functional
from torchvision import transforms
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms.functional import pil_to_tensor, rgb_to_grayscale
from torchvision.transforms.v2.functional import equalize

from longseq.tasks.data.loader import UNREADABLE, Batch, Failure
from longseq.tasks.data.sampler import SampleIndex, derive_seed
from longseq.tasks.image.config import Augmentation, DataInfo
from longseq.tasks.image.datasets import REPLACEMENTS, TrainingBatches, as_targets, read_or_failure
from longseq.tasks.image.decoding import decode, find_jpeg_size
from longseq.tasks.image.sources import Split
from longseq.tasks.image.transforms import list_operations, training_steps

# Nested tensors are said to be a prototype.
warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")

_MOST_PIXELS = 1 << 27  # pixels that are decoded and resized at a time

# The operations on images; an affine one covers rotation, shear and translation.
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
            height, width = _resized_sides(size, first)
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


def _resized_sides(size: tuple[int, int], resize: transforms.Resize) -> tuple[int, int]:
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
    return [*steps, ("affine", _affine_map(name, size, amount))]


def _affine_map(name: str, size: int, amount: float) -> tuple[float, ...]:
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


def _as_pixels(image: Image.Image) -> EncodedFile:
    return EncodedFile(image.convert("RGB").tobytes(), (image.height, image.width), False)


class EncodedTrainingBatches(TrainingBatches):
    """`TrainingBatches` that a `DeviceTransform` finishes: inputs are `EncodedImages`."""

    def __init__(self, split: Split, draws: TrainingDraws, seed: int) -> None:
        super().__init__(split, draws, seed)
        self.size = draws.size

    def read(self, index: int) -> tuple[EncodedFile, Any]:
        source: Any = self.split.source
        if not hasattr(source, "read_file"):
            image, target = source.read(index)
            return _as_pixels(image), target
        data, target = source.read_file(index)
        size = find_jpeg_size(data)
        return (_as_pixels(decode(io.BytesIO(data))) if size is None else EncodedFile(data, size, True)), target

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


class DeviceTransform:
    """Decodes and augments a batch: inputs `EncodedImages` -> uint8 [B, C, S, S] on the device.

    Pixels differ from Pillow's by rounding. An image that its index determines replaces a file that cannot be decoded.
    """

    def __init__(
        self, split: Split, info: DataInfo, augmentation: Augmentation, device: torch.device, *, seed: int
    ) -> None:
        self.split, self.info, self.augmentation = split, info, augmentation
        self.device, self.seed = device, seed
        self.precision = torch.float16 if device.type == "cuda" else torch.float32
        self.fill = torch.tensor([round(255 * value) for value in (info.mean * 3)[:3]], device=device).view(3, 1, 1)

    def __call__(self, batch: Batch) -> Batch:
        return self.finish(self.decode(batch))

    def decode(self, batch: Batch) -> tuple[Batch, Tensor | None]:
        """Decode a batch: the batch and the pixels of its files [F, 3, H, W]; None if they would not fit in memory.

        Waits for nvJPEG, so it runs in a thread of its own, on the stream of `finish`.
        """
        batch = batch._replace(targets=batch.targets.clone())
        parts = _parts(batch.inputs.files)
        return batch, self._load(batch, parts[0]) if len(parts) == 1 else None

    def finish(self, decoded: tuple[Batch, Tensor | None]) -> Batch:
        """Crop, augment and erase the images of a decoded batch."""
        batch, pixels = decoded
        encoded = batch.inputs
        cropped = []
        for files in _parts(encoded.files):
            samples = encoded.samples[(encoded.samples[:, 0] >= files[0]) & (encoded.samples[:, 0] <= files[-1])]
            found = self._load(batch, files) if pixels is None else pixels
            cropped.append(self._resize(found, samples[:, 0] - files[0], samples))
        images = torch.cat(cropped).view(-1, 3, self.info.side, self.info.side)
        images = apply_steps(images, encoded.kinds, encoded.numbers, self.fill)
        if self.info.in_chans == 1:
            images = rgb_to_grayscale(images.float())
        images = images.round().to(torch.uint8)
        if len(encoded.where):
            chosen = self._send(encoded.erased.nonzero().flatten())
            part = images[chosen]
            where = self._send(encoded.where)[:, None].expand_as(part)
            images[chosen] = part.masked_scatter(where, self._send(encoded.values))
        return Batch(images, self._send(batch.targets), batch.failures)

    def _send(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

    def _load(self, batch: Batch, files: Sequence[int]) -> Tensor:
        """The decoded pixels [F, 3, H, W] of files, padded by zeros to the size of the largest."""
        images: list[Any] = self._decode(batch.inputs, files)
        for number, image in zip(files, images, strict=True):
            if image is None:
                images[number - files[0]] = self._replace(batch.inputs, number, batch.targets, batch.failures)
        height, width = (max(image.shape[axis] for image in images) for axis in (1, 2))
        nested = torch.nested.as_nested_tensor(images).to(self.precision)
        return nested.to_padded_tensor(0.0, (len(images), 3, height, width))

    def _resize(self, pixels: Tensor, file_of: Tensor, samples: Tensor) -> Tensor:
        """Crop the images [F, 3, H, W] as the rows of `samples` say: [N, 3, S, S]; `file_of` [N] numbers their files.

        Resizing is linear in each axis: two products with the weights of all pixels resize a batch at once.
        """
        here = self._send(torch.cat([samples[:, 1:11], file_of[:, None]], dim=1))
        height, width = pixels.shape[2:]
        down, across = self._weigh(torch.cat([here[:, 0:10:2], here[:, 1:10:2]]), max(height, width)).chunk(2)
        repeated = pixels if len(pixels) == len(samples) else pixels[here[:, 10]]
        wide = repeated.flatten(1, 2) @ across[..., :width].mT
        found = down[:, None, :, :height] @ wide.view(len(samples), 3, height, -1)
        return found.round_().clamp_(0, 255)

    def _weigh(self, axis: Tensor, length: int) -> Tensor:
        """How much each of `length` pixels of an image counts in each pixel of the result, [N, S, length].

        `axis` [N, 5] has of each image the beginning and the length of its box, the length of the resized box, where
        the result begins in it, and whether it is mirrored.
        """
        first, size, resized, start, mirrored = (column[:, None] for column in axis.unbind(1))
        place = torch.arange(self.info.side, device=self.device)
        place = torch.where(mirrored > 0, self.info.side - 1 - place, place) + start
        padding = self.augmentation.padding_mode if self.augmentation.crop == "padded" else "constant"
        if padding == "edge":
            place = torch.minimum(place.clamp(min=0), resized - 1)
        elif padding in ("reflect", "symmetric"):
            edge = int(padding == "symmetric")  # which is repeated
            place = torch.where(place < 0, -place - edge, place)
            place = torch.where(place >= resized, 2 * (resized - 1) + edge - place, place)
        scale = (size / resized)[..., None]
        filter_scale = scale.clamp(min=1) if self.info.interpolation != "nearest" else 1
        pixel = torch.arange(length, device=self.device) - first[..., None]
        distance = ((pixel + 0.5 - (place[..., None] + 0.5) * scale) / filter_scale).to(self.precision)
        weights = _FILTERS[self.info.interpolation](distance)
        inside = (pixel >= 0) & (pixel < size[..., None]) & ((place >= 0) & (place < resized))[..., None]
        weights = weights * inside
        return weights / weights.sum(2, keepdim=True).clamp(min=1e-3)

    def _decode(self, encoded: EncodedImages, files: Sequence[int]) -> list[Tensor | None]:
        """The images uint8 [3, H, W] of files; None for one that cannot be decoded to the size in its head."""
        data = encoded.data.split((encoded.files[:, 1] - encoded.files[:, 0]).tolist())
        table = encoded.files[:, 2:].tolist()
        jpegs = [number for number in files if table[number][2]]
        found = dict(zip(jpegs, decode_jpegs([data[number] for number in jpegs], self.device), strict=True))
        for number in files:
            size = tuple(table[number][:2])
            if number not in found:
                found[number] = data[number].view(*size, 3).permute(2, 0, 1).to(self.device)
            elif (image := found[number]) is None or image.shape[1:] != size:
                found[number] = self._decode_on_host(data[number], size)
        return [found[number] for number in files]

    def _decode_on_host(self, data: Tensor, size: tuple[int, ...]) -> Tensor | None:
        try:
            image = decode(io.BytesIO(data.numpy().tobytes())).convert("RGB")
        except UNREADABLE:
            return None
        return pil_to_tensor(image).to(self.device) if (image.height, image.width) == size else None

    def _replace(self, encoded: EncodedImages, file: int, targets: Tensor, failures: list[Failure]) -> Tensor:
        """An image in place of a file; all samples of the file get its class."""
        of_file = encoded.samples[:, 0] == file
        index = SampleIndex(*encoded.samples[of_file][0, 11:].tolist())
        path = self.split.source.path(int(self.split.indices[index.position]))
        failures.append(Failure(path, "its pixels cannot be decoded"))
        height, width = encoded.files[file, 2:4].tolist()
        for attempt in range(1, REPLACEMENTS):
            sample = read_or_failure(self.split, derive_seed(self.seed, *index, attempt) % len(self.split))
            if isinstance(sample, Failure):
                failures.append(sample)
                continue
            targets[of_file] = torch.as_tensor(sample[1], dtype=targets.dtype)
            return pil_to_tensor(sample[0].convert("RGB").resize((width, height))).to(self.device)
        raise ValueError(f"{path} and {REPLACEMENTS} other files cannot be decoded")


def _parts(files: Tensor) -> list[range]:
    """The numbers of the files of a batch, in parts that are decoded and resized together."""
    parts = [range(0)]
    height = width = 0
    for number, size in enumerate(files[:, 2:4].tolist()):
        height, width = max(height, size[0]), max(width, size[1])
        if parts[-1] and (len(parts[-1]) + 1) * height * width > _MOST_PIXELS:
            parts.append(range(number, number))
            height, width = size
        parts[-1] = range(parts[-1].start, number + 1)
    return parts


def _cubic(x: Tensor) -> Tensor:
    x = x.abs()
    near, far = (1.5 * x - 2.5) * x * x + 1, ((2.5 - 0.5 * x) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0))


def _box(x: Tensor) -> Tensor:
    return ((x > -0.5) & (x <= 0.5)).to(x.dtype)


# Pillow's, by the distance in pixels of the result, or of the box where those are smaller.
_FILTERS: dict[str, Callable[[Tensor], Tensor]] = {
    "nearest": _box,
    "box": _box,
    "bilinear": lambda x: (1 - x.abs()).clamp(min=0),
    "hamming": lambda x: torch.where(x.abs() < 1, x.sinc() * (0.54 + 0.46 * (torch.pi * x).cos()), 0),
    "bicubic": _cubic,
    "lanczos": lambda x: torch.where(x.abs() < 3, x.sinc() * (x / 3).sinc(), 0),
}


def decode_jpegs(files: list[Tensor], device: torch.device) -> list[Tensor | None]:
    """The images uint8 [3, H, W] of JPEG files uint8 [N] in host memory; None for a file that the decoder refuses."""
    if not files:
        return []
    try:
        if device.type != "cuda":
            return list(decode_jpeg(files, mode=ImageReadMode.RGB))
        # nvJPEG works on a stream of its own, which does not wait for this one. Afterwards nothing reads the files.
        stream = torch.cuda.current_stream(device)
        stream.synchronize()
        images = list(decode_jpeg(files, mode=ImageReadMode.RGB, device=device))
        stream.synchronize()
        return images
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return [None] if len(files) == 1 else [one for file in files for one in decode_jpegs([file], device)]


def apply_steps(images: Tensor, kinds: Tensor, numbers: Tensor, fill: Tensor) -> Tensor:
    """Apply to each image [B, 3, S, S] of floats in 0..255 its operations.

    `kinds` [n, B] and `numbers` [n, B, 6] are as in `EncodedImages`; `fill` [3, 1, 1] is the colour of the corners that
    an affine map leaves. Each turn sorts the images by operation, so that an operation is applied to a slice.
    """
    if not len(kinds):
        return images
    device = images.device
    orders = kinds.argsort(dim=1)
    places = orders.argsort(dim=1)  # of each image among the sorted ones
    numbers = numbers.gather(1, orders[..., None].expand_as(numbers)).to(device, images.dtype, non_blocking=True)
    # Each turn takes the images from their places of the turn before.
    moves = [order if turn == 0 else places[turn - 1][order] for turn, order in enumerate(orders)]
    moves_here = torch.stack([*moves, places[-1]]).to(device, non_blocking=True)
    for turn, row in enumerate(kinds):
        images, changed = images[moves_here[turn]], []
        parts = images.split(row.bincount(minlength=len(KINDS)).tolist())
        start = 0
        for kind, part in zip(KINDS, parts, strict=True):
            if len(part):
                amounts = numbers[turn, start : start + len(part)]
                changed.append(part if kind == "none" else _OPERATIONS[kind](part, amounts, fill))
                start += len(part)
        images = torch.cat(changed).round_().clamp_(0, 255)
    return images[moves_here[-1]]


@cache
def _luma(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor([0.299, 0.587, 0.114], device=device, dtype=dtype).view(3, 1, 1)


def _grey(images: Tensor) -> Tensor:
    """The luma [N, 1, S, S] of ITU-R 601, as in Pillow."""
    return (images * _luma(images.device, images.dtype)).sum(1, keepdim=True).round()


def _amount(numbers: Tensor) -> Tensor:
    return numbers[:, :1, None, None]


def _affine(images: Tensor, numbers: Tensor, fill: Tensor) -> Tensor:
    size = images.shape[-1]
    a, b, c, d, e, f = numbers.float().unbind(1)
    # From Pillow's pixels to the coordinates of `affine_grid`, which go from -1 to 1.
    theta = torch.stack([a, b, a + b - 1 + 2 * c / size, d, e, d + e - 1 + 2 * f / size], dim=1).view(-1, 2, 3)
    grid = functional.affine_grid(theta, list(images.shape), align_corners=False)
    return functional.grid_sample((images - fill).float(), grid, align_corners=False).to(images.dtype) + fill


def _blend(base: Tensor | int, images: Tensor, numbers: Tensor) -> Tensor:
    return (base + _amount(numbers) * (images - base)).floor()  # as Pillow rounds


def _sharpness(images: Tensor, numbers: Tensor) -> Tensor:
    kernel = torch.full((3, 1, 3, 3), 1 / 13, device=images.device, dtype=images.dtype)
    kernel[..., 1, 1] = 5 / 13
    smooth = images.clone()
    smooth[..., 1:-1, 1:-1] = functional.conv2d(images, kernel, groups=3).round()
    return _blend(smooth, images, numbers)


def _auto_contrast(images: Tensor) -> Tensor:
    least, most = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    return torch.where(most > least, (images - least) * (255 / (most - least).clamp(min=1)), images)


def _gaussian_blur(images: Tensor, numbers: Tensor) -> Tensor:
    """A Gaussian of each image's own radius, of at most 4 pixels; borders are repeated."""
    reach = torch.arange(-12, 13, device=images.device)
    weights = torch.exp(-0.5 * (reach / numbers[:, :1].clamp(min=1e-3)) ** 2)  # [N, 25]
    weights = (weights / weights.sum(1, keepdim=True)).repeat_interleave(3, 0)  # one for each channel
    rows = functional.pad(images, (12, 12, 12, 12), mode="replicate").flatten(0, 1)[None]
    rows = functional.conv2d(rows, weights[:, None, :, None], groups=len(weights))
    return functional.conv2d(rows, weights[:, None, None, :], groups=len(weights)).view(images.shape)


_OPERATIONS: dict[str, Any] = {
    "affine": _affine,
    "brightness": lambda images, numbers, _: _blend(0, images, numbers),
    "contrast": lambda images, numbers, _: _blend(_grey(images).mean((2, 3), keepdim=True).round(), images, numbers),
    "color": lambda images, numbers, _: _blend(_grey(images), images, numbers),
    "sharpness": lambda images, numbers, _: _sharpness(images, numbers),
    "posterize": lambda images, numbers, _: images - images % 2 ** (8 - _amount(numbers)),
    "solarize": lambda images, numbers, _: torch.where(images < _amount(numbers), images, 255 - images),
    "solarize_add": lambda images, numbers, _: torch.where(images < 128, images + _amount(numbers), images),
    "auto_contrast": lambda images, *_: _auto_contrast(images),
    "equalize": lambda images, *_: equalize(images.to(torch.uint8)).to(images.dtype),
    "gaussian_blur": lambda images, numbers, _: _gaussian_blur(images, numbers),
}
