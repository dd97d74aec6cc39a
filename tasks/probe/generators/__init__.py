"""The generators of the probes, by name. Each makes many samples at once from a `numpy.random.Generator`.

A plug-in adds its own with `@register("name")` on a function (random, samples, *, options with defaults) -> Samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from longseq.tasks.data.generators.listops import listops
from longseq.tasks.data.generators.options import check_values, options_of
from longseq.tasks.data.generators.samples import IGNORED, Samples, draw
from longseq.tasks.probe.generators.copying import copy, selective_copying
from longseq.tasks.probe.generators.mad import compression, fuzzy_recall, memorization, recall
from longseq.tasks.probe.generators.mqar import mqar
from longseq.tasks.probe.generators.mqar_vla import mqar_vla
from longseq.tasks.probe.generators.regbench import regbench

__all__ = ["GENERATORS", "IGNORED", "Samples", "check_options", "draw", "generator_options", "register"]

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
    """Register a generator, which `data.generator=NAME` then chooses; its keyword arguments are `data.options`."""

    def enter(generator: Generator) -> Generator:
        if name in _GENERATORS:
            raise ValueError(f"the generator {name!r} is there already; choose another name")
        _GENERATORS[name] = generator
        return generator

    return enter


def generator_options(name: str) -> dict[str, Any]:
    """The options of a generator with their defaults. ValueError for an unknown name."""
    if name not in GENERATORS:
        raise ValueError(f"data.generator={name} is unknown: choose one of {', '.join(GENERATORS)}")
    return options_of(GENERATORS[name])


def check_options(name: str, chosen: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that the generator does not have, or a value of another type than its default."""
    check_values(name, generator_options(name), chosen)
