"""What tells a file from a later one of the same name."""

from __future__ import annotations

import os
from typing import Any


def stamp(path: str) -> list[Any]:
    """The size and the times of a file, by which a later one is told from it; of a folder those of its files.

    Archives and copies give a file the time of its content, also one that other files had before. The time of its last
    change on the disk (`st_ctime_ns`) cannot be given.
    """
    try:
        if os.path.isdir(path):
            return [[name, *stamp(os.path.join(path, name))] for name in sorted(os.listdir(path))]
        found = os.stat(path)
    except OSError:
        return []
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns]
