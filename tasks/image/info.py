"""What a model must know of its training data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class DataInfo:
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
    sizes: dict[str, int | None] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Dictionaries, lists and numbers, for checkpoints."""
        return asdict(self)

    def to_keys(self) -> dict[str, Any]:
        """The keys of `data` that transform other images as these were."""
        prepared = ("img_size", "in_chans", "mean", "std", "interpolation", "crop_pct")
        return {"name": "images", **{key: getattr(self, key) for key in prepared}}

    def describe(self) -> str:
        """The data in a few words."""
        return f"{self.img_size} px, {self.num_classes} classes"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DataInfo:
        """The inverse of `to_dict`; other keys are ignored."""
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})
