"""Files that are written whole, so that an error or an interruption leaves no part of one."""

import hashlib
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_BLOCK = 1 << 24  # bytes that are read at a time


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The path of a new file next to `path`, which replaces it at the end, or is removed if the block fails.

    Devices and pipes, such as /dev/stdout, are written directly. Permissions follow the umask, which safetensors
    ignores.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    partial = path.with_name(f"{path.name}.partial")
    partial.touch()
    mode = partial.stat().st_mode
    try:
        yield partial
        partial.chmod(mode)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def crc32_of(path: Path) -> int:
    """The CRC-32 of a file's bytes."""
    found = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            found = zlib.crc32(block, found)
    return found


def sha256(path: str | Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
