"""The names of the tasks of lm-evaluation-harness, without its index of tasks, which takes half a minute to make."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from longseq.tasks.training.options import nearest

YAML = (".yaml", ".yml")

# A task, a group or a tag in a YAML file, at any depth: a group may define tasks of its own.
_NAMED = re.compile(rb"""^[ \t-]*["']?(?:task|group|tag)["']?:[ \t]*["']?([^\s"'#\[\]]+)""", re.MULTILINE)
# What a list may name, such as the tags of a task.
_LISTED = re.compile(rb"""(?:^[ \t]*-[ \t]+|[\[,][ \t]*)["']?([^\s"',:#\[\]]+)""", re.MULTILINE)


def check_names(names: Sequence[str], include: str | None = None) -> None:
    """Raise ValueError, in one line, for a YAML file or a folder that does not exist, and for names that no YAML file
    of lm-evaluation-harness or of the folder `include` has.

    The text of the files is searched. A name that passes may still be none of a task: the index has the last word.
    """
    for path in [*(name for name in names if name.endswith(YAML)), *([include] if include else [])]:
        if not Path(path).exists():
            raise ValueError(f"{path} does not exist: give a YAML file of a task, or include=FOLDER with such files")
    own = _own_folder()
    open_ = [name for name in names if not name.endswith(YAML) and not _has_folder(own, name)]
    if not open_:
        return
    found: set[str] = set()
    for folder in (own, include):
        for text in _texts(folder):
            found.update(name.decode("utf-8", "replace") for name in _NAMED.findall(text))
            if b"tag" in text or b"group" in text:
                found.update(name.decode("utf-8", "replace") for name in _LISTED.findall(text))
    for name in open_:
        if name not in found:
            raise ValueError(unknown_task(name, sorted(found)))


def unknown_task(name: str, known: Sequence[str]) -> str:
    """The message for a name that is none of the `known` ones."""
    near = nearest(name, known)
    hint = f"did you mean {near}? " if near else ""
    return (
        f"tasks: lm-evaluation-harness has no task {name!r}: {hint}give a name of its list, a YAML file, or "
        "include=FOLDER with your own"
    )


def _own_folder() -> Path | None:
    spec = find_spec("lm_eval")
    places = None if spec is None else spec.submodule_search_locations
    return Path(places[0], "tasks") if places else None


def _has_folder(own: Path | None, name: str) -> bool:
    """True for the usual place of a task, where its name need not be searched for."""
    return own is not None and name.isidentifier() and (own / name / f"{name}.yaml").is_file()


def _texts(folder: str | Path | None) -> Iterator[bytes]:
    for parent, _, files in os.walk(folder) if folder is not None else ():
        for name in files:
            if "yaml" in name or name.endswith(YAML) or "." not in name:  # parts that others include have no ending
                yield Path(parent, name).read_bytes()
