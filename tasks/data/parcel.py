"""A batch as one tensor, for its way from a data worker to the training process.

Each tensor that a worker sends costs the receiver a file descriptor, a message over a socket and a mapping of memory,
while it holds Python's lock: half a millisecond, and more on a slow host. A batch of encoded images has ten, one of
documents six. To give back a mapping of many megabytes takes milliseconds, with the lock held again. A worker therefore
puts its batches into a few pieces of shared memory in turn, which both processes keep.
"""

from __future__ import annotations

import io
import itertools
import multiprocessing
import os
import pickle
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes; a multiple of the size of every number
_MOST_SLOTS = 4  # of a worker: by default two batches are on their way, one arrives, and one is still in use
_FREE, _LENT = 0, 1


class Parcel(NamedTuple):
    """`memory` uint8 [N] holds the numbers of all tensors, and `rest` everything else, pickled."""

    memory: Tensor
    rest: bytes


def unpack(parcel: Parcel) -> Any:
    """The value that a `Packer` was given. Its tensors are views: one of them keeps the memory of all of them."""
    return _Unpickler(io.BytesIO(parcel.rest), parcel.memory).load()


class Packer:
    """Puts the tensors of a picklable value into one, in a data worker: it arrives as a `Parcel` where it is received.

    Tensors that are not dense ones of the CPU stay in `rest`.

    The memory of a parcel is used again when no tensor of it is left there. If the receiver keeps more parcels than a
    worker has pieces of memory, those that follow get memory of their own.
    """

    def __init__(self) -> None:
        self._slots: list[_Slot] = []
        self._replaced: list[int] = []

    def __call__(self, value: Any) -> Parcel | _Sent:
        slot: _Slot | None = None

        def find_memory(length: int) -> Tensor:
            nonlocal slot
            slot = self._find_slot(length)
            return torch.empty(length, dtype=torch.uint8) if slot is None else slot.lend(length)

        parcel = _fill(value, find_memory)
        if slot is None:
            return parcel
        replaced, self._replaced = self._replaced, []
        return _Sent(slot, len(parcel.memory), parcel.rest, replaced)

    def _find_slot(self, length: int) -> _Slot | None:
        free = [slot for slot in self._slots if slot.is_free()]
        for slot in free:
            if slot.length >= length:
                return slot
        if len(self._slots) == _MOST_SLOTS:
            if not free:
                return None
            self._slots.remove(free[0])
            self._replaced.append(free[0].number)
        # Batches differ a little in length: with some room, the next one fits, too.
        self._slots.append(_Slot(length + length // 8))
        return self._slots[-1]


class _Slot:
    """A piece of shared memory of a worker: whether its parcel is in use, and then the parcel."""

    _numbers = itertools.count()

    def __init__(self, length: int) -> None:
        self.memory = torch.zeros(_ALIGNMENT + length, dtype=torch.uint8).share_memory_()
        self.state = self.memory.numpy()[:1]
        self.length = length
        self.number = next(self._numbers)
        self.is_known = False  # to the receiver

    def is_free(self) -> bool:
        return bool(self.state[0] == _FREE)

    def lend(self, length: int) -> Tensor:
        self.state[0] = _LENT
        return self.memory[_ALIGNMENT : _ALIGNMENT + length]


class _Sent:
    """A parcel in a slot. It is pickled once, and is a `Parcel` where it is received."""

    def __init__(self, slot: _Slot, length: int, rest: bytes, replaced: list[int]) -> None:
        self.slot, self.length, self.rest, self.replaced = slot, length, rest, replaced

    def __reduce__(self) -> tuple[Callable[..., Parcel], tuple[Any, ...]]:
        memory = None if self.slot.is_known else self.slot.memory
        self.slot.is_known = True
        return _receive, (os.getpid(), self.slot.number, memory, self.length, self.rest, self.replaced)


# The slots of living workers, by the worker's process number and the slot's own.
_received: dict[tuple[int, int], np.ndarray[Any, Any]] = {}


def _receive(worker: int, number: int, memory: Tensor | None, length: int, rest: bytes, replaced: list[int]) -> Parcel:
    if memory is not None:
        _forget_ended_workers(worker)
        _received[worker, number] = memory.numpy()
    for other in replaced:
        _received.pop((worker, other), None)
    slot = _received[worker, number]
    # Every tensor that views the memory keeps this array, however it came to be.
    lent = slot[_ALIGNMENT : _ALIGNMENT + length]
    weakref.finalize(lent, _give_back, slot, os.getpid()).atexit = False
    return Parcel(torch.from_numpy(lent), rest)


def _give_back(slot: np.ndarray[Any, Any], receiver: int) -> None:
    if os.getpid() == receiver:  # a forked process drops its copy while the receiver still uses the parcel
        slot[0] = _FREE


def _forget_ended_workers(new: int) -> None:
    living = {new, *(process.pid for process in multiprocessing.active_children())}
    for key in [key for key in _received if key[0] not in living]:
        del _received[key]


def _fill(value: Any, find_memory: Callable[[int], Tensor]) -> Parcel:
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(value)
    memory = find_memory(pickler.end)
    for tensor, start in pickler.found:
        memory[start : start + tensor.nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))
    return Parcel(memory, stream.getvalue())


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
