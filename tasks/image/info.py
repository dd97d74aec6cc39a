"""What a model must know of its training data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longseq.tasks.data.info import Info


@dataclass(frozen=True)
class DataInfo(Info):
    """What a model, a checkpoint and an exported file must know of the data.

    `mean` and `std` are per channel, of pixels in [0, 1]. `sizes` has the number of images of each split, None if a
    stream does not know it.
    """

    class_names: list[str]
    num_classes: int
    img_size: int
    in_chans: int
    mean: list[float]
    std: list[float]
    interpolation: str
    crop_pct: float

    def to_keys(self) -> dict[str, Any]:
        """The keys of `data` that transform other images as these were."""
        prepared = ("img_size", "in_chans", "mean", "std", "interpolation", "crop_pct")
        return {"name": "images", **{key: getattr(self, key) for key in prepared}}

    def describe(self) -> str:
        """The data in a few words."""
        return f"{self.img_size} px, {self.num_classes} classes"
