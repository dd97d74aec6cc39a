"""The options of generators: their keyword arguments, which a configuration chooses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from longseq.tasks.data.generators.samples import Samples


def options_of(generator: Callable[..., Samples]) -> dict[str, Any]:
    """The options of a generator with their defaults."""
    parameters = inspect.signature(generator).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def check_values(name: str, known: Mapping[str, Any], chosen: Mapping[str, Any], *, foreign: bool = False) -> None:
    """Raise ValueError for an option that is not in `known`, or a value of another type than the default there.

    `name` is that of the generator. Numbers and ranges of longseq's generators have limits, those of `foreign` ones
    their types only.
    """
    if unknown := sorted(set(chosen) - set(known)):
        remedy = f"; data={name}, in place of data.generator={name}, sets these alone" if foreign else ""
        raise ValueError(
            f"data.generator={name} has no option {', '.join(unknown)}: its options are {', '.join(known)}{remedy}"
        )
    unmet = _other_type if foreign else _unmet
    for key, value in chosen.items():
        if (needed := unmet(known[key], value)) is not None:
            raise ValueError(f"data.options.{key}={value!r} must be {needed}")


def _unmet(default: Any, value: Any) -> str | None:
    """What a value must be to replace `default`; None if it is that."""
    if isinstance(default, int) and not isinstance(default, bool):
        whole = _other_type(default, value) is None
        return None if whole and value >= 0 else "a whole number of at least 0"
    if isinstance(default, tuple):
        pair = isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(end, int) for end in value)
        return None if pair and 1 <= value[0] <= value[1] else "a range [low, high] with 1 <= low <= high"
    if isinstance(default, bool | float | str):
        return _other_type(default, value)
    whole = isinstance(value, int) and not isinstance(value, bool)
    numbers = whole or (isinstance(value, (list, tuple)) and all(isinstance(end, int) for end in value))
    return None if value is None or numbers else "a whole number, a range of them or null"


def _other_type(default: Any, value: Any) -> str | None:
    """What a value must be to have the type of `default`; None if it has. A default of None has no type."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(default, int):
        return None if whole else "a whole number"
    if isinstance(default, float):
        return None if whole or isinstance(value, float) else "a number"
    if isinstance(default, str):
        return None if isinstance(value, str) else "a word"
    if isinstance(default, list | tuple):
        listed = isinstance(value, list | tuple)
        same = listed and all(any(_other_type(entry, one) is None for entry in default) for one in value if default)
        return None if same else f"a list of entries such as {list(default)}"
    return None
