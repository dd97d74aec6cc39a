"""The keys of `data` of tasks on text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from longseq.tasks.training.options import Length, Range

Fraction = Annotated[float, Range(0, below=1)]


@dataclass(frozen=True, kw_only=True)
class TextDataKeys:
    """The keys of `data`; what they mean stands in `longseq.tasks.lm.data.LanguageModelData`."""

    name: str
    source: Literal["standard_library", "tokens"]
    root: str | Annotated[list[str], Length(1)] | None = None
    weights: Annotated[list[Annotated[float, Range(above=0)]], Length(1)] | None = None
    check: bool = True
    validation: Fraction = 0.05
    test: Fraction = 0.05
    window: Annotated[int, Range(2)]
    packing: Literal["concatenated", "documents", "streams"] = "concatenated"
    reset_state: bool = True
    eval_batch_size: Annotated[int | None, Range(1)] = None
    num_workers: Annotated[int, Range(0)] = 0
    pin_memory: bool = False

    def __post_init__(self) -> None:
        if self.validation + self.test >= 1:
            raise ValueError(
                f"data.validation={self.validation} and data.test={self.test} leave nothing to train on: their sum is "
                "below 1"
            )
        if self.source == "tokens" and self.root is None:
            raise ValueError("data=tokens reads what `longseq prepare` has written: give data.root=FOLDER")
        if self.source == "standard_library" and self.root is not None:
            raise ValueError(f"data.root={self.root} is not read by data.source=standard_library: leave it out")
        roots = 1 if self.root is None or isinstance(self.root, str) else len(self.root)
        if self.weights is not None and len(self.weights) != roots:
            raise ValueError(
                f"data.weights has {len(self.weights)} entries, data.root {roots}: give one for each folder"
            )
        if self.packing == "streams" and roots > 1:
            raise ValueError("data.packing=streams reads one corpus: give one data.root, or another data.packing")
        if self.packing == "documents" and not self.reset_state:
            raise ValueError("data.packing=documents keeps documents apart: leave data.reset_state at true")
