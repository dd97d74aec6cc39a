"""Mixers by name."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from longseq.arguments import is_plain
from longseq.mixers.base import Mixer
from longseq.plugins import is_foreign

_REGISTRY: dict[str, type[Mixer[Any]]] = {}
_INERT_EXAMPLE = 'as {"eps": ({"normalizer": (False,)},)} is'

MixerClass = TypeVar("MixerClass", bound=type[Mixer[Any]])


def register(name: str) -> Callable[[MixerClass], MixerClass]:
    """Enter a mixer class under `name`: `@register("deltanet")`.

    Raises:
        ValueError: the name is taken; an option of the constructor is not keyword-only, or has no default that a
            configuration can hold; or the class's `inert_with` has another form than `longseq.arguments.Inert` or names
            an option that the class does not have.
    """

    def enter(mixer: MixerClass) -> MixerClass:
        if name in _REGISTRY:
            raise ValueError(f"the mixer name {name!r} is taken by {_REGISTRY[name].__qualname__}; choose another name")
        _check_constructor(mixer)
        _check_inert(mixer)
        _REGISTRY[name] = mixer
        return mixer

    return enter


def _check_constructor(mixer: type[Mixer[Any]]) -> None:
    """Raise ValueError for options that a configuration or a saved model could not hold by their names and values."""
    first, *rest = inspect.signature(mixer).parameters.values() or (None,)
    if first is None:
        raise ValueError(f"{mixer.__qualname__}.__init__ has no parameter d_model: put it first")
    for option in rest:
        if option.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
            raise ValueError(
                f"{mixer.__qualname__}: the option {option.name} must be keyword-only: put * after d_model in __init__"
            )
        if option.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        if option.default is inspect.Parameter.empty:
            raise ValueError(f"{mixer.__qualname__}: the option {option.name} needs a default, such as {option.name}=1")
        if not is_plain(option.default):
            raise ValueError(
                f"{mixer.__qualname__}: the option {option.name} has the default {option.default!r}: give a number, "
                "text, a list, a dictionary or None, which configurations and saved models can hold"
            )


def _check_inert(mixer: type[Mixer[Any]]) -> None:
    """Raise ValueError if the `inert_with` of a class could never be heeded, or only fails in a training."""
    # A class may inherit the cases of options that its own constructor no longer has.
    own, known = "inert_with" in vars(mixer), _options_of(mixer)
    if not isinstance(mixer.inert_with, Mapping):
        raise ValueError(f"{mixer.__qualname__}.inert_with must be a mapping of options to cases, {_INERT_EXAMPLE}")
    for option, cases in mixer.inert_with.items():
        place = f"{mixer.__qualname__}.inert_with[{option!r}]"
        if not isinstance(cases, tuple) or not all(
            isinstance(case, Mapping) and all(isinstance(values, tuple) for values in case.values()) for case in cases
        ):
            raise ValueError(
                f"{place} must be a tuple of cases, each a mapping of options to tuples of values, {_INERT_EXAMPLE}"
            )
        unknown = [name for name in (option, *(name for case in cases for name in case)) if name not in known]
        if own and unknown:
            raise ValueError(f"{place} names {unknown[0]!r}, which is none of the options: {', '.join(known)}")


def _options_of(mixer: type[Mixer[Any]]) -> dict[str, Any]:
    parameters = inspect.signature(mixer).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def mixer_names() -> tuple[str, ...]:
    """Return the names of all mixers, in alphabetical order."""
    return tuple(sorted(_REGISTRY))


def get(name: str) -> type[Mixer[Any]]:
    """Return the class registered under `name`; a ValueError lists the valid names."""
    if name not in _REGISTRY:
        near = difflib.get_close_matches(str(name), _REGISTRY, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"unknown mixer {name!r}: {hint}the mixers are {', '.join(mixer_names())}")
    return _REGISTRY[name]


def name_of(mixer: type[Mixer[Any]]) -> str | None:
    """Return the name under which a class is registered, None for one that is not."""
    return next((name for name, registered in _REGISTRY.items() if registered is mixer), None)


def options(name: str) -> dict[str, Any]:
    """Return the keyword options of a mixer's constructor with their defaults."""
    return _options_of(get(name))


def create(name: str, d_model: int, **chosen: Any) -> Mixer[Any]:
    """Build the mixer `name` for `d_model` channels; the further keywords are its constructor's options.

    Raises:
        ValueError: the name or an option is unknown, and the message lists the valid ones; or a number of a mixer of
            longseq is NaN or infinite where the default is not.
    """
    known = options(name)
    unknown = sorted(set(chosen) - set(known))
    if unknown:
        raise ValueError(f"mixer {name!r} has no option {', '.join(unknown)}; its options are {', '.join(known)}")
    mixer = get(name)
    for option, value in ({} if is_foreign(mixer) else chosen).items():
        if _is_not_finite(value) and not _is_not_finite(known[option]):
            raise ValueError(f"{option}={value} of the mixer {name!r} is not finite: give a finite number")
    return mixer(d_model, **chosen)


def _is_not_finite(value: Any) -> bool:
    """True for NaN and infinity, also as one of several numbers."""
    if isinstance(value, Mapping):
        return any(map(_is_not_finite, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_is_not_finite, value))
    return isinstance(value, float) and not math.isfinite(value)
