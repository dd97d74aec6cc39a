"""The keys in `longseq VERB --help`: the default and the line of each in its YAML file, and what it takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib import import_module, resources
from typing import Any, get_type_hints

from omegaconf import OmegaConf

from longseq.tasks.training.options import OneOf, Required, describe_type

# The dataclass of each command whose help lists its keys.
KEYS = {
    "train": "longseq.tasks.command_keys.TrainKeys",
    "evaluate": "longseq.tasks.command_keys.EvaluateKeys",
    "predict": "longseq.tasks.command_keys.PredictKeys",
    "generate": "longseq.tasks.command_keys.GenerateKeys",
    "prepare_image": "longseq.tasks.image.prepare_keys.PrepareImagesKeys",
    "prepare": "longseq.tasks.text.prepare_keys.PrepareKeys",
    "harness": "longseq.tasks.command_keys.HarnessKeys",
    "convert": "longseq.tools.hugging_face.convert_keys.ConvertKeys",
}

_LINE = re.compile(r"(?P<indent>(?:  )?)(?P<key>\w+):(?P<value>(?: [^#]*)?)(?:# *(?P<words>.*))?")
_WIDTH = 34  # of a key with its default


def register() -> None:
    """Let the files of the commands write `${keys_of:VERB}` in their help."""
    OmegaConf.register_new_resolver("keys_of", describe_keys, replace=True)


def describe_keys(verb: str) -> str:
    """A line for each key of a command that is no group: `key=default`, what it means, and what it takes."""
    module, _, name = KEYS[verb].rpartition(".")
    hints = get_type_hints(getattr(import_module(module), name), include_extras=True)
    inner = {f"data.{key}": hint for key, hint in _data_hints().items()}
    for key, hint in hints.items():
        if is_dataclass(hint):
            inner |= {f"{key}.{part}": of for part, of in get_type_hints(hint, include_extras=True).items()}
    lines = []
    for key, default, words in _read_file(verb):
        hint = hints.get(key, inner.get(key))
        if hint is not None:
            told = words if hint is Any else f"{words}; {_describe(hint)}"
            lines.append(f"{f'{key}={default}':<{_WIDTH}}  {told}")
    return "\n".join(lines).replace("$", "$$")  # Hydra's help fills in a template


def _describe(hint: Any) -> str:
    for one in getattr(hint, "__metadata__", ()):
        if isinstance(one, OneOf) and one.such_as:
            return f"one of {', '.join(one.such_as)} and others"
    needed = any(isinstance(one, Required) for one in getattr(hint, "__metadata__", ()))
    return describe_type(hint).removesuffix(" or null") + ", needed" if needed else describe_type(hint)


def _read_file(verb: str) -> Iterator[tuple[str, str, str]]:
    """Each key of a command's file, one level deep, with its default and its line."""
    place = ""
    for line in (resources.files("longseq.conf") / f"{verb}.yaml").read_text(encoding="utf-8").splitlines():
        if (match := _LINE.fullmatch(line)) is None:
            continue
        default, words = match["value"].strip(), (match["words"] or "").strip()
        if not match["indent"]:
            place = match["key"]
        if default:
            yield (f"{place}.{match['key']}" if match["indent"] else place), default, words


def _data_hints() -> dict[str, Any]:
    """The types of the keys of `data`, but of those to which tasks give several."""
    from longseq.tasks import registry

    found: dict[str, list[Any]] = {}
    for name in registry.names():
        for key, hint in get_type_hints(registry.keys(name).data, include_extras=True).items():
            found.setdefault(key, []).append(hint)
    return {key: hints[0] if hints == hints[:1] * len(hints) else Any for key, hints in found.items()}
