"""A batch as one tensor, for its way from a data worker to the training process.

Each tensor that a worker sends costs the receiver a file descriptor, a message over a socket and a mapping of memory,
while it holds Python's lock: half a millisecond, and more on a slow host. A batch of encoded images has ten, one of
documents six.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, NamedTuple

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes; a multiple of the size of every number


class Parcel(NamedTuple):
    """`memory` uint8 [N] holds the numbers of all tensors, and `rest` everything else, pickled."""

    memory: Tensor
    rest: bytes


def pack(value: Any) -> Parcel:
    """Put the tensors of a picklable value into one. Tensors that are not dense ones of the CPU stay in `rest`."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(value)
    memory = torch.empty(pickler.end, dtype=torch.uint8)
    for tensor, start in pickler.found:
        memory[start : start + tensor.nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))
    return Parcel(memory, stream.getvalue())


def unpack(parcel: Parcel) -> Any:
    """The value that `pack` was given. Its tensors are views: one of them keeps the memory of all of them."""
    return _Unpickler(io.BytesIO(parcel.rest), parcel.memory).load()


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.found: list[tuple[Tensor, int]] = []
        self.end = 0

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.device.type != "cpu" or obj.layout is not torch.strided:
            return None
        start, self.end = self.end, self.end + -(-obj.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.found.append((obj, start))
        return start, obj.dtype, tuple(obj.shape)


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, memory: Tensor) -> None:
        super().__init__(stream)
        self.memory = memory

    def persistent_load(self, pid: Any) -> Tensor:
        start, dtype, shape = pid
        length = torch.Size(shape).numel() * dtype.itemsize
        return self.memory[start : start + length].view(dtype).view(shape)
