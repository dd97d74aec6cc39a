"""The lock of a run folder: a file that names the process that writes there. A dead process's lock is taken over."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

LOCK_FILE = "run.lock"

# The lock files that this process holds.
_held: dict[Path, Holder] = {}


class Holder(NamedTuple):
    """The process that writes to a run folder.

    `started` is its start time, which distinguishes it from a later process with the same number. `job` is the address
    at which the processes of its run connect; it is empty for a process that runs alone.
    """

    pid: int
    host: str
    started: str
    job: str = ""

    def is_dead(self) -> bool:
        """True if the process has ended. Processes of other hosts cannot be checked, and count as alive."""
        return self.host == socket.gethostname() and self.started != _start_of(self.pid)

    def describe(self) -> str:
        return f"process {self.pid} on {self.host}" if self.pid else "an unknown process"


@contextmanager
def locked(folder: Path, key: str = "output") -> Iterator[None]:
    """Hold the lock of a run folder, which a person chooses by `key`.

    Raises ValueError, in one line, if another process that may be alive holds it, or the folder is read-only.

    The lock of an ended process of this host is taken over. The lock file is written beside its destination and then
    linked there. The link fails if the file exists, also on network file systems.
    """
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{folder} is read-only: choose another {key}")
    path, own = folder / LOCK_FILE, Holder(os.getpid(), socket.gethostname(), _start_of(os.getpid()), _job())
    while not _create(path, own):
        holder = _read(path)
        if holder is None:  # the holder has just released it
            continue
        if not holder.is_dead():
            raise ValueError(
                f"{folder} is being written by {holder.describe()}{_since(path)}{_remedy(holder, path, key)}"
            )
        _remove(path, holder)
    _held[path] = own
    try:
        yield
    finally:
        del _held[path]
        if _read(path) == own:
            path.unlink()
        with suppress(OSError):  # a run that did not begin leaves no folder
            for place in made:
                place.rmdir()


def abandon() -> None:
    """Remove the locks of this process, which ends without leaving its blocks."""
    for path, own in _held.items():
        with suppress(OSError):
            if _read(path) == own:
                path.unlink()


def is_locked(folder: Path) -> bool:
    """True if a process of another run, which may be alive, writes to a run folder."""
    holder = _read(folder / LOCK_FILE)
    return holder is not None and not holder.is_dead() and (not holder.job or holder.job != _job())


def _create(path: Path, own: Holder) -> bool:
    """Create the lock file, unless it exists; True if it was created."""
    whole = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    descriptor = os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(own._asdict(), file)
        os.link(whole, path)  # fails if the file exists
    except FileExistsError:
        return False
    finally:
        whole.unlink()
    return True


def _read(path: Path) -> Holder | None:
    """The holder that a lock file names; None if there is no file."""
    try:
        return Holder(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError):
        return Holder(0, "", "")


def _remove(path: Path, dead: Holder) -> None:
    """Remove the lock of a dead process, unless another process has replaced it in the meantime."""
    with suppress(FileNotFoundError), path.open(encoding="utf-8") as file:
        # Processes that take over a lock wait for each other here. All are on this host, as the dead process was.
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_ino == path.stat().st_ino and _read(path) == dead:
            path.unlink()


def _since(path: Path) -> str:
    """When a lock was taken, in the time of this host; nothing for one that has just been released."""
    with suppress(OSError):
        return f" since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(path.stat().st_mtime))}"
    return ""


def _remedy(holder: Holder, path: Path, key: str) -> str:
    """What a person can do about a lock whose process may be alive."""
    if holder.host != socket.gethostname():
        return f": wait for it, or choose another {key}; if it has ended, remove {path}"
    if _state_of(holder.pid)[:1] in (["T"], ["t"]):
        return f"; it is stopped, and `kill -CONT {holder.pid}` lets it go on: or end it, or choose another {key}"
    return f": wait for it, end it, or choose another {key}"


def _job() -> str:
    return f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}".strip(":")


def _state_of(pid: int) -> list[str]:
    """What the kernel writes of a process, from its state on; nothing if there is no such process, or no /proc."""
    with suppress(OSError):
        # The name of the program may contain blanks; it ends at the last parenthesis.
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return []


def _start_of(pid: int) -> str:
    """The start time of a process as the kernel writes it; empty if there is no such process."""
    if not (fields := _state_of(pid)):
        return "" if Path("/proc/self/stat").exists() else _alive(pid)
    return "" if fields[0] in "ZX" else fields[19]


def _alive(pid: int) -> str:
    """Without /proc: "alive" if a process with this number exists, else empty."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "alive"
