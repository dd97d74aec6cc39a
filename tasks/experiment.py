"""The configuration of a training, checked before anything is opened, downloaded, built or written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longseq.tasks import registry
from longseq.tasks.config import Train, read, unknown_key
from longseq.tasks.training import automatic
from longseq.tasks.training.recipe import device_batch_size, device_count
from longseq.tasks.training.schedule import RunLength


def read_experiment(config: Mapping[str, Any], command: type[Train] = Train) -> dict[str, Any]:
    """The configuration with all defaults. ValueError, in one line, for an unknown key or an impossible value."""
    keys = registry.of(config).config
    if unread := [key for key in config if key not in command.model_fields]:
        raise ValueError(unknown_key(unread[0], list(command.model_fields)))
    ready = with_any_choice(config)
    checked = read(keys.experiment(command), ready).to_dict()
    RunLength.from_recipe(checked["recipe"])
    device_batch_size(checked)
    keys.check(checked)
    return automatic.restore_words(checked, config)


def choose(config: Mapping[str, Any], info: Any | None) -> tuple[dict[str, Any], str | None]:
    """The configuration with the values that its task chooses where the recipe says `auto`, and why it chooses them.

    `info` is that of the data; without it, the values are possible ones.
    """
    if not automatic.is_automatic(config):
        return dict(config), None
    parts = device_count(config) * config["trainer"].get("accumulate_grad_batches", 1)
    choice = registry.of(config).config.choose(config, info, parts)
    return automatic.settle(config, choice), choice.reason


def with_any_choice(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with possible values in place of those that are chosen or found when the data is open."""
    return automatic.with_rate(choose(config, None)[0])
