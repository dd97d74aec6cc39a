"""Recurrent state is a value: a (nested) named tuple of tensors whose leading dimension is the batch."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

# The types of a state: tensors, absent parts, and tuples of these. A mixer's own state is a named tuple.
StateTree: TypeAlias = "Tensor | tuple[StateTree, ...] | None"
Device: TypeAlias = "torch.device | str | None"
StateT = TypeVar("StateT", bound="tuple[StateTree, ...]")

State = TypeVar("State")
Class = TypeVar("Class", bound="type[tuple[Any, ...]]")


def loadable(cls: Class) -> Class:
    """Decorate the class of a state: `torch.load` reads it like its tensors, without `weights_only=False`."""
    torch.serialization.add_safe_globals([cls])
    return cls


def map_state(function: Callable[[Tensor], Tensor], state: State) -> State:
    """Apply `function` to every tensor of `state` and keep its type, `None` entries included."""
    given: Any = state
    if isinstance(given, Tensor):
        return cast(State, function(given))
    if given is None:
        return state
    parts = [map_state(function, part) for part in given]
    return type(given)(*parts) if hasattr(given, "_fields") else type(given)(parts)


def state_tensors(state: object, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield `(name, tensor)` for every tensor of `state`; names of nested fields are joined by dots."""
    if isinstance(state, Tensor):
        yield prefix, state
    elif isinstance(state, tuple | list):
        fields = getattr(state, "_fields", range(len(state)))
        for field, part in zip(fields, state, strict=True):
            yield from state_tensors(part, f"{prefix}.{field}" if prefix else str(field))


def fill_state(template: State, tensors: Iterable[Tensor]) -> State:
    """Replace the tensors of `template`, in the order of `state_tensors`; ValueError if the numbers differ."""
    given = list(tensors)
    wanted = len(list(state_tensors(template)))
    if len(given) != wanted:
        raise ValueError(f"the state has {wanted} tensors, and {len(given)} are given")
    following = iter(given)
    return map_state(lambda _: next(following), template)


def select_state(state: State, index: Tensor) -> State:
    """Select or reorder sequences by `index [N]`, along the batch dimension of every tensor."""
    return map_state(lambda tensor: tensor.index_select(0, index), state)


def state_size(state: object) -> int:
    """Count the elements of `state`, over the whole batch."""
    return sum(tensor.numel() for _, tensor in state_tensors(state))
