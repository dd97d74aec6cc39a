"""Python's own source files as text: real text that every machine has."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Folders that are left out: installed packages, tests, and the editor that comes with Python.
_PACKAGES = frozenset(("site-packages", "dist-packages"))
_LEFT_OUT = frozenset(("test", "tests", "idle_test", "idlelib", "__pycache__")) | _PACKAGES


def standard_library_files() -> list[str]:
    """The modules of the standard library of this Python, without tests and idlelib, in the order of their paths."""
    return sorted(modules_of(sysconfig.get_paths()["stdlib"]))


def installed_files() -> list[str]:
    """The modules of the standard library and of all packages that this Python imports, without tests."""
    folders = {os.path.realpath(folder) for folder in sys.path if Path(folder).name in _PACKAGES}
    return standard_library_files() + sorted({path for folder in folders for path in modules_of(folder)})


def modules_of(root: str) -> Iterator[str]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        yield from (os.path.join(folder, name) for name in names if name.endswith(".py"))
