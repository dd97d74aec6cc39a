"""A run repeated by its own record: `longseq train --config-dir RUN --config-name config output=FOLDER`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from longseq.tools.mistakes import CONF, full_flag

# Hydra's settings in a command's own configuration, which a record does not have.
_SETTINGS = ("output_subdir", "job.name", "run.dir", "sweep.dir", "sweep.subdir")


def settings_of_record(verb: str, flags: Sequence[str]) -> list[str]:
    """Hydra's settings of `longseq VERB`, as overrides, where `flags` name the record of a run as the configuration.

    Without them Hydra would use its own: folders of its own, and logging that replaces that of the program.

    Raises:
        ValueError: the folder of a record is given by --config-path, which begins at a file of this package; or the
            record is of an earlier version, whose callbacks would write into the folder of the first run.
    """
    given = _values(flags)
    if "--config-name" not in given:
        return []
    name = f"{given['--config-name'].removesuffix('.yaml')}.yaml"
    if "--config-path" in given and _is_record(Path(given["--config-path"], name)):
        raise ValueError(f"--config-path={given['--config-path']}: write --config-dir={given['--config-path']}")
    file = Path(given.get("--config-dir", ""), name)
    if "--config-dir" not in given or not _is_record(file):
        return []
    record: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    if _names(str(record["output"]), [record.get("callbacks"), record.get("logger")]):
        raise ValueError(
            f"{file} is of an earlier version, whose callbacks and loggers name {record['output']}: "
            "write ${output} there in its place"
        )
    own: Any = OmegaConf.create((files(CONF) / f"{verb.replace(' ', '_')}.yaml").read_text(encoding="utf-8"))
    hydra: Any = OmegaConf.to_container(own.hydra, resolve=False)
    settings = {key: value for key in _SETTINGS if (value := _find(hydra, key)) is not ...}
    written = [f"hydra.{key}={'null' if value is None else repr(value)}" for key, value in settings.items()]
    if {"-m", "--multirun"} & {full_flag(flag) for flag in flags}:  # each trial has a folder of its own
        written.append("output='${hydra:runtime.output_dir}'")
    return ["hydra/job_logging=none", "hydra/hydra_logging=none", *written]


def _values(flags: Sequence[str]) -> dict[str, str]:
    """The flags that name a configuration, by their long names, and their values."""
    long = {"-cn": "--config-name", "-cd": "--config-dir", "-cp": "--config-path"}
    found = {}
    for place, word in enumerate(flags):
        begin, has_value, value = word.partition("=")
        flag = (full_flag(begin) if begin.startswith("-") else None) or ""
        flag = long.get(flag, flag)
        if flag in long.values():
            found[flag] = value if has_value else flags[place + 1]
    return found


def _is_record(file: Path) -> bool:
    """Whether a file is a whole configuration, as runs leave it, and no part or extension of another one."""
    if not file.is_file():
        return False
    keys = OmegaConf.load(file)
    return isinstance(keys, Mapping) and "output" in keys and not {"defaults", "hydra"} & set(keys)


def _names(output: str, keys: Any) -> bool:
    """Whether a path among the keys begins with `output`."""
    if isinstance(keys, dict | list):
        return any(_names(output, key) for key in (keys.values() if isinstance(keys, dict) else keys))
    return isinstance(keys, str) and (keys == output or keys.startswith(f"{output}/"))


def _find(keys: Any, path: str) -> Any:
    """The value at a path of names, or `...` if there is none."""
    for name in path.split("."):
        if not isinstance(keys, dict) or name not in keys:
            return ...
        keys = keys[name]
    return keys
