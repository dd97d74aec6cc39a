"""Decoding and augmentation of training images on a device: nvJPEG, then plain torch on whole batches."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms.functional import center_crop, pad, pil_to_tensor, rgb_to_grayscale

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

# torch's name of a filter of Pillow, or of the one that is nearest to it.
_MODES = {"nearest": "nearest-exact", "box": "area", "hamming": "bilinear", "lanczos": "bicubic"}


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
        self.mode = _MODES.get(info.interpolation, info.interpolation)
        self.fill = torch.tensor([round(255 * value) for value in (info.mean * 3)[:3]], device=device).view(3, 1, 1)

    def __call__(self, batch: Batch) -> Batch:
        encoded, targets, failures = batch
        if not isinstance(encoded, EncodedImages):  # nothing could be read
            return batch
        targets = targets.clone()
        images = self._crop(encoded, targets, failures)
        flips = encoded.samples[:, 9:11].to(self.device).bool()[..., None, None, None]
        for column, dim in ((0, 3), (1, 2)):
            images = torch.where(flips[:, column], images.flip(dim), images)
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
        """The cropped images, float32 [B, 3, S, S] in 0..255."""
        rows = encoded.samples.tolist()
        cropped: dict[int, Tensor] = {}
        for files in self._parts(encoded.files.tolist()):
            images = self.decode(encoded, files)
            for place, row in enumerate(rows):
                if row[0] in images:
                    image = images[row[0]]
                    if image is None:
                        image = images[row[0]] = self._replace(encoded, row, rows, targets, failures)
                    cropped[place] = self._resize(image, row)
        return torch.stack([cropped[place] for place in range(len(rows))])

    def _parts(self, files: Sequence[Sequence[int]]) -> list[list[int]]:
        """The numbers of the files, in parts that are decoded together."""
        parts: list[list[int]] = []
        pixels = 0
        for number, (_, _, height, width, _) in enumerate(files):
            pixels += height * width
            if not parts or pixels > _MOST_PIXELS:
                parts.append([])
                pixels = height * width
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

    def _replace(
        self,
        encoded: EncodedImages,
        row: Sequence[int],
        rows: Sequence[Sequence[int]],
        targets: Tensor,
        failures: list[Failure],
    ) -> Tensor:
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
            for place, other in enumerate(rows):
                if other[0] == row[0]:
                    targets[place] = torch.as_tensor(sample[1])
            return pil_to_tensor(sample[0].convert("RGB").resize((width, height))).to(self.device)
        raise ValueError(f"{path} and {REPLACEMENTS} other files cannot be decoded")

    def _resize(self, image: Tensor, row: Sequence[int]) -> Tensor:
        """The crop of an image that a row of `samples` says, before its flips."""
        top, left, height, width, resized_height, resized_width, corner_top, corner_left = row[1:9]
        part = image[None, :, top : top + height, left : left + width].float()
        antialias = {"antialias": True} if self.mode in ("bilinear", "bicubic") else {}
        part = functional.interpolate(part, size=(resized_height, resized_width), mode=self.mode, **antialias)[0]
        part = part.round_().clamp_(0, 255)
        side, options = self.info.side, self.augmentation
        if corner_top >= 0:
            if options.padding:
                part = pad(part, [options.padding], padding_mode=options.padding_mode)
            return part[:, corner_top : corner_top + side, corner_left : corner_left + side]
        return center_crop(part, [side, side]) if part.shape[1:] != (side, side) else part


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


def _blend(base: Tensor, images: Tensor, numbers: Tensor) -> Tensor:
    return base + _amount(numbers) * (images - base)


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
    "brightness": lambda images, numbers, _: images * _amount(numbers),
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
