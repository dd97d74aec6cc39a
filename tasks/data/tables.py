"""Checks of tables: the header of a csv file, and a column that names the split of each line."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

# Names of a column that says which split a line is of, and what it says.
_SPLIT_COLUMNS = ("split", "splits", "set", "subset", "partition", "phase")
_TRAINING = {"train", "training"}
_HELD_OUT = {"val", "valid", "validation", "dev", "test", "testing", "eval"}


def find_split_column(path: Path | str, used: Collection[str], delimiter: str = ",") -> str | None:
    """What is wrong where a column of a training table says that some lines are no training lines; None if none does.

    The columns `used` are read as something else. Only a table that has such a column is read.
    """
    try:
        with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            rows = csv.reader(file, delimiter=delimiter)
            header = next(rows, [])
            names = (name for name in header if name not in used and name.strip().lower() in _SPLIT_COLUMNS)
            if (column := next(names, None)) is None:
                return None
            place = header.index(column)
            said = Counter(row[place].strip().lower() for row in rows if len(row) > place)
    except csv.Error:  # which is told where the table is read
        return None
    held_out = {name: count for name, count in said.items() if name in _HELD_OUT}
    if not held_out or not said.keys() & _TRAINING:
        return None
    counts = " and ".join(f"{count} lines {name}" for name, count in held_out.items())
    return f"{path}: its column {column!r} calls {counts}, and all lines are read as training"


def check_header(path: Path | str, header: Sequence[str]) -> None:
    """Raise ValueError if the header of a csv table is one column that another delimiter divides.

    `header` was read with `errors="surrogateescape"`, so that names in another encoding than UTF-8 are told, too.
    """
    if any(letter == "\0" or "\udc80" <= letter <= "\udcff" for name in header for letter in name):
        raise ValueError(f"{path} is no UTF-8 (its first line is not): save it so")
    if len(header) == 1 and (found := next((mark for mark in ";\t|" if mark in header[0]), None)):
        raise ValueError(f"{path} has {found!r} between its columns: save it with commas")
