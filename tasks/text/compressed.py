"""Files of one or more compressed streams, in which all bytes belong to a stream.

`bz2.open` and `lzma.open` drop what follows a stream and is none, as do the bytes of a damaged one, without a word.
"""

from __future__ import annotations

import bz2
import io
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

_BLOCK = 1 << 16  # bytes of the file in memory, and of its content


def open_bzip2(path: str | Path, mode: str) -> IO[bytes]:
    """A file that bzip2 has compressed, to read: OSError or EOFError where one of its streams is broken."""
    return io.BufferedReader(_Streams(path, bz2.BZ2Decompressor), _BLOCK)


def open_xz(path: str | Path, mode: str) -> IO[bytes]:
    """A file that xz has compressed, to read: LZMAError or EOFError where one of its streams is broken."""
    return io.BufferedReader(_Streams(path, lzma.LZMADecompressor, padding=4), _BLOCK)


class _Streams(io.RawIOBase):
    """The content of streams that follow one another. Behind each, multiples of `padding` zeros are passed over."""

    def __init__(self, path: str | Path, begin: Callable[[], Any], padding: int = 0) -> None:
        self._file = io.FileIO(path)
        self._begin = begin
        self._padding = padding
        self._stream = begin()  # None at the end of the file
        self._waiting = b""  # bytes of the file that no stream has taken yet

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while self._stream is not None:
            if self._stream.eof:
                self._go_on()
                continue
            if self._stream.needs_input and not self._waiting:
                self._waiting = self._file.read(_BLOCK)
                if not self._waiting:
                    raise EOFError("the last stream is cut off")
            content = self._stream.decompress(self._waiting, len(buffer))
            self._waiting = b""
            if content:
                buffer[: len(content)] = content
                return len(content)
        return 0

    def close(self) -> None:
        self._file.close()
        super().close()

    def _go_on(self) -> None:
        """Begin the stream behind one that has ended."""
        block, zeros = self._stream.unused_data or self._file.read(_BLOCK), 0
        while self._padding and block and not block.strip(b"\0"):
            zeros += len(block)
            block = self._file.read(_BLOCK)
        self._waiting = block.lstrip(b"\0") if self._padding else block
        zeros += len(block) - len(self._waiting)
        if self._padding and zeros % self._padding:
            raise EOFError(f"{zeros} bytes of zeros behind a stream, which are no multiple of {self._padding}")
        self._stream = self._begin() if self._waiting else None
