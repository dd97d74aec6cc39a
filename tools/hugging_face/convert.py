"""`longseq convert`: a model of another library becomes one of ours, or ours one of theirs, with the same weights."""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from longseq import mixers
from longseq.backbones.tokens import TokenBackbone
from longseq.mixers.pattern import options_by_name
from longseq.models import describe
from longseq.tasks.commands import Convert
from longseq.tasks.report import quiet_libraries
from longseq.tasks.training.configuration import BodyKeys, TokenModelKeys, read_command
from longseq.tokenizer_files import TOKENIZER_FILE
from longseq.tools.hugging_face.conversion import change_mixer, read_model, write_family, write_model
from longseq.tools.hugging_face.families import FAMILIES


@quiet_libraries()
def run(cfg: DictConfig) -> Path:
    """Convert a model as configured; returns the folder that was written."""
    keys = read_command(Convert, cfg)
    output = Path(keys.output)
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"output={output} is not empty")
    model = read_model(Path(keys.source))
    if keys.mixer.name is not None:
        model = change_mixer(model, keys.mixer.name, keys.mixer.options, keys.seed)
    if keys.format == "longseq":
        write_model(model, output)
    else:
        write_family(model, FAMILIES[keys.format], output)
    backbone = model.backbone()
    count = sum(parameter.numel() for parameter in backbone.parameters())
    print(f"{output}: {count:,} parameters, {backbone.mixer_name}, format={keys.format}")
    if keys.format == "longseq" and (output / TOKENIZER_FILE).is_file():
        print(f"to classify documents with it: {train_command(backbone, output, 'document')}")
        print(f"to train it further: {train_command(backbone, output, 'lm')}")
    return output


def train_command(backbone: TokenBackbone, folder: Path, task: str) -> str:
    """The command that trains a saved model further, quoted for a shell; it names options that are not the defaults."""
    arguments = describe(backbone)["model_args"]
    pattern = arguments["mixer"]
    chosen = options_by_name(pattern, arguments["mixer_options"])
    hybrid = len(chosen) > 1
    words = [f"init={folder}", *(["mixer=hybrid", f"mixer.name={pattern}"] if hybrid else [f"mixer={pattern}"])]
    for name, options in chosen.items():
        usual = mixers.options(name)
        place = f"+mixer.options.{name}" if hybrid else "mixer.options"
        words += [f"{place}.{key}={_write(value)}" for key, value in options.items() if value != usual[key]]
    usual = {name: one.default for name, one in inspect.signature(TokenBackbone).parameters.items()}
    for key in (TokenModelKeys if task == "lm" else BodyKeys).model_fields:
        if key in arguments and (key in ("d_model", "depth", "mlp_ratio") or arguments[key] != usual[key]):
            words.append(f"model.{key}={_write(arguments[key])}")
    return shlex.join(["longseq", "train", f"task={task}", *words])


def _write(value: Any) -> str:
    """A value as Hydra reads it."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_write(one)}" for key, one in value.items()) + "}"
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    return str(value)
