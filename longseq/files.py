"""Files that are written whole, so that an error or an interruption leaves no part of one, and their checksums."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_TRIED = 1 << 20  # bytes
_BLOCK = 1 << 24  # bytes that are read at a time
_CODE_OF_RUST = re.compile(r"\(os error (\d+)\)")  # in messages of safetensors


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The path of a new file beside `path`, which is renamed to `path` at the end. Errors are those of `writing`.

    A device or a pipe, such as /dev/stdout, is written itself.
    """
    with writing(path) as written:
        yield written
    if written != path:
        os.replace(written, path)


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """The path of a new file beside `path`, which is removed if the block fails; else the caller renames it.

    If `path` is a device or a pipe, it is `path` itself. OSError, which names `path`, if the system refuses to write,
    as on a full disk. torch and safetensors then raise errors of their own. torch's says nothing of the disk; so the
    file is asked whether it takes more bytes.
    """
    special = path.exists() and not path.is_file()
    partial = path if special else partial_path(path)
    try:
        yield partial
    except BaseException as error:
        refused = _refusal(error, partial) if isinstance(error, Exception) else None
        if not special:
            with suppress(OSError):
                partial.unlink()
        if refused is not None:
            raise OSError(refused.errno, refused.strerror, str(path)) from error
        raise


def partial_path(path: Path) -> Path:
    """The file beside `path` that is renamed to it once it is whole."""
    return path.with_name(f"{path.name}.partial")


def _refusal(error: Exception, path: Path) -> OSError | None:
    """The error of the system that made writing a file fail; None if `error` has another reason."""
    if isinstance(error, OSError):  # of this file, or of another one that was read meanwhile
        return error if error.filename in (None, str(path)) and error.errno is not None else None
    if match := _CODE_OF_RUST.search(str(error)):
        return OSError(int(match[1]), os.strerror(int(match[1])))
    try:
        with path.open("ab") as file:
            file.write(bytes(_TRIED))
    except OSError as refused:
        return refused
    return None


def crc32_of(path: Path) -> int:
    """The CRC-32 of a file's bytes."""
    found = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            found = zlib.crc32(block, found)
    return found
