"""Limits of keys, under the names that the tasks use."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field

from longseq.tasks.config import nearest, read, read_value, spell, unknown_key

__all__ = ["Length", "Off", "Range", "check_call", "check_value", "nearest", "read", "signature_options", "spell"]

check_value = read_value


def Range(least: Any = None, most: Any = None, *, above: Any = None, below: Any = None) -> Any:
    return Field(ge=least, le=most, gt=above, lt=below)


def Length(least: int = 1, most: int | None = None) -> Any:
    return Field(min_length=least, max_length=most)


def Off() -> Any:
    return Field()


def signature_options(function: Callable[..., Any]) -> dict[str, Any]:
    """The parameters of a function that can be given by name, with their defaults."""
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {p.name: p.default for p in inspect.signature(function).parameters.values() if p.kind in kinds}


def check_call(function: Any, values: Mapping[str, Any], place: str, **_: Any) -> dict[str, Any]:
    return dict(values)


def refuse_unknown(values: Any, known: Any, place: str = "") -> None:
    known = list(known)
    for key in values:
        if key not in known:
            raise ValueError(unknown_key(str(key), known, place))


def choices_of(function: Any, name: str) -> list[Any]:
    return []
