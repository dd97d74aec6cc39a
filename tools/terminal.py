"""Output into a terminal or a pipe that may be closed while a command runs."""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from typing import Any


class _File(io.FileIO):
    """The file of a terminal or a pipe. Once that is closed, what is written goes nowhere.

    `unread` says that a pipe was closed before all was written. With `needs_reader` that is an error, as it is without
    this class.
    """

    unread = False
    needs_reader = False

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):
                raise
            self.unread = self.unread or error.errno == errno.EPIPE
            lead_nowhere(self.fileno())
            if self.unread and self.needs_reader:
                raise
            return memoryview(data).nbytes


class _Output(io.TextIOWrapper):
    """The text that goes to such a file."""

    def __init__(self, file: _File, stream: io.TextIOWrapper) -> None:
        # With `python -u` each text goes to the terminal at once.
        binary: Any = file if stream.write_through else io.BufferedWriter(file)
        super().__init__(binary, stream.encoding, stream.errors, None, stream.line_buffering, stream.write_through)
        self._file = file

    @property
    def unread(self) -> bool:
        """Whether nobody has read the end of what was written."""
        return self._file.unread

    def require_reader(self) -> None:
        """Let a line that nobody reads be an error from now on."""
        self._file.needs_reader = True


def open_closed_streams() -> None:
    """Open the standard streams that were closed for this process, as a daemon's are; they lead nowhere.

    Their numbers would else be those of the next files that are opened, into which libraries would write messages.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # No text is an error, as on stderr: a character that the locale does not have is escaped.
            stream = os.fdopen(os.open(os.devnull, os.O_RDWR), "w" if number else "r", errors="backslashreplace")
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def outlive_readers() -> None:
    """Let the command go on if nobody reads its output any more.

    A terminal may be closed and no signal end the command, as after `longseq train & disown`. The reader of a pipe may
    have enough, as `head` has. Without this, the next line that is printed is an error, which ends the command.
    """
    if os.name != "posix":
        return
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper) or (number := _find_number(stream)) is None:
            continue
        stream.flush()
        setattr(sys, name, _Output(_File(number, "w", closefd=False), stream))


def _find_number(stream: io.TextIOWrapper) -> int | None:
    """The number of the stream's file if that is a pipe, or a device, as a terminal is, also one that is gone already.

    A stream that is closed, or made of memory, has no number.
    """
    try:
        number = stream.fileno()
    except ValueError:  # io.UnsupportedOperation is one
        return None
    mode = os.fstat(number).st_mode
    return number if stat.S_ISCHR(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else None


def lead_nowhere(number: int) -> None:
    """Let a file lead nowhere, also for what does not write through Python."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


def is_unread() -> bool:
    """Whether nobody has read the end of the command's output, or of its messages, because a pipe was closed."""
    outputs = [one for one in (sys.stdout, sys.stderr) if isinstance(one, _Output)]
    for one in outputs:
        one.flush()  # the last lines may find nobody, too
    return any(one.unread for one in outputs)


def require_reader() -> None:
    """Let output that nobody reads any more be an error: BrokenPipeError, as in other programs."""
    if isinstance(sys.stdout, _Output):
        sys.stdout.require_reader()
