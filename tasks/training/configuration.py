"""The resolved configuration of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from longseq.mixers.pattern import spell_pattern

Config = Mapping[str, Any]

# `${mixer_label:${mixer.name}}` names a run by its mixer, also where a hybrid's pattern is a list or a dictionary.
OmegaConf.register_new_resolver("mixer_label", spell_pattern, replace=True)


def resolve(config: DictConfig | Config) -> dict[str, Any]:
    """Return the configuration as plain containers, every interpolation replaced by its value."""
    if isinstance(config, DictConfig):
        return OmegaConf.to_container(config, resolve=True)  # type: ignore[return-value]
    return dict(config)
