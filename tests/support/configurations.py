"""Hydra, without work that changes no result: the suite runs hundreds of commands in each of its processes."""

from __future__ import annotations

import copy
import dataclasses
import importlib
from pathlib import Path
from typing import Any


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
