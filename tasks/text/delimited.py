"""Rows of csv and tsv files, in which a stray quotation mark costs its own row and no other."""

from __future__ import annotations

import csv
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

DELIMITERS = {"csv": ",", "tsv": "\t"}
# A cell over at least so many lines, of which at least such a share are whole rows by themselves, may have been opened
# by a stray quotation mark. Text has one comma a line more often than one tab.
_SWALLOWED = {",": (10, 1.0), "\t": (2, 0.9)}
_NEAR = 100  # rows before and lines behind such a cell, with which its lines are compared
# A mark in a file of tabs that neither opens nor closes a cell, nor is one of two: who quotes does not write it.
_UNQUOTED = re.compile(r'"(?<=[^"\t\r\n]")(?=[^"\t\r\n])')
PARTED = "begins here whose lines are read as rows, since they look like those of the file"
JOINED = "ends here whose lines have as many cells as rows, and it is read as one text"
_STRAY = "a quotation mark that closes no cell: write it twice inside a cell"
_NUL = "a NUL among quotation marks, which Python reads from 3.11 on"


class Row(NamedTuple):
    """The cells of a row and the line at which it ends; or why it is `malformed`, and the line at which it begins.

    The first line is 1. A row has a `doubt` about a quoted cell whose lines look like rows: PARTED, if they are
    read as rows, of which this is the first, or JOINED, if they are a cell of this row.
    """

    line: int
    cells: list[str]
    malformed: str | None = None
    doubt: str | None = None


def read_rows(file: Iterable[str], delimiter: str) -> Iterator[Row]:
    """The rows of a file, the header first; empty ones are left out.

    A cell in quotation marks may hold delimiters and ends of lines. Where a mark closes no cell, the row is malformed,
    and reading goes on in the next line. But files of tabs are often written without quotation: there the row is read
    as it stands, if it has as many cells as the header.

    A stray mark may be closed by one at the end of a later cell. The rows between them are then a cell of a row that is
    well formed, as a quoted text of such lines is. The rest of the file tells which it is (see `_Neighbours`).
    """
    csv.field_size_limit(sys.maxsize)
    lines = _Lines(file)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    neighbours = _Neighbours(delimiter)
    columns = 0
    while True:
        lines.begin()
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error:
            cells = []
            strays, doubt = True, None
            has_nul = any("\0" in line for line in lines.taken)  # which Python reads from 3.11 on
            neighbours.is_unquoted |= delimiter == "\t" and not has_nul
        else:
            has_nul = False
            whole = _find_whole(lines.taken, delimiter, columns)
            strays = bool(whole) and (len(cells) != columns or neighbours.have_like(whole, lines.peek(_NEAR)))
            doubt = (PARTED if strays else JOINED) if whole else None
        if strays:
            first = lines.go_back()
            cells = first.rstrip("\r\n").split(delimiter)
            is_quoted = '"' in first
            if (is_quoted or not has_nul) and (delimiter != "\t" or len(cells) != columns):
                yield Row(lines.number, [], _NUL if has_nul else _STRAY, doubt)
                continue
        if cells:
            if columns:
                neighbours.add(cells, lines.taken)
            columns = columns or len(cells)
            yield Row(lines.number, cells, doubt=doubt)


def _find_whole(lines: list[str], delimiter: str, columns: int) -> list[str]:
    """The lines of one row that have as many cells as a row; none if too few of them have, blank ones aside."""
    whole = [line for line in lines if line.count(delimiter) == columns - 1]
    least, share = _SWALLOWED[delimiter]
    count = sum(not line.isspace() for line in lines)
    is_like_rows = columns > 1 and count >= least and whole[:1] == lines[:1] and len(whole) >= share * count
    return whole if is_like_rows else []


class _Neighbours:
    """What the rest of a file tells of the lines of a quoted cell that may be rows.

    They are if most of them have a cell that rows nearby have in the same column, such as a label. They also are in a
    file of tabs that `is_unquoted`, as stray marks of other rows tell; in one of commas such a mark is a slip, since
    texts with commas must be quoted there.
    """

    def __init__(self, delimiter: str) -> None:
        self._delimiter = delimiter
        # Of cells only hashes are kept: texts may be long.
        self._before: deque[list[int]] = deque(maxlen=_NEAR)
        self.is_unquoted = False

    def add(self, cells: list[str], lines: list[str]) -> None:
        """A row that has been read, and the lines that it was read from."""
        self._before.append(_hashes(cells))
        self._look_for_strays(lines)

    def have_like(self, lines: list[str], behind: list[str]) -> bool:
        """Whether `lines`, which have as many cells as a row, are rows, with the lines `behind` the last one."""
        self._look_for_strays(behind)
        if self.is_unquoted:
            return True
        found = [_hashes(line.rstrip("\r\n").split(self._delimiter)) for line in lines]
        columns = len(found[0])
        others = [row for row in (*self._before, *self._rows(behind)) if len(row) == columns]
        for column in range(columns):
            known = {row[column] for row in others} - {hash("")}
            # The first or the last line has a cell outside the quotation, which is known in any case.
            if 2 * sum(row[column] in known for row in found) > len(found):
                return True
        return False

    def _look_for_strays(self, lines: list[str]) -> None:
        if self._delimiter == "\t" and not self.is_unquoted:
            self.is_unquoted = any(_UNQUOTED.search(line) for line in lines)

    def _rows(self, lines: list[str]) -> Iterator[list[int]]:
        """The rows of lines up to a stray mark: a line of a quoted cell is no row."""
        try:
            yield from map(_hashes, csv.reader(lines, delimiter=self._delimiter, strict=True))
        except csv.Error:
            return


def _hashes(cells: list[str]) -> list[int]:
    return [hash(cell) for cell in cells]


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

    def peek(self, count: int) -> list[str]:
        """The lines that follow, `count` at most, which are read again afterwards."""
        self._again.extend(islice(self._file, max(0, count - len(self._again))))
        return list(islice(self._again, count))

    def go_back(self) -> str:
        """Go back to the end of the row's first line, and return that line."""
        first, *others = self.taken
        self._again.extendleft(reversed(others))
        self.number -= len(others)
        self.taken = [first]
        return first
