"""Saliency: how strongly each pixel of an image moves the score of a class."""

from __future__ import annotations

import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torchvision.transforms.functional import gaussian_blur, to_pil_image

_SMALLEST = 128  # the least size of an image in a picture, in pixels
_LINE = 14  # the height of a line of text
_HOT = (1.0, 0.35, 0.0)  # the colour of the strongest pixels


def saliency(model: nn.Module, images: Tensor, classes: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The logits [B, num_classes] of images, and the gradients of a class's score [B, H, W].

    A map is the largest absolute gradient over the channels (Simonyan, Vedaldi and Zisserman 2014, "Deep inside
    convolutional networks", section 3.1). It needs the gradient of the images alone, which every mixer has, and leaves
    the gradients of the weights as they are. It may be called in inference mode.

    Args:
        model: maps images to logits; in evaluation mode, so that images do not influence each other.
        images: normalised, float [B, C, H, W].
        classes: int64 [B], whose scores (logits) are explained; None for the predicted ones.
    """
    with torch.inference_mode(False), torch.enable_grad():
        pixels = images.detach().clone().requires_grad_()
        logits = model(pixels).float()
        chosen = logits.detach().argmax(dim=1) if classes is None else classes.clone()
        (gradients,) = torch.autograd.grad(logits.gather(1, chosen[:, None]).sum(), pixels)
    return logits.detach(), gradients.float().abs().amax(dim=1)


def shade(pixels: Tensor, maps: Tensor) -> Tensor:
    """Grey images [N, 3, h, w] in which the pixels of high saliency glow; `pixels` [N, C, h, w] lie in [0, 1].

    A map [N, h, w] is smoothed, because the gradients of neighbours differ by the weights of the patches. Its darker
    half does not glow, and its brightest hundredth glows fully.
    """
    smooth = _blurred(maps)
    middle, most = smooth.flatten(1).quantile(torch.tensor([0.5, 0.99], device=maps.device), dim=1)[:, :, None, None]
    heat = ((smooth - middle) / (most - middle).clamp(min=torch.finfo(maps.dtype).tiny)).clamp(0, 1)[:, None]
    grey = pixels.mean(dim=1, keepdim=True)
    return 0.6 * grey * (1 - heat) + heat * torch.tensor(_HOT, device=maps.device).view(3, 1, 1)


def _blurred(maps: Tensor) -> Tensor:
    """Maps [N, h, w] through a Gaussian of a 32nd of their shorter side: half a patch where 16 of them lie along it."""
    deviation = min(maps.shape[-2:]) / 32
    radius = round(2 * deviation)
    return maps if radius == 0 else gaussian_blur(maps[:, None], 2 * radius + 1, deviation)[:, 0]


def draw_saliency(pixels: Tensor, saliency_map: Tensor, caption: str) -> Image.Image:
    """An image [C, h, w] in [0, 1] beside its map [h, w], with a line of text below."""
    shown = (pixels, shade(pixels[None], saliency_map[None])[0])
    times = -(-_SMALLEST // pixels.shape[-1])  # whole, so that pixels stay squares
    width, height = pixels.shape[-1] * times, pixels.shape[-2] * times
    canvas = Image.new("RGB", (2 * width + 2, height + _LINE), "white")
    for place, image in enumerate(shown):
        tile = to_pil_image(image.clamp(0, 1)).convert("RGB")
        canvas.paste(tile.resize((width, height), Image.Resampling.NEAREST), (place * (width + 2), 0))
    ImageDraw.Draw(canvas).text((2, height + 1), caption, fill="black")
    return canvas
