"""What a model must know of its probe."""

from __future__ import annotations

from dataclasses import dataclass, field

from longseq.tasks.data.info import Info


@dataclass(frozen=True)
class ProbeInfo(Info):
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

    def describe(self) -> str:
        """The probe in a few words."""
        return f"{self.vocab_size} tokens, sequences of at most {self.longest}"
