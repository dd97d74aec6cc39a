"""The checksum of a model's weights."""

import json
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor


def checksum(state: Mapping[str, Tensor]) -> str:
    """CRC-32 of names, types, shapes and values, in hexadecimal digits. Few tensors are on the CPU at a time."""
    names = sorted(state)
    with ThreadPoolExecutor() as pool:  # zlib releases Python's lock while it computes
        values = pool.map(_checksum, (state[name] for name in names))
    parts = [
        (name, str(state[name].dtype), list(state[name].shape), value)
        for name, value in zip(names, values, strict=True)
    ]
    return f"{zlib.crc32(json.dumps(parts).encode()):08x}"


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
