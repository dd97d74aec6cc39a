"""The states of an exported language model: their names, shapes and types, and their values before the first token."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longseq.backbones.tokens import TokenBackbone
from longseq.state import state_tensors


@dataclass(frozen=True)
class StateSpec:
    """One tensor of a model's state.

    `name` is from `longseq.state.state_tensors`, such as layers.0.memory. `shape` names open axes: batch, and past for
    a state that grows with each token. `start` is the value of one row before the first token.
    """

    name: str
    shape: tuple[int | str, ...]
    start: Tensor

    @property
    def input_name(self) -> str:
        """The file's input, for the state before a token."""
        return f"state.{self.name}"

    @property
    def output_name(self) -> str:
        """The file's output, for the state after a token."""
        return f"next_state.{self.name}"

    @property
    def dtype(self) -> str:
        """The name of the type: float32 or int64."""
        return str(self.start.dtype).removeprefix("torch.")

    @property
    def axes(self) -> dict[int, str]:
        """The open axes by index."""
        return {axis: size for axis, size in enumerate(self.shape) if isinstance(size, str)}

    def starts(self, batch: int) -> Tensor:
        """The value before the first token, of `batch` rows."""
        return self.start.expand(batch, *self.start.shape[1:]).contiguous()

    def to_dict(self) -> dict[str, Any]:
        """What a program needs to run the file, for its metadata.

        `start` is a number if all values are equal. Else it is Base64 of the values of one row, in C's order and
        little-endian bytes. States with the axis past start without an entry.
        """
        values = self.start.flatten()
        is_constant = values.numel() == 0 or bool((values == values[0]).all())
        if is_constant:
            start: Any = values[0].item() if values.numel() else 0
        else:
            array = values.numpy()
            start = base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()
        return {
            "input": self.input_name,
            "output": self.output_name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "start": start,
        }

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> StateSpec:
        """The inverse of `to_dict`."""
        dtype, shape = getattr(torch, facts["dtype"]), tuple(facts["shape"])
        sizes = [{"batch": 1, "past": 0}.get(size, size) for size in shape]
        start = facts["start"]
        if isinstance(start, str):
            row = torch.frombuffer(bytearray(base64.b64decode(start)), dtype=dtype).reshape(sizes)
        else:
            row = torch.full(sizes, start, dtype=dtype)
        return cls(facts["input"].removeprefix("state."), shape, row)


def state_spec(model: TokenBackbone, max_length: int | None = None) -> list[StateSpec]:
    """The states of a language model, in the order of `longseq.state.state_tensors`.

    With `max_length`, attention has room for so many tokens (see `TokenBackbone.preallocate`), at most the number of
    learned positions. Without it, its state grows with each token, as Hyena's always does.

    Raises:
        ValueError: the model does not read forward.
    """
    device = next(model.parameters()).device
    start = model.initial_state(1, device)
    if max_length is not None:
        start = model.preallocate(start, min(max_length, model.max_length or max_length))
    with torch.no_grad():
        _, after = model(torch.zeros(1, 1, dtype=torch.long, device=device), start)
    pairs = zip(state_tensors(start), state_tensors(after), strict=True)
    return [StateSpec(name, _open_shape(own, grown), own.cpu()) for (name, own), (_, grown) in pairs]


def _open_shape(start: Tensor, after: Tensor) -> tuple[int | str, ...]:
    sizes = zip(start.shape[1:], after.shape[1:], strict=True)
    return ("batch", *(size if size == later else "past" for size, later in sizes))
