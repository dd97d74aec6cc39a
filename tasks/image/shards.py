"""Shards: images of a data set in tar files, read by offset, with an index that tells where each image lies.

A folder of `longseq prepare task=image` holds, for each split (train, validation, test):

    SPLIT-000000.tar, ...   each image as KEY.jpg (or another ending), and its class number as KEY.cls, or its labels as
                            KEY.json ({"labels": [names]}): the layout of WebDataset
    SPLIT.index.npy         int64 [N, 4]: shard, offset of the image's bytes in it, their number, and their CRC-32
    SPLIT.targets.npy       int64 [N], the class numbers; or uint8 [N, classes] of 0 and 1, several labels
    SPLIT.names.txt         N lines: the image's path in the input, below its folder, as JSON text

and manifest.json: the version of the format, the names of the classes, and the sizes and checksums of all files. The
manifest is written last: a folder without it is unfinished.
"""

from __future__ import annotations

import io
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from longseq.files import crc32_of
from longseq.tasks.image.decoding import decode

VERSION = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "validation", "test")


def holds_shards(folder: str | Path) -> bool:
    """True if a folder is one of `longseq prepare task=image`, finished or not."""
    path = Path(folder)
    return (path / MANIFEST).is_file() and "class_names" in _load(path / MANIFEST)


class ShardSource:
    """The images of one split of a folder of shards; `splits_of` opens them.

    Images are read by their offsets, so that any order costs the same, and compared with their checksums: a ValueError
    says that one was changed. Processes open the files for themselves. Classes have the numbers of the shards, or those
    of `order`, the names of the same classes as a trained model has them.
    """

    def __init__(self, root: str, split: str, manifest: Mapping[str, Any], order: Sequence[str] | None = None) -> None:
        told = manifest["splits"][split]
        self.label, self.root = f"{root}/{split}", Path(root)
        self.class_names: list[str] = list(manifest["class_names"])
        self.multi_label = bool(manifest["multi_label"])
        self.shards = [str(one["name"]) for one in told["shards"]]
        for one in told["shards"]:
            _check_size(self.root / one["name"], one["size"])
        self._index = np.load(_checked(self.root, told["index"]))
        targets = np.load(_checked(self.root, told["targets"]))
        if order is not None and set(order) == set(self.class_names):
            written, self.class_names = self.class_names, list(order)
            if self.multi_label:
                targets = targets[:, [written.index(name) for name in order]]
            else:
                targets = np.array([self.class_names.index(name) for name in written], targets.dtype)[targets]
        self._targets = targets.astype(np.float32) if self.multi_label else targets
        self._names_path = _checked(self.root, told["names"])
        self._names: list[str] | None = None
        self._files: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._index)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_files": {}}

    def read(self, index: int) -> tuple[Image.Image, Any]:
        data, target = self.read_file(index)
        return decode(io.BytesIO(data)), target

    def read_file(self, index: int) -> tuple[bytes, Any]:
        """The bytes of the image's file, and its class or its labels."""
        shard, offset, size, wanted = self._index[index].tolist()
        data = os.pread(self._file(shard), size, offset)
        if len(data) != size or zlib.crc32(data) != wanted:
            raise ValueError("its bytes are not those that were written: prepare the shards again")
        target = self._targets[index]
        return data, target if self.multi_label else int(target)

    def path(self, index: int) -> str:
        if self._names is None:
            self._names = [json.loads(line) for line in self._names_path.read_text(encoding="utf-8").splitlines()]
        return f"{self.root / self.shards[int(self._index[index, 0])]}/{self._names[index]}"

    def size(self, index: int) -> int:
        """The bytes of the image's file."""
        return int(self._index[index, 2])

    def targets(self) -> np.ndarray:
        return self._targets

    def _file(self, shard: int) -> int:
        """The open file of a shard; reading at an offset moves no position that processes could share."""
        if shard not in self._files:
            self._files[shard] = os.open(self.root / self.shards[shard], os.O_RDONLY | os.O_CLOEXEC)
        return self._files[shard]

    def __del__(self) -> None:
        for file in getattr(self, "_files", {}).values():
            os.close(file)


def read_manifest(root: str | None) -> dict[str, Any]:
    """The manifest of a folder of shards. ValueError, in one line, for another folder, and for an unfinished one."""
    if root is None:
        raise ValueError("data.source=shards reads a folder of `longseq prepare task=image`: give data.root=FOLDER")
    folder = Path(root)
    if not (folder / MANIFEST).is_file():
        begun = folder.is_dir() and any(folder.glob("*-000000.tar*"))
        told = "holds shards that are not finished: run `longseq prepare task=image` again" if begun else ""
        missing = "does not exist" if not folder.exists() else f"holds no {MANIFEST}"
        raise ValueError(
            f"data.root={root} " + (told or f"{missing}: give the folder that `longseq prepare task=image` wrote")
        )
    manifest = _load(folder / MANIFEST)
    if "class_names" not in manifest or manifest.get("kind") != "images":
        raise ValueError(f"{folder / MANIFEST} is not of images: give the folder of `longseq prepare task=image`")
    if manifest["version"] > VERSION:
        raise ValueError(f"{folder / MANIFEST} is of version {manifest['version']}, and this longseq reads {VERSION}")
    return manifest


def open_shards(
    root: str | None, names: Sequence[str] = SPLITS, *, multi_label: bool, order: Sequence[str] | None = None
) -> dict[str, ShardSource]:
    """The splits of a folder of shards, of those in `names` that it has. ValueError as of `read_manifest`."""
    manifest = read_manifest(root)
    if manifest["multi_label"] != multi_label:
        found = str(manifest["multi_label"]).lower()
        raise ValueError(f"data.root={root} was prepared with multi_label={found}: give data.multi_label={found}")
    return {name: ShardSource(str(root), name, manifest, order) for name in names if name in manifest["splits"]}


def _load(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged: run `longseq prepare` again") from error
    return found if isinstance(found, dict) else {}


def _check_size(path: Path, size: int) -> None:
    if not path.is_file() or path.stat().st_size != size:
        raise ValueError(f"{path} is missing or of another size than it was written with: prepare the shards again")


def _checked(root: Path, told: Mapping[str, Any]) -> Path:
    """The path of a small file whose size and checksum are right."""
    path = root / told["name"]
    _check_size(path, told["size"])
    if crc32_of(path) != told["crc32"]:
        raise ValueError(f"{path} was changed after it was written: prepare the shards again")
    return path
