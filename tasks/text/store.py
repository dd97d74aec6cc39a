"""Prepared tokens: documents as memory-mapped numbers, where each begins, and a manifest that tells what they are.

A folder of `longseq prepare` holds, for each split (train, validation, test):

    SPLIT.tokens     uint16 or uint32, little-endian: each document as `separator, t_1, ..., t_n`
    SPLIT.offsets    int64, N + 1: document i is tokens[offsets[i]:offsets[i + 1]]
    SPLIT.bytes      int64, N: bytes of the text that the document's targets stand for
    SPLIT.prompts    int64, N: how many targets at a document's beginning are not trained on; only of instructions

and manifest.json: the version of the format, the tokenizer, counts, sizes and checksums of the files; beside it
tokenizer.json, where the tokenizer is not that of bytes. The manifest is written last: a folder without it is
unfinished. Reading needs numpy alone.
"""

from __future__ import annotations

import json
import mmap
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.unsignedinteger[Any]]

VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
PARTIAL = ".partial"
SPLITS = ("train", "validation", "test")

_BLOCK = 1 << 24


class Corpus(NamedTuple):
    """The documents of a split, end to end; the fields are the files of a folder (see the module)."""

    tokens: Tokens
    offsets: Integers
    byte_counts: Integers
    prompts: Integers | None = None

    @property
    def documents(self) -> int:
        return len(self.byte_counts)


@dataclass(frozen=True)
class TokenStore:
    """Prepared tokens: `splits`, and the tokenizer that made them, as returned by `Tokenizer.to_dict`.

    `gzip_bits_per_byte` is the size of the documents of test after gzip -9, in bits per byte; None without any.
    """

    name: str
    tokenizer: dict[str, Any]
    vocab_size: int
    separator: int
    splits: dict[str, Corpus]
    gzip_bits_per_byte: float | None = None


def token_type(vocab_size: int) -> Any:
    """The smallest of uint16 and uint32 that holds all tokens."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def file_types(vocab_size: int, *, prompts: bool) -> dict[str, Any]:
    """The files of a split: their endings, and the types of their numbers."""
    types = {"tokens": token_type(vocab_size), "offsets": np.dtype("<i8"), "bytes": np.dtype("<i8")}
    return {**types, "prompts": np.dtype("<i8")} if prompts else types


def checksum(path: Path) -> int:
    """CRC-32 of a file's bytes."""
    found = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            found = zlib.crc32(block, found)
    return found


def open_store(root: str | Path, *, check: bool = True) -> TokenStore:
    """Open the folder `root` of prepared tokens.

    The sizes of its files are compared with the manifest, and with `check` their checksums, which reads all of them.

    Raises:
        ValueError: in one line, what is missing, unfinished, truncated or changed.
    """
    root = Path(root)
    manifest = _read_manifest(root)
    tokenizer = dict(manifest["tokenizer"])
    if tokenizer["kind"] == "file":
        path = root / TOKENIZER
        _check_file(path, manifest["tokenizer_file"], check=True)
        tokenizer["json"] = path.read_text(encoding="utf-8")
    splits = {}
    for split, told in manifest["splits"].items():
        types = file_types(manifest["vocab_size"], prompts="prompts" in told["files"])
        arrays = {}
        for ending, dtype in types.items():
            arrays[ending] = _open_file(root / f"{split}.{ending}", told["files"][ending], dtype, check)
        splits[split] = Corpus(arrays["tokens"], arrays["offsets"], arrays["bytes"], arrays.get("prompts"))
    return TokenStore(
        name=root.resolve().name,
        tokenizer=tokenizer,
        vocab_size=manifest["vocab_size"],
        separator=manifest["separator"],
        splits=splits,
        gzip_bits_per_byte=manifest["gzip_bits_per_byte"],
    )


def _read_manifest(root: Path) -> dict[str, Any]:
    path = root / MANIFEST
    if not root.is_dir():
        raise ValueError(f"{root} is no folder: give one that `longseq prepare` has written")
    if not path.is_file():
        unfinished = (root / PARTIAL).is_dir()
        raise ValueError(
            f"{root} was not prepared to its end: give the same `longseq prepare` again, which goes on"
            if unfinished
            else f"{root} holds no {MANIFEST}: give a folder that `longseq prepare` has written"
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version = manifest["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no manifest of prepared tokens: prepare them again") from error
    if version != VERSION:
        raise ValueError(f"{path} is of version {version}, this longseq reads {VERSION}: prepare the tokens again")
    return manifest


def _open_file(path: Path, told: Mapping[str, int], dtype: Any, check: bool) -> Any:
    _check_file(path, told, check)
    return _Mapped(path.resolve(), dtype=dtype, mode="r") if told["size"] else np.zeros(0, dtype)


class _Mapped(np.memmap):
    """A mapped file that goes to another process by its path: numpy would send all of its numbers."""

    def __reduce__(self) -> Any:
        if isinstance(self.base, mmap.mmap):
            return _Mapped, (self.filename, self.dtype, "r")
        return np.asarray(self).__reduce__()  # a part of the file


def _check_file(path: Path, told: Mapping[str, int], check: bool) -> None:
    if not path.is_file():
        raise ValueError(f"{path} is missing: copy it again, or prepare the tokens again")
    size = path.stat().st_size
    if size != told["size"]:
        raise ValueError(f"{path} has {size} bytes, its manifest tells {told['size']}: it is truncated or changed")
    if check and checksum(path) != told["crc32"]:
        raise ValueError(f"{path} was changed: its checksum is not that of its manifest; prepare the tokens again")
