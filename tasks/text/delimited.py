"""Rows of csv and tsv files, in which a stray quotation mark costs its own row and no other."""

from __future__ import annotations

import csv
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

DELIMITERS = {"csv": ",", "tsv": "\t"}
# A cell over at least so many lines, of which at least such a share are whole rows by themselves, was opened by a stray
# quotation mark. Text has one comma a line more often than one tab.
_SWALLOWED = {",": (10, 1.0), "\t": (2, 0.9)}
_STRAY = "a quotation mark that closes no cell: write it twice inside a cell"
_NUL = "a NUL among quotation marks, which Python reads from 3.11 on"


class Row(NamedTuple):
    """The cells of a row and the line at which it ends; or why it is `malformed`, and the line at which it begins.

    The first line is 1.
    """

    line: int
    cells: list[str]
    malformed: str | None = None


def read_rows(file: Iterable[str], delimiter: str) -> Iterator[Row]:
    """The rows of a file, the header first; empty ones are left out.

    A cell in quotation marks may hold delimiters and ends of lines. Where a mark closes no cell, the row is malformed,
    and reading goes on in the next line. But files of tabs are often written without quotation: there the row is read
    as it stands, if it has as many cells as the header.
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
            has_nul = any("\0" in line for line in lines.taken)  # which Python reads from 3.11 on
        else:
            has_nul = False
            strays = _has_swallowed(lines.taken, delimiter, columns)
        if strays:
            first = lines.go_back()
            cells = first.rstrip("\r\n").split(delimiter)
            is_quoted = '"' in first
            if (is_quoted or not has_nul) and (delimiter != "\t" or len(cells) != columns):
                yield Row(lines.number, [], _NUL if has_nul else _STRAY)
                continue
        if cells:
            columns = columns or len(cells)
            yield Row(lines.number, cells)


def _has_swallowed(lines: list[str], delimiter: str, columns: int) -> bool:
    """Whether the lines of one row, blank ones aside, are rows of their own."""
    whole = [line.count(delimiter) == columns - 1 for line in lines if line.strip()]
    least, share = _SWALLOWED[delimiter]
    return columns > 1 and len(whole) >= least and whole[0] and sum(whole) >= share * len(whole)


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
