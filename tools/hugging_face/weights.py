"""Weights in safetensors files that are read when they are written, so that a large model needs little memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from longseq.hub import INDEX_FILE, WEIGHTS_FILE


@dataclass(frozen=True)
class Weight:
    """A tensor that is not computed yet: its shape, its type and how it is computed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @staticmethod
    def of(tensor: Tensor) -> Weight:
        """A tensor in memory, or in a mapped file."""
        return Weight(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    @property
    def mT(self) -> Weight:
        """The transposed matrix."""
        return Weight(self.shape[::-1], self.dtype, lambda: self.read().mT)


def read_weights(folder: Path) -> dict[str, Weight]:
    """The weights of a folder by name, from the shards in its index or from its only file.

    Raises:
        ValueError: the shards do not have the weights of the index.
    """
    index = folder / INDEX_FILE
    if not index.is_file():
        return _read_file(folder / WEIGHTS_FILE)
    places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    files = {name: _read_file(folder / name) for name in set(places.values())}
    found = {name: place for place, weights in files.items() for name in weights}
    if found.keys() != places.keys():
        raise ValueError(f"{index} and its shards differ in {', '.join(sorted(found.keys() ^ places.keys()))}")
    return {name: files[place][name] for name, place in places.items()}


def _read_file(path: Path) -> dict[str, Weight]:
    # The tensors are views of the mapped file, whose pages are read when they are needed.
    with safe_open(path, "pt") as file:
        return {name: Weight.of(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118  no dictionary


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
        save_file(shard, folder / name, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
