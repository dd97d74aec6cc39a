"""The keys of an image's random transforms."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from longseq.tasks.training.options import Off

_CROPS = ("random_resized", "padded", "center")
_PADDING_MODES = ("constant", "reflect", "edge", "symmetric")  # torchvision's
_ERASING_MODES = ("const", "rand", "pixel")  # timm's


@dataclass(frozen=True)
class Augmentation:
    """The random transforms of a sample; the defaults change only the size.

    crop: random_resized (Inception's), padded (resize the short side to the image size, pad by `padding` pixels, random
    crop: with padding_mode=reflect, the simple random crop of DeiT III), or center (as in evaluation). `auto_augment`
    is one of timm's strings, such as rand-m9-mstd0.5-inc1 or 3a. timm ignores `color_jitter` together with RandAugment.
    `erasing` has prob, mode (const, rand, pixel) and count. `scale` are the least and the largest part of an image's
    area that random_resized takes, `ratio` those of the width to the height. ValueError for impossible values.
    """

    crop: str = "center"
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    padding: int = 4
    padding_mode: str = "constant"
    hflip: Annotated[float, Off()] = 0.0
    vflip: Annotated[float, Off()] = 0.0
    color_jitter: Annotated[float, Off()] = 0.0
    auto_augment: str | None = None
    erasing: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.crop not in _CROPS:
            raise ValueError(f"augment.crop={self.crop!r} is unknown: choose one of {', '.join(_CROPS)}")
        if not _is_whole(self.padding, 0):
            raise ValueError(f"augment.padding={self.padding} must be a whole number of at least 0")
        if self.padding_mode not in _PADDING_MODES:
            raise ValueError(
                f"augment.padding_mode={self.padding_mode!r} is unknown: choose one of {', '.join(_PADDING_MODES)}"
            )
        _check_erasing(self.erasing)
        for name in ("hflip", "vflip", "color_jitter"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"augment.{name}={getattr(self, name)} must lie between 0 and 1")
        for name, most in (("scale", 1.0), ("ratio", math.inf)):
            low, high = getattr(self, name)
            if not 0 < low <= high <= most:
                limits = "above 0" if most == math.inf else f"above 0 and of at most {most:g}"
                raise ValueError(
                    f"augment.{name}={[low, high]} must be the least and the largest value in this order, {limits}"
                )
        if self.auto_augment is not None:
            _check_policy(self.auto_augment)


def _check_erasing(erasing: Mapping[str, Any]) -> None:
    if unknown := set(erasing) - {"prob", "mode", "count"}:
        raise ValueError(f"augment.erasing has no {', '.join(sorted(unknown))}: its keys are prob, mode, count")
    prob, mode, count = erasing.get("prob", 0.0), erasing.get("mode", "const"), erasing.get("count", 1)
    if isinstance(prob, bool) or not isinstance(prob, int | float) or not 0 <= prob <= 1:
        raise ValueError(f"augment.erasing.prob={prob} must lie between 0 and 1")
    if mode not in _ERASING_MODES:
        raise ValueError(f"augment.erasing.mode={mode!r} is unknown: choose one of {', '.join(_ERASING_MODES)}")
    if not _is_whole(count, 1):
        raise ValueError(f"augment.erasing.count={count} must be a whole number of at least 1")


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check_policy(text: str) -> None:
    """Raise ValueError, in one line, for a policy that timm does not know, or parts of it that timm passes over."""
    from timm.data import auto_augment as timms  # the keys beside this module do without it

    name, *parts = text.split("-")
    chosen = [part[1:] for part in parts if name == "rand" and part.startswith("t")]
    usual = timms.rand_augment_choices("")
    unread = [part for part in parts if not any(map(str.isdigit, part)) and part[1:] not in chosen]
    unread += [f"t{one}" for one in chosen if timms.rand_augment_choices(one) is usual]
    reason = f"it reads no {unread[0] or 'empty part'}" if unread else None
    makers = {"rand": timms.rand_augment_transform, "augmix": timms.augment_and_mix_transform}
    try:
        makers.get(name, timms.auto_augment_transform)(text)
    except (AssertionError, ValueError) as error:
        reason = reason or str(error) or "it cannot be read"
    reason = reason or _find_wrong_number(parts)
    if reason is not None:
        raise ValueError(
            f"augment.auto_augment={text} is no policy of timm ({reason}): give one such as rand-m9-mstd0.5-inc1, "
            "augmix-m3-w3, 3a, original or v0, or null"
        )


def _find_wrong_number(parts: Sequence[str]) -> str | None:
    """What is wrong with a number of a policy, of which timm takes any."""
    found = [match for part in parts if (match := re.fullmatch(r"([a-z]+)([\d.]+)", part))]
    numbers = {match[1]: float(match[2]) for match in found}
    if numbers.get("n") == 0 or numbers.get("w") == 0:
        return "it changes no image"
    return f"p={numbers['p']:g} is no probability" if numbers.get("p", 0) > 1 else None
