"""Rows of csv and tsv files, in which a stray quotation mark costs its own row and no other."""

from __future__ import annotations

import csv
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

DELIMITERS = {"csv": ",", "tsv": "\t"}
# A cell over at least so many lines, each of which is a whole row by itself, was opened by a stray quotation mark. Text
# has one comma a line more often than one tab.
_SWALLOWED = {",": 10, "\t": 2}


class Row(NamedTuple):
    """A row that ends at a line (the first is 1), or that begins there and is `malformed`: why."""

    line: int
    cells: list[str]
    malformed: str | None = None


def read_rows(file: Iterable[str], delimiter: str) -> Iterator[Row]:
    """The rows of a file, the header first; empty ones are left out.

    By its quotation marks a cell holds delimiters and ends of lines. In a file of tabs, which is often written without
    quotation, a row that these marks do not explain is read as it stands, if it has as many cells as the header.
    """
    csv.field_size_limit(sys.maxsize)
    lines = _Lines(file)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    columns = 0
    while True:
        lines.begin()
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error:
            cells = []
            strays = True
        else:
            strays = _has_swallowed(lines.taken, delimiter, columns)
        if strays:
            first = lines.go_back()
            cells = first.rstrip("\r\n").split(delimiter)
            if delimiter != "\t" or len(cells) != columns:
                yield Row(lines.number, [], "a quotation mark that closes no cell: write it twice inside a cell")
                continue
        if cells:
            columns = columns or len(cells)
            yield Row(lines.number, cells)


def _has_swallowed(lines: list[str], delimiter: str, columns: int) -> bool:
    if columns < 2 or len(lines) < _SWALLOWED[delimiter]:
        return False
    return all(line.count(delimiter) == columns - 1 for line in lines)


class _Lines:
    """The lines of a file, of which those of the current row can be read again but for the first."""

    def __init__(self, file: Iterable[str]) -> None:
        self._file = iter(file)
        self._again: deque[str] = deque()
        self.taken: list[str] = []  # of the current row
        self.number = 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self._again.popleft() if self._again else next(self._file)
        self.taken.append(line)
        self.number += 1
        return line

    def begin(self) -> None:
        self.taken = []

    def go_back(self) -> str:
        """Go back to the end of the row's first line, and return that line."""
        first, *others = self.taken
        self._again.extendleft(reversed(others))
        self.number -= len(others)
        return first
