"""The properties of data that models, checkpoints and exported files need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, ClassVar, TypeVar

InfoT = TypeVar("InfoT", bound="Info")


@dataclass(frozen=True, kw_only=True)
class Info(ABC):
    """What a model, a checkpoint and an exported file must know of the data; each task has a dataclass of its own.

    Its fields are dictionaries, lists, text and numbers. `sizes` has the number of samples of each split, None if a
    stream does not know it. `checksums` are of what is known of the samples of val and test without reading images: of
    each corpus the tokens, of documents their text and labels, of image files their names and labels.
    """

    sizes: dict[str, int | None] = field(default_factory=dict)
    checksums: dict[str, list[int]] = field(default_factory=dict)

    # What a changed checksum means.
    _changed: ClassVar[str] = "other samples"

    def find_change(self: InfoT, trained: InfoT, split: str) -> str | None:
        """How the data of a split differ from those that a model was trained beside, in words; None if nothing is known
        to differ."""
        now, then = self.sizes.get(split), trained.sizes.get(split)
        if now is not None and then is not None and now != then:
            return f"{split} has {now} samples now, and had {then} when the model was trained"
        own, its = self.checksums.get(split), trained.checksums.get(split)
        if own is None or its is None or own == its:
            return None
        return f"{split} has {self._changed} than when the model was trained, and as many samples"

    def to_dict(self) -> dict[str, Any]:
        """Dictionaries, lists and numbers, for checkpoints."""
        return asdict(self)

    @classmethod
    def from_dict(cls: type[InfoT], values: Mapping[str, Any]) -> InfoT:
        """The inverse of `to_dict`; other keys are ignored. ValueError if one is missing."""
        needed = [entry.name for entry in fields(cls) if MISSING is entry.default is entry.default_factory]
        if missing := [name for name in needed if name not in values]:
            raise ValueError(f"the checkpoint does not tell {', '.join(missing)} of its data: it is of another task")
        return cls(**{entry.name: values[entry.name] for entry in fields(cls) if entry.name in values})

    @abstractmethod
    def describe(self) -> str:
        """The data in a few words."""
