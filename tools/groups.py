"""What plug-ins add to the command line: their folders of configuration, and options of the groups mixer and data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

import longseq.conf
from longseq import plugins


class PluginFolders(SearchPathPlugin):
    """Adds the folders `conf` of the loaded plug-ins to Hydra's search path, after ours."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in plugins.conf_folders():
            search_path.append("longseq-plugin", f"file://{folder}")


def load_plugins(words: Sequence[str]) -> None:
    """Load the plug-ins that `plugins=[...]` declares, and add their mixers and generators to Hydra's groups.

    A mixer without a file in the group `mixer` becomes an option of the group, with its constructor's defaults; so does
    a generator of samples in the group `data`.
    """
    declared = [word for word in words if word.lstrip("+").startswith("plugins=")]
    parsed = OverridesParser.create().parse_overrides(declared)
    plugins.load([name for override in parsed for name in override.value()])  # type: ignore[union-attr]
    if not plugins.loaded():
        return
    from longseq import mixers
    from longseq.tasks.probe import generators

    Plugins.instance().register(PluginFolders)
    store = ConfigStore.instance().store
    for name in _without_file("mixer", mixers.mixer_names()):
        longseq.conf.store_mixer(name)
    foreign = [name for name, generator in generators.GENERATORS.items() if plugins.is_foreign(generator)]
    for name in _without_file("data", foreign):
        store(group="data", name=name, node=generators.preset(name))


def _without_file(group: str, names: Iterable[str]) -> list[str]:
    """Those names that no file of a group of ours or of a plug-in has."""
    folders = [Path(longseq.conf.__path__[0], group), *(folder / group for folder in plugins.conf_folders())]
    return [name for name in names if not any((folder / f"{name}.yaml").is_file() for folder in folders)]
