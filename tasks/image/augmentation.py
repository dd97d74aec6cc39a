"""The keys of an image's random transforms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from longseq.tasks.training.options import Off, Range

Share = Annotated[float, Range(0, 1), Off()]


@dataclass(frozen=True)
class Augmentation:
    """The random transforms of a sample; the defaults change only the size.

    crop: random_resized (Inception's), padded (resize the short side to the image size, pad by `padding` pixels, random
    crop: with padding_mode=reflect, the simple random crop of DeiT III), or center (as in evaluation). `auto_augment`
    is one of timm's strings, such as rand-m9-mstd0.5-inc1 or 3a. timm ignores `color_jitter` together with RandAugment.
    `erasing` has prob, mode (const, rand, pixel) and count. `scale` are the least and the largest part of an image's
    area that random_resized takes, `ratio` those of the width to the height.
    """

    crop: Literal["random_resized", "padded", "center"] = "center"
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    padding: Annotated[int, Range(0)] = 4
    padding_mode: Literal["constant", "reflect", "edge", "symmetric"] = "constant"
    hflip: Share = 0.0
    vflip: Share = 0.0
    color_jitter: Share = 0.0
    auto_augment: str | None = None
    erasing: Mapping[str, Any] = field(default_factory=dict)
