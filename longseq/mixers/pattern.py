"""The mixer of each layer of a hybrid model."""

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from longseq.mixers.registry import get

# A name or several, spelled as in `expand_pattern`; or names in turn.
Pattern = str | Sequence[str]

_TERM = re.compile(r"(?:(?P<count>[1-9]\d*)x)?(?P<name>[^\W\d]\w*)(?P<layers>(?:@\d+)*)")

# The names that repeat in turn, and the names at chosen layers.
_Parsed = tuple[tuple[str, ...], dict[int, str]]


def expand_pattern(pattern: Pattern, depth: int) -> tuple[str, ...]:
    """Name the mixer of each of `depth` layers.

        "deltanet"                       the same in every layer
        "3xdeltanet+attention"           three and one in turn, from the first layer to the last
        ["deltanet", "attention"]        the same as "deltanet+attention"
        "deltanet+attention@1@12"        attention in layers 1 and 12, counted from 0, and deltanet in the others

    The last turn may be incomplete.

    Raises ValueError if the pattern has none of these forms, names an unknown mixer, or names more layers than `depth`.
    """
    cycle, placed = _parse(pattern)
    for name in (*cycle, *placed.values()):
        get(name)
    if len(cycle) > depth:
        raise ValueError(f"mixer={pattern} names {len(cycle)} layers in turn and the model has {depth}")
    if max(placed, default=0) >= depth:
        raise ValueError(f"mixer={pattern} names layer {max(placed)} and the model's layers are 0 to {depth - 1}")
    return tuple(placed.get(layer, cycle[layer % len(cycle)]) for layer in range(depth))


def spell_pattern(pattern: Pattern) -> str:
    """Write a pattern in one line that can be a file name: `3xdeltanet+attention`, `deltanet+attention@1@12`.

    Names that repeat within a turn, as in a list of all layers, are written once.
    """
    cycle, placed = _parse(pattern)
    size = len(cycle)
    period = next(p for p in range(1, size + 1) if size % p == 0 and cycle[:p] * (size // p) == cycle)
    runs = [(len(list(run)), name) for name, run in groupby(cycle[:period])]
    turns = [name if count == 1 else f"{count}x{name}" for count, name in runs]
    chosen = [
        name + "".join(f"@{index}" for index in sorted(placed) if placed[index] == name)
        for name in sorted(set(placed.values()))
    ]
    return "+".join(turns + chosen)


def options_by_name(pattern: Pattern, options: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Return the constructor options of each mixer that a pattern names, by its name.

    If the pattern names one mixer, `options` are that mixer's. Otherwise they are a dictionary `{name: options}`, which
    need not have all names; ValueError for other keys.
    """
    cycle, placed = _parse(pattern)
    names = tuple(dict.fromkeys((*cycle, *placed.values())))
    given = dict(options or {})
    if len(names) == 1:
        return {names[0]: given}
    for key, value in given.items():
        if key not in names or not isinstance(value, Mapping | None):
            raise ValueError(f"mixer_options of a hybrid are {{NAME: options}}, and {key}={value!r} is not")
    return {name: dict(given.get(name) or {}) for name in names}


def _parse(pattern: Pattern) -> _Parsed:
    if isinstance(pattern, str):
        return _parse_terms(pattern)
    if isinstance(pattern, Sequence) and pattern and all(isinstance(name, str) for name in pattern):
        return _parse_terms("+".join(pattern))
    raise ValueError(f"mixer={pattern!r} is no pattern of mixers")


def _parse_terms(text: str) -> _Parsed:
    cycle: list[str] = []
    placed: dict[int, str] = {}
    for term in text.split("+"):
        match = _TERM.fullmatch(term)
        if match is None or (match["count"] and match["layers"]):
            raise ValueError(f"mixer={text!r} is no pattern of mixers")
        for index in map(int, match["layers"].split("@")[1:]):
            placed[index] = match["name"]
        if not match["layers"]:
            cycle += [match["name"]] * int(match["count"] or 1)
    if not cycle:
        raise ValueError(f"mixer={text!r} leaves layers without a mixer")
    return tuple(cycle), placed
