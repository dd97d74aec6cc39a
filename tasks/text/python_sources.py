"""Python's own source files as text: real text that is on every machine."""

from __future__ import annotations

import sysconfig
from pathlib import Path

# Folders that hold no modules but tests, and the editor that comes with Python.
_LEFT_OUT = frozenset(
    ("test", "tests", "idle_test", "idlelib", "__pycache__", "site-packages", "dist-packages", "node_modules")
)


def standard_library_files() -> list[Path]:
    """The modules of the standard library of this Python, without tests and idlelib, in the order of their names."""
    return _modules(Path(sysconfig.get_paths()["stdlib"]))


def _modules(root: Path) -> list[Path]:
    found = []
    for path in root.rglob("*.py"):
        if _LEFT_OUT.isdisjoint(path.relative_to(root).parts):
            found.append(path)
    return sorted(found)
