"""Hydra, without work that changes no result: the suite runs hundreds of commands in each of its processes."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import os
import sys
from pathlib import Path
from typing import Any

# How the folders end that tell of an installed package.
PACKAGES = (".dist-info", ".egg-info", ".egg")


def share_work() -> None:
    """All that commands of one process can share whatever they do."""
    find_modes_once()
    parse_files_once()
    choose_files_faster()
    share_places()
    find_entry_points_once()
    parse_values_once()
    copy_directly()


def find_modes_once() -> None:
    """Compose no configuration only to learn that a command is no sweep, if a command of the same groups was none.

    Only `hydra.mode` and files of groups say that it is one: other keys are left out of the comparison.
    """
    hydra = importlib.import_module("hydra._internal.hydra").Hydra
    get_mode = hydra.get_mode
    plain: set[tuple[str | None, ...]] = set()

    def get_mode_once(self: Any, config_name: str | None, overrides: list[str]) -> Any:
        groups = self.config_loader.repository.group_exists
        chosen = [
            word for word in overrides if "hydra" in word or groups(word.lstrip("+~").split("=")[0].split("@")[0])
        ]
        call = (config_name, str(self.config_loader.get_search_path()), *chosen)
        if call in plain:
            return None
        mode = get_mode(self, config_name, overrides)
        if mode is None:
            plain.add(call)
        return mode

    hydra.get_mode = get_mode_once


def parse_files_once() -> None:
    """Parse a configuration file of a package once; every command gets a copy of what it holds."""
    module = importlib.import_module("hydra._internal.core_plugins.importlib_resources_config_source")
    source = module.ImportlibResourcesConfigSource
    read = source._read_config
    parsed: dict[tuple[Any, ...], Any] = {}

    def read_once(self: Any, file: Any) -> Any:
        if not isinstance(file, Path):  # in a zip file
            return read(self, file)
        version = (self.path, self.provider, file, file.stat().st_mtime_ns)
        if version not in parsed:
            parsed[version] = read(self, file)
        found = parsed[version]
        return dataclasses.replace(found, config=copy.deepcopy(found.config), header=dict(found.header))

    source._read_config = read_once


def choose_files_faster() -> None:
    """Make no table of what is chosen for a list of files of which none is named by another choice: nobody reads it."""
    module = importlib.import_module("hydra._internal.defaults_list")
    make_table = module._create_interpolation_map

    def make_table_if_read(overrides: Any, defaults_list: list[Any], self_added: bool) -> Any:
        if any(default.is_interpolation() for default in defaults_list):
            return make_table(overrides, defaults_list, self_added)
        return None

    module._create_interpolation_map = make_table_if_read


def share_places() -> None:
    """Copy no description of the places of files for each command: only a list of them changes."""
    repository = importlib.import_module("hydra._internal.config_repository").ConfigRepository

    def copy_list(self: Any, memo: Any) -> Any:
        twin = copy.copy(self)
        twin.sources = list(self.sources)
        return twin

    repository.__deepcopy__ = copy_list


def find_entry_points_once() -> None:
    """Read what installed packages declare once, as long as those on Python's path stay as they are."""
    metadata = importlib.import_module("importlib.metadata")
    read = metadata.entry_points
    found: dict[Any, Any] = {}
    listed: dict[str, tuple[int | None, Any]] = {}

    def packages_in(place: str) -> Any:
        """The packages in a folder, and when each was changed: a command may write files beside them."""
        changed = mtime(place)
        if place not in listed or listed[place][0] != changed:
            names = os.listdir(place) if os.path.isdir(place) else []
            packages = [
                os.path.join(place, name) for name in names if name.endswith((".dist-info", ".egg-info", ".egg"))
            ]
            kept = {} if os.path.isdir(place) else {place: changed}
            listed[place] = (changed, tuple(sorted((kept | {path: mtime(path) for path in packages}).items())))
        return listed[place][1]

    def read_once(**parameters: Any) -> Any:
        places = tuple((place, packages_in(os.path.abspath(place))) for place in sys.path)
        key = (places, tuple(map(id, sys.meta_path)), tuple(sorted(parameters.items())))
        if key not in found:
            found[key] = read(**parameters)
        return found[key]

    metadata.entry_points = read_once


def parse_values_once() -> None:
    """Parse the text of a value once: those who read the tree change nothing in it."""
    parse = functools.lru_cache(10_000)(importlib.import_module("omegaconf.grammar_parser").parse)
    for name in ("omegaconf.base", "omegaconf._utils"):
        importlib.import_module(name).parse = parse  # type: ignore[attr-defined]


def copy_directly() -> None:
    """Copy a configuration as its own methods do, without a search in each value and without a check of the copies."""
    base = importlib.import_module("omegaconf.base")
    nodes = importlib.import_module("omegaconf.nodes")
    containers = {name: getattr(importlib.import_module("omegaconf"), name) for name in ("DictConfig", "ListConfig")}

    def copy_notes(self: Any, memo: Any) -> Any:
        """What stands beside a value: types, a key and a few flags."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.flags = None if self.flags is None else dict(self.flags)
        cache = self.resolver_cache
        twin.resolver_cache = copy.deepcopy(cache, memo) if cache else type(cache)(dict)
        return twin

    def copy_value(self: Any, memo: Any) -> Any:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__, _metadata=copy_notes(self._metadata, memo), _flags_cache=None)
        return twin

    def copy_container(self: Any, memo: Any) -> Any:
        parts, flags = self.__dict__["_content"], self.__dict__["_flags_cache"]
        twin = object.__new__(type(self))
        twin.__dict__.update(
            self.__dict__,
            _metadata=copy_notes(self.__dict__["_metadata"], memo),
            _flags_cache=None if flags is None else dict(flags),
        )

        def copy_part(part: Any) -> Any:
            copied = part.__deepcopy__(memo)
            copied.__dict__["_parent"] = twin
            return copied

        if isinstance(parts, dict):
            twin.__dict__["_content"] = {key: copy_part(part) for key, part in parts.items()}
        elif isinstance(parts, list):
            twin.__dict__["_content"] = [copy_part(part) for part in parts]
        return twin

    base.Metadata.__deepcopy__ = copy_notes
    for name in ("AnyNode", "StringNode", "IntegerNode", "FloatNode", "BooleanNode"):
        getattr(nodes, name).__deepcopy__ = copy_value
    for container in containers.values():
        container.__deepcopy__ = copy_container


def mtime(path: str) -> int | None:
    """When a folder or file was changed; None if there is none."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None
