"""The keys of an image's random transforms."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from longseq.tasks.config import Count, Keys, Positive, key

Part = Annotated[float, Field(ge=0, le=1)]
# The least and the largest value.
Span = Annotated[tuple[Positive, Positive], Field(strict=False)]


class ErasingKeys(Keys):
    """The keys of `recipe.augment.erasing`, timm's RandomErasing."""

    prob: Part = key(0.0, "the share of the images of which a rectangle is erased")
    mode: Literal["const", "rand", "pixel"] = key("const", "zeros, a random colour, or random pixels")
    count: Count = key(1, "the most rectangles")


class Augmentation(Keys):
    """The random transforms of a sample; the defaults change only the size."""

    crop: Literal["random_resized", "padded", "center"] = key(
        "center", "random_resized: Inception's; padded: a random crop of the whole image (DeiT III's); center: none"
    )
    scale: Span = key((0.08, 1.0), "of random_resized: the least and the largest part of an image's area")
    ratio: Span = key((3 / 4, 4 / 3), "of random_resized: the width over the height")
    padding: int = key(4, "of padded: the pixels that are added at each side", ge=0)
    padding_mode: Literal["constant", "reflect", "edge", "symmetric"] = key("constant", "of padded")
    hflip: Part = key(0.0, "the share of the images that are mirrored")
    vflip: Part = key(0.0, "the share of the images that are turned upside down")
    color_jitter: Part = key(0.0, "timm ignores it together with RandAugment")
    auto_augment: str | None = key(None, "a policy of timm such as rand-m9-mstd0.5-inc1, 3a or augmix-m3-w3")
    erasing: ErasingKeys = key(ErasingKeys(), "random erasing")
