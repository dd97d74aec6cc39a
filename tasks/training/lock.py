"""One process group a run folder: a lock that names its holder, and gives way when the holder is dead."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

LOCK_FILE = "run.lock"


class Holder(NamedTuple):
    """The process that writes to a run folder; `started` tells it from a later one of the same number.

    `job` is where the processes of its run meet, empty where they were not started together.
    """

    pid: int
    host: str
    started: str
    job: str = ""

    def is_dead(self) -> bool:
        """Whether this process has ended, as far as can be seen from here: of other hosts nothing can."""
        return self.host == socket.gethostname() and self.started != _start_of(self.pid)

    def describe(self) -> str:
        return f"process {self.pid} on {self.host}" if self.pid else "an unknown process"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder. ValueError, in one line, where another process that may be alive holds it.

    A lock of a process of this host that has ended is taken over. The file appears whole, by a link, which fails where
    there is one: this holds on network file systems, too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, own = folder / LOCK_FILE, Holder(os.getpid(), socket.gethostname(), _start_of(os.getpid()), _job())
    while not _create(path, own):
        holder = _read(path)
        if holder is None:  # it has just been given up
            continue
        if not holder.is_dead():
            raise ValueError(
                f"{folder} is being written by {holder.describe()}: wait for it, or choose another hydra.run.dir; "
                f"if it has ended, remove {path}"
            )
        _remove(path, holder)
    try:
        yield
    finally:
        if _read(path) == own:
            path.unlink()


def is_locked(folder: Path) -> bool:
    """Whether a process that may be alive, and is of another run than this one, writes to a run folder."""
    holder = _read(folder / LOCK_FILE)
    return holder is not None and not holder.is_dead() and (not holder.job or holder.job != _job())


def _create(path: Path, own: Holder) -> bool:
    """Make the lock file, unless there is one."""
    whole = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    descriptor = os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(own._asdict(), file)
        os.link(whole, path)  # which is exclusive, too
    except FileExistsError:
        return False
    finally:
        whole.unlink()
    return True


def _read(path: Path) -> Holder | None:
    """The holder that a lock file names, None where there is no file."""
    try:
        return Holder(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError):
        return Holder(0, "", "")


def _remove(path: Path, dead: Holder) -> None:
    """Remove the lock of a dead process, unless another one that found it dead too has replaced it since."""
    with suppress(FileNotFoundError), path.open() as file:
        # Those that take over a lock wait for each other: the dead one is of this host, and so are they.
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_ino == path.stat().st_ino and _read(path) == dead:
            path.unlink()


def _job() -> str:
    return f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}".strip(":")


def _start_of(pid: int) -> str:
    """When a process started, in the kernel's words; empty where there is none. Another number is another process."""
    try:
        # The name of the program, which may hold blanks, ends with the last parenthesis.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "" if Path("/proc/self/stat").exists() else _alive(pid)
    return "" if fields[0] in "ZX" else fields[19]


def _alive(pid: int) -> str:
    """Where there is no /proc: whether a process of this number exists at all."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "alive"
