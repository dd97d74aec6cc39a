"""The generators of the probes, by name. Each makes many samples at once from a `numpy.random.Generator`.

A plug-in adds its own with `@register("name")` on a function (random, samples, *, options with defaults) -> Samples.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from longseq.arguments import is_plain
from longseq.plugins import is_foreign
from longseq.tasks.data.generators.listops import listops
from longseq.tasks.data.generators.options import check_values, options_of
from longseq.tasks.data.generators.samples import IGNORED, Samples, check_samples, draw
from longseq.tasks.probe.generators.copying import copy, selective_copying
from longseq.tasks.probe.generators.mad import compression, fuzzy_recall, memorization, recall
from longseq.tasks.probe.generators.mqar import mqar
from longseq.tasks.probe.generators.mqar_vla import mqar_vla
from longseq.tasks.probe.generators.regbench import regbench

__all__ = [
    "GENERATORS",
    "IGNORED",
    "Samples",
    "check_options",
    "check_samples",
    "draw",
    "generator_options",
    "preset",
    "register",
]

Generator = TypeVar("Generator", bound=Callable[..., Samples])

_GENERATORS: dict[str, Callable[..., Samples]] = {
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
GENERATORS: Mapping[str, Callable[..., Samples]] = MappingProxyType(_GENERATORS)


def register(name: str) -> Callable[[Generator], Generator]:
    """Register a generator, which `task=probe data=NAME` then chooses; its keyword arguments are `data.options`.

    Where there is no file `conf/data/NAME.yaml`, of longseq or of a plug-in, the command takes `preset(NAME)` for it.

    Raises:
        ValueError: the name is taken, an option has no default, or there is no option `vocab_size`.
    """

    def enter(generator: Generator) -> Generator:
        if name in _GENERATORS:
            raise ValueError(f"the generator {name!r} is there already; choose another name")
        options = options_of(generator)
        if required := [option for option, default in options.items() if default is inspect.Parameter.empty]:
            key = required[0]
            raise ValueError(f"the generator {name!r}: the option {key} needs a default, such as {key}=1")
        if not isinstance(options.get("vocab_size"), int):
            raise ValueError(
                f"the generator {name!r} needs the keyword-only option vocab_size with a default, such as vocab_size=16"
            )
        _GENERATORS[name] = generator
        return generator

    return enter


def preset(name: str) -> dict[str, Any]:
    """A file of the group `data` for a generator that has none: its defaults, and mqar's numbers of samples.

    A default that no configuration holds, such as a function, is left out.
    """
    return {
        "tasks": ["probe"],
        "name": name,
        "generator": name,
        "options": {key: default for key, default in generator_options(name).items() if is_plain(default)},
        "train": [{"samples": 10000}],
        "validation": [{"samples": 500}],
        "test": [{"samples": 1000}],
        "eval_batch_size": 250,
        "draw_seed": 0,
        "cache": None,
    }


def generator_options(name: str) -> dict[str, Any]:
    """The options of a generator with their defaults. ValueError for an unknown name."""
    if name not in GENERATORS:
        raise ValueError(f"data.generator={name} is unknown: choose one of {', '.join(GENERATORS)}")
    return options_of(GENERATORS[name])


def check_options(name: str, chosen: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that the generator does not have, or a value of another type than its default."""
    check_values(name, generator_options(name), chosen, foreign=is_foreign(GENERATORS[name]))
