"""The keys of an image's random transforms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_CROPS = ("random_resized", "padded", "center")


@dataclass(frozen=True)
class Augmentation:
    """The random transforms of a sample; the defaults change only the size.

    crop: random_resized (Inception's), padded (resize the short side to the image size, pad by `padding` pixels, random
    crop: with padding_mode=reflect, the simple random crop of DeiT III), or center (as in evaluation). `auto_augment`
    is one of timm's strings, such as rand-m9-mstd0.5-inc1 or 3a. timm ignores `color_jitter` together with RandAugment.
    `erasing` has prob, mode (const, rand, pixel) and count.
    """

    crop: str = "center"
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    padding: int = 4
    padding_mode: str = "constant"
    hflip: float = 0.0
    vflip: float = 0.0
    color_jitter: float = 0.0
    auto_augment: str | None = None
    erasing: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.crop not in _CROPS:
            raise ValueError(f"augment.crop={self.crop!r} is unknown: choose one of {', '.join(_CROPS)}")
        if unknown := set(self.erasing) - {"prob", "mode", "count"}:
            raise ValueError(f"augment.erasing has no {', '.join(sorted(unknown))}: its keys are prob, mode, count")
        for name in ("hflip", "vflip", "color_jitter"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"augment.{name}={getattr(self, name)} must lie between 0 and 1")
