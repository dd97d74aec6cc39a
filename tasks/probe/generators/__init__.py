"""The generators of the probes, by name. Each makes many samples at once from a `numpy.random.Generator`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from longseq.tasks.probe.generators.copying import copy, selective_copying
from longseq.tasks.probe.generators.listops import listops
from longseq.tasks.probe.generators.mad import compression, fuzzy_recall, memorization, recall
from longseq.tasks.probe.generators.mqar import mqar
from longseq.tasks.probe.generators.mqar_vla import mqar_vla
from longseq.tasks.probe.generators.regbench import regbench
from longseq.tasks.probe.generators.samples import IGNORED, Samples, draw

__all__ = ["GENERATORS", "IGNORED", "Samples", "check_options", "draw", "generator_options"]

GENERATORS: Mapping[str, Callable[..., Samples]] = MappingProxyType(
    {
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
)


def generator_options(name: str) -> dict[str, Any]:
    """The options of a generator with their defaults. ValueError for an unknown name."""
    if name not in GENERATORS:
        raise ValueError(f"data.generator={name} is unknown: choose one of {', '.join(GENERATORS)}")
    parameters = inspect.signature(GENERATORS[name]).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def check_options(name: str, chosen: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that the generator does not have."""
    known = generator_options(name)
    if unknown := sorted(set(chosen) - set(known)):
        raise ValueError(
            f"data.generator={name} has no option {', '.join(unknown)}: its options are {', '.join(known)}"
        )
