"""The keys in `longseq VERB --help` and in the reference page, from the classes that declare them."""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from omegaconf import OmegaConf
from pydantic.fields import FieldInfo

from longseq.tasks.commands import COMMANDS
from longseq.tasks.config import Keys, spell

_WIDTH = 34  # of a key with its default


def register() -> None:
    """Let the files of the commands write `${keys_of:VERB}` in their help."""
    OmegaConf.register_new_resolver("keys_of", describe_keys, replace=True)


def describe_keys(verb: str) -> str:
    """A line for each key of a command that is no group: `key=default`, its help and its values."""
    # Hydra's help fills in a template, in which $ has a meaning.
    return "\n".join(f"{key:<{_WIDTH}}  {text}" for key, text in rows_of(COMMANDS[verb])).replace("$", "$$")


def rows_of(cls: type[Keys], place: str = "") -> list[tuple[str, str]]:
    """`key=default` and its help for each key of a section, and of the sections in it that have defaults."""
    rows = []
    for name, field in cls.model_fields.items():
        if _section(field) is not None:
            if not field.is_required():
                rows += rows_of(_section(field), f"{place}{name}.")  # type: ignore[arg-type]
        elif field.annotation is not type(None):
            begin = f"{place}{name}=" + ("..." if field.is_required() else spell(field.get_default()))
            rows.append((begin, f"{field.description}{_allowed(field)}"))
    return rows


def _section(field: FieldInfo) -> type[Keys] | None:
    kind: Any = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Keys) else None


def _allowed(field: FieldInfo) -> str:
    """The names or the range that a key takes, if it has any."""
    kinds = [kind for kind in _kinds(field.annotation) if kind is not type(None)]
    names = [spell(name) for kind in kinds if get_origin(kind) is Literal for name in get_args(kind)]
    limits = {"Ge": "at least", "Gt": "above", "Le": "at most", "Lt": "below"}
    bounds = [
        f"{limits[type(one).__name__]} {getattr(one, type(one).__name__.lower())}"
        for one in field.metadata
        if type(one).__name__ in limits
    ]
    return "".join(f"; {limit}" for limit in (", ".join(names), " and ".join(bounds)) if limit)


def _kinds(hint: Any) -> list[Any]:
    if get_origin(hint) is Annotated:
        return _kinds(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return [kind for one in get_args(hint) for kind in _kinds(one)]
    return [hint]
