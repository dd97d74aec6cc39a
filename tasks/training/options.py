"""Checks of what a person writes: a dictionary against a dataclass, options of a function against its signature.

@dataclass(frozen=True, kw_only=True)
class Data:
    root: str | None = None
    img_size: Annotated[int, Range(1)]
    val_fraction: Annotated[float, Range(0, below=1)] = 0.1
    on_error: Literal["skip", "raise"] = "skip"

read(Data, {"img_size": 32}, "data")      Data(root=None, img_size=32, val_fraction=0.1, on_error="skip")
read(Data, {"img_size": 32.5}, "data")    ValueError: data.img_size=32.5 must be a whole number of at least 1
read(Data, {"img_sise": 32}, "data")      ValueError: data.img_sise is unknown: did you mean data.img_size? ...

A field without a default must be there. A type is bool, int, float, str, None, Any, Literal, a dataclass, or a list,
Sequence, tuple, Mapping or union of those; `Annotated` narrows it by the classes below. Numbers are finite. A dataclass
refuses values that contradict each other in its `__post_init__`, by a ValueError.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

_LONGEST = 100  # the most characters of a value in a message
_MANY = 40  # the most names in a message


@dataclass(frozen=True)
class Range:
    """Numbers from `least` to `most`, both included, above `above` and below `below`. In a list, each number."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        if self.least is not None and self.most is not None:
            return f"from {self.least} to {self.most}"
        limits = (("of at least", self.least), ("above", self.above), ("of at most", self.most), ("below", self.below))
        return " and ".join(f"{word} {limit}" for word, limit in limits if limit is not None)


@dataclass(frozen=True)
class OneOf:
    """One of `choices`, or of the results of the function `choices`, for names that are only known at run time."""

    choices: Iterable[str] | Callable[[], Iterable[str]]
    such_as: tuple[str, ...] = ()  # some of them for `--help`, where the function takes long

    def names(self) -> list[str]:
        return list(self.choices() if callable(self.choices) else self.choices)


@dataclass(frozen=True)
class Length:
    """The number of entries of a list: from `least` to `most`."""

    least: int = 1
    most: int | None = None

    def holds(self, length: int) -> bool:
        return length >= self.least and (self.most is None or length <= self.most)

    def __str__(self) -> str:
        if self.most is None:
            return f"of at least {self.least}"
        return f"of {self.least}" if self.least == self.most else f"of {self.least} to {self.most}"


@dataclass(frozen=True)
class Required:
    """A key that is null in the YAML file and that the user must give, not as empty text; `remedy` says how."""

    remedy: str


@dataclass(frozen=True)
class Off:
    """A number of which 0 turns off what it is of; the message for null, which is no number, says so."""


class _Unfit(Exception):
    """A value that does not fit its type; `near` is a similar value that does."""

    def __init__(self, place: str, value: Any, needed: str, near: str | None = None) -> None:
        super().__init__()
        self.place, self.value, self.needed, self.near = place, value, needed, near

    def __str__(self) -> str:
        hint = f"; did you mean {self.near}?" if self.near else ""
        if not hint and "number" in self.needed and _is_number_as_text(self.value):
            hint = ", and is text: give it without quotes, and a variable as '${oc.decode:${oc.env:NAME}}'"
        return f"{self.place}={spell(self.value)} must be {self.needed}{hint}"


def _is_number_as_text(value: Any) -> bool:
    """True for text that a variable of the environment, or quotes, have made of a number."""
    try:
        return isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        return False


def read(cls: type[T], values: Any, place: str = "") -> T:
    """The dataclass `cls` with the values of a dictionary; `place` is the dotted key of the dictionary.

    ValueError, in one line, for a key that the dataclass does not have, a missing key, and a value of another type or
    outside its range.
    """
    try:
        return _read(cls, values, place)
    except _Unfit as error:
        raise ValueError(str(error)) from None


