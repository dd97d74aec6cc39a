"""Options of configuration groups and their tasks, which an option's file states: `tasks: [image]`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigSource
from omegaconf import DictConfig, ListConfig, OmegaConf

from longseq.tasks.training.options import nearest

# The group that chooses the others, then the one that defines the samples, and so on.
_FIRST = ("experiment", "data", "model", "recipe")
# What a file of comparison=NAME may hold beside the keys of `longseq compare`: its runs read nothing of it but what
# `overrides` and the rows give them.
_OF_ANY = ("defaults", "tasks", "hydra")


def check_choices(cfg: DictConfig, runtime: Any) -> None:
    """Raise ValueError, in one line with the remedy, if a chosen option is for another task than `cfg.task`, or does
    not exist.

    `runtime` is Hydra's `hydra.runtime`: the option of each group, and the folders of the files. A file without the key
    `tasks` is for every task. With its key `like: [NAME]`, a task also takes the options of another task.
    """
    groups = _Groups(runtime.config_sources)
    # GROUP@PLACE puts a file of the group elsewhere; the check of keys judges the place
    chosen = {
        group: option
        for group, option in runtime.choices.items()
        if not group.startswith("hydra/") and "@" not in group
    }
    task = chosen.get("task")
    if task is None:
        return
    served = {task, *(OmegaConf.select(cfg, "task.like") or [])}
    for group in sorted(chosen, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST)):
        for option in chosen[group] if isinstance(chosen[group], list | tuple | ListConfig) else [chosen[group]]:
            _check_choice(groups, group, option, chosen, task, served)


def _check_choice(
    groups: _Groups, group: str, option: Any, chosen: Mapping[str, Any], task: str, served: set[str]
) -> None:
    if option in (None, "null") or group == "task":
        return
    if not groups.has(group, option):
        raise ValueError(_no_such_option(groups, group, option, chosen, served))
    tasks = groups.tasks(group, option)
    if tasks is not None and not served & set(tasks):
        raise ValueError(_wrong_task(groups, group, option, tasks, task, served))
    if group == "comparison":
        _check_comparison(groups, option)


def _check_comparison(groups: _Groups, option: str) -> None:
    """Raise ValueError if a file of a comparison sets what no run would read."""
    from longseq.tasks.compare import OWN_KEYS  # imports torch, without which other commands are checked

    content, package = groups.read("comparison", option)
    if package != "_global_":
        raise ValueError(f"comparison={option}: no key of its file counts: its first line must be # @package _global_")
    if others := [str(key) for key in content if key not in (*OWN_KEYS, *_OF_ANY)]:
        key = f"{others[0]}.KEY" if OmegaConf.is_config(content[others[0]]) else others[0]
        raise ValueError(
            f"comparison={option} sets {others[0]}, which its runs do not read: write overrides: [{key}=VALUE] in its "
            "file"
        )


class _Groups:
    """The files of the configuration groups, including those of plug-ins."""

    def __init__(self, places: Iterable[Any]) -> None:
        found: list[Any] = Plugins.instance().discover(ConfigSource)
        kinds = {kind.scheme(): kind for kind in found}
        sources = [kinds[place.schema](place.provider, f"{place.schema}://{place.path}") for place in places]
        self.sources: list[ConfigSource] = [source for source in sources if source.available()]

    def has(self, group: str, option: str) -> bool:
        return any(source.is_config(f"{group}/{option}") for source in self.sources)

    def tasks(self, group: str, option: str) -> list[str] | None:
        """The tasks in an option's file, or in the file that it extends; None for every task."""
        path = f"{group}/{option}"
        source = next((source for source in self.sources if source.is_config(path)), None)
        if source is None:
            return None
        content = _read(source, path)
        if "tasks" in content:
            return list(content["tasks"])
        parents = [name for name in content.get("defaults", []) if isinstance(name, str) and name != "_self_"]
        named = [tasks for parent in parents if (tasks := self.tasks(group, parent)) is not None]
        return named[-1] if named else None

    def read(self, group: str, option: str) -> tuple[Any, str | None]:
        """The content of an option's file, and the package that its first lines name."""
        path = f"{group}/{option}"
        loaded = next(source for source in self.sources if source.is_config(path)).load_config(path)
        return loaded.config, loaded.header.get("package")

    def options(self, group: str, served: Iterable[str]) -> list[str]:
        """The options of a group for any of the tasks `served`, in alphabetical order."""
        return [
            name for name in self.names(group) if (tasks := self.tasks(group, name)) is None or set(tasks) & set(served)
        ]

    def names(self, group: str, prefix: str = "") -> list[str]:
        """All options of a group; those of its folders are FOLDER/NAME."""
        path = f"{group}/{prefix}".rstrip("/")
        names, folders = set(), set()
        for source in self.sources:
            if source.is_group(path):
                names.update(source.list(path, ObjectType.CONFIG))
                folders.update(source.list(path, ObjectType.GROUP))
        below = (name for folder in folders for name in self.names(group, f"{prefix}{folder}/"))
        return sorted([*(f"{prefix}{name}" for name in names), *below])


# The files that are parts of packages, which do not change while a program runs: each command reads two dozen of them.
_packed: dict[tuple[str, str], Any] = {}


def _read(source: ConfigSource, path: str) -> Any:
    """The content of an option's file."""
    key = (source.path, path)
    if key in _packed:
        return _packed[key]
    content = source.load_config(path).config
    if source.scheme() == "pkg":
        _packed[key] = content
    return content


def _wrong_task(groups: _Groups, group: str, option: str, tasks: list[str], task: str, served: set[str]) -> str:
    wanted = " or ".join(f"task={name}" for name in tasks)
    here = groups.options(group, served)
    other = f"; for task={task}, give {group}={_one_of(here)}" if here else ""
    return f"{group}={option} belongs to {wanted}: add {wanted}{other}"


def _no_such_option(groups: _Groups, group: str, option: str, chosen: Mapping[str, Any], served: set[str]) -> str:
    here = f"{group}={_one_of(groups.options(group, served))}"
    if group == "recipe" and option == chosen.get("data"):
        return f"data={option} has no recipe of its own name: give {here}"
    near = nearest(option, groups.names(group))
    hint = f"did you mean {group}={near}? " if near else ""
    return f"{group}={option} is unknown: {hint}for task={chosen['task']}, give {here}"


def _one_of(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
