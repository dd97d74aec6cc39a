"""Transforms of images, PIL to uint8 on the host and float32 on the device; Mixup and CutMix of batches."""

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import Mixup, auto_augment, create_transform
from timm.data.auto_augment import AugmentOp
from timm.data.mixup import mixup_target
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import str_to_interp_mode
from torch import Tensor
from torchvision import transforms
from torchvision.transforms.functional import pil_to_tensor

from longseq.tasks.data.sampler import derive_seed
from longseq.tasks.image.config import Augmentation, DataInfo


def to_mode(image: Image.Image, mode: str) -> Image.Image:
    """An image of any mode in RGB or L (grey)."""
    return image if image.mode == mode else image.convert(mode)


class PixelErasing:
    """timm's random erasing (Zhong et al. 2020) of uint8 pixels."""

    def __init__(self, info: DataInfo, prob: float = 0.0, mode: str = "const", count: int = 1) -> None:
        self.prob = prob
        self.erase = RandomErasing(probability=1.0, mode=mode, max_count=count, device="cpu")
        self.mean = torch.tensor(info.mean).view(-1, 1, 1)
        self.std = torch.tensor(info.std).view(-1, 1, 1)

    def __call__(self, pixels: Tensor) -> Tensor:
        drawn = self.draw(tuple(pixels.shape))
        return pixels if drawn is None else torch.where(drawn[0], drawn[1], pixels)

    def draw(self, shape: tuple[int, ...]) -> tuple[Tensor, Tensor] | None:
        """For an image of this shape [C, H, W]: the erased pixels, bool [H, W], and their values, uint8 [C, H, W]."""
        if random.random() >= self.prob:
            return None
        fill = self.erase(torch.full(shape, torch.nan))
        erased = (fill * self.std + self.mean).mul_(255).round_().clamp_(0, 255)
        return ~fill[0].isnan(), erased.nan_to_num_().to(torch.uint8)


def training_steps(
    info: DataInfo, augmentation: Augmentation
) -> tuple[Callable[[Image.Image], Image.Image], list[Any], list[Any], PixelErasing | None]:
    """The parts of `training_transform`: conversion to a mode, crop to the model's size, colours, erasing."""
    crop, colour, _ = create_transform(
        (3, info.side, info.side),
        is_training=True,
        separate=True,
        color_jitter=augmentation.color_jitter or None,  # type: ignore[arg-type]
        interpolation=info.interpolation,
        mean=tuple((info.mean * 3)[:3]),
        std=tuple((info.std * 3)[:3]),
        **augmentation.model_dump(include={"scale", "ratio", "hflip", "vflip", "auto_augment"}),
    )
    geometry = crop.transforms
    if augmentation.crop == "center":
        geometry = evaluation_transform(info).transforms[1:-1] + geometry[1:]
    elif augmentation.crop == "padded":
        padding, mode = augmentation.padding or None, augmentation.padding_mode
        resize = transforms.Resize(info.side, interpolation=str_to_interp_mode(info.interpolation))
        geometry = [resize, transforms.RandomCrop(info.side, padding, padding_mode=mode), *geometry[1:]]
    # timm's colour operations fill with RGB triples, so they need RGB images.
    inner = partial(to_mode, mode="RGB") if colour.transforms else _final_mode(info)
    for op in chain.from_iterable(map(list_operations, colour.transforms)):
        if op.aug_fn is auto_augment.posterize:
            op.aug_fn = posterize
    erasing = PixelErasing(info, **augmentation.erasing.model_dump()) if augmentation.erasing.prob else None
    return inner, geometry, colour.transforms, erasing


def training_transform(info: DataInfo, augmentation: Augmentation) -> transforms.Compose:
    """Random transform of a PIL image to uint8 [C, S, S], drawn from the generators that `seed_everything` seeds."""
    mode, geometry, colour, erasing = training_steps(info, augmentation)
    steps = [mode, *geometry, *colour, _final_mode(info), pil_to_tensor]
    return transforms.Compose(steps if erasing is None else [*steps, erasing])


def evaluation_transform(info: DataInfo) -> transforms.Compose:
    """timm's transform for evaluation: PIL image -> uint8 [C, H, W] of the size `info.img_size`.

    The short side is resized to img_size / crop_pct, and the centre is cut out. With `crop_mode` squash both sides are
    resized to it; with border the long one, and the mean fills the rest. A crop_pct above 1 adds a black border.
    """
    options: dict[str, Any] = {name: getattr(info, name) for name in ("interpolation", "crop_pct", "crop_mode")}
    whole = create_transform((3, *info.sides), mean=tuple(info.mean), normalize=False, **options)
    resize, cut, _ = whole.transforms
    return transforms.Compose([_final_mode(info), resize, cut, pil_to_tensor])


def normalize(images: Tensor, info: DataInfo) -> Tensor:
    """uint8 [..., C, H, W] -> float32 with mean 0 and standard deviation 1 over the data set, on the same device."""
    mean, std = _channel_statistics(info, images.device)
    return images.float().sub_(mean).div_(std)


def denormalize(images: Tensor, info: DataInfo) -> Tensor:
    """The inverse of `normalize`, to pixels in [0, 1], for pictures."""
    mean, std = _channel_statistics(info, images.device)
    return images.float().mul(std).add_(mean).div_(255).clamp_(0, 1)


