"""The keys of `longseq convert`, without what the command itself imports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from longseq.tasks.training.command import CommandKeys
from longseq.tasks.training.options import Length, Range, Required

OURS = "longseq"


@dataclass(frozen=True, kw_only=True)
class MixerKeys:
    """The keys of `mixer`."""

    name: str | Annotated[list[str], Length(1)] | None
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.options and self.name is None:
            raise ValueError("mixer.options are those of new mixers: give mixer=NAME, too")


@dataclass(frozen=True, kw_only=True)
class ConvertKeys(CommandKeys):
    """The keys of `longseq convert`, explained in conf/convert.yaml."""

    source: Annotated[str | None, Required("give source=FOLDER: the model to convert")]
    output: Annotated[str | None, Required("give output=FOLDER: where the converted model is written")]
    mixer: MixerKeys
    format: str
    seed: Annotated[int, Range(0)]

    def __post_init__(self) -> None:
        from longseq.tools.hugging_face.families import FAMILIES  # it imports all mixers, and `--help` need not wait

        if self.format != OURS and self.format not in FAMILIES:
            raise ValueError(f"format={self.format} is unknown: take {OURS}, {', '.join(FAMILIES)}")
        if self.seed != 0 and self.mixer.name is None:
            raise ValueError(f"seed={self.seed} has no effect: it draws parameters of new mixers; give mixer=NAME, too")
