"""What a model must know of the probe it was made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class ProbeInfo:
    """What a model and a checkpoint must know of a probe.

    `longest` is the length of its longest sequences in training, validation and test; with `rebuild` the model must
    write the whole sequence from its last feature; `slices` names the parts of val and test, `sizes` counts the
    sequences of each split.
    """

    generator: str
    vocab_size: int
    longest: int
    rebuild: bool
    slices: dict[str, list[str]] = field(default_factory=dict)
    sizes: dict[str, int | None] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, for checkpoints."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ProbeInfo:
        """The inverse of `to_dict`; keys of others are ignored."""
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})

    def describe(self) -> str:
        """The probe in a few words."""
        return f"{self.vocab_size} tokens, sequences of at most {self.longest}"
