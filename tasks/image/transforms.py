"""Image transforms: from a PIL image to a uint8 tensor on the host, and to normalised float32 on the device."""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import torch
from PIL import Image
from timm.data import auto_augment, create_transform
from timm.data.auto_augment import AugmentOp
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import ResizeKeepRatio, str_to_interp_mode, str_to_pil_interp
from torch import Tensor
from torchvision import transforms
from torchvision.transforms.functional import pil_to_tensor

from longseq.tasks.image.augmentation import Augmentation
from longseq.tasks.image.info import LEAST_CROP, DataInfo

# Of a resized image, with three channels 192 MiB.
_MOST_PIXELS = 1 << 26


class ToMode:
    """PIL image of any mode -> RGB or L (grey)."""

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def __call__(self, image: Image.Image) -> Image.Image:
        return image if image.mode == self.mode else image.convert(self.mode)


class ShortSide(transforms.Resize):
    """timm's resizing of the short side, before the centre is cut out.

    Of an image so long that the result would have more than _MOST_PIXELS, only the centre is made: one of 1 x 65,535
    pixels would take 17 GB.
    """

    def __init__(self, resize: transforms.Resize, info: DataInfo) -> None:
        super().__init__(resize.size, resize.interpolation)
        self.kept, self.filter = info.sides, str_to_pil_interp(info.interpolation)

    def forward(self, image: Image.Image) -> Image.Image:
        short, long = sorted(image.size)
        resized = self.size * long // short
        if self.size * resized <= _MOST_PIXELS:
            return super().forward(image)
        size = (resized, self.size) if image.width == long else (self.size, resized)
        return _centre_of_resized(image, size, self.kept, self.filter)


class KeptRatio(ResizeKeepRatio):
    """timm's resizing to a size that is no square or has a border; of a long image as `ShortSide`."""

    def __init__(self, resize: ResizeKeepRatio, info: DataInfo) -> None:
        super().__init__(resize.size, resize.longest, info.interpolation)
        self.kept, self.filter = info.sides, str_to_pil_interp(info.interpolation)

    def __call__(self, image: Image.Image) -> Image.Image:
        height, width = self.get_params(image, self.size, self.longest)
        if height * width <= _MOST_PIXELS:
            return super().__call__(image)
        return _centre_of_resized(image, (width, height), self.kept, self.filter)

    @staticmethod
    def get_params(*arguments: Any, **options: Any) -> list[int]:
        # a long image with a border keeps no pixel of its short side, which Pillow refuses
        return [max(1, side) for side in ResizeKeepRatio.get_params(*arguments, **options)]


def _centre_of_resized(
    image: Image.Image, size: tuple[int, int], kept: tuple[int, int], resample: Image.Resampling
) -> Image.Image:
    """The image resized to `size` (width, height), and of its longer side the centre that `kept` (height, width) is."""
    wide, resized = size[0] > size[1], max(size)
    short, long = (image.height, image.width) if wide else (image.width, image.height)
    length, scale = kept[1] if wide else kept[0], long / resized
    first = round((resized - length) / 2) * scale
    last = first + length * scale
    beside = math.ceil(3 * max(1, scale)) + 1  # what the widest filter reads
    start, stop = max(0, int(first) - beside), min(long, math.ceil(last) + beside)
    ends = first - start, last - start
    if wide:
        part = image.crop((start, 0, stop, short))
        return part.resize((length, size[1]), resample, (ends[0], 0, ends[1], short))
    part = image.crop((0, start, short, stop))
    return part.resize((size[0], length), resample, (0, ends[0], short, ends[1]))


class PixelErasing:
    """Random erasing (Zhong et al. 2020) of uint8 pixels: timm's, converted back from normalised units."""

    def __init__(self, info: DataInfo, prob: float = 0.0, mode: str = "const", count: int = 1) -> None:
        self.prob = prob
        self.erase = RandomErasing(probability=1.0, mode=mode, max_count=count, device="cpu")
        self.mean = torch.tensor(info.mean).view(-1, 1, 1)
        self.std = torch.tensor(info.std).view(-1, 1, 1)

    def __call__(self, pixels: Tensor) -> Tensor:
        drawn = self.draw(tuple(pixels.shape))
        return pixels if drawn is None else torch.where(drawn[0], drawn[1], pixels)

    def draw(self, shape: tuple[int, ...]) -> tuple[Tensor, Tensor] | None:
        """Where an image of this shape [C, H, W] is erased, bool [H, W], and by what, uint8 [C, H, W]; or None."""
        if random.random() >= self.prob:
            return None
        fill = self.erase(torch.full(shape, torch.nan))
        erased = (fill * self.std + self.mean).mul_(255).round_().clamp_(0, 255)
        return ~fill[0].isnan(), erased.nan_to_num_().to(torch.uint8)


class TrainingSteps(NamedTuple):
    """The random transforms of a PIL image: to the model's size, then colours, whose mode is `mode`, then erasing."""

    mode: ToMode
    geometry: list[Any]
    colour: list[Any]
    erasing: PixelErasing | None


