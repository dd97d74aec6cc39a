"""Rows of csv and tsv files in UTF-8."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path

DELIMITERS = {".csv": ",", ".tsv": "\t"}


def read_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The rows of a file, the header first, each with the line at which it ends; blank lines are left out.

    The file's suffix, .csv or .tsv, decides the delimiter. Invalid UTF-8 becomes lone surrogates, which the caller
    reports.

    Raises:
        ValueError: a quoted cell is not closed, or text follows its closing mark; gives file and first line of the row.
    """
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        rows = csv.reader(file, delimiter=DELIMITERS[path.suffix.lower()], strict=True)
        while True:
            begin = rows.line_num + 1
            try:
                cells = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                raise ValueError(f"{path}, line {begin}: {error}") from error
            if cells:
                yield rows.line_num, cells
