"""The table of tasks: what `task=NAME` chooses, the five parts of a task, and configurations checked by their task."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longseq.tasks.config import TaskKeys, Train, read, unknown_key
from longseq.tasks.training import automatic
from longseq.tasks.training.recipe import device_batch_size, device_count
from longseq.tasks.training.schedule import RunLength

if TYPE_CHECKING:  # the table itself imports no task
    from longseq.tasks.data.module import TaskData
    from longseq.tasks.report import Report
    from longseq.tasks.training.model import TaskModel
    from longseq.tasks.training.module import TrainedModule


@dataclass(frozen=True)
class Task:
    """The parts of a task; `task()` of a task's folder names them.

    config: the classes of the task's keys, and checks over several keys.
    data: the class of the data module.
    model: builds the model for the data.
    module: the class of the Lightning module, with steps, losses and metrics.
    report: what a run prints and records at its end.
    """

    config: TaskKeys
    data: type[TaskData]
    model: TaskModel
    module: type[TrainedModule]
    report: Report = field(default_factory=lambda: importlib.import_module("longseq.tasks.report").Report())


_registered: dict[str, Task | Callable[[], Task]] = {}


def register(name: str, task: Task | Callable[[], Task]) -> None:
    """Add a task, or a function that makes it on first use. ValueError if another task has the name."""
    if _registered.get(name) is task:
        return
    if name in names():
        raise ValueError(f"the task {name!r} is already registered")
    _registered[name] = task


def get(name: str) -> Task:
    """The task of a name. ValueError for an unknown one."""
    if name not in names():
        raise ValueError(f"task.name={name} is unknown: choose one of {', '.join(names())}")
    found: Task | Callable[[], Task] = _registered.get(name) or importlib.import_module(f"longseq.tasks.{name}").task
    return found if isinstance(found, Task) else found()


def keys(name: str) -> TaskKeys:
    """The keys of a task; for one of this package without importing its other parts, which takes seconds."""
    if name not in own_names():
        return get(name).config
    module = importlib.import_module(f"longseq.tasks.{name}.config")
    (own,) = [
        one for one in vars(module).values() if isinstance(one, type) and issubclass(one, TaskKeys) and one != TaskKeys
    ]
    found: TaskKeys = own()  # type: ignore[call-arg]
    return found


def of(config: Mapping[str, Any]) -> Task:
    """The task of a configuration."""
    return get(config["task"]["name"])


def like(name: str) -> list[str]:
    """The names of the task `name` and of the plug-ins' tasks that extend its data module."""
    return [other for other in names() if issubclass(get(other).data, get(name).data)]


def own_names() -> list[str]:
    """The names of this package's tasks: the folders with a config.py."""
    return sorted(path.parent.name for path in Path(__file__).parent.glob("*/config.py"))


def names() -> list[str]:
    """The names of all tasks: this package's, then the registered ones."""
    return [*own_names(), *sorted(_registered)]


def read_experiment(config: Mapping[str, Any], command: type[Train] = Train) -> dict[str, Any]:
    """The configuration of a training with all defaults, checked before anything is opened, built or written.

    ValueError for an unknown key or an impossible value.
    """
    task_keys = of(config).config
    if unread := [key for key in config if key not in command.model_fields]:
        raise ValueError(unknown_key(unread[0], list(command.model_fields)))
    checked = read(task_keys.experiment(command), with_any_choice(config)).to_dict()
    RunLength.from_recipe(checked["recipe"])
    device_batch_size(checked)
    task_keys.check(checked)
    return automatic.restore_words(checked, config)


def choose(config: Mapping[str, Any], info: Any | None) -> tuple[dict[str, Any], str | None]:
    """The configuration with the task's choices where the recipe says `auto`, and what is chosen, in words.

    `info` describes the data; without it, the values are only possible ones.
    """
    if not automatic.is_automatic(config):
        return dict(config), None
    parts = device_count(config) * config["trainer"].get("accumulate_grad_batches", 1)
    chosen = automatic.settle(config, of(config).config.choose(config, info, parts))
    samples = "" if info is None else f" for {info.sizes['train']:,} {config['task']['unit']}"
    return chosen, f"recipe {config['recipe']['name']}{samples}: {automatic.describe(chosen)}"


def with_any_choice(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with possible values where it says `auto` or `find`."""
    return automatic.with_any_rate(choose(config, None)[0])


def open_data(config: Mapping[str, Any]) -> tuple[dict[str, Any], TaskData, str | None]:
    """The configuration with the values that depend on the data, the data, and in words what is chosen.

    `recipe.learning_rate=find` stays.
    """
    ready = with_any_choice(config)
    datamodule = of(config).data.from_config(ready, device_batch_size(ready))
    chosen, reason = choose(config, datamodule.info)
    if reason is not None:
        settled = automatic.with_any_rate(chosen)
        datamodule.take_recipe(settled, device_batch_size(settled))
    return chosen, datamodule, reason
