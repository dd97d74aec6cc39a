"""Lets the commands of a test share the work of Hydra: a third of the time, with the same configurations.

Hydra reads its files anew in each command, and composes them twice: the first time only to see whether `hydra.mode`
asks for a sweep.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.hydra import Hydra
from hydra.types import RunMode
from omegaconf import DictConfig


def share_composition(patch: pytest.MonkeyPatch) -> None:
    """Read each file once, and merge each choice of files once. For commands without -m and without plug-ins."""
    files: dict[str, Any] = {}
    merged: dict[Any, DictConfig] = {}
    load, merge = CachingConfigRepository.load_config, ConfigLoaderImpl._compose_config_from_defaults_list

    def load_once(self: CachingConfigRepository, config_path: str) -> Any:
        if config_path not in files:
            files[config_path] = load(self, config_path)
        return files[config_path]

    def merge_once(self: ConfigLoaderImpl, defaults: Any, repo: Any) -> DictConfig:
        choice = tuple((entry.config_path, entry.package, entry.is_self) for entry in defaults)
        if choice not in merged:
            merged[choice] = merge(self, defaults, repo)
        return copy.deepcopy(merged[choice])

    patch.setattr(CachingConfigRepository, "load_config", load_once)
    patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", merge_once)
    patch.setattr(Hydra, "get_mode", lambda self, config_name, overrides: RunMode.RUN)
