"""The resolved configuration of a run, and its values as words of a command."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping
from typing import Any, TypeVar

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from longseq.tasks.config import Keys, read

Config = Mapping[str, Any]
T = TypeVar("T", bound=Keys)

# Keys of `data` with a value for each name of a class.
CLASS_TABLES = ("class_weights", "class_map")

# Text that stands for itself in an override.
_UNQUOTED = re.compile(r"[\w/+.$%*@?|:-]+", re.ASCII)


def mixer_label(pattern: Any) -> str:
    """Resolver `${mixer_label:${mixer.name}}`: a run's name by its mixer, also if the pattern of a hybrid is a list."""
    if isinstance(pattern, str) and pattern.isidentifier():
        return pattern
    from longseq.mixers.pattern import spell_pattern  # it imports all mixers, which `--help` need not wait for

    return spell_pattern(pattern)


def by_width(width: int, table: Mapping[Any, Any]) -> Any:
    """Resolver `${by_width:WIDTH,{0: A, 384: B}}`: the value for the largest width in the table that is at most WIDTH.

    With it, a recipe has a value for models of any size.
    """
    return table[max(least for least in table if least <= width)]


def better(metric: str | None) -> str:
    """Resolver `${better:METRIC}`: maximize or minimize, by the name of a metric."""
    low = ("loss", "perplexity", "bits_per_byte", "error", "seconds", "parameters", "_ms", "_gib", "epochs", "updates")
    name = str(metric)
    return "minimize" if any(word in name for word in low) and not name.endswith("_per_second") else "maximize"


OmegaConf.register_new_resolver("mixer_label", mixer_label, replace=True)
OmegaConf.register_new_resolver("by_width", by_width, replace=True)
OmegaConf.register_new_resolver("better", better, replace=True)
# `${either:FLAG,A,B}` is A if the flag is true, else B; a key that a file does not state is null.
OmegaConf.register_new_resolver("either", lambda flag, first, second: first if flag else second, replace=True)


def resolve(config: DictConfig | Config) -> dict[str, Any]:
    """The configuration as dictionaries and lists, with all interpolations resolved."""
    if not isinstance(config, DictConfig):
        return dict(config)
    metric = OmegaConf.select(config, "task.metric")
    if isinstance(metric, str) and "/" not in metric:  # other keys refer to it
        config = OmegaConf.merge(config, {"task": {"metric": f"val/{metric}"}})  # type: ignore[assignment]
    found: Any = OmegaConf.to_container(config, resolve=True)
    _read_tables(found.get("data"))
    return _given(found)


def _given(section: Any) -> Any:
    """The keys without those that must be given and are not."""
    if not isinstance(section, dict):
        return section
    return {key: _given(value) for key, value in section.items() if not (isinstance(value, str) and value == "???")}


def _read_tables(data: Any) -> None:
    """Read dictionaries by names of classes that are text: Hydra's grammar has no keys with accents or signs."""
    for key in CLASS_TABLES:
        text = data.get(key) if isinstance(data, dict) else None
        if isinstance(text, str) and text.startswith("{"):
            data[key] = OmegaConf.to_container(OmegaConf.create(re.sub(r":(?=[\d.+-])", ": ", text)))


def command_words() -> list[str] | None:
    """The overrides of the command that runs; None without one."""
    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else None


def read_command(keys: type[T], config: DictConfig) -> T:
    """The keys of a command, from its YAML file and the command line."""
    return read(keys, resolve(config))


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
