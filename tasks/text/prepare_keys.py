"""The keys of `longseq prepare`, without what the command itself imports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from longseq.tasks.training.command import CommandKeys
from longseq.tasks.training.options import Length, Range, Required
from longseq.tasks.training.processes import refuse_many

Fraction = Annotated[float, Range(0, below=1)]


@dataclass(frozen=True, kw_only=True)
class PrepareKeys(CommandKeys):
    """The keys of `longseq prepare`, explained in conf/prepare.yaml."""

    input: Annotated[
        str | Annotated[list[str], Length(1)] | None,
        Required("give input=FILE, input=FOLDER or input=[A,B]: the text to prepare"),
    ]
    whole_files: bool
    output: Annotated[str | None, Required("give output=FOLDER: where the tokens are written")]
    tokenizer: str
    separator: str | None
    column: str
    prompt_column: str | None
    validation: Fraction
    test: Fraction
    processes: Annotated[int | None, Range(1)]

    def __post_init__(self) -> None:
        refuse_many(self.processes, "processes")
        if not self.tokenizer:
            raise ValueError("tokenizer= is empty: give bytes, train:SIZE, or a tokenizer.json")
        if self.validation + self.test >= 1:
            raise ValueError(
                f"validation={self.validation} and test={self.test} leave nothing to train on: give less than 1"
            )
