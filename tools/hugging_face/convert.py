"""`longseq convert`: a model of another library becomes one of ours, or ours one of theirs, with the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from omegaconf import DictConfig

from longseq.tasks.report import quiet_libraries
from longseq.tasks.training.command import CommandKeys, read_command
from longseq.tasks.training.options import Length, Required
from longseq.tools.hugging_face.conversion import change_mixer, read_model, write_family, write_model
from longseq.tools.hugging_face.families import FAMILIES

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
    seed: int

    def __post_init__(self) -> None:
        if self.format != OURS and self.format not in FAMILIES:
            raise ValueError(f"format={self.format} is unknown: take {OURS}, {', '.join(FAMILIES)}")


@quiet_libraries()
def run(cfg: DictConfig) -> Path:
    """Convert a model as configured; returns the folder that was written."""
    keys = read_command(ConvertKeys, cfg)
    assert keys.source is not None
    assert keys.output is not None
    source, output = Path(keys.source), Path(keys.output)
    if not source.exists():
        raise ValueError(f"source={source} is no folder here; download a model of the hub first")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"output={output} is not empty: give a new folder")
    model = read_model(source)
    if keys.mixer.name is not None:
        model = change_mixer(model, keys.mixer.name, keys.mixer.options, keys.seed)
    if keys.format == OURS:
        write_model(model, output)
    else:
        write_family(model, FAMILIES[keys.format], output)
    backbone = model.backbone()
    count = sum(parameter.numel() for parameter in backbone.parameters())
    print(f"{output}: {count:,} parameters, {backbone.mixer_name}, format={keys.format}")
    return output
