"""Lets the commands of a test share the work of Hydra: a quarter of its time, with the same configurations.

Hydra reads its files anew in each command, and composes them twice: the first time only to see whether `hydra.mode`
asks for a sweep. Nearly all trainings here parse the same digits besides, and look at a model without weights.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.defaults_list import DefaultsList
from hydra._internal.hydra import Hydra
from omegaconf import DictConfig
from sklearn.datasets import load_digits
from timm.layers import weight_init

# What sets `hydra.mode`, or chooses a file that does.
SETS_THE_MODE = ("hydra", "hparams_search")


# What is patched now.
_patches: list[pytest.MonkeyPatch] = []


@contextmanager
def shared_composition() -> Iterator[None]:
    """A block in which commands share the work; one within another changes nothing."""
    with pytest.MonkeyPatch.context() as patch:
        if not _patches:
            _share(patch)
            _read_digits_once(patch)
            _draw_no_weights_without_values(patch)
        _patches.append(patch)
        yield
        _patches.remove(patch)


def stop_sharing() -> None:
    """From here on Hydra does all its work."""
    for patch in _patches:
        patch.undo()


def _share(patch: pytest.MonkeyPatch) -> None:
    """Read each file of a package once, and find and merge each choice of such files once.

    Files of a user's folder and what plug-ins store are read each time.
    """
    files: dict[Any, Any] = {}
    merged: dict[Any, bytes] = {}
    load, merge = CachingConfigRepository.load_config, ConfigLoaderImpl._compose_config_from_defaults_list
    find_mode, choose = Hydra.get_mode, config_loader_impl.create_defaults_list
    load_part = ConfigLoaderImpl._load_single_config
    chosen: dict[Any, DefaultsList] = {}
    parts: dict[Any, bytes] = {}

    def places(repo: Any) -> tuple[str, ...]:
        return tuple(source.full_path() for source in repo.get_sources())

    def load_once(self: CachingConfigRepository, config_path: str) -> Any:
        if config_path in self.cache:
            return self.cache[config_path]
        key = (places(self), config_path)
        found = files.get(key)
        if found is None:
            found = load(self, config_path)
            if is_of_package(config_path, found):
                files[key] = found
        self.cache[config_path] = found
        return found

    def choose_once(repo: Any, config_name: str | None, overrides_list: list[Any], **options: bool) -> DefaultsList:
        """The files of a command, found once for each choice of groups: the values of keys have no say in them."""
        values = [
            word
            for word in overrides_list
            if not word.is_sweep_override()
            and (isinstance(word.value(), dict) or not repo.group_exists(word.key_or_group))
        ]
        groups = [word for word in overrides_list if not any(word is value for value in values)]
        key = (places(repo), config_name, *(word.input_line for word in groups), *options.items())
        found = chosen.get(key)
        if found is None:
            found = choose(repo, config_name, groups, **options)
            if all(is_of_package(path, repo.load_config(path)) for path in {one.config_path for one in found.defaults}):
                chosen[key] = found
        return dataclasses.replace(found, config_overrides=values)

    def load_part_once(self: ConfigLoaderImpl, default: Any, repo: Any) -> Any:
        """A file as it is merged: below the key of its package."""
        if isinstance(default, _Merged):
            return default
        key = (places(repo), default.config_path, default.package, default.primary)
        if key in parts:
            return pickle.loads(parts[key])
        part = load_part(self, default, repo)
        if is_of_package(default.config_path, repo.load_config(default.config_path)):
            parts[key] = pickle.dumps(part)
        return part

    def merge_once(self: ConfigLoaderImpl, defaults: Any, repo: Any) -> DictConfig:
        choice = tuple((entry.config_path, entry.package, entry.is_self) for entry in defaults)
        key = (places(repo), choice)
        if key not in merged:
            # Hydra's own files come first, and are the same in nearly all choices.
            count = sum(1 for _ in itertools.takewhile(lambda entry: entry.config_path.startswith("hydra/"), defaults))
            if 0 < count < len(defaults):
                defaults = [_Merged("hydra", merge_once(self, defaults[:count], repo)), *defaults[count:]]
            whole = merge(self, defaults, _Copies(repo))
            if not all(is_of_package(path, repo.load_config(path)) for path, _, _ in choice):
                return whole
            merged[key] = pickle.dumps(whole)
        return pickle.loads(merged[key])

    def find_mode_of_few(self: Hydra, config_name: str | None, overrides: list[str]) -> Any:
        if any(word.lstrip("+~").startswith(SETS_THE_MODE) for word in overrides):
            return find_mode(self, config_name, overrides)
        return None  # as in all files that have no say: the flags decide

    patch.setattr(CachingConfigRepository, "load_config", load_once)
    patch.setattr(config_loader_impl, "create_defaults_list", choose_once)
    patch.setattr(ConfigLoaderImpl, "_load_single_config", load_part_once)
    patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", merge_once)
    patch.setattr(Hydra, "get_mode", find_mode_of_few)


def _read_digits_once(patch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []

    def load_once() -> Any:
        if not found:
            found.append(load_digits())
        return copy.deepcopy(found[0])

    patch.setattr("sklearn.datasets.load_digits", load_once)


def _draw_no_weights_without_values(patch: pytest.MonkeyPatch) -> None:
    """On the meta device, initial values are computed step by step, in Python, and are none."""
    fill = weight_init._trunc_normal_
    patch.setattr(weight_init, "_trunc_normal_", lambda x, *options: x if x.is_meta else fill(x, *options))


class _Merged(NamedTuple):
    """The result of merging some files, in their place among others."""

    config_path: str
    config: DictConfig


class _Copies:
    """The files of a repository, each a copy: Hydra changes them as it merges them."""

    def __init__(self, repo: Any) -> None:
        self.repo = repo

    def __getattr__(self, name: str) -> Any:
        return getattr(self.repo, name)

    def load_config(self, config_path: str) -> Any:
        found = copy.copy(self.repo.load_config(config_path))
        if found is not None:
            found.config = copy.deepcopy(found.config)
        return found


def is_of_package(path: str, loaded: Any) -> bool:
    """True for a file of an installed package, and for what Hydra defines itself."""
    return loaded is not None and (loaded.path.startswith("pkg://") or path.startswith("hydra/"))
