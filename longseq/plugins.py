"""Plug-ins: modules outside longseq that register mixers, tasks, data sources, generators, callbacks or file formats.

A plug-in is a module that calls the `register` functions of what it adds. Three ways declare it:

    longseq train plugins=[my_module] mixer=mine                  in a command; also a module in the working folder
    longseq.plugins.load(["my_module"])                           in a program
    [project.entry-points."longseq.plugins"]                      in the pyproject.toml of an installed package,
    my_name = "my_package"                                        for every command

A package may have a folder `conf` with files of configuration groups, such as conf/mixer/mine.yaml. Nothing else is
imported: a checkpoint records the plug-ins of its run, and loading it only checks that they are there.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

GROUP = "longseq.plugins"

Kind = TypeVar("Kind")

_LOADED: dict[str, ModuleType] = {}


def load(names: Iterable[str] = ()) -> tuple[str, ...]:
    """Import the plug-ins of installed packages and of `names`; return the names of all loaded ones.

    Modules that are not installed are searched in the working folder. Import errors pass through.
    """
    declared = [entry.module for entry in importlib.metadata.entry_points(group=GROUP)]
    for name in (*declared, *names):
        if name in _LOADED:
            continue
        root, here = name.partition(".")[0], os.getcwd()
        # At the end of the path: modules in the working folder do not replace installed ones.
        if root not in sys.modules and importlib.util.find_spec(root) is None and here not in sys.path:
            sys.path.append(here)
            importlib.invalidate_caches()
        _LOADED[name] = importlib.import_module(name)
    return loaded()


def loaded() -> tuple[str, ...]:
    """The names of the plug-ins that are loaded, in the order of loading."""
    return tuple(_LOADED)


def check_loaded(names: Iterable[str], label: str) -> None:
    """Load the plug-ins of installed packages; ValueError if one of `names`, which `label` needs, is missing."""
    wanted = list(names)
    present = load() if wanted else ()  # looks through all installed packages
    missing = [name for name in wanted if name not in present and name not in sys.modules]
    if missing:
        raise ValueError(f"{label} needs a plug-in that nothing declares: give plugins=[{','.join(missing)}]")


def plugin_of(part: Any) -> str | None:
    """The loaded plug-in that defines a class or a function; None if none does."""
    module = getattr(part, "__module__", None) or ""
    own = [name for name in _LOADED if f"{module}.".startswith(f"{name}.")]
    kin = [name for name in _LOADED if name.partition(".")[0] == module.partition(".")[0]]
    return max(own, key=len) if own else next(iter(kin), None)


def is_foreign(part: Any) -> bool:
    """True for a class or a function that longseq does not define."""
    return not f"{getattr(part, '__module__', None) or ''}.".startswith("longseq.")


def find_class(target: Any, base: type[Kind], key: str) -> type[Kind]:
    """The class that `target`, such as my_module.MyModel, names in a loaded plug-in; it must derive from `base`.

    Nothing outside the loaded plug-ins is imported. `key` is where the name was given. Raises ValueError otherwise.
    """
    module, _, name = str(target).rpartition(".")
    if not any(f"{module}.".startswith(f"{plugin}.") for plugin in _LOADED):
        raise ValueError(f"{key}={target} is in no plug-in: declare its module by plugins=[MODULE]")
    found = getattr(importlib.import_module(module), name)
    if plugin_of(found) is None or not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{key}={target} must be a class of a plug-in derived from {base.__name__}")
    return found


def conf_folders() -> list[Path]:
    """The folders of configuration groups of the loaded plug-ins."""
    files = [Path(module.__file__) for module in _LOADED.values() if module.__file__ and hasattr(module, "__path__")]
    return [file.parent / "conf" for file in files if (file.parent / "conf").is_dir()]
