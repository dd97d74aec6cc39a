"""The generators of the probes, by name. Each makes many samples at once from a `numpy.random.Generator`.

A plug-in adds its own with `@register("name")` on a function (random, samples, *, options with defaults) -> Samples.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from longseq.tasks.data.generators import IGNORED, Samples, draw, listops
from longseq.tasks.probe.generators.copying import copy, selective_copying
from longseq.tasks.probe.generators.mad import compression, fuzzy_recall, memorization, recall
from longseq.tasks.probe.generators.mqar import mqar
from longseq.tasks.probe.generators.mqar_vla import mqar_vla
from longseq.tasks.probe.generators.regbench import regbench

__all__ = ["GENERATORS", "IGNORED", "Samples", "draw", "generator_options", "is_own", "preset", "register"]

Generator = TypeVar("Generator", bound=Callable[..., Samples])

GENERATORS: dict[str, Callable[..., Samples]] = {
    "compression": compression,
    "copy": copy,
    "fuzzy_recall": fuzzy_recall,
    "listops": listops,
    "memorization": memorization,
    "mqar": mqar,
    "mqar_vla": mqar_vla,
    "recall": recall,
    "regbench": regbench,
    "selective_copying": selective_copying,
}


def register(name: str) -> Callable[[Generator], Generator]:
    """Register a generator, which `task=probe data=NAME` then chooses; its keyword arguments are `data.options`.

    Each has a default, and one is `vocab_size`. Without a file `conf/data/NAME.yaml`, of longseq or of a plug-in,
    `preset(NAME)` takes its place.

    Raises:
        ValueError: the name is taken.
    """

    def enter(generator: Generator) -> Generator:
        if name in GENERATORS:
            raise ValueError(f"there already is a generator {name!r}")
        GENERATORS[name] = generator
        return generator

    return enter


def is_own(name: str) -> bool:
    """Whether a generator is one of longseq, and not of a plug-in."""
    return GENERATORS[name].__module__.startswith("longseq.")


def preset(name: str) -> dict[str, Any]:
    """The group `data` of a generator that has no file: its defaults, and mqar's numbers of samples."""
    return {
        "name": name,
        "generator": name,
        "options": generator_options(name),
        "train": [{"samples": 10000}],
        "validation": [{"samples": 500}],
        "test": [{"samples": 1000}],
        "eval_batch_size": 250,
        "draw_seed": 0,
        "cache": None,
    }


def generator_options(name: str) -> dict[str, Any]:
    """The options of a generator with their defaults."""
    parameters = inspect.signature(GENERATORS[name]).parameters.values()
    return {one.name: one.default for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY}
