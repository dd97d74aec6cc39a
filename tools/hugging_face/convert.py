"""`longseq convert`: a model of another library becomes one of ours, or ours one of theirs, with the same weights."""

from __future__ import annotations

import inspect
import json
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from longseq import mixers
from longseq.backbones.tokens import TokenBackbone
from longseq.files import check_place
from longseq.mixers.pattern import options_by_name
from longseq.models import describe
from longseq.tasks.commands import Convert
from longseq.tasks.report import quiet_libraries
from longseq.tasks.training.configuration import read_command
from longseq.tasks.training.token_keys import BodyKeys, TokenModelKeys
from longseq.tokenizer_files import TOKENIZER_FILE
from longseq.tools.hugging_face.conversion import VOCABULARIES, change_mixer, read_model, write_family, write_model
from longseq.tools.hugging_face.families import FAMILIES

OURS = "longseq"


@quiet_libraries()
def run(cfg: DictConfig) -> Path:
    """Convert a model as configured; returns the folder that was written."""
    keys = read_command(Convert, cfg)
    assert keys.source is not None
    assert keys.output is not None
    source, output = Path(keys.source), Path(keys.output)
    if not source.exists():
        raise ValueError(f"source={source} is no folder here; download a model of the hub first")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"output={output} is not empty: give a new folder")
    check_place(output, "output", is_folder=True)
    model = read_model(source)
    if keys.mixer.name is not None:
        model = change_mixer(model, keys.mixer.name, keys.mixer.options, keys.seed)
    with _written_whole(output):
        if keys.format == OURS:
            write_model(model, output)
        else:
            write_family(model, FAMILIES[keys.format], output)
    backbone = model.backbone()
    count = sum(parameter.numel() for parameter in backbone.parameters())
    print(f"{output}: {count:,} parameters, {backbone.mixer_name}, format={keys.format}")
    lacking = _without_tokenizer(source, output, keys.format)
    if lacking is not None:
        print(lacking)
    elif keys.format == OURS:
        print(f"to classify documents with it: {train_command(backbone, output, 'document')}")
        print(f"to train it further: {train_command(backbone, output, 'lm')}")
    return output


def _without_tokenizer(source: Path, output: Path, format: str) -> str | None:
    """What a folder without a tokenizer lacks, and the remedy; None for a folder that has one."""
    needed = (TOKENIZER_FILE,) if format == OURS else VOCABULARIES
    if any((output / name).is_file() for name in needed):
        return None
    readers = "longseq train, longseq generate and AutoTokenizer need" if format == OURS else "AutoTokenizer needs"
    return (
        f"{output} has no tokenizer, as {source} has no {' or '.join(needed)}, and {readers} one: save that of the "
        f"model there, with AutoTokenizer.from_pretrained(NAME).save_pretrained({str(output)!r})"
    )


@contextmanager
def _written_whole(folder: Path) -> Iterator[None]:
    """Leave a folder that was empty, or not there, as it was if the block fails."""
    existed = folder.exists()
    try:
        yield
    except BaseException:
        if folder.exists():
            shutil.rmtree(folder, ignore_errors=True)
            if existed:
                folder.mkdir(exist_ok=True)
        raise


def train_command(backbone: TokenBackbone, folder: Path, task: str) -> str:
    """The command of a task that starts from a saved model, quoted for a shell: options that are not the defaults."""
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
    for key in (entry.name for entry in fields(TokenModelKeys if task == "lm" else BodyKeys)):
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
