"""The lock of a run folder, which the system releases when its process ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

LOCK_FILE = "run.lock"

# Data workers of a killed process hold its lock until they end.
_PATIENCE = 5.0  # seconds


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder. ValueError if another process holds it.

    Folders that this makes are removed again if they stay empty.
    """
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_FILE
    try:
        with FileLock(path, timeout=_PATIENCE):
            path.write_text(_job(), encoding="utf-8")
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
    except Timeout:
        raise ValueError(f"another process is writing to {folder}") from None
    finally:
        with suppress(OSError):
            for place in made:
                place.rmdir()


def is_locked(folder: Path) -> bool:
    """True if a process of another run writes to a run folder."""
    path = folder / LOCK_FILE
    if not path.is_file() or (_job() and path.read_text(encoding="utf-8") == _job()):
        return False
    try:
        with FileLock(path, timeout=0):
            return False
    except Timeout:
        return True


def _job() -> str:
    """The address at which the processes of a run connect; empty for a process that runs alone."""
    return f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}".strip(":")