def read_part(cls: type, values: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """`values` of some keys of the dataclass `cls`, as `read` converts them. ValueError as of `read`."""
    hints = _read_hints(cls)  # type: ignore[arg-type]
    refuse_unknown(values, [field.name for field in fields(cls)], place)
    return {key: check_value(hints[key], value, _join(place, key)) for key, value in values.items()}


def check_value(hint: Any, value: Any, place: str) -> Any:
    """`value`, converted to the type `hint`. ValueError, in one line, if that is impossible."""
    try:
        return _convert(hint, value, place)
    except _Unfit as error:
        raise ValueError(str(error)) from None


def check_call(
    function: Callable[..., Any],
    values: Mapping[str, Any],
    place: str,
    *,
    given: Iterable[str] = (),
    least: float | None = None,
) -> dict[str, Any]:
    """`values` as keywords of `function`, checked against its annotations.

    `given` names parameters that the program passes itself: they are not options. Numbers are at least `least`.
    ValueError, in one line, for an option that the function does not have, a missing one, and a value that its
    annotation does not allow. Annotations that are not types of this module's list are not checked.
    """
    known, hints, taken = signature_options(function), _hints_of(function), set(given)
    for name in taken:
        known.pop(name, None)
    if not takes_any(function):
        refuse_unknown(values, known, place)
    for name, default in known.items():
        if default is inspect.Parameter.empty and name not in values:
            raise ValueError(_missing(_join(place, name)))
    checked = {}
    for name, value in values.items():
        hint = hints.get(name, Any)
        if least is not None and _is_number(hint):
            hint = Annotated[hint, Range(least)]
        # A value equal to the default is allowed, whatever the annotation.
        same = name in known and type(known[name]) is type(value) and known[name] == value
        checked[name] = value if same or not _is_known(hint) else check_value(hint, value, _join(place, name))
    return checked


def read_beside(
    cls: type[T], function: Callable[..., Any], values: Mapping[str, Any], place: str, *, given: Iterable[str] = ()
) -> T:
    """Read `cls`, and check the other values against the signature of `function`, as `check_call` does.

    For functions of other libraries: the dataclass narrows some options, and the library's annotations check the
    others.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{place}={spell(values)} must be a dictionary")
    own = [entry.name for entry in fields(cls)]  # type: ignore[arg-type]
    rest = {key: value for key, value in values.items() if key not in own}
    others = [name for name in signature_options(function) if name not in own and name not in set(given)]
    refuse_unknown(rest, [*own, *others], place)
    found = read(cls, {key: value for key, value in values.items() if key in own}, place)
    check_call(function, rest, place, given=(*own, *given))
    return found


def signature_options(function: Callable[..., Any]) -> dict[str, Any]:
    """The parameters of a function that can be given by name, with their defaults (`inspect.Parameter.empty`: none)."""
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind in kinds}


def takes_any(function: Callable[..., Any]) -> bool:
    """True if a function takes keywords that its signature does not name."""
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def choices_of(function: Callable[..., Any], name: str) -> list[Any]:
    """The values that the annotation of a parameter lists; an empty list where it lists none."""
    hint = _hints_of(function).get(name)
    return [choice for one in (hint, *get_args(hint)) if get_origin(one) is Literal for choice in get_args(one)]


def refuse_unknown(values: Iterable[Any], known: Iterable[str], place: str = "") -> None:
    """Raise ValueError for the first key that is not one of `known`; the message names the nearest one."""
    known = list(known)
    for key in values:
        if key not in known:
            raise ValueError(unknown_key(str(key), known, place))


def unknown_key(key: str, known: Sequence[str], place: str = "") -> str:
    """The message that `key` does not exist below `place`, with the key that may have been meant."""
    close = nearest(key, known)
    hint = f"did you mean {_join(place, close)}? " if close else ""
    shown = ", ".join(known[:_MANY]) + (", ..." if len(known) > _MANY else "")
    owner = f"the keys of {place}" if place else "the keys"
    return f"{_join(place, key)} is unknown: {hint}{owner} are {shown}" if known else f"{_join(place, key)} is unknown"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The name in `known` that `name` may be a misspelling of, or None."""
    known = list(known)
    begun = [one for one in known if len(name) > 2 and one.startswith(name)]
    return next(iter([*difflib.get_close_matches(name, known, n=1, cutoff=0.6), *begun]), None)


def spell(value: Any) -> str:
    """A value as it is written on the command line, shortened if it is long."""
    if value is None:
        text = "null"
    elif isinstance(value, bool):
        text = str(value).lower()
    else:
        text = " ".join(str(value).split()) if isinstance(value, str) else str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _read(cls: type[T], values: Any, place: str) -> T:
    if not isinstance(values, Mapping):
        raise _Unfit(place, values, "a dictionary of its keys: " + ", ".join(f.name for f in fields(cls)))  # type: ignore[arg-type]
    hints = _read_hints(cls)  # type: ignore[arg-type]
    own = [field for field in fields(cls) if field.init]  # type: ignore[arg-type]
    refuse_unknown(values, [field.name for field in own], place)
    read_values = {}
    for field in own:
        where = _join(place, field.name)
        if field.name in values:
            read_values[field.name] = _convert(hints[field.name], values[field.name], where)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(_missing(where))
    return cls(**read_values)


def _convert(hint: Any, value: Any, place: str) -> Any:
    """`value` as `hint` requires: numbers become floats for float, dictionaries become dataclasses."""
    if get_origin(hint) is Annotated:
        return _convert_annotated(hint, value, place)
    if hint is Any:
        return value
    if is_dataclass(hint):
        return _read(hint, value, place)  # type: ignore[arg-type]
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin is Literal:
        if any(type(value) is type(name) and value == name for name in inner):
            return value
        raise _Unfit(
            place, value, describe_type(hint), _near_value(value, [name for name in inner if type(name) is str])
        )
    if origin in (Union, types.UnionType):
        return _convert_union(hint, value, place)
    if origin in (list, Sequence, tuple):
        return _convert_list(hint, value, place)
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise _Unfit(place, value, describe_type(hint))
        kinds = inner or (Any, Any)
        return {key: _convert(kinds[1], one, _join(place, str(key))) for key, one in value.items()}
    if not _fits(origin, value):
        raise _Unfit(place, value, describe_type(hint))
    return float(value) if origin is float else value


def _fits(kind: type, value: Any) -> bool:
    if kind is type(None):
        return value is None
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _convert_annotated(hint: Any, value: Any, place: str) -> Any:
    kind, *narrowings = get_args(hint)
    if value in (None, "") and (required := next((one for one in narrowings if isinstance(one, Required)), None)):
        raise ValueError(required.remedy)
    try:
        found = _convert(kind, value, place)
    except _Unfit as error:
        if error.place != place:  # a value inside of it; its message says more
            raise
        remedy = "; 0 turns it off" if value is None and any(isinstance(one, Off) for one in narrowings) else ""
        raise _Unfit(place, value, describe_type(hint) + remedy, error.near) from None
    for one in narrowings:
        numbers = [found] if isinstance(found, int | float) else found if isinstance(found, list | tuple) else []
        if isinstance(one, Range) and not all(one.holds(number) for number in numbers):
            raise _Unfit(place, value, describe_type(hint))
        if isinstance(one, Length) and isinstance(found, list | tuple) and not one.holds(len(found)):
            raise _Unfit(place, value, describe_type(hint))
        if isinstance(one, OneOf) and isinstance(value, str) and value not in (names := one.names()):
            raise _Unfit(place, value, describe_type(hint), _near_value(value, names))
    return found


def _convert_union(hint: Any, value: Any, place: str) -> Any:
    kinds = get_args(hint)
    if value is None and type(None) in kinds:
        return None
    # a whole number for `int | float` stays an int
    kinds = tuple(sorted((kind for kind in kinds if kind is not type(None)), key=lambda kind: kind is float))
    failures = []
    for kind in kinds:
        try:
            return _convert(kind, value, place)
        except _Unfit as error:
            failures.append(error)
    deeper = next((error for error in failures if error.place != place), None)
    if deeper is not None:
        raise deeper
    raise _Unfit(place, value, describe_type(hint), next((error.near for error in failures if error.near), None))


def _convert_list(hint: Any, value: Any, place: str) -> Any:
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if not isinstance(value, list | tuple):
        raise _Unfit(place, value, describe_type(hint))
    if origin is tuple and inner and inner[-1] is not Ellipsis:
        if len(value) != len(inner):
            raise _Unfit(place, value, describe_type(hint))
        kinds: Sequence[Any] = inner
    else:
        kinds = [inner[0] if inner else Any] * len(value)
    try:
        found = [
            _convert(kind, one, f"{place}[{index}]") for index, (kind, one) in enumerate(zip(kinds, value, strict=True))
        ]
    except _Unfit as error:
        if any(is_dataclass(kind) for kind in kinds):
            raise
        raise _Unfit(place, value, describe_type(hint), error.near) from None
    return tuple(found) if origin is tuple else found


def describe_type(hint: Any) -> str:
    """What a type accepts, in words."""
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        words = describe_type(inner[0])
        for one in inner[1:]:
            if isinstance(one, OneOf):
                names = sorted(one.names())
                words = "one of " + ", ".join(names[:_MANY]) + (", ..." if len(names) > _MANY else "")
            elif isinstance(one, Length):
                words = words.replace("a list", f"a list {one}", 1)
            elif isinstance(one, Range):
                null = words.endswith(" or null")
                words = f"{words.removesuffix(' or null')} {one}" + (" or null" if null else "")
        return words
    if origin is Literal:
        shown = [spell(name) for name in inner]
        return shown[0] if len(shown) == 1 else f"one of {', '.join(shown)}"
    if origin in (Union, types.UnionType):
        kinds = [kind for kind in inner if kind is not type(None)]
        if int in kinds and float in kinds:
            kinds.remove(int)
        alternatives = [describe_type(kind) for kind in kinds]
        return " or ".join(dict.fromkeys(alternatives + ["null"] * (type(None) in inner)))
    if origin is tuple and inner and inner[-1] is not Ellipsis:
        return f"a list of {len(inner)}: {', '.join(describe_type(kind) for kind in inner)}"
    if origin in (list, Sequence, tuple):
        return f"a list, each entry {describe_type(inner[0])}" if inner and inner[0] is not Any else "a list"
    if is_dataclass(hint):
        return "a dictionary of " + ", ".join(field.name for field in fields(hint))
    if origin in (dict, Mapping):
        return "a dictionary"
    words_of = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return "null" if hint is type(None) else words_of.get(origin, getattr(origin, "__name__", str(origin)))


def _is_known(hint: Any) -> bool:
    """True if `_convert` supports a type and all its parts."""
    if get_origin(hint) is Annotated:
        return _is_known(get_args(hint)[0])
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin is Literal or is_dataclass(hint):
        return True
    containers = (list, Sequence, tuple, dict, Mapping, Union, types.UnionType)
    if origin in containers:
        return all(_is_known(kind) for kind in inner if kind is not Ellipsis)
    return origin in (bool, int, float, str, Any, type(None))


def _is_number(hint: Any) -> bool:
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return all(kind in (int, float, type(None)) for kind in kinds)


def _hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    call = function.__init__ if inspect.isclass(function) else function  # type: ignore[misc]
    try:
        return _read_hints(call) if inspect.isfunction(call) else get_type_hints(call, include_extras=True)
    except (NameError, TypeError):
        return {}  # names that its module imports only for type checkers


@functools.cache
def _read_hints(owner: Any) -> dict[str, Any]:
    """The types that a class or a function states; to evaluate them takes longer than the check of the values."""
    return get_type_hints(owner, include_extras=True)


def _missing(place: str) -> str:
    return f"{place} is missing: give {place}=..."


def _near_value(value: Any, names: Sequence[str]) -> str | None:
    return nearest(value, names) if isinstance(value, str) else None


def _join(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key
