"""What a model must know of its probe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class ProbeInfo:
    """What a model and a checkpoint must know of a probe.

    `longest` is the length of the longest sequences in training, validation and test. With `rebuild`, the model must
    reproduce the whole sequence from its last feature. `slices` names the slices of val and test; `sizes` has the
    number of sequences of each split.
    """

    generator: str
    vocab_size: int
    longest: int
    rebuild: bool
    slices: dict[str, list[str]] = field(default_factory=dict)
    sizes: dict[str, int | None] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Dictionaries, lists and numbers, for checkpoints."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ProbeInfo:
        """The inverse of `to_dict`; other keys are ignored."""
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})

    def describe(self) -> str:
        """The probe in a few words."""
        return f"{self.vocab_size} tokens, sequences of at most {self.longest}"
