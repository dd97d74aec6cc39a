"""Files that are written whole, so that an error or an interruption leaves no part of one, and their checksums.

`check_place` tells before the work whether the system would write at all, `check_replaced` whether the file that it
would replace is one of the same command.
"""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_PROBED = 1 << 12  # bytes that are written before the work
_TRIED = 1 << 20  # bytes
_LONGEST = 255 - len(".partial")  # bytes of a file's name, of which the file that is renamed needs some
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
    file is asked whether it takes more bytes. Who may read the file follows from the umask, as of any new file:
    safetensors would leave it to its owner alone.
    """
    special = path.exists() and not path.is_file()
    partial = path if special else partial_path(path)
    try:
        if not special:
            partial.touch()
            mode = partial.stat().st_mode
        yield partial
        if not special and partial.stat().st_mode != mode:
            partial.chmod(mode)
    except BaseException as error:
        refused = refusal_in(error, partial) if isinstance(error, Exception) else None
        if not special:
            with suppress(OSError):
                partial.unlink()
        if refused is not None:
            raise OSError(refused.errno, refused.strerror, str(path)) from error
        raise


def partial_path(path: Path) -> Path:
    """The file beside `path` that is renamed to it once it is whole."""
    return path.with_name(f"{path.name}.partial")


def check_place(path: Path, key: str, *, is_folder: bool = False) -> None:
    """Check that a file, or a folder, can be written where `key` says. The folders above it may not exist yet.

    ValueError, in one line, where something above it is a file, or the system refuses a new file: the place is
    read-only or of another user, or the disk is full.
    """
    check_name(path, key)
    if not is_folder and path.exists() and not path.is_file():
        return  # a device or a pipe, which is written itself
    check_above(path, key, is_folder=is_folder)
    above = _find_above(path, is_folder)
    # The mode of a folder does not tell it: root may write everywhere, but in /sys or on a disk that is read-only.
    try:
        with tempfile.TemporaryFile(dir=above, buffering=0) as file:
            file.write(bytes(_PROBED))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ValueError(f"{key}={path}: the disk is full: make room first") from error
        raise ValueError(f"{key}={path}: {error.strerror}") from error


def check_above(path: Path, key: str, *, is_folder: bool = False) -> None:
    """ValueError, in one line, where no folder stands above `path`, or in the place of a folder: a file or a device."""
    above = _find_above(path, is_folder)
    if not above.is_dir():
        what = "a file" if above.exists() else "a link to nothing"
        raise ValueError(f"{key}={path}: {above} is {what}, and a folder is needed there: give another name")


def _find_above(path: Path, is_folder: bool) -> Path:
    """The first place above `path` that is there, or the folder itself; for `.` and `/`, with none above, `path`."""
    return next((place for place in ([path] * is_folder + [*path.parents]) if os.path.lexists(place)), path)


def check_name(path: Path, key: str) -> None:
    """Raise ValueError, in one line, for a name that no system takes, or that breaks the lines of what is printed."""
    for name in path.parts:
        if any(ord(character) < 32 for character in name):
            raise ValueError(f"{key}={str(path)!r} has a character that no line shows: give another name")
        if len(os.fsencode(name)) > _LONGEST:
            raise ValueError(
                f"{key}={name[:20]}... has {len(os.fsencode(name))} bytes: give a name of at most {_LONGEST}"
            )


class Kind(NamedTuple):
    """The files that a command writes: what they are called, and a function that tells one of them from other files."""

    name: str
    is_own: Callable[[Path], bool]


def check_replaced(path: Path, key: str, kind: Kind, *, reads: Iterable[str | Path | None] = ()) -> None:
    """Raise ValueError, in one line, where the file at `path` is not one that a command may replace.

    A command replaces files of the kind that it writes, and empty ones. It replaces none of the files that it `reads`,
    whatever they are and by whatever names they are given. `key` is the key that names the file.
    """
    if not path.is_file():
        return
    for read in reads:
        if read is not None and os.path.exists(read) and path.samefile(read):
            raise ValueError(f"{key}={path} is what the command reads, and would be replaced: give another name")
    if path.stat().st_size and not kind.is_own(path):
        raise ValueError(f"{key}={path} is there and holds no {kind.name}: give another name, or remove it")


def json_keys(path: Path) -> set[str]:
    """The keys of the JSON object in a file, or in the first line of a .jsonl; none where there is no such object."""
    try:
        with path.open(encoding="utf-8") as file:
            content = json.loads(file.readline()) if path.suffix == ".jsonl" else json.load(file)
    except (OSError, ValueError):
        return set()
    return set(content) if isinstance(content, dict) else set()


def refusal_in(error: Exception, path: Path) -> OSError | None:
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
