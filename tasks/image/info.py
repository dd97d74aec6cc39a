"""The properties of the training data that a model keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from longseq.tasks.data.info import Info

if TYPE_CHECKING:
    from longseq.tasks.image.config import ImageDataKeys


_SHARED = ("img_size", "in_chans", "interpolation", "crop_pct", "multi_label")  # with the keys of `data`


@dataclass(frozen=True)
class DataInfo(Info):
    """The classes and the preprocessing of image data, kept by models, checkpoints and exported files.

    `img_size` is [height, width] for images that are not square. `mean` and `std` are per channel, of pixels in [0, 1].
    `crop_mode` is timm's: center, squash or border. `sizes` has the number of images in each split, None if unknown.
    With `multi_label` an image has any number of the classes. `class_weights` has the weight of each class in the loss,
    None if all are 1. `thresholds` are the probabilities from which each label, or the second of two classes, is
    predicted; None for one half, or for the most probable class.
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

    @classmethod
    def from_keys(cls, keys: ImageDataKeys, *, class_names: list[str], **values: Any) -> DataInfo:
        """The info of data opened with these keys of `data`; `values` are the fields that `keys` does not have."""
        values |= {name: getattr(keys, name) for name in _SHARED}
        values |= {name: per_channel(name, getattr(keys, name), keys.in_chans) for name in ("mean", "std")}
        return cls(class_names=class_names, num_classes=len(class_names), **values)

    @property
    def sides(self) -> tuple[int, int]:
        """The height and width of the images that the model reads."""
        height, width = (self.img_size, self.img_size) if isinstance(self.img_size, int) else self.img_size
        return height, width

    @property
    def side(self) -> int:
        """The side of the square images that the model reads; ValueError for others."""
        height, width = self.sides
        if height != width:
            raise ValueError(f"img_size={list(self.sides)} is not square: only predict and export read such images")
        return height

    def to_keys(self) -> dict[str, Any]:
        """The keys of `data` that transform other images in the same way."""
        return {"name": "images", **{key: getattr(self, key) for key in (*_SHARED, "mean", "std")}}

    def describe(self) -> str:
        """The data in a few words."""
        size = " x ".join(str(side) for side in dict.fromkeys(self.sides))
        return f"{size} px, {self.num_classes} {'labels' if self.multi_label else 'classes'}"


def per_channel(name: str, values: Sequence[float], in_chans: int) -> list[float]:
    """`data.mean` or `data.std` with one value per channel: repeated for RGB, averaged for grey."""
    if len(values) not in (1, 3):
        raise ValueError(f"data.{name} has {len(values)} values: give 1 or 3")
    if len(values) == in_chans:
        return [float(value) for value in values]
    return [sum(values) / len(values)] * in_chans
