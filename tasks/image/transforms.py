"""Image transforms: from a PIL image to a uint8 tensor on the host, and to normalised float32 on the device."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from PIL import Image
from timm.data import auto_augment, create_transform
from timm.data.auto_augment import AugmentOp
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import str_to_interp_mode
from torch import Tensor
from torchvision import transforms
from torchvision.transforms.functional import pil_to_tensor

from longseq.tasks.image.augmentation import Augmentation
from longseq.tasks.image.info import DataInfo


class ToMode:
    """PIL image of any mode -> RGB or L (grey)."""

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def __call__(self, image: Image.Image) -> Image.Image:
        return image if image.mode == self.mode else image.convert(self.mode)


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

    ValueError for other images than RGB and grey ones. A crop_pct above 1 adds a black border.
    """
    if info.in_chans not in (1, 3):
        raise ValueError(f"images are read as RGB or grey, and the model has in_chans={info.in_chans}")
    resize, cut, _ = create_transform(
        (3, *info.sides),
        interpolation=info.interpolation,
        crop_pct=info.crop_pct,
        crop_mode=info.crop_mode,
        mean=tuple(info.mean),
        normalize=False,
    ).transforms
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
