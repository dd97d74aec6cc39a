"""Prepared tokens: documents as memory-mapped numbers, their offsets, and a manifest.

A folder of `longseq prepare` has, for each split (train, validation, test):

    SPLIT.tokens     uint16 or uint32, little-endian: each document as `separator, t_1, ..., t_n`
    SPLIT.offsets    int64, N + 1: document i is tokens[offsets[i]:offsets[i + 1]]
    SPLIT.bytes      int64, N: bytes of the document's text, without its prompt
    SPLIT.prompts    int64, N: targets at a document's beginning that are not trained on; instructions only
    SPLIT.labels     int64, N: the number of the document's set of labels in the manifest; labelled documents only
    SPLIT.hashes     uint64, N x 2: the hash of the document's content; labelled documents only

and manifest.json: the version of the format, the tokenizer, counts, sizes and checksums of the files; and
tokenizer.json, unless tokens are bytes. The manifest is written last: a folder without it is unfinished.
"""

import hashlib
import json
import mmap
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from longseq.files import crc32_of
from longseq.tasks.report import long_step, shorten

Integers = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.unsignedinteger[Any]]

VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
SPLITS = ("train", "validation", "test")


class Corpus(NamedTuple):
    """The documents of a split, end to end; the fields are the files of a folder (see the module)."""

    tokens: Tokens
    offsets: Integers
    byte_counts: Integers
    prompts: Integers | None = None
    labels: Integers | None = None
    hashes: npt.NDArray[np.uint64] | None = None

    @property
    def documents(self) -> int:
        return len(self.byte_counts)


class TokenStore(NamedTuple):
    """Prepared tokens by split, and the tokenizer that made them (`Tokenizer.to_dict`).

    checksums: the CRC-32 of the tokens of each split.
    """

    tokenizer: dict[str, Any]
    vocab_size: int
    separator: int
    splits: dict[str, Corpus]
    checksums: dict[str, int]


def file_type(ending: str, vocab_size: int) -> Any:
    """The type of the numbers in files with an ending; tokens have the smaller of uint16 and uint32 that holds all."""
    return np.dtype({"tokens": "<u2" if vocab_size <= 1 << 16 else "<u4", "hashes": "<u8"}.get(ending, "<i8"))


def open_store(root: str | Path, *, check: bool = True) -> TokenStore:
    """Open the folder `root` of prepared tokens; `check` compares the checksums of its files, which reads all of them.

    FileNotFoundError in an unfinished folder. ValueError for a truncated or changed file, and for another version.
    """
    root = Path(root)
    manifest = json.loads((root / MANIFEST).read_text(encoding="utf-8"))
    if manifest["version"] != VERSION:
        raise ValueError(f"{root} has the format {manifest['version']}, not {VERSION}: prepare the tokens again")
    tokenizer = dict(manifest["tokenizer"])
    if tokenizer["kind"] == "file":
        path = root / TOKENIZER
        _check_file(path, manifest["tokenizer_file"], check=True)
        tokenizer["json"] = path.read_text(encoding="utf-8")
    splits = {}
    for split, entry in manifest["splits"].items():
        arrays: dict[str, Any] = {}
        for ending, written in entry["files"].items():
            path, dtype = root / f"{split}.{ending}", file_type(ending, manifest["vocab_size"])
            with long_step(f"checking {shorten(path)}"):
                _check_file(path, written, check)
            arrays[ending] = _Mapped(path.resolve(), dtype, "r") if written["size"] else np.zeros(0, dtype)
        if "hashes" in arrays:
            arrays["hashes"] = arrays["hashes"].reshape(-1, 2)
        splits[split] = Corpus(byte_counts=arrays.pop("bytes"), **arrays)
    checksums = {split: entry["files"]["tokens"]["crc32"] for split, entry in manifest["splits"].items()}
    return TokenStore(tokenizer, manifest["vocab_size"], manifest["separator"], splits, checksums)


class _Mapped(np.memmap):
    """A mapped file that is pickled as its path; numpy would pickle all of its numbers."""

    def __reduce__(self) -> Any:
        if isinstance(self.base, mmap.mmap):
            return _Mapped, (self.filename, self.dtype, "r")
        return np.asarray(self).__reduce__()  # a part of the file


def _check_file(path: Path, written: Mapping[str, int], check: bool) -> None:
    if path.stat().st_size != written["size"] or (check and crc32_of(path) != written["crc32"]):
        raise ValueError(f"{path} was truncated or changed after it was prepared")


class SplitWriter:
    """Writes the files of a split, part by part, and counts their contents; `others` are endings of further files."""

    def __init__(self, output: Path, split: str, vocab_size: int, others: Sequence[str]) -> None:
        self._types = {ending: file_type(ending, vocab_size) for ending in ("tokens", "offsets", "bytes", *others)}
        self._files = {ending: (output / f"{split}.{ending}").open("wb") for ending in self._types}
        self._sums = dict.fromkeys(self._types, 0)
        self._counts = {"documents": 0, "tokens": 0, "bytes": 0}
        self._write("offsets", np.zeros(1, np.int64))

    def add(self, tokens: Tokens, lengths: Integers, byte_counts: Integers, **others: npt.NDArray[Any]) -> None:
        """Add documents: their tokens end to end, their lengths and bytes, and the split's other arrays by ending."""
        offsets = self._counts["tokens"] + np.cumsum(lengths)
        for ending, numbers in {"tokens": tokens, "offsets": offsets, "bytes": byte_counts, **others}.items():
            self._write(ending, numbers)
        self._counts["documents"] += len(lengths)
        self._counts["tokens"] += int(lengths.sum())
        self._counts["bytes"] += int(byte_counts.sum())

    def close(self) -> dict[str, Any]:
        """The manifest's entry of the split."""
        files = {}
        for ending, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            files[ending] = {"size": file.tell(), "crc32": self._sums[ending]}
            file.close()
        return {**self._counts, "files": files}

    def _write(self, ending: str, numbers: npt.NDArray[Any]) -> None:
        content = np.ascontiguousarray(numbers, self._types[ending]).data.cast("B") if len(numbers) else b""
        self._files[ending].write(content)
        self._sums[ending] = zlib.crc32(content, self._sums[ending])


def stamp(path: str) -> list[Any]:
    """The size and times of a file, or of all files in a folder, which identify its content.

    An archive or a copy can restore an old modification time, but not `st_ctime_ns`.
    """
    try:
        if os.path.isdir(path):
            return [[name, *stamp(os.path.join(path, name))] for name in sorted(os.listdir(path))]
        found = os.stat(path)
    except OSError:
        return []
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def in_cache(name: str, plan: Any, cache: str | None, file: str, write: Callable[[Path], Any]) -> Path:
    """The folder in the cache for `plan`, which determines its content; `write` fills it, and makes `file` last.

    `cache` is by default longseq/text in the user's cache (XDG_CACHE_HOME). One process writes while others wait.
    """
    base = Path(cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longseq" / "text")
    folder = base / f"{name}_{hashlib.sha256(json.dumps(plan).encode()).hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    with long_step(f"preparing {name} in {shorten(folder)}"), FileLock(base / f"{folder.name}.lock"):
        if not (folder / file).exists():
            write(folder)
    return folder
