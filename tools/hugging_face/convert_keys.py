"""The keys of `longseq convert`, without what the command itself imports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from longseq.tasks.training.command import CommandKeys
from longseq.tasks.training.options import Length, OneOf, Range, Required

OURS = "longseq"


def _formats() -> list[str]:
    from longseq.tools.hugging_face.families import FAMILIES  # it imports all mixers, and `--help` need not wait

    return [OURS, *FAMILIES]


@dataclass(frozen=True, kw_only=True)
class MixerKeys:
    """The keys of `mixer`."""

    name: str | Annotated[list[str], Length(1)] | None
    options: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ConvertKeys(CommandKeys):
    """The keys of `longseq convert`, explained in conf/convert.yaml."""

    source: Annotated[str | None, Required("give source=FOLDER: the model to convert")]
    output: Annotated[str | None, Required("give output=FOLDER: where the converted model is written")]
    mixer: MixerKeys
    format: Annotated[str, OneOf(_formats)]
    seed: Annotated[int, Range(0)]
