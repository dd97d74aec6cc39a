"""Shards: images of a data set in tar files, read by offset, with an index that tells where each image lies.

A folder of `longseq prepare task=image` holds, for each split (train, validation, test):

    SPLIT-000000.tar, ...   each image as KEY.jpg (or another ending), and its class number as KEY.cls, or its labels as
                            KEY.json ({"labels": [names]}): the layout of WebDataset
    SPLIT.index.npy         int64 [N, 4]: shard, offset of the image's bytes in it, their number, and their CRC-32
    SPLIT.targets.npy       int64 [N], the class numbers; or uint8 [N, classes] of 0 and 1, several labels
    SPLIT.names.txt         N lines: the image's path in the input, below its folder, as JSON text

and manifest.json: the names of the classes, the shards, and what could not be read. The manifest is written last: a
folder without it is unfinished.
"""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from longseq.tasks.image.decoding import decode

MANIFEST = "manifest.json"
SPLITS = ("train", "validation", "test")


class ShardSource:
    """The images of one split of a folder of shards; `open_shards` opens them.

    Images are read by their offsets, so that any order costs the same, and compared with their checksums: a ValueError
    says that one was changed. Classes have the numbers of the shards, or those of `order`, the names of the same
    classes as a trained model has them.
    """

    def __init__(self, root: str, split: str, manifest: Mapping[str, Any], order: Sequence[str] | None = None) -> None:
        self.label, self.root = f"{root}/{split}", Path(root)
        self.class_names: list[str] = list(manifest["class_names"])
        self.multi_label = bool(manifest["multi_label"])
        self.shards: list[str] = manifest["splits"][split]["shards"]
        self._index = np.load(self.root / f"{split}.index.npy")
        targets = np.load(self.root / f"{split}.targets.npy")
        if order is not None and set(order) == set(self.class_names):
            written, self.class_names = self.class_names, list(order)
            if self.multi_label:
                targets = targets[:, [written.index(name) for name in order]]
            else:
                targets = np.array([self.class_names.index(name) for name in written], targets.dtype)[targets]
        self.class_to_idx = {name: number for number, name in enumerate(self.class_names)}
        self._targets = targets.astype(np.float32) if self.multi_label else targets
        names = (self.root / f"{split}.names.txt").read_text(encoding="utf-8").splitlines()
        self._names = [json.loads(line) for line in names]

    def __len__(self) -> int:
        return len(self._index)

    def read(self, index: int) -> tuple[Image.Image, Any]:
        data, target = self.read_file(index)
        return decode(io.BytesIO(data)), target

    def read_file(self, index: int) -> tuple[bytes, Any]:
        """The bytes of the image's file, and its class or its labels."""
        shard, offset, size, wanted = self._index[index].tolist()
        with open(self.root / self.shards[shard], "rb", buffering=0) as file:
            file.seek(offset)
            data = file.read(size)
        if zlib.crc32(data) != wanted:
            raise ValueError("its bytes are not those that were written: prepare the shards again")
        target = self._targets[index]
        return data, target if self.multi_label else int(target)

    def path(self, index: int) -> str:
        return f"{self.root / self.shards[int(self._index[index, 0])]}/{self._names[index]}"

    def targets(self) -> np.ndarray:
        return self._targets


def open_shards(root: str, *, multi_label: bool, order: Sequence[str] | None = None) -> dict[str, ShardSource]:
    """The splits of a folder of shards. ValueError if it was prepared with other labels."""
    manifest = json.loads(Path(root, MANIFEST).read_text(encoding="utf-8"))
    if manifest["multi_label"] != multi_label:
        found = str(manifest["multi_label"]).lower()
        raise ValueError(f"data.root={root} was prepared with multi_label={found}: give data.multi_label={found}")
    return {name: ShardSource(root, name, manifest, order) for name in SPLITS if name in manifest["splits"]}
