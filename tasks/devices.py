"""The device that a command runs on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def choose_device(name: str) -> torch.device:
    """The device of a name; `auto` is the first GPU, or the CPU. ValueError, in one line, for one that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device={name!r} is unknown: choose auto, cpu, cuda or cuda:INDEX") from error
    if device.type == "meta":
        raise ValueError(f"device={name} computes no numbers: choose auto, cpu, cuda or cuda:INDEX")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name} needs a GPU, and none is usable here: choose device=cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={name}: this machine has {torch.cuda.device_count()} GPU(s), counted from cuda:0")
    return device


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error says that a device, or the host, has no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def halve(key: str, size: int) -> str:
    """What to do where `key=size` inputs at a time do not fit into the memory."""
    if size == 1:
        return f"{key}=1: a single input is too large for this device: give shorter or smaller ones"
    return f"{key}={size}: evaluate fewer at a time, with {size // 2}"


@contextmanager
def memory_explained(key: str, size: int) -> Iterator[None]:
    """ValueError, in one line, where the memory ends while `key=size` inputs are read at a time."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ValueError(f"out of memory with {halve(key, size)}") from error
