"""The first line of a table: a file of csv or tsv that is written in another way is told before its columns are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_NAMES = {",": "commas", "\t": "tabs"}


def check_header(path: Path | str, header: Sequence[str], delimiter: str = ",") -> None:
    """Raise ValueError where `header`, as read with `delimiter`, is one column that other delimiters divide.

    `header` was read with `errors="surrogateescape"`, so that names in another encoding than UTF-8 are told, too.
    """
    if any(letter == "\0" or "\udc80" <= letter <= "\udcff" for name in header for letter in name):
        raise ValueError(f"{path} is no UTF-8 (its first line is not): save it so")
    if len(header) == 1 and (found := next((mark for mark in ",;\t|" if mark in header[0]), None)):
        raise ValueError(f"{path} has {found!r} between its columns: save it with {_NAMES[delimiter]}")
