"""Pillow's arithmetic on whole numbers from 0 to 255, in float32."""

import torch
from torch import Tensor

# Pillow's conversion to grey, in 65,536ths (ITU-R 601-2).
_GREY = (19595.0, 38470.0, 7471.0)


def grey_of(values: Tensor, dim: int) -> Tensor:
    """Three channels of whole numbers in float32 along `dim` -> one."""
    red, green, blue = values.split(1, dim)
    return ((red * _GREY[0] + green * _GREY[1] + blue * _GREY[2] + 32768) / 65536).floor_()


def rounded(values: Tensor) -> Tensor:
    # Pillow rounds halves up.
    return values.add_(0.5).floor_().clamp_(0, 255)


def weighted(pixels: Tensor, weights: Tensor) -> Tensor:
    """pixels @ weights, for pixels of whole numbers up to 255 [n, P, L] and weights [n, L, S].

    TF32, in which a GPU may multiply float32, keeps 11 bits of a number. The pixels need 8; the weights are multiplied
    in two parts, so that nothing is lost.
    """
    if pixels.dtype == torch.float16:
        return pixels @ weights.half()
    if pixels.device.type == "cpu":
        return pixels @ weights
    coarse = weights.half().float()
    return torch.baddbmm(pixels @ coarse, pixels, weights - coarse)


def to_grey(images: Tensor) -> Tensor:
    """uint8 [B, 3, H, W] -> uint8 [B, 1, H, W], as Pillow converts RGB to L."""
    return grey_of(images.float(), 1).to(torch.uint8)