def training_steps(info: DataInfo, augmentation: Augmentation) -> TrainingSteps:
    """The parts of `training_transform`."""
    crop, colour, _ = create_transform(
        (3, info.side, info.side),
        is_training=True,
        separate=True,
        scale=augmentation.scale,
        ratio=augmentation.ratio,
        hflip=augmentation.hflip,
        vflip=augmentation.vflip,
        color_jitter=augmentation.color_jitter or None,  # type: ignore[arg-type]
        auto_augment=augmentation.auto_augment,
        interpolation=info.interpolation,
        mean=_rgb(info.mean),
        std=_rgb(info.std),
    )
    geometry = crop.transforms
    if augmentation.crop != "random_resized":
        geometry = _crop(info, augmentation) + geometry[1:]
    # timm's colour operations fill with RGB triples, so that grey images must be RGB for them
    inner = ToMode("RGB") if colour.transforms else _final_mode(info)
    for operation in colour.transforms:
        _allow_zero_bits(operation)
    erasing = PixelErasing(info, **augmentation.erasing.model_dump()) if augmentation.erasing.prob else None
    return TrainingSteps(inner, geometry, colour.transforms, erasing)


def training_transform(info: DataInfo, augmentation: Augmentation) -> transforms.Compose:
    """Random transform of a PIL image to uint8 [C, S, S]; it draws from the generators that `seed_everything` seeds."""
    mode, geometry, colour, erasing = training_steps(info, augmentation)
    steps = [mode, *geometry, *colour, _final_mode(info), pil_to_tensor]
    return transforms.Compose(steps if erasing is None else [*steps, erasing])


def evaluation_transform(info: DataInfo) -> transforms.Compose:
    """timm's transform of an evaluation: PIL image -> uint8 [C, H, W], squares but for a model of another `img_size`.

    The short side becomes img_size / crop_pct, and the centre is cut out. With `crop_mode` squash both sides become it,
    and with border the long one, and the mean fills the rest.

    ValueError for a crop_pct below LEAST_CROP, and for other images than RGB and grey ones. A crop_pct above 1 adds a
    black border.
    """
    if info.crop_pct < LEAST_CROP:
        raise ValueError(f"crop_pct={info.crop_pct} must be a number of at least {LEAST_CROP}: give data.crop_pct=1.0")
    if info.in_chans not in (1, 3):
        raise ValueError(
            f"in_chans={info.in_chans} must be 1 or 3: image files are read as RGB or grey; call this model from a "
            "program of your own"
        )
    resize, cut, _ = create_transform(
        (3, *info.sides),
        interpolation=info.interpolation,
        crop_pct=info.crop_pct,
        crop_mode=info.crop_mode,
        mean=tuple(info.mean),
        normalize=False,
    ).transforms
    if isinstance(resize, ResizeKeepRatio):
        resize = KeptRatio(resize, info)
    elif info.crop_mode == "center":
        resize = ShortSide(resize, info)
    return transforms.Compose([_final_mode(info), resize, cut, pil_to_tensor])


def normalize(images: Tensor, info: DataInfo) -> Tensor:
    """uint8 [..., C, H, W] -> float32 with mean 0 and standard deviation 1 over the data set, on the images' device."""
    mean, std = _channel_statistics(info, images.device)
    return images.float().sub_(mean).div_(std)


def denormalize(images: Tensor, info: DataInfo) -> Tensor:
    """The inverse of `normalize`, to pixels in [0, 1], for pictures."""
    mean, std = _channel_statistics(info, images.device)
    return images.float().mul(std).add_(mean).div_(255).clamp_(0, 1)


def _crop(info: DataInfo, augmentation: Augmentation) -> list[Any]:
    if augmentation.crop == "center":
        return evaluation_transform(info).transforms[1:-1]
    resize = transforms.Resize(info.side, interpolation=str_to_interp_mode(info.interpolation))
    crop = transforms.RandomCrop(
        info.side, padding=augmentation.padding or None, padding_mode=augmentation.padding_mode
    )
    return [resize, crop]


def list_operations(augmentation: Any) -> list[AugmentOp]:
    """The operations among which timm's RandAugment, AutoAugment or AugMix chooses."""
    choices = getattr(augmentation, "ops", None) or getattr(augmentation, "policy", [])
    return [op for choice in choices for op in ([choice] if isinstance(choice, AugmentOp) else choice)]


def posterize(image: Image.Image, bits: int, **options: Any) -> Image.Image:
    """timm's, also for 0 bits, its strongest magnitude: Pillow 13 refuses what older versions turned to black."""
    return auto_augment.posterize(image, bits, **options) if bits else Image.new(image.mode, image.size)


def _allow_zero_bits(operation: Any) -> None:
    for op in list_operations(operation):
        if op.aug_fn is auto_augment.posterize:
            op.aug_fn = posterize


def _final_mode(info: DataInfo) -> ToMode:
    return ToMode("L" if info.in_chans == 1 else "RGB")


def _rgb(values: list[float]) -> tuple[float, ...]:
    return tuple(values) if len(values) == 3 else tuple(values[:1]) * 3


def _channel_statistics(info: DataInfo, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and deviation [C, 1, 1] of pixels in [0, 255]. They are filled on the device: a copy from the host waits."""
    mean, std = (
        torch.cat([torch.full((1, 1, 1), 255.0 * value, device=device) for value in values])
        for values in (info.mean, info.std)
    )
    return mean, std