def list_operations(augmentation: Any) -> list[AugmentOp]:
    """The operations of timm's RandAugment, AutoAugment or AugMix."""
    choices = getattr(augmentation, "ops", None) or getattr(augmentation, "policy", [])
    return [op for choice in choices for op in ([choice] if isinstance(choice, AugmentOp) else choice)]


def posterize(image: Image.Image, bits: int, **options: Any) -> Image.Image:
    """timm's posterize; black for 0 bits, its strongest magnitude, which Pillow 13 refuses."""
    return auto_augment.posterize(image, bits, **options) if bits else Image.new(image.mode, image.size)


def _final_mode(info: DataInfo) -> Callable[[Image.Image], Image.Image]:
    return partial(to_mode, mode="L" if info.in_chans == 1 else "RGB")


def _channel_statistics(info: DataInfo, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and deviation [C, 1, 1] of pixels in [0, 255], filled on the device without a copy from the host."""
    mean, std = (
        torch.cat([torch.full((1, 1, 1), 255.0 * value, device=device) for value in values])
        for values in (info.mean, info.std)
    )
    return mean, std


class BatchMixing:
    """Mixup, CutMix, label smoothing and class weights of a batch: a function of (seed, update, part of the batch).

    Mixes image i with image B - 1 - i; with mixup = cutmix = 0, images stay unchanged and targets are only smoothed.
    `options` are timm's prob, switch_prob and mode.
    Zhang et al. 2018 (arXiv:1710.09412), Yun et al. 2019 (arXiv:1905.04899), in timm's implementation.

    `class_weights` multiply the loss of an image by the weight of its class; with `multi_label`, the loss of each label
    that the image has. A mixed image has the weighted losses of both images, each times its share. Smoothing spreads a
    part of the target over all classes, or with `multi_label` moves each target towards 1/2; it changes no weight.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        seed: int,
        label_smoothing: float = 0.0,
        class_weights: Sequence[float] | None = None,
        multi_label: bool = False,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        **options: Any,
    ) -> None:
        self.num_classes, self.seed, self.label_smoothing = num_classes, seed, label_smoothing
        self.multi_label = multi_label
        self._class_weights = None if class_weights is None else torch.tensor(class_weights)
        self._mixup = None
        if mixup > 0 or cutmix > 0:
            fixed: Any = {"label_smoothing": label_smoothing, "num_classes": num_classes}
            self._mixup = Mixup(mixup, cutmix, **fixed, **options)

    def __call__(
        self, images: Tensor, targets: Tensor, *, update: int, part: int = 0
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Mix in place: images [B, C, H, W] float, targets [B] int or with `multi_label` [B, classes] of 0 and 1.

        Returns the images, soft targets [B, classes], and the weights of the losses: [B, 1] of images, [B, classes] of
        decisions about labels, or None if all are 1. `update` and `part` are as in `seed_batch`. timm needs an even B.
        """
        if self._mixup is not None and self._class_weights is None and not self.multi_label:
            return *self._mix(self._mixup, images, targets, update, part), None
        if self.multi_label:
            smooth = targets * (1 - self.label_smoothing) + self.label_smoothing / 2
        else:
            smooth = mixup_target(targets, self.num_classes, smoothing=self.label_smoothing)
        weights = self._weigh(targets)
        if self._mixup is None:
            return images, smooth, weights
        shares = self._share(self._mixup, images, update, part)
        if weights is None:
            return images, shares @ smooth, None
        # A loss is linear in its target, so the weighted losses of both images are one loss of a weighted target.
        mixed = shares @ weights
        return images, (shares @ (weights * smooth)) / mixed.clamp_min(torch.finfo(mixed.dtype).tiny), mixed

    def weigh(self, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """Soft targets and loss weights `[B, 1]` for labels that are probabilities `[B, classes]`; without smoothing.

        The loss of a class counts with its weight and its probability.
        """
        if self._class_weights is None:
            return targets, None
        self._class_weights = self._class_weights.to(targets.device)
        weighted = targets * self._class_weights
        sums = weighted.sum(dim=1, keepdim=True)
        return weighted / sums.clamp_min(torch.finfo(sums.dtype).tiny), sums

    def _weigh(self, targets: Tensor) -> Tensor | None:
        """The weights of images, `[B, 1]`, or of the decisions about their labels, `[B, classes]`."""
        if self._class_weights is None:
            return None
        weights = self._class_weights = self._class_weights.to(targets.device)  # copied once
        return torch.where(targets > 0, weights, 1.0) if self.multi_label else weights[targets].unsqueeze(1)

    def _share(self, mixup: Mixup, images: Tensor, update: int, part: int) -> Tensor:
        """Mix the images; returns the share `[B, B]` of image j in image i.

        timm mixes targets like images: with the numbers of the images as classes, it returns the shares.
        """
        numbered = torch.arange(len(images), device=images.device)
        own = mixup.num_classes, mixup.label_smoothing
        mixup.num_classes, mixup.label_smoothing = len(images), 0.0
        try:
            return self._mix(mixup, images, numbered, update, part)[1]
        finally:
            mixup.num_classes, mixup.label_smoothing = own

    def _mix(self, mixup: Mixup, images: Tensor, targets: Tensor, update: int, part: int) -> tuple[Tensor, Tensor]:
        state = np.random.get_state()  # noqa: NPY002 - timm draws from the global generator
        np.random.seed(derive_seed(self.seed, update, part) % 2**32)  # noqa: NPY002
        try:
            return mixup(images, targets)
        finally:
            np.random.set_state(state)  # noqa: NPY002
