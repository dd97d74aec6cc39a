"""The generators of the probes, by name. Each makes many samples at once from a `numpy.random.Generator`.

A plug-in adds its own with `@register("name")` on a function (random, samples, *, options with defaults) -> Samples.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from longseq.tasks.probe.generators.copying import copy, selective_copying
from longseq.tasks.probe.generators.listops import listops
from longseq.tasks.probe.generators.mad import compression, fuzzy_recall, memorization, recall
from longseq.tasks.probe.generators.mqar import mqar
from longseq.tasks.probe.generators.mqar_vla import mqar_vla
from longseq.tasks.probe.generators.regbench import regbench
from longseq.tasks.probe.generators.samples import IGNORED, Samples, draw

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
    parameters = inspect.signature(GENERATORS[name]).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def check_options(name: str, chosen: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that the generator does not have, or a value of another type than its default."""
    known = generator_options(name)
    if unknown := sorted(set(chosen) - set(known)):
        raise ValueError(
            f"data.generator={name} has no option {', '.join(unknown)}: its options are {', '.join(known)}"
        )
    for key, value in chosen.items():
        if (needed := _unmet(known[key], value)) is not None:
            raise ValueError(f"data.options.{key}={value!r} must be {needed}")


def _unmet(default: Any, value: Any) -> str | None:
    """What a value must be to replace `default`; None if it is that."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(default, int):
        return None if whole and value >= 0 else "a whole number of at least 0"
    if isinstance(default, float):
        return None if whole or isinstance(value, float) else "a number"
    if isinstance(default, tuple):
        pair = isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(end, int) for end in value)
        return None if pair and 1 <= value[0] <= value[1] else "a range [low, high] with 1 <= low <= high"
    if isinstance(default, str):
        return None if isinstance(value, str) else "a word"
    numbers = whole or (isinstance(value, (list, tuple)) and all(isinstance(end, int) for end in value))
    return None if value is None or numbers else "a whole number, a range of them or null"
