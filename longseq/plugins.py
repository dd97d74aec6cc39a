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

import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

GROUP = "longseq.plugins"

Kind = TypeVar("Kind")


class _Frame(NamedTuple):
    """A call in a traceback."""

    module: str
    file: str
    line: int
    function: str


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


def is_foreign(part: Any) -> bool:
    """True for a class or a function that longseq does not define: limits that fit its own parts may not fit this one.

    It may be that of a plug-in, or of a program that registers its own.
    """
    return not f"{getattr(part, '__module__', None) or ''}.".startswith("longseq.")


def source_of(function: Any) -> str | None:
    """A hash of the source that a function of a plug-in depends on, or None if it is not known.

    That is its whole file, and the modules that it imports, and those import, at their top: those of its own package,
    and others outside the folders where Python and pip install. Imports within functions and files of data are not
    seen.
    """
    own = inspect.unwrap(function)
    try:
        lines, _ = inspect.findsource(own)
        digest = hashlib.sha256("".join(lines).encode())
        for module in _imports_of(sys.modules.get(getattr(own, "__module__", None) or "")):
            digest.update(inspect.getsource(module).encode())
    except (OSError, TypeError):
        return None
    return digest.hexdigest()


def place_of(error: BaseException, names: Iterable[str] = ()) -> str | None:
    """Where the code of a plug-in raised an error, or called what raised it: `FILE, line N, in FUNCTION`.

    None if longseq raised it, also for a plug-in that called longseq. Of an error that another one caused, the place of
    the cause counts; an error of a data worker is text by now, and read from it. `names` are plug-ins beside the loaded
    ones.
    """
    wanted = {*_LOADED, *names}
    found: str | None = None
    while found is None and error is not None:
        for frames in (_frames_of(error), *_frames_of_worker(error)):
            found = found or _last_place(frames, wanted)
        error = error.__cause__  # type: ignore[assignment]
    return found


def find_class(target: Any, base: type[Kind], key: str) -> type[Kind]:
    """The class that `target`, text such as my_module.MyModel, names in a loaded plug-in: one derived from `base`.

    Nothing outside the loaded plug-ins is imported or found. `key` is where the name was given.

    Raises:
        ValueError: in one line, a name of no such class.
    """
    if not isinstance(target, str) or "." not in target:
        given = "null" if target is None else target
        example = f"{next(iter(_LOADED), 'my_module')}.MyClass"
        raise ValueError(f"{key}={given} names no class: give its full name in a plug-in, such as {key}={example}")
    module, _, name = target.rpartition(".")
    if not any(f"{module}.".startswith(f"{plugin}.") for plugin in _LOADED):
        declared = f"; declared is {', '.join(_LOADED)}" if _LOADED else ""
        raise ValueError(
            f"{key}={target} is not called: it must be a class of a module of yours that plugins=[MODULE] declares"
            f"{declared}"
        )
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        raise ValueError(f"{key}={target}: there is no module {error.name}") from error
    if not isinstance(found, type) or plugin_of(found) is None:
        known = [one for one, part in vars(importlib.import_module(module)).items() if _is_own(part, module, base)]
        listed = f"; its classes of this kind are {', '.join(known)}" if known else ""
        raise ValueError(f"{key}={target}: {module} defines no class {name}{listed}")
    if not issubclass(found, base):
        kind = f"{base.__name__} of {base.__module__.partition('.')[0]}"
        raise ValueError(f"{key}={target} is no {kind}: derive {name} from it")
    return found


def conf_folders() -> list[Path]:
    """The folders of configuration groups of the loaded plug-ins."""
    packages = [Path(module.__file__).parent for module in _LOADED.values() if _is_package(module) and module.__file__]
    return [folder / "conf" for folder in packages if (folder / "conf").is_dir()]


def _frames_of(error: BaseException) -> list[_Frame]:
    return [
        _Frame(frame.f_globals.get("__name__") or "", frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]


def _frames_of_worker(error: BaseException) -> list[list[_Frame]]:
    """The frames in the text of an error that a data worker raised, the error first, then what caused it."""
    if not isinstance(error.args[:1] and error.args[0], str) or " in DataLoader worker process " not in error.args[0]:
        return []
    modules = {getattr(module, "__file__", None): name for name, module in list(sys.modules.items())}
    parts = str(error.args[0]).split("The above exception was the direct cause of the following exception:")
    return [
        [
            _Frame(modules.get(file, ""), file, int(line), function)
            for file, line, function in re.findall(r'^  File "(.+)", line (\d+), in (\S+)$', part, re.MULTILINE)
        ]
        for part in reversed(parts)
    ]


def _last_place(frames: Iterable[_Frame], names: Iterable[str]) -> str | None:
    """The last frame of a plug-in, if none of longseq follows it."""
    last: _Frame | None = None
    for frame in frames:
        if any(f"{frame.module}.".startswith(f"{name}.") for name in names):
            last = frame
        elif frame.module.partition(".")[0] == "longseq":
            last = None
    if last is None:
        return None
    path = Path(last.file)
    file = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{file}, line {last.line}, in {last.function}"


def _imports_of(first: ModuleType | None) -> Iterator[ModuleType]:
    """The modules outside longseq whose parts a module has, and these have, by name."""
    if first is None:
        return
    package = first.__name__.partition(".")[0]
    found, waiting = {first.__name__: first}, [first]
    while waiting:
        for part in list(vars(waiting.pop()).values()):
            name = part.__name__ if isinstance(part, ModuleType) else getattr(part, "__module__", None)
            other = sys.modules.get(name) if isinstance(name, str) else None
            if other is not None and name not in found and _may_change(other, package):
                found[str(name)] = other
                waiting.append(other)
    yield from (found[name] for name in sorted(found) if name != first.__name__)


def _may_change(module: ModuleType, package: str) -> bool:
    """True for a module of `package`, and for one that is not installed; never for longseq's, whose version tells."""
    top, file = module.__name__.partition(".")[0], getattr(module, "__file__", None)
    if top == "longseq" or file is None:
        return False
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return top == package or not any(Path(file).is_relative_to(folder) for folder in installed)


def _is_own(part: Any, module: str, base: type) -> bool:
    return isinstance(part, type) and issubclass(part, base) and part.__module__ == module


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
        place = place_of(error, [name])
        told = f"{type(error).__name__}: {first}" + (f" ({place})" if place else "")
        raise ValueError(f"{what}, which fails when it is imported: {told}") from error


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
