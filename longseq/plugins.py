"""Plug-ins: modules outside longseq that register mixers, tasks, data sources, generators, callbacks or file formats.

A plug-in is a module that can be imported and calls the `register` functions of what it adds. Three ways declare it:

    longseq train plugins=[my_module] mixer=mine                  in a command; also a module in the working folder
    longseq.plugins.load(["my_module"])                           in a program
    [project.entry-points."longseq.plugins"]                      in the pyproject.toml of an installed package,
    my_name = "my_package"                                        for every command

A plug-in that is a package may hold a folder `conf` with files of configuration groups, such as conf/mixer/mine.yaml.
Nothing else is imported: a checkpoint records the plug-ins of its run, and loading it only checks that they are there.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

GROUP = "longseq.plugins"

_LOADED: dict[str, ModuleType] = {}


def load(names: Iterable[str] = ()) -> tuple[str, ...]:
    """Import the plug-ins that installed packages declare, and those of `names`; return the names of all loaded ones.

    A module that is not installed is looked for in the working folder. One that is loaded is not imported again.

    Raises:
        ValueError: in one line, a name that is no module's, or a module that fails when it is imported.
    """
    for entry in importlib.metadata.entry_points(group=GROUP):
        owner = f"the entry point {entry.name} of {entry.dist.name if entry.dist else 'an installed package'}"
        _load(entry.module, f"{owner} names the plug-in {entry.module}", "mend or uninstall that package")
    for name in [names] if isinstance(names, str) else names:
        _load(name, f"plugins=[{name}]", "name a module that is installed or lies in the working folder")
    return loaded()


def loaded() -> tuple[str, ...]:
    """The names of the plug-ins that are loaded, in the order of loading."""
    return tuple(_LOADED)


def check_loaded(names: Iterable[str], label: str) -> None:
    """Load what installed packages declare, and raise ValueError, in one line, if one of `names` is missing then.

    A module that the program has imported by itself is not missing. `label` says what needs the plug-ins, such as
    `checkpoint=FILE`.
    """
    wanted = list(names)
    present = load() if wanted else ()  # looks through all installed packages
    missing = [name for name in wanted if name not in present and name not in sys.modules]
    if missing:
        listed = ", ".join(missing)
        raise ValueError(
            f"{label} needs the plug-in{'s' * (len(missing) > 1)} {listed}, which nothing declares: add "
            f"plugins=[{','.join(missing)}] to the command, or call longseq.plugins.load({missing}) in a program"
        )


def plugin_of(part: Any) -> str | None:
    """The loaded plug-in that defines a class or a function; None for those of longseq and of other packages."""
    module = getattr(part, "__module__", None) or ""
    own = [name for name in _LOADED if module == name or module.startswith(f"{name}.")]
    kin = [name for name in _LOADED if name.partition(".")[0] == module.partition(".")[0]]
    return max(own, key=len) if own else next(iter(kin), None)


def conf_folders() -> list[Path]:
    """The folders of configuration groups of the loaded plug-ins."""
    packages = [Path(module.__file__).parent for module in _LOADED.values() if _is_package(module) and module.__file__]
    return [folder / "conf" for folder in packages if (folder / "conf").is_dir()]


def _is_package(module: ModuleType) -> bool:
    return hasattr(module, "__path__")


def _load(name: str, what: str, remedy: str) -> None:
    if name in _LOADED:
        return
    try:
        _LOADED[name] = _import(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise ValueError(f"{what}, and there is no module {error.name}: {remedy}") from error
        first = " ".join(str(error).split()) or "no reason given"
        raise ValueError(f"{what}, which fails when it is imported: {type(error).__name__}: {first}") from error


def _import(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ModuleNotFoundError(f"{name} is no name of a module", name=name)
    here = os.getcwd()
    root = name.partition(".")[0]
    # At the end of the path: no module in the working folder replaces an installed one. Processes that this one spawns
    # get the same path.
    if root not in sys.modules and importlib.util.find_spec(root) is None and here not in sys.path:
        sys.path.append(here)
        importlib.invalidate_caches()
    return importlib.import_module(name)
