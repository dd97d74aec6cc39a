"""Constructors that record all of their arguments on the object, including arguments left at their defaults."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType, NoneType, UnionType
from typing import Any, ClassVar, TypeVar, get_args, get_type_hints

Construct = TypeVar("Construct", bound=Callable[..., None])
# For an option the cases in which it has no effect. A case is a mapping of other options to some of their values: it
# holds if each of them has one of these. Example: {"eps": ({"normalizer": (False,)},)}.
Inert = Mapping[str, tuple[Mapping[str, tuple[Any, ...]], ...]]

# What messages call the types of numbers, the widest first.
_NUMBERS = {float: "a number", int: "a whole number", bool: "true or false"}


class KeepsArguments:
    """Base class of objects that can be built again after a default has changed.

    `arguments` holds every argument of the constructor of the object's own class by name, with the values of defaults.
    If the constructor replaces an argument of None by a number or a word and keeps it under the argument's name, that
    value is recorded: `num_heads=None` becomes the computed `self.num_heads`. The constructor gives values that it
    resolves in another way to `resolve_arguments`.

    Text in place of a number is refused by a ValueError: an argument that is annotated as a number is not "4".

    Class attributes:
        arguments_before: values of arguments that were added after the first release: what objects did before the
            argument existed, whatever its default is. An object that was saved without the argument gets this value.
    """

    arguments_before: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    arguments: dict[str, Any]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = _keep_arguments(vars(cls)["__init__"])  # type: ignore[method-assign]

    def resolve_arguments(self, **values: Any) -> None:
        """Record other values of arguments: those that the constructor computed, or that a method has changed.

        Names that the constructor of the object's class does not have are ignored: a subclass decides them.
        """
        known = {name: copy_containers(value) for name, value in values.items() if name in self.arguments}
        self.arguments.update(known)


def takes_also(other: type, without: Collection[str] = ()) -> Callable[[Construct], Construct]:
    """Decorate a constructor with `**options`: they are the keyword arguments of the class `other`, with its defaults.

    The signature then lists these arguments by name, and `KeepsArguments` records all of them. `without` names those
    that the constructor does not take.
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
    """Wrap a constructor: it records its arguments if it is that of the object's own class, not of a base class."""

    @functools.wraps(construct)
    def construct_and_keep(self: Any, *args: Any, **kwargs: Any) -> None:
        is_base = type(self).__init__ is not construct_and_keep
        if not is_base:
            arguments = _bind(construct, self, args, kwargs)
            if arguments is not None:
                _refuse_words(construct, arguments)
                self.arguments = arguments
        construct(self, *args, **kwargs)
        if not is_base:
            for name, value in self.arguments.items():
                resolved = getattr(self, name, None) if value is None else None
                if isinstance(resolved, bool | int | float | str):
                    self.arguments[name] = resolved

    return construct_and_keep


def _bind(construct: Callable[..., None], self: Any, args: Any, kwargs: Any) -> dict[str, Any] | None:
    """The arguments of a call by name; None if they do not fit, in which case the call itself raises the best error."""
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


def _refuse_words(construct: Callable[..., None], arguments: Mapping[str, Any]) -> None:
    """ValueError, in one line, for text in place of a number, such as num_heads="4".

    The annotations of the constructor tell which arguments are numbers.
    """
    for name, value in arguments.items():
        kinds = _kinds_of(construct).get(name, ()) if isinstance(value, str) else ()
        numbers = [words for kind, words in _NUMBERS.items() if kind in kinds]
        if numbers and {*kinds} <= {*_NUMBERS, NoneType}:
            raise ValueError(f"{name}={value!r} must be {numbers[0]}, and is text")


@functools.lru_cache
def _kinds_of(construct: Callable[..., None]) -> dict[str, tuple[Any, ...]]:
    """The types that each argument of a constructor may have; none for arguments that are not annotated."""
    try:
        hints = get_type_hints(construct)
    except (NameError, TypeError):  # a plug-in's, with types that it imports for a type checker alone
        return {}
    return {name: get_args(hint) if isinstance(hint, UnionType) else (hint,) for name, hint in hints.items()}


def is_plain(value: Any) -> bool:
    """True for a value that JSON and configurations hold: a number, text, None, and lists and dictionaries of them."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_plain(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return isinstance(value, bool | int | float | str | NoneType)


def copy_containers(value: Any) -> Any:
    """Copy nested dictionaries and lists: later changes of the original do not affect the copy. Tuples become lists."""
    if isinstance(value, Mapping):
        return {key: copy_containers(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [copy_containers(each) for each in value]
    return value


def complete(
    constructor: type[KeepsArguments], given: Mapping[str, Any], *, optional: Collection[str] = ()
) -> dict[str, Any]:
    """Add to saved arguments those that were added to the constructor later, with the values of `arguments_before`.

    Arguments in `optional` may be missing: they get the constructor's default.

    Raises:
        ValueError: the constructor does not have an argument, or the former value of a missing argument is not known.
            The message is a clause about the saved model, such as "its deltanet layers have ...".
    """
    parameters = list(inspect.signature(constructor).parameters.values())
    known = [parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    unknown = [name for name in given if name not in known]
    if unknown and len(known) == len(parameters):
        raise ValueError(f"{constructor.__name__} has no argument {', '.join(unknown)}")
    before = {name: value for name, value in constructor.arguments_before.items() if name not in given}
    missing = [name for name in known if name not in given and name not in before and name not in optional]
    if missing:
        raise ValueError(f"{constructor.__name__} takes {', '.join(missing)}, of which it says nothing")
    return {**given, **before}
