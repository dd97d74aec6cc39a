"""The resolved configuration of a run."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

Config = Mapping[str, Any]

# Keys of `data` with a value for each name of a class.
CLASS_TABLES = ("class_weights", "class_map")

# Text that stands for itself in an override.
_UNQUOTED = re.compile(r"[\w/+.$%*@?|:-]+", re.ASCII)

# Keys by which the files of configuration groups state their tasks (see `longseq.tools.groups`).
MARKS = ("tasks", "like")


def mixer_label(pattern: Any) -> str:
    """Resolver `${mixer_label:${mixer.name}}`: a run's name by its mixer, also if the pattern of a hybrid is a list."""
    if isinstance(pattern, str) and pattern.isidentifier():
        return pattern
    from longseq.mixers.pattern import spell_pattern  # it imports all mixers, which `--help` need not wait for

    return spell_pattern(pattern)


OmegaConf.register_new_resolver("mixer_label", mixer_label, replace=True)


def by_width(width: Any, table: Mapping[Any, Any]) -> Any:
    """Resolver `${by_width:WIDTH,{0: A, 384: B}}`: the value for the largest width in the table that is at most WIDTH.

    With it, a recipe has a value for models of any size. ValueError for a width that is not a number.
    """
    if not isinstance(width, int):
        raise ValueError(f"scale.embed_dim={width}: the recipe depends on the model's width, so give scale.embed_dim=N")
    return table[max(least for least in table if least <= width)]


OmegaConf.register_new_resolver("by_width", by_width, replace=True)

# `${either:FLAG,A,B}` is A if the flag is true, else B; a key that a file does not state is null.
OmegaConf.register_new_resolver("either", lambda flag, first, second: first if flag else second, replace=True)


def better(metric: str | None) -> str:
    """Resolver `${better:METRIC}`: maximize or minimize, told from the name of a metric.

    Losses, errors, durations and sizes are to be low. A run compares this with what its metric says of itself.
    """
    low = ("loss", "perplexity", "bits_per_byte", "error", "seconds", "parameters", "_ms", "_gib", "epochs", "updates")
    name = str(metric)
    return "minimize" if any(word in name for word in low) and not name.endswith("_per_second") else "maximize"


OmegaConf.register_new_resolver("better", better, replace=True)


def resolve(config: DictConfig | Config) -> dict[str, Any]:
    """The configuration as dictionaries and lists, with all interpolations resolved, without the marks of its files.

    Marks at the top are those of an experiment, which only a command that chooses a task has.
    """
    if not isinstance(config, DictConfig):
        return dict(config)
    config = _with_whole_metric(config)
    whole: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    marks = marks_at_top(whole)
    _read_tables(whole.get("data"))
    return {key: _without_marks(value) for key, value in whole.items() if key not in marks}


def _read_tables(data: Any) -> None:
    """Read dictionaries by names of classes that are text in `data`, in place.

    Hydra's grammar has no keys with accents, quotes or other signs; YAML has.
    """
    for key in CLASS_TABLES:
        text = data.get(key) if isinstance(data, dict) else None
        if not isinstance(text, str) or not text.startswith("{"):
            continue
        try:
            data[key] = OmegaConf.to_container(OmegaConf.create(re.sub(r":(?=[\d.+-])", ": ", text)))
        except (YAMLError, OmegaConfBaseException, AssertionError):
            raise ValueError(
                f"data.{key}={text} cannot be read: write {{NAME: NUMBER}}, and a NAME with signs in quotes"
            ) from None


def _with_whole_metric(config: DictConfig) -> DictConfig:
    """The configuration with `task.metric=NAME` as `val/NAME`, which other keys refer to."""
    metric = OmegaConf.select(config, "task.metric")
    if not isinstance(metric, str) or "/" in metric:
        return config
    config = copy.deepcopy(config)
    OmegaConf.update(config, "task.metric", f"val/{metric}")
    return config


def marks_at_top(config: Mapping[Any, Any]) -> tuple[str, ...]:
    """The keys at the top of a command's configuration that are marks."""
    return MARKS if "task" in config else ()


def _without_marks(section: Any) -> Any:
    return {key: value for key, value in section.items() if key not in MARKS} if isinstance(section, dict) else section


def spell_value(value: Any) -> str:
    """A value in the grammar of Hydra's overrides, in quotes where a character has a meaning there."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {spell_value(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(spell_value, value)) + "]"
    if not isinstance(value, str):
        return json.dumps(value)
    escaped = value.replace("'", "\\'")
    return value if _UNQUOTED.fullmatch(value) else f"'{escaped}'"


def command_word(key: str, value: Any) -> str:
    """The word KEY=VALUE of a command, as a shell and then Hydra take it."""
    return shlex.quote(f"{key}={spell_value(value)}")


def with_absolute_root(config: Config) -> dict[str, Any]:
    """The configuration with the paths of `data.root` as absolute ones, which mean the same in any working folder.

    An entry that does not exist, such as the name of a stream, stays as it is.
    """
    data = config.get("data")
    if not isinstance(data, Mapping) or "root" not in data:
        return dict(config)
    root = data["root"]
    whole = [_absolute(one) for one in root] if isinstance(root, list) else _absolute(root)
    return {**config, "data": {**data, "root": whole}}


def _absolute(path: Any) -> Any:
    if not isinstance(path, str) or not path:
        return path
    found = os.path.expanduser(path)
    return os.path.abspath(found) if os.path.exists(found) else path
