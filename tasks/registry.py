"""The table of tasks: the name that `task=NAME` chooses, and the five parts of a task."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longseq.tasks.config import TaskKeys

if TYPE_CHECKING:  # the table itself needs none of what tasks import
    from longseq.tasks.data.module import TaskData
    from longseq.tasks.report import Report
    from longseq.tasks.training.model import TaskModel
    from longseq.tasks.training.module import TrainedModule

# The files of a task's folder.
PARTS = ("config", "data", "model", "module", "report")


def _plain_report() -> Report:
    from longseq.tasks.report import Report

    return Report()


@dataclass(frozen=True)
class Task:
    """The parts of a task for training, evaluation and prediction; each field is defined in the file of its name.

    config: the keys that the task reads, as dataclasses, and their check.
    data: the class of the data module.
    model: builds the model for the data.
    module: the class of the Lightning module: steps, losses and metrics.
    report: what a run prints and records at its end.
    """

    config: TaskKeys
    data: type[TaskData]
    model: TaskModel
    module: type[TrainedModule]
    report: Report = field(default_factory=_plain_report)


_registered: dict[str, Task | Callable[[], Task]] = {}


def register(name: str, task: Task | Callable[[], Task]) -> None:
    """Add a task, or a function that makes it on first use.

    ValueError for a name that another task has. Registering the same object again does nothing.
    """
    if _registered.get(name) is task:
        return
    if name in names():
        raise ValueError(f"the task {name!r} is there already: register yours under another name")
    _registered[name] = task


def get(name: str) -> Task:
    """The task of a name. ValueError, which lists the names, for an unknown one."""
    if name not in names():
        raise ValueError(f"task.name={name} is unknown: choose one of {', '.join(names())}")
    found: Task | Callable[[], Task] = _registered.get(name) or importlib.import_module(f"longseq.tasks.{name}").task
    return found if isinstance(found, Task) else found()


def keys(name: str) -> TaskKeys:
    """The keys of a task of this package, without its other parts, which take seconds to import; else as of `get`."""
    if name in _registered or name not in names():
        return get(name).config
    parts: Any = vars(importlib.import_module(f"longseq.tasks.{name}.config")).values()
    own: Any
    (own,) = [one for one in parts if isinstance(one, type) and issubclass(one, TaskKeys) and one is not TaskKeys]
    found: TaskKeys = own()
    return found


def of(config: Mapping[str, Any]) -> Task:
    """The task of a configuration."""
    return get(config["task"]["name"])


def like(name: str) -> list[str]:
    """The names of the tasks with the data of the task `name`: itself, and variants of it that plug-ins add."""
    return [other for other in names() if issubclass(get(other).data, get(name).data)]


def own_names() -> list[str]:
    """The names of this package's tasks: the folders here with the files of a task."""
    here = Path(__file__).parent
    folders = sorted(path.parent.name for path in here.glob("*/config.py"))
    return [name for name in folders if all((here / name / f"{part}.py").is_file() for part in PARTS)]


def names() -> list[str]:
    """The names of all tasks: those of this package, and the registered ones."""
    return [*own_names(), *sorted(_registered)]
