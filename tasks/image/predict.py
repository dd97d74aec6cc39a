"""Image files for `longseq predict`, and saliency: how strongly each pixel changes the score of a class."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.functional import gaussian_blur
from torchvision.utils import save_image

from longseq.tasks.commands import Predict
from longseq.tasks.data.loader import UNREADABLE, share_memory
from longseq.tasks.data.module import NO_DETAILS, TOP_K, Inputs, Prediction, Unreadable, decided_details, predictions_of
from longseq.tasks.image.config import DataInfo
from longseq.tasks.image.datasets import stack_images
from longseq.tasks.image.decoding import decode, first_line
from longseq.tasks.image.files import find_images
from longseq.tasks.image.transforms import denormalize, evaluation_transform, normalize

_log = logging.getLogger(__name__)

_SMALLEST = 128  # the smallest side of an image in a picture, in pixels
_HOT = (1.0, 0.35, 0.0)  # the colour of the strongest pixels


class ImageFiles(Inputs, Dataset[Any]):
    """The image files below a folder, or one file, in the order of their paths, transformed for a model.

    A prediction has the five most probable classes, or all labels if the info has `multi_label`. Items are (uint8
    [C, H, W], path), or `Unreadable` with the reason, which is logged. Hidden files and files without an image ending
    are left out. ValueError if there are no images.
    """

    def __init__(self, path: str, info: DataInfo) -> None:
        root = Path(path)
        self.paths = [str(root)] if root.is_file() else sorted(find_images(str(root)))
        if not self.paths:
            raise ValueError(f"input={path} holds no images")
        self.info = info
        self.transform = evaluation_transform(info)
        self.details = decided_details(info)
        self._root = str(root.parent if root.is_file() else root)

    @classmethod
    def open(cls, path: str, info: DataInfo, keys: Predict) -> ImageFiles:
        return cls(path, info)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, str] | Unreadable:
        path = self.paths[index]
        try:
            return self.transform(decode(path)), path
        except UNREADABLE as error:
            _log.warning("skipped unreadable image %s (%s)", path, first_line(error))
            return Unreadable(path, f"unreadable: {first_line(error)}")

    def collate(self, items: list[tuple[Tensor, str] | Unreadable]) -> tuple[Tensor, list[str], list[Unreadable]]:
        """Images uint8 [B, C, H, W], their paths, and the images that cannot be read."""
        read = [item for item in items if not isinstance(item, Unreadable)]
        images = stack_images([image for image, _ in read], self.info)
        failed = [item for item in items if isinstance(item, Unreadable)]
        return share_memory((images, [path for _, path in read], failed))

    def predict(self, model: nn.Module, keys: Predict) -> Iterator[Prediction | Unreadable]:
        info, device = self.info, next(model.parameters()).device
        count = keys.top_k or (len(info.class_names) if info.multi_label else TOP_K)
        loader = DataLoader(self, keys.batch_size, num_workers=keys.num_workers, collate_fn=self.collate)
        for batch, paths, failed in loader:
            if paths:
                logits = self._score(model, normalize(batch.to(device), info), paths, keys)
                yield from predictions_of(((path, NO_DETAILS) for path in paths), logits, info, count)
            yield from failed

    def _score(self, model: nn.Module, batch: Tensor, paths: list[str], keys: Predict) -> Tensor:
        """The logits [B, num_classes]; with `saliency=FOLDER`, also writes a picture of each image."""
        if keys.saliency is None:
            return model(batch)
        chosen = None
        if keys.saliency_class is not None:
            number = self.info.class_names.index(str(keys.saliency_class))
            chosen = torch.full((len(batch),), number, device=batch.device)
        logits, maps = saliency(model, batch, chosen)
        for path, *shown in zip(paths, denormalize(batch, self.info).cpu(), maps.cpu(), strict=True):
            picture = Path(keys.saliency, os.path.relpath(path, self._root) + ".png")
            picture.parent.mkdir(parents=True, exist_ok=True)
            save_image(draw_saliency(*shown), picture)
        return logits


def saliency(model: nn.Module, images: Tensor, classes: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The logits [B, num_classes] of images, and the saliency [B, H, W] of a class's score.

    Saliency is the largest absolute gradient over the channels (Simonyan, Vedaldi and Zisserman 2014, "Deep inside
    convolutional networks", section 3.1). The gradients of the weights stay as they are. Works in inference mode, too.

    Args:
        model: maps images to logits; in evaluation mode, so that images do not influence each other.
        images: normalised, float [B, C, H, W].
        classes: int64 [B], the class of each image whose logit is explained; None for the predicted one.
    """
    with torch.inference_mode(False), torch.enable_grad():
        pixels = images.detach().clone().requires_grad_()
        logits = model(pixels).float()
        chosen = logits.detach().argmax(dim=1) if classes is None else classes.clone()
        (gradients,) = torch.autograd.grad(logits.gather(1, chosen[:, None]).sum(), pixels)
    return logits.detach(), gradients.float().abs().amax(dim=1)


def shade(pixels: Tensor, maps: Tensor) -> Tensor:
    """Grey images [N, 3, h, w] in which the pixels of high saliency glow; `pixels` [N, C, h, w] are in [0, 1].

    A map [N, h, w] is first blurred, with 1/32 of the shorter side as standard deviation, because neighbouring pixels
    meet different weights of their patch. Its darker half does not glow, and its brightest hundredth glows fully.
    """
    deviation = min(maps.shape[-2:]) / 32
    radius = round(2 * deviation)
    smooth = maps if radius == 0 else gaussian_blur(maps[:, None], 2 * radius + 1, deviation)[:, 0]
    middle, most = smooth.flatten(1).quantile(torch.tensor([0.5, 0.99], device=maps.device), dim=1)[:, :, None, None]
    heat = ((smooth - middle) / (most - middle).clamp(min=torch.finfo(maps.dtype).tiny)).clamp(0, 1)[:, None]
    grey = pixels.mean(dim=1, keepdim=True)
    return 0.6 * grey * (1 - heat) + heat * torch.tensor(_HOT, device=maps.device).view(3, 1, 1)


def draw_saliency(pixels: Tensor, saliency_map: Tensor) -> Tensor:
    """An image [C, h, w] in [0, 1] next to its map [h, w]: [3, H, W]."""
    times = -(-_SMALLEST // pixels.shape[-1])  # whole, so that pixels stay squares
    shown = torch.cat([pixels.expand(3, -1, -1), shade(pixels[None], saliency_map[None])[0]], dim=2)
    return shown.repeat_interleave(times, 1).repeat_interleave(times, 2)
