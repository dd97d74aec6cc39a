"""Weights in safetensors files that are read when they are written, so that a large model needs little memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from longseq.checksum import CHECKSUM, checksum
from longseq.files import replacing
from longseq.hub import INDEX_FILE, WEIGHTS_FILE

# The names of types in the header of a safetensors file.
_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Weight:
    """A tensor that is not read yet: its shape, its type and how it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @staticmethod
    def of(tensor: Tensor) -> Weight:
        """A tensor that is in memory already."""
        return Weight(tuple(tensor.shape), tensor.dtype, lambda: tensor)


def read_weights(folder: Path) -> dict[str, Weight]:
    """The weights of a folder by name: of the shards that its index names, or of its only file.

    Raises:
        ValueError: in one line: there are none, a shard is missing or damaged, or the index does not tell the truth.
    """
    index = folder / INDEX_FILE
    if not index.is_file():
        if not (folder / WEIGHTS_FILE).is_file():
            raise ValueError(f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}: it holds no weights to read")
        return _read_file(folder / WEIGHTS_FILE)
    try:
        places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is damaged: it is no JSON with the key weight_map") from error
    found: dict[str, Weight] = {}
    for name in sorted(set(places.values())):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} lacks the shard {name}, which {INDEX_FILE} names")
        found |= _read_file(folder / name)
    if missing := sorted(places.keys() - found.keys()):
        raise ValueError(f"{folder}: {places[missing[0]]} lacks {missing[0]}, which {INDEX_FILE} places there")
    if unknown := sorted(found.keys() - places.keys()):
        raise ValueError(f"{folder}: {INDEX_FILE} does not name {unknown[0]}, which one of its shards holds")
    return found


def _read_file(path: Path) -> dict[str, Weight]:
    try:
        file = safe_open(path, "pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut short: {error}") from error
    names = list(file.keys())
    stated = (file.metadata() or {}).get(CHECKSUM)
    # The tensors are views of the mapped file, whose pages are read one after the other and need not stay.
    if stated and stated != checksum({name: file.get_tensor(name) for name in names}):
        raise ValueError(f"{path} is damaged: its weights do not have the checksum that it states")
    found = {}
    for name in names:
        part = file.get_slice(name)
        dtype = _TYPES.get(part.get_dtype())
        if dtype is None:
            raise ValueError(f"{path}: {name} is of the type {part.get_dtype()}, which is not read")
        found[name] = Weight(tuple(part.get_shape()), dtype, _reader(file, name))
    return found


def _reader(file: Any, name: str) -> Callable[[], Tensor]:
    return lambda: file.get_tensor(name)


def write_weights(folder: Path, weights: Mapping[str, Weight], max_shard_size: int | str = "5GB") -> None:
    """Write weights as `longseq.save_pretrained` does; no more than a file's are in memory at a time."""
    with torch.device("meta"):
        shapes = {name: torch.empty(weight.shape, dtype=weight.dtype) for name, weight in weights.items()}
    split = split_torch_state_dict_into_shards(
        shapes, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    for name, keys in split.filename_to_tensors.items():
        shard = {key: weights[key].read().contiguous() for key in keys}
        for key, tensor in shard.items():
            assert (tuple(tensor.shape), tensor.dtype) == (weights[key].shape, weights[key].dtype), key
        with replacing(folder / name) as partial:
            save_file(shard, partial, metadata={"format": "pt", CHECKSUM: checksum(shard)})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        with replacing(folder / INDEX_FILE) as partial:
            partial.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
