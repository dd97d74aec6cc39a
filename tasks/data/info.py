"""The properties of data that models, checkpoints and exported files need."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from longseq.tokenizer_files import same_tokenizer

InfoT = TypeVar("InfoT", bound="Info")

STAGES = {"train": "train", "val": "validation", "test": "test"}  # the split of each stage of a run


@dataclass(frozen=True, kw_only=True)
class Info(ABC):
    """The facts about the data that a model, its checkpoint and exported files need; each task has its own dataclass.

    Its fields are dictionaries, lists, text and numbers. `sizes` has the samples of each split, None for a stream of
    unknown length. `checksums` are of tokens; of documents' text and labels; or of image files' names and labels.
    """

    sizes: dict[str, int | None] = field(default_factory=dict)
    checksums: dict[str, list[int]] = field(default_factory=dict)

    _changed: ClassVar[str] = "other samples"  # the meaning of a changed checksum
    _meaning: ClassVar[tuple[str, ...]] = ()  # the fields that give class or token numbers their meaning

    def find_change(self: InfoT, trained: InfoT, split: str) -> str | None:
        """The difference between a split and the one at training, in words; None without a known difference."""
        now, then = self.sizes.get(split), trained.sizes.get(split)
        if None not in (now, then) and now != then:
            return f"{split} has {now} samples now, and had {then} when the model was trained"
        own, its = self.checksums.get(split), trained.checksums.get(split)
        if own is None or its is None or own == its:
            return None
        return f"{split} has {self._changed} than when the model was trained, and as many samples"

    def find_other_meaning(self: InfoT, trained: InfoT) -> str | None:
        """Why class or token numbers mean something else than in the data `trained`, in words; None if they do not."""
        for name in self._meaning:
            own, its = getattr(self, name), getattr(trained, name)
            if own == its or (name == "tokenizer" and None not in (own, its) and same_tokenizer(own, its)):
                continue
            return f"the {name.replace('_', ' ')} differs"
        return None

    def to_dict(self) -> dict[str, Any]:
        """Dictionaries, lists and numbers, for checkpoints."""
        return asdict(self)

    @classmethod
    def from_dict(cls: type[InfoT], values: Mapping[str, Any]) -> InfoT:
        """The inverse of `to_dict`; other keys are ignored."""
        return cls(**{entry.name: values[entry.name] for entry in fields(cls) if entry.name in values})

    @abstractmethod
    def describe(self) -> str:
        """The data in a few words."""
