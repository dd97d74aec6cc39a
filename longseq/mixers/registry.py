"""Mixers by name."""

import difflib
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from longseq.mixers.base import Mixer
from longseq.mixers.parts import missing_options, with_parts

_REGISTRY: dict[str, type[Mixer[Any]]] = {}

MixerClass = TypeVar("MixerClass", bound=type[Mixer[Any]])


def register(name: str) -> Callable[[MixerClass], MixerClass]:
    """Register a mixer class under `name`: `@register("deltanet")`.

    The options of its constructor are keyword-only and have defaults that a configuration can hold. Raises ValueError
    for a name that is taken.
    """

    def enter(mixer: MixerClass) -> MixerClass:
        if name in _REGISTRY:
            raise ValueError(f"the mixer name {name!r} is taken by {_REGISTRY[name].__qualname__}")
        _REGISTRY[name] = mixer
        return mixer

    return enter


def mixer_names() -> tuple[str, ...]:
    """Return the names of all mixers, in alphabetical order."""
    return tuple(sorted(_REGISTRY))


def get(name: str) -> type[Mixer[Any]]:
    """Return the class registered under `name`; a ValueError names the nearest one."""
    if name not in _REGISTRY:
        near = difflib.get_close_matches(str(name), _REGISTRY, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"the mixers are {', '.join(mixer_names())}"
        raise ValueError(f"unknown mixer {name!r}: {hint}")
    return _REGISTRY[name]


def name_of(mixer: type[Mixer[Any]]) -> str | None:
    """Return the name under which a class is registered, None for one that is not."""
    return next((name for name, registered in _REGISTRY.items() if registered is mixer), None)


def options(name: str) -> dict[str, Any]:
    """Return the keyword options of a mixer's constructor with their defaults, and those that every mixer has."""
    parameters = inspect.signature(get(name)).parameters.values()
    own = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    return own | missing_options(get(name))


def create(name: str, d_model: int, **chosen: Any) -> Mixer[Any]:
    """Build the mixer `name` for `d_model` channels, with the options that `options` lists; ValueError for others.

    A mixer without a short convolution or an output gate of its own gets them from `longseq.mixers.parts`, by the
    options `convolution_width` and `output_gate`.
    """
    known = options(name)
    unknown = sorted(set(chosen) - set(known))
    if unknown:
        raise ValueError(f"mixer {name!r} has no option {', '.join(unknown)}; its options are {', '.join(known)}")
    kind: Any = get(name)
    missing = {option: chosen.pop(option) for option in missing_options(kind) if option in chosen}
    return with_parts(kind)(d_model, **chosen, **missing) if any(missing.values()) else kind(d_model, **chosen)
