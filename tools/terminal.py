"""Output into a terminal that may be closed while a command runs."""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from typing import Any


class _Terminal(io.FileIO):
    """The file of a terminal. Once the terminal is gone, what is written goes nowhere."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # also for what does not write through Python
            os.close(nowhere)
            return memoryview(data).nbytes


def _find_terminal(stream: io.TextIOWrapper) -> int | None:
    """The number of the stream's file if that is a device, as a terminal is, also one that is gone already.

    A stream that is closed, or made of memory, has no number.
    """
    try:
        number = stream.fileno()
    except ValueError:  # io.UnsupportedOperation is one
        return None
    return number if stat.S_ISCHR(os.fstat(number).st_mode) else None


def outlive_terminals() -> None:
    """Let the command go on if its terminal is closed and no signal ends it, as after `longseq train & disown`.

    Without this, the first line that is printed then is an error, which ends the command.
    """
    if os.name != "posix":
        return
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper) or (number := _find_terminal(stream)) is None:
            continue
        stream.flush()
        binary: Any = _Terminal(number, "w", closefd=False)
        if not stream.write_through:  # with `python -u` each text goes to the terminal at once
            binary = io.BufferedWriter(binary)
        lasting = io.TextIOWrapper(
            binary, stream.encoding, stream.errors, None, stream.line_buffering, stream.write_through
        )
        setattr(sys, name, lasting)
