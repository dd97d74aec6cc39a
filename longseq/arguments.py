"""Constructors that record all of their arguments on the object, including arguments left at their defaults."""

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

Construct = TypeVar("Construct", bound=Callable[..., None])


class KeepsArguments:
    """Base class of objects that can be built again after a default has changed.

    `arguments` holds every argument of the constructor of the object's own class by name, including defaults. If an
    argument is None and the constructor sets the attribute of that name to a number or a string, that value is
    recorded: `num_heads=None` becomes the computed `self.num_heads`. Other resolved values are passed to
    `resolve_arguments`.
    """

    arguments: dict[str, Any]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = _keep_arguments(vars(cls)["__init__"])  # type: ignore[method-assign]

    def resolve_arguments(self, **values: Any) -> None:
        """Record values that the constructor or a method computed; names of no argument are ignored."""
        known = {name: copy_containers(value) for name, value in values.items() if name in self.arguments}
        self.arguments.update(known)


def takes_also(other: type, without: Collection[str] = ()) -> Callable[[Construct], Construct]:
    """Decorate a constructor with `**options`: these are the keyword arguments of the class `other`, with its defaults.

    The signature then lists them, and `KeepsArguments` records them. `without` names arguments that are not taken.
    """

    def decorate(construct: Construct) -> Construct:
        own = inspect.signature(construct)
        named = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        taken = {*own.parameters, *without}
        added = [each for name, each in inspect.signature(other).parameters.items() if name not in taken]
        construct.__signature__ = own.replace(parameters=[*named, *added])  # type: ignore[attr-defined]
        return construct

    return decorate


def _keep_arguments(construct: Callable[..., None]) -> Callable[..., None]:
    """Wrap a constructor: it records its arguments if it is the object's own, not a base class's."""

    @functools.wraps(construct)
    def construct_and_keep(self: Any, *args: Any, **kwargs: Any) -> None:
        is_base = type(self).__init__ is not construct_and_keep
        if not is_base:
            arguments = _bind(construct, self, args, kwargs)
            if arguments is not None:
                self.arguments = arguments
        construct(self, *args, **kwargs)
        if not is_base:
            for name, value in self.arguments.items():
                resolved = getattr(self, name, None) if value is None else None
                if isinstance(resolved, bool | int | float | str):
                    self.arguments[name] = resolved

    return construct_and_keep


def _bind(construct: Callable[..., None], self: Any, args: Any, kwargs: Any) -> dict[str, Any] | None:
    """The arguments of a call by name; None if they do not fit, so that the call raises the error."""
    signature = inspect.signature(construct)
    try:
        bound = signature.bind(self, *args, **kwargs)
    except TypeError:
        return None
    bound.apply_defaults()
    arguments: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= {key: copy_containers(each) for key, each in value.items()}
        else:
            arguments[name] = copy_containers(value)
    return arguments


def check_choice(name: str, value: Any, known: Iterable[Any]) -> None:
    """Raise ValueError unless the argument `name` has one of the known values."""
    if value not in (choices := tuple(known)):
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(str, choices))}")


def copy_containers(value: Any) -> Any:
    """Copy nested dictionaries and lists; tuples become lists."""
    if isinstance(value, Mapping):
        return {key: copy_containers(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [copy_containers(each) for each in value]
    return value
