"""Python's own source files as text: real text that is on every machine."""

from __future__ import annotations

import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

# Folders that hold no modules but tests, and the editor that comes with Python.
_LEFT_OUT = frozenset(
    ("test", "tests", "idle_test", "idlelib", "__pycache__", "site-packages", "dist-packages", "node_modules")
)


def standard_library_files() -> list[Path]:
    """The modules of the standard library of this Python, without tests and idlelib, in the order of their names."""
    return _modules(Path(sysconfig.get_paths()["stdlib"]))


def read_sources(files: list[Path]) -> Iterator[str]:
    """The texts of Python files in the encodings that they declare; those that cannot be read so are left out."""
    for file in files:
        try:
            with tokenize.open(file) as opened:
                yield opened.read()
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue


def _modules(root: Path) -> list[Path]:
    found = []
    for path in root.rglob("*.py"):
        if _LEFT_OUT.isdisjoint(path.relative_to(root).parts):
            found.append(path)
    return sorted(found)
