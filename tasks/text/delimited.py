"""Rows of csv and tsv files, in which a stray quotation mark costs its own row and no other."""

from __future__ import annotations

import csv
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, islice, pairwise, takewhile
from typing import NamedTuple

DELIMITERS = {"csv": ",", "tsv": "\t"}
# A cell over at least so many lines, of which at least such a share are whole rows by themselves, may have been opened
# by a stray quotation mark. Text has one comma a line more often than one tab.
_SWALLOWED = {",": (10, 1.0), "\t": (2, 0.9)}
_ENOUGH = 10  # rows that tell whether a column numbers them
_LONG = 20  # letters that a whole number has not
_LEAP = 4  # times the greatest step of numbers that do not ascend evenly
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
            strays = strays or neighbours.count_on(cells, lines, columns)
            doubt = PARTED if strays else JOINED if whole else None
        if strays:
            first = lines.go_back()
            cells = first.rstrip("\r\n").split(delimiter)
            is_quoted = '"' in first
            if (is_quoted or not has_nul) and (delimiter != "\t" or len(cells) != columns):
                if len(cells) == columns:  # its other cells are as good as those of any row
                    neighbours.add(cells, lines.taken)
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

    They are if most of them have a cell that rows nearby have in the same column, such as a label. They also are if
    they count on where the rows before them stop. They also are in a file of tabs that `is_unquoted`, as stray marks of
    other rows tell; in one of commas such a mark is a slip, since texts with commas must be quoted there.
    """

    def __init__(self, delimiter: str) -> None:
        self._delimiter = delimiter
        self._before: deque[_Kept] = deque(maxlen=_NEAR)
        self.is_unquoted = False

    def add(self, cells: list[str], lines: list[str]) -> None:
        """A row that has been read, and the lines that it was read from."""
        self._before.append(_Kept.of(cells, len(lines)))
        self._look_for_strays(lines)

    def have_like(self, lines: list[str], behind: list[str]) -> bool:
        """Whether `lines`, which have as many cells as a row, are rows, with the lines `behind` the last one."""
        self._look_for_strays(behind)
        if self.is_unquoted:
            return True
        found = [_Kept.of(line.rstrip("\r\n").split(self._delimiter)).hashes for line in lines]
        columns = len(found[0])
        before, after = self._sides(behind, columns)
        others = [*before, *after]
        for column in range(columns):
            # A column that numbers the rows repeats nothing: such numbers in these lines are those of a table.
            if len(others) >= _ENOUGH and _usual_steps(column, before, after):
                continue
            known = {row.hashes[column] for row in others} - {hash("")}
            # The first or the last line has a cell outside the quotation, which is known in any case.
            if 2 * sum(row[column] in known for row in found) > len(found):
                return True
        return False

    def count_on(self, cells: list[str], lines: _Lines, columns: int) -> bool:
        """Whether the lines of a row with these `cells` are rows that a column numbers.

        Its numbers ascend from row to row nearby. Through the lines they ascend, too, by steps that are no greater; as
        one row the lines would be a leap. The lines of a text, such as a table in it, do not fill the gap of a leap.
        """
        taken = [line for line in lines.taken if not line.isspace()]
        if len(taken) < 2 or any(line.count(self._delimiter) != columns - 1 for line in taken):
            return False
        rows = [line.rstrip("\r\n").split(self._delimiter) for line in taken]
        for column in range(columns):
            counted = [_number(row[column]) for row in rows]
            # Few texts have such lines: the rows behind those of others are not looked at.
            if not _steps(counted):
                continue
            before, behind = self._sides(lines.peek(_NEAR), columns)
            # Other stray marks may have joined rows behind.
            single = [] if len(before) >= _ENOUGH else list(takewhile(lambda row: row.lines == 1, behind))
            if not (steps := _usual_steps(column, before, single)):
                continue
            last, follower = ([row.number(column) for row in side] for side in (before[-1:], behind[:1]))
            through = _steps([*last, *counted, *follower])
            if not through or max(through) > max(steps):
                continue
            joined = _number(cells[column]) if len(cells) == columns else None
            leap = max(_steps([*last, joined, *follower]), default=0)
            if joined is None or leap > max(steps) * (1 if len(steps) == 1 else _LEAP):
                return True
        return False

    def _sides(self, lines: list[str], columns: int) -> tuple[list[_Kept], list[_Kept]]:
        """The rows before a cell and those of the `lines` behind it that have so many cells."""
        before, behind = (
            [row for row in side if len(row.hashes) == columns] for side in (self._before, self._rows(lines))
        )
        return before, behind

    def _look_for_strays(self, lines: list[str]) -> None:
        if self._delimiter == "\t" and not self.is_unquoted:
            self.is_unquoted = any(_UNQUOTED.search(line) for line in lines)

    def _rows(self, lines: list[str]) -> Iterator[_Kept]:
        """The rows of lines up to a stray mark: a line of a quoted cell is no row."""
        reader, read = csv.reader(lines, delimiter=self._delimiter, strict=True), 0
        try:
            for cells in reader:
                yield _Kept.of(cells, reader.line_num - read)
                read = reader.line_num
        except csv.Error:
            return


class _Kept(NamedTuple):
    """What is kept of the cells of a row, since texts may be long: the hash of each, and those that may be numbers."""

    hashes: list[int]
    short: list[str]
    lines: int  # from which the row was read

    @classmethod
    def of(cls, cells: list[str], lines: int = 1) -> _Kept:
        return cls([hash(cell) for cell in cells], [cell if len(cell) < _LONG else "" for cell in cells], lines)

    def number(self, column: int) -> int | None:
        return _number(self.short[column])


def _number(cell: str) -> int | None:
    return int(cell) if len(cell) < _LONG and cell.strip().isdecimal() else None


def _steps(numbers: list[int | None]) -> list[int]:
    """The differences of numbers that ascend; none if they do not."""
    steps = []
    for one, other in pairwise(numbers):
        if one is None or other is None or other <= one:
            return []
        steps.append(other - one)
    return steps


def _usual_steps(column: int, *sides: list[_Kept]) -> set[int]:
    """The steps by which the numbers of a column ascend; none if it holds others, or they do not ascend."""
    found = [_steps([row.number(column) for row in side]) for side in sides if len(side) > 1]
    return set(chain(*found)) if all(found) else set()


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
