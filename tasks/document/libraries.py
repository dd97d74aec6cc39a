"""Python files of eight installed libraries, which are the classes: real documents that every install has."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longseq.tasks.document.sources import TEXT_KEYS, Opened, Reader, Sample, Source, register
from longseq.tasks.text.corpora import modules_of
from longseq.tasks.text.sources import TEXT, Malformed, group_files, read_part
from longseq.tasks.text.store import stamp

LIBRARIES = ("lightning", "networkx", "scipy", "sklearn", "sympy", "timm", "torch", "torchmetrics")
_SHORTEST = 1000  # bytes of a file
_MOST = 320  # files of a library, so that the classes have similar sizes

# Also names in prose and of packages inside the libraries, longer names first, since they contain shorter ones.
# The lookahead at the first letter makes the search three times as fast.
_NAMES = re.compile(
    "(?=[lnpst])(?:pytorch[-_ ]?lightning|torch[-_ ]?metrics|torch[-_ ]?vision|torch[-_ ]?audio|"
    "scikit[-_ ]?learn|lightning|networkx|py[-_ ]?torch|torch|sklearn|scipy|sympy|timm)",
    re.IGNORECASE,
)
_IMPORTS = re.compile(
    r"^[ \t]*(?:from[ \t]+[\w.]+[ \t]+import[ \t]*(?:\([^)]*\)|(?:[^\n]*\\\n)*[^\n]*)|"
    r"import[ \t]+(?:[^\n]*\\\n)*[^\n]*)[^\n]*\n?",
    re.MULTILINE,
)
_HEAD = re.compile(r"\A(?:[ \t]*(?:#[^\n]*)?\n)*")
_COPYRIGHT = re.compile(r"^[^\n]*(?:copyright|licen[cs]e)[^\n]*\n?", re.IGNORECASE | re.MULTILINE)


def conceal(source: str) -> str:
    """A Python file without what gives its library away.

    Imports, comments at the beginning and lines with a copyright are removed; the names of libraries become "library".
    """
    text = _HEAD.sub("", source, count=1)
    text = _COPYRIGHT.sub("", _IMPORTS.sub("", text))
    return _NAMES.sub("library", text)


def find_files() -> dict[str, list[str]]:
    """The files of each library, in the order of their paths."""
    found = {}
    for name in LIBRARIES:
        spec: Any = importlib.util.find_spec(name)
        root = spec.submodule_search_locations[0]
        files = sorted(path for path in modules_of(root) if os.path.getsize(path) >= _SHORTEST)
        # Hashes of the paths below the library's folder select the same files on every machine.
        chosen = sorted(files, key=lambda path, root=root: _hash(os.path.relpath(path, root)))[:_MOST]  # type: ignore[misc]
        found[name] = sorted(chosen)
    return found


def _hash(path: str) -> bytes:
    return hashlib.blake2b(Path(path).as_posix().encode(), digest_size=8).digest()


def _read(files: dict[str, list[str]]) -> Iterator[Sample | Malformed]:
    for name, paths in files.items():
        for part in group_files(paths, format="python"):
            for one in read_part(part, TEXT):
                if isinstance(one, Malformed):
                    yield one
                elif len(text := conceal(one.text)) >= _SHORTEST // 2:
                    assert one.place is not None
                    yield Sample(text, (name,), one.place)


def _find() -> Reader:
    files = find_files()
    stamps = [[path, *stamp(path)] for paths in files.values() for path in paths]
    return Reader(lambda: _read(files), stamp=[_hash(_NAMES.pattern).hex(), *stamps])


register("libraries", Source(lambda keys: Opened({"train": _find}), reads=TEXT_KEYS, prepare=conceal))
