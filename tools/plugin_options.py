"""What plug-ins add to the command line: their folders of configuration, and options of the group `mixer`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

import longseq.conf
from longseq import plugins

# Options that a file of the group `mixer` leaves to the model and to the direction.
_DECIDED = ("backend", "causal")


class PluginFolders(SearchPathPlugin):
    """Adds the folders `conf` of the loaded plug-ins to Hydra's search path, after ours."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in plugins.conf_folders():
            search_path.append("longseq-plugin", f"file://{folder}")


def load_plugins(overrides: Sequence[str]) -> list[str]:
    """Load the plug-ins that a command declares, and add their options to Hydra; return the overrides for Hydra.

    A plug-in's mixer without a file in the group `mixer` becomes an option of the group, with its constructor's
    defaults, and so does its generator of samples in the group `data`. If `mixer.name=NAME` names one mixer and the
    command does not choose the group, it means `mixer=NAME`: the options of the group's default belong to another
    mixer.
    """
    plugins.load(_declared(overrides))
    if plugins.loaded():
        from longseq import mixers
        from longseq.tasks.probe import generators

        Plugins.instance().register(PluginFolders)
        store = ConfigStore.instance().store
        for name in _without_file("mixer", mixers.mixer_names()):
            options = {key: value for key, value in mixers.options(name).items() if key not in _DECIDED}
            store(group="mixer", name=name, node={"name": name, "options": options})
        foreign = [name for name, generator in generators.GENERATORS.items() if plugins.is_foreign(generator)]
        for name in _without_file("data", foreign):
            store(group="data", name=name, node=generators.preset(name))
    return [_as_group(override, overrides) for override in overrides]


def _without_file(group: str, names: Iterable[str]) -> list[str]:
    """Those names that no file of a group of ours or of a plug-in has; Hydra would merge a file with what is stored."""
    folders = [Path(longseq.conf.__path__[0], group), *(folder / group for folder in plugins.conf_folders())]
    return [name for name in names if not any((folder / f"{name}.yaml").is_file() for folder in folders)]


def _declared(overrides: Sequence[str]) -> Iterator[str]:
    """The names after `plugins=`."""
    for override in overrides:
        if re.match(r"\+{0,2}plugins=", override):
            names: Any = OverridesParser.create().parse_override(override).value()
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise ValueError(f"{override} is no list of modules: write plugins=[my_module]")
            yield from names


def _as_group(override: str, overrides: Sequence[str]) -> str:
    key, _, value = override.partition("=")
    if key != "mixer.name" or any(other.startswith("mixer=") for other in overrides):
        return override
    from longseq import mixers  # all of them, which other commands need later or not at all

    return f"mixer={value}" if value in mixers.mixer_names() else override
