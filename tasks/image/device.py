"""Decoding and augmentation of training images on a device: nvJPEG, then plain torch on whole batches."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms.functional import pil_to_tensor, rgb_to_grayscale

from longseq.tasks.data.batch import Batch, Failure
from longseq.tasks.data.sampler import SampleIndex
from longseq.tasks.data.unreadable import UNREADABLE
from longseq.tasks.image.augmentation import Augmentation
from longseq.tasks.image.datasets import REPLACEMENTS, read_or_failure, replace_position
from longseq.tasks.image.decoding import decode
from longseq.tasks.image.draws import KINDS, EncodedImages
from longseq.tasks.image.info import DataInfo
from longseq.tasks.image.sources import Split

# Pixels that are decoded at a time; of three bytes each, 384 MiB.
_MOST_PIXELS = 1 << 27


class DeviceTransform:
    """Decodes and augments a batch: inputs `EncodedImages` -> uint8 [B, C, S, S] on the device.

    The parameters are those of `longseq.tasks.image.draws`; pixels differ from Pillow's by rounding. A file that
    neither nvJPEG nor Pillow decodes is replaced by the image that its index determines, in the size of the file.
    """

    def __init__(
        self, split: Split, info: DataInfo, augmentation: Augmentation, device: torch.device, *, seed: int
    ) -> None:
        self.split, self.info, self.augmentation = split, info, augmentation
        self.device, self.seed = device, seed
        self.precision = torch.float16 if device.type == "cuda" else torch.float32
        self.fill = torch.tensor([round(255 * value) for value in (info.mean * 3)[:3]], device=device).view(3, 1, 1)

    def __call__(self, batch: Batch) -> Batch:
        encoded, targets, failures = batch
        if not isinstance(encoded, EncodedImages):  # nothing could be read
            return batch
        targets = targets.clone()
        images = self._crop(encoded, targets, failures)
        images = apply_steps(images, encoded.kinds, encoded.numbers, self.fill)
        if self.info.in_chans == 1:
            images = rgb_to_grayscale(images)
        images = images.round().to(torch.uint8)
        if len(encoded.where):
            chosen = encoded.erased.nonzero().flatten().to(self.device)
            part = images[chosen]
            where = encoded.where.to(self.device)[:, None].expand_as(part)
            images[chosen] = part.masked_scatter(where, encoded.values.to(self.device))
        return Batch(images, targets.to(self.device), failures)

    def _crop(self, encoded: EncodedImages, targets: Tensor, failures: list[Failure]) -> Tensor:
        """The cropped and mirrored images, float32 [B, 3, S, S] in 0..255."""
        side = self.info.side
        cropped = torch.empty(len(encoded.samples), 3, side, side, device=self.device)
        for files in self._parts(encoded.files.tolist()):
            images = self.decode(encoded, files)
            places = [place for place, file in enumerate(encoded.samples[:, 0].tolist()) if file in images]
            for place in places:
                row = encoded.samples[place].tolist()
                if images[row[0]] is None:
                    images[row[0]] = self._replace(encoded, row, targets, failures)
            cropped[places] = self._resize(images, encoded.samples[places])
        return cropped

    def _resize(self, images: dict[int, Any], samples: Tensor) -> Tensor:
        """The crops [N, 3, S, S] that the rows of `samples` say.

        Resizing is linear in each axis: two products with the weights of all pixels of a box resize a batch at once.
        """
        boxes = samples[:, 1:5]
        height, width = boxes[:, 2:].amax(0).tolist()
        pixels = torch.zeros(len(samples), 3, height, width, dtype=torch.uint8, device=self.device)
        for place, (file, top, left, rows, columns) in zip(pixels, samples[:, :5].tolist(), strict=True):
            place[:, :rows, :columns] = images[file][:, top : top + rows, left : left + columns]
        here = samples.to(self.device, non_blocking=True)
        down, across = (self._weigh(here[:, axis:11:2], length) for axis, length in ((3, height), (4, width)))
        wide = pixels.to(self.precision).flatten(1, 2) @ across.mT
        found = down[:, None] @ wide.view(len(samples), 3, height, -1)
        return found.float().round_().clamp_(0, 255)

    def _weigh(self, axis: Tensor, length: int) -> Tensor:
        """How much each of `length` pixels of a box counts in each pixel of the result, [N, S, length].

        `axis` [N, 4] has of each image the length of its box, that of the resized box, where the result begins in it,
        and whether it is mirrored.
        """
        size, resized, start, mirrored = (column[:, None] for column in axis.unbind(1))
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
        pixel = torch.arange(length, device=self.device)
        weights = _FILTERS[self.info.interpolation]((pixel + 0.5 - (place[..., None] + 0.5) * scale) / filter_scale)
        weights = weights * (pixel < size[..., None]) * ((place >= 0) & (place < resized))[..., None]
        return (weights / weights.sum(2, keepdim=True).clamp(min=1e-6)).to(self.precision)

    def _parts(self, files: Sequence[Sequence[int]]) -> list[list[int]]:
        """The numbers of the files, in parts that are decoded and resized together."""
        parts: list[list[int]] = []
        sides = (0, 0)
        for number, (_, _, *size, _) in enumerate(files):
            sides = max(sides[0], size[0]), max(sides[1], size[1])
            if not parts or (len(parts[-1]) + 1) * sides[0] * sides[1] > _MOST_PIXELS:
                parts.append([])
                sides = size[0], size[1]
            parts[-1].append(number)
        return parts

    def decode(self, encoded: EncodedImages, files: Sequence[int]) -> dict[int, Tensor | None]:
        """The images uint8 [3, H, W] of files; None for one that cannot be decoded to the size in its head."""
        table = encoded.files.tolist()
        data = {number: encoded.data[table[number][0] : table[number][1]] for number in files}
        jpegs = [number for number in files if table[number][4]]
        found = dict(zip(jpegs, decode_jpegs([data[number] for number in jpegs], self.device), strict=True))
        for number in files:
            size = tuple(table[number][2:4])
            if number not in found:
                found[number] = data[number].view(*size, 3).permute(2, 0, 1).to(self.device)
            elif (image := found[number]) is None or image.shape[1:] != size:
                found[number] = self._decode_on_host(data[number], size)
        return found

    def _decode_on_host(self, data: Tensor, size: tuple[int, ...]) -> Tensor | None:
        try:
            image = decode(io.BytesIO(data.numpy().tobytes())).convert("RGB")
        except UNREADABLE:
            return None
        return pil_to_tensor(image).to(self.device) if (image.height, image.width) == size else None

    def _replace(self, encoded: EncodedImages, row: Sequence[int], targets: Tensor, failures: list[Failure]) -> Tensor:
        """An image in place of the file of a sample; all samples of the file get its class."""
        index = SampleIndex(*row[11:])
        path = self.split.source.path(int(self.split.indices[index.position]))
        failures.append(Failure(path, "its pixels cannot be decoded"))
        height, width = encoded.files[row[0], 2:4].tolist()
        for attempt in range(1, REPLACEMENTS):
            sample = read_or_failure(self.split, replace_position(self.seed, index, attempt, len(self.split)))
            if isinstance(sample, Failure):
                failures.append(sample)
                continue
            targets[encoded.samples[:, 0] == row[0]] = torch.as_tensor(sample[1], dtype=targets.dtype)
            return pil_to_tensor(sample[0].convert("RGB").resize((width, height))).to(self.device)
        raise ValueError(f"{path} and {REPLACEMENTS} other files cannot be decoded")


def _cubic(x: Tensor) -> Tensor:
    x = x.abs()
    near, far = (1.5 * x - 2.5) * x * x + 1, ((2.5 - 0.5 * x) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0))


def _box(x: Tensor) -> Tensor:
    return ((x > -0.5) & (x <= 0.5)).float()


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
    """Apply to each image float32 [B, 3, S, S] in 0..255 its operations, in place.

    `kinds` [n, B] and `numbers` [n, B, 6] are as in `EncodedImages`; `fill` [3, 1, 1] is the colour of the corners that
    an affine map leaves. Images with the same operation are changed at once.
    """
    order, counts = kinds.argsort(dim=1), [row.bincount(minlength=len(KINDS)).tolist() for row in kinds]
    order_here, numbers_here = order.to(images.device), numbers.to(images.device)
    for turn, count in enumerate(counts):
        end = count[0]
        for kind, size in zip(KINDS[1:], count[1:], strict=True):
            if size:
                chosen = order_here[turn, end : end + size]
                changed = _OPERATIONS[kind](images[chosen], numbers_here[turn, chosen], fill)
                images[chosen] = changed.round_().clamp_(0, 255)
                end += size
    return images


def _grey(images: Tensor) -> Tensor:
    """The lightness [N, 1, S, S] by the weights of ITU-R 601, as Pillow has it."""
    return (images * images.new_tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(1, keepdim=True).round()


def _amount(numbers: Tensor) -> Tensor:
    return numbers[:, :1, None, None]


def _affine(images: Tensor, numbers: Tensor, fill: Tensor) -> Tensor:
    size = images.shape[-1]
    a, b, c, d, e, f = numbers.unbind(1)
    # From Pillow's pixels to the coordinates of `affine_grid`, which go from -1 to 1.
    theta = torch.stack(
        [a, b, a + b - 1 + 2 * c / size, d, e, d + e - 1 + 2 * f / size],
        dim=1,
    ).view(-1, 2, 3)
    grid = functional.affine_grid(theta, list(images.shape), align_corners=False)
    return functional.grid_sample(images - fill, grid, align_corners=False) + fill


def _blend(base: Tensor | int, images: Tensor, numbers: Tensor) -> Tensor:
    return (base + _amount(numbers) * (images - base)).floor()  # as Pillow rounds


def _sharpness(images: Tensor, numbers: Tensor) -> Tensor:
    kernel = torch.full((3, 1, 3, 3), 1 / 13, device=images.device)
    kernel[..., 1, 1] = 5 / 13
    smooth = images.clone()
    smooth[..., 1:-1, 1:-1] = functional.conv2d(images, kernel, groups=3).round()
    return _blend(smooth, images, numbers)


def _auto_contrast(images: Tensor) -> Tensor:
    least, most = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    return torch.where(most > least, (images - least) * (255 / (most - least).clamp(min=1)), images)


def _equalize(images: Tensor) -> Tensor:
    """Pillow's: each level becomes the share of the pixels below it, channel by channel."""
    levels = images.round().long().flatten(2).flatten(0, 1)  # [N * 3, S * S]
    counts = torch.zeros(len(levels), 256, dtype=torch.long, device=images.device)
    counts.scatter_add_(1, levels, torch.ones_like(levels))
    last = counts.gather(1, levels.amax(1, keepdim=True))
    step = (levels.shape[1] - last) // 255
    table = ((counts.cumsum(1) - counts + step // 2) // step.clamp(min=1)).clamp(max=255)
    equal = torch.where(step > 0, table.gather(1, levels), levels)
    return equal.view(images.shape).float()


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
    "invert": lambda images, *_: 255 - images,
    "auto_contrast": lambda images, *_: _auto_contrast(images),
    "equalize": lambda images, *_: _equalize(images),
    "gaussian_blur": lambda images, numbers, _: _gaussian_blur(images, numbers),
}
