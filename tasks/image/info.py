"""What a model must know of its training data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longseq.tasks.data.info import Info

# The least part of an image's side that an evaluation keeps: of less, hardly anything is left, and the image is
# enlarged more than tenfold before it is cropped.
LEAST_CROP = 0.1


@dataclass(frozen=True)
class DataInfo(Info):
    """What a model, a checkpoint and an exported file must know of the data.

    `img_size` is [height, width] of a model that reads no squares. `mean` and `std` are per channel, of pixels in
    [0, 1]. `crop_mode` is how timm calls the way to `img_size`: center, squash or border. `sizes` has the number of
    images of each split, None if a stream does not know it. With `multi_label` an image has any number of the classes.
    `class_weights` has the weight of each class in the loss (with `multi_label` that of an image's own labels), None if
    all are 1. `thresholds` are those of `longseq.tasks.training.metrics.decide`: the probabilities from which a label
    is given, or the second one of two classes; None for one half, or for the most probable class.
    """

    class_names: list[str]
    num_classes: int
    img_size: int | list[int]
    in_chans: int
    mean: list[float]
    std: list[float]
    interpolation: str
    crop_pct: float
    multi_label: bool = False
    class_weights: list[float] | None = None
    thresholds: list[float] | None = None
    crop_mode: str = "center"

    _changed = "other files or labels"
    _meaning = ("class_names", "multi_label")

    @property
    def sides(self) -> tuple[int, int]:
        """The height and width of the images that the model reads."""
        if isinstance(self.img_size, int):
            return self.img_size, self.img_size
        height, width = self.img_size
        return height, width

    @property
    def side(self) -> int:
        """The side of the square images that the model reads; ValueError for others."""
        height, width = self.sides
        if height != width:
            raise ValueError(f"img_size={list(self.sides)} is no square: only predict and export read such images")
        return height

    def to_keys(self) -> dict[str, Any]:
        """The keys of `data` that transform other images as these were."""
        prepared = ("img_size", "in_chans", "mean", "std", "interpolation", "crop_pct", "multi_label")
        return {"name": "images", **{key: getattr(self, key) for key in prepared}}

    def describe(self) -> str:
        """The data in a few words."""
        size = " x ".join(str(side) for side in dict.fromkeys(self.sides))
        return f"{size} px, {self.num_classes} {'labels' if self.multi_label else 'classes'}"
