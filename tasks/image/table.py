"""Images that a csv file lists: the name of each file, and its class or its labels."""

from __future__ import annotations

import csv
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from longseq.tasks.data.folders import named_file
from longseq.tasks.data.labels import LABEL_COLUMN, Labels, read_labels, remarks, targets_of
from longseq.tasks.data.tables import check_header, find_split_column
from longseq.tasks.image.decoding import decode
from longseq.tasks.image.folder import sort_classes
from longseq.tasks.image.sources import (
    MOST_FILES,
    RealPaths,
    Source,
    Split,
    Splits,
    finish_splits,
    refuse_trained,
    size_of,
)
from longseq.tasks.image.split_folders import SPLIT_NAMES, is_compressed, refuse_compressed_tables, require_named

if TYPE_CHECKING:
    from longseq.tasks.image.config import ImageDataKeys

_log = logging.getLogger(__name__)

# The column of files where the user names none, as in Hugging Face's image folders.
FILE_COLUMN = "file_name"

# Letters of a column's name in a message: the first line of another kind of file may be a text.
_LONG_NAME = 60


class Listed(NamedTuple):
    """A line of a table: its number, the path of the image, and its labels."""

    line: int
    path: str
    labels: Labels


class UnknownLabel(ValueError):
    """A line of a table has a label that the classes do not include."""


class TableSource:
    """The images that a table lists, with classes `[N]`, or for several labels targets `[N, C]` of 0 and 1."""

    has_files = True

    def __init__(self, path: Path, rows: Sequence[Listed], class_names: Sequence[str], *, multi_label: bool) -> None:
        self.label, self.class_names = str(path), list(class_names)
        self.class_to_idx = {name: index for index, name in enumerate(class_names)}
        for row in rows:
            if unknown := [name for name in row.labels if name not in self.class_to_idx]:
                raise UnknownLabel(
                    f"{path}, line {row.line}: the label {unknown[0]} is not among those of the training images "
                    f"({', '.join(self.class_names[:5])}{', ...' * (len(self.class_names) > 5)})"
                )
        self._paths = [row.path for row in rows]
        self._targets = targets_of(
            np.arange(len(rows)), [row.labels for row in rows], self.class_names, multi_label=multi_label
        )

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, index: int) -> tuple[Image.Image, Any]:
        return decode(self._paths[index]), self._targets[index]

    def path(self, index: int) -> str:
        return self._paths[index]

    def size(self, index: int) -> int | None:
        """The bytes of the image's file; None if it is gone."""
        return size_of(self._paths[index])

    def targets(self) -> np.ndarray:
        return self._targets


def table_splits(
    keys: ImageDataKeys, root: str | None, names: Mapping[str, str | None], order: Sequence[str] | None = None
) -> Splits:
    """The splits of `data.source=csv`; what has no table is taken as of a folder of images."""
    train, held_out = open_tables(keys, root, names, order)
    return finish_splits(train, held_out, keys.val_fraction, keys.split_seed, str(root))


def open_tables(
    keys: ImageDataKeys, root: str | None, names: Mapping[str, str | None], order: Sequence[str] | None = None
) -> tuple[TableSource, dict[str, Source]]:
    """The training images, and those of `validation` and `test` that have a table.

    `root` is a table, or a folder with train.csv and maybe val.csv and test.csv; `order` is that of `sort_classes`.
    ValueError, in one line, for a table that cannot be read, and for labels that training does not have.
    """
    refuse_compressed_tables(str(root), names)
    tables = {kind: find_table(root, kind, name) for kind, name in names.items()}
    if Path(str(root)).is_dir():
        require_named(str(root), names, tables)
    refuse_trained(names, {kind: None if path is None else str(path) for kind, path in tables.items()})
    if tables["train"] is None:
        raise ValueError(f"{root} holds no {names['train']}.csv: add it, or give data.root=FILE.csv")
    rows = _read_rows(tables["train"], keys)
    if not rows:
        raise ValueError(f"{tables['train']} lists no images: give each image a line below the header")
    columns = keys.label_column
    if isinstance(columns, list | tuple):
        class_names = list(order if order is not None and set(order) == set(columns) else columns)
    else:
        class_names = sort_classes((name for row in rows for name in row.labels), order)
    if len(class_names) < 2 and not (keys.multi_label and class_names):
        raise ValueError(f"{tables['train']} has one class alone ({''.join(class_names)}), and nothing to tell apart")
    used = [keys.file_column or FILE_COLUMN, *([columns] if isinstance(columns, str) else columns or [LABEL_COLUMN])]
    if told := find_split_column(tables["train"], used):
        _log.warning("%s: write train.csv, val.csv and test.csv into a folder, and give data.root=FOLDER", told)
    for told in remarks(class_names, multi_label=keys.multi_label):
        _log.warning("%s: %s", tables["train"], told)
    train = TableSource(tables["train"], rows, class_names, multi_label=keys.multi_label)
    held_out: dict[str, Source] = {
        kind: _open(path, keys, class_names) for kind, path in tables.items() if kind != "train" and path is not None
    }
    return train, held_out


def held_out_table(
    keys: ImageDataKeys, root: str | None, kind: str, name: str | None, class_names: Sequence[str], *, whole: bool
) -> Split | None:
    """The table of a split, with classes numbered as in `class_names`; None if there is none.

    Without a test table the validation images are the test images. With `whole`, the images are not those of the
    training: without a name, test.csv is the test table, and a `root` that is a table is the split.
    """
    refuse_compressed_tables(str(root), {kind: name})
    path = None if name is None and not whole else find_table(root, kind, name, single=False)
    if kind == "test" and (path is None or name is None):
        other = find_table(root, "validation", None, single=False)
        if path is not None and other is not None:
            _log.warning("%s is measured, and not %s: data.test_split=NAME names another table", path, other)
        path = path or other
    if path is None and whole:
        path = find_table(root, "train", None) if Path(root or "").is_file() else None
    return None if path is None else Split.whole(_open(path, keys, class_names))


def find_table(root: str | None, kind: str, name: str | None, *, single: bool = True) -> Path | None:
    """The csv file of a split; with `single` a `root` that is a file is the training table."""
    if root is None:
        raise ValueError("data.source=csv reads a table of images: give data.root=FILE.csv, or a folder with train.csv")
    path = Path(root)
    if not path.exists():
        raise ValueError(f"data.root={root} does not exist: give a csv file, or the folder of train.csv")
    if is_compressed(str(path)):
        raise ValueError(f"data.root={root} is compressed: decompress it and give the csv file")
    if path.is_file():
        return path if single and kind == "train" else None
    usual = SPLIT_NAMES[kind] if name is None or name == kind else (name,)
    files = (path / (one if one.endswith(".csv") else f"{one}.csv") for one in usual)
    return next((file for file in files if file.is_file()), None)


def _open(path: Path, keys: ImageDataKeys, class_names: Sequence[str]) -> TableSource:
    return TableSource(path, _read_rows(path, keys), class_names, multi_label=keys.multi_label)


def _read_rows(path: Path, keys: ImageDataKeys) -> list[Listed]:
    """The lines of a table. Those that list the file of an earlier line in another spelling are told in one warning."""
    rows = list(_read(path, keys))
    real, first = RealPaths(links=len(rows) <= MOST_FILES), dict[str, Listed]()
    again = [(row, other) for row in rows if (other := first.setdefault(real.find(row.path), row)) is not row]
    if again:
        row, other = again[0]
        _log.warning(
            "%s: %d of the %d lines list the file of an earlier one in another spelling, such as line %d (%s) that of "
            "line %d (%s): it counts more than once; give each image one line",
            path,
            len(again),
            len(rows),
            row.line,
            row.path,
            other.line,
            other.path,
        )
    return rows


def _read(path: Path, keys: ImageDataKeys) -> Iterator[Listed]:
    """The lines of a table. ValueError, which names the line, for one that cannot be read."""
    given = keys.label_column or LABEL_COLUMN
    columns = [given] if isinstance(given, str) else list(given)
    named = keys.file_column or FILE_COLUMN
    seen: dict[str, int] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            present = list(reader.fieldnames or [])
            check_header(path, present)
            if repeated := next((one for one in present if present.count(one) > 1), None):
                raise ValueError(f"{path} has two columns {repeated}: rename one of them")
            for key, column in (("file_column", named), *(("label_column", one) for one in columns)):
                if column not in present:
                    names = [name if len(name) < _LONG_NAME else f"{name[:_LONG_NAME]}..." for name in present]
                    shown = ", ".join(name if name == name.strip() else repr(name) for name in names)
                    raise ValueError(f"{path} has no column {column}: give data.{key}=NAME, one of {shown}")
            for row in reader:
                line = reader.line_num
                if extra := row.get(None):  # type: ignore[call-overload]
                    raise ValueError(
                        f"{path}, line {line}: {len(present) + len(extra)} cells for {len(present)} columns: put one "
                        "that has a comma into quotation marks"
                    )
                name = row[named]
                if not name:
                    raise ValueError(f"{path}, line {line}: no file in column {named!r}")
                image = path.parent / named_file(name)  # "./a.png" and "a.png" are one
                if (first := seen.setdefault(str(image), line)) != line:
                    raise ValueError(
                        f"{path}, line {line}: {name} is in line {first} already: give each image one line"
                    )
                try:
                    labels = read_labels(
                        [row[one] for one in columns],
                        given,
                        multi_label=keys.multi_label,
                        delimiter=keys.label_delimiter,
                    )
                except ValueError as error:
                    raise ValueError(f"{path}, line {line}: {error}") from None
                yield Listed(line, str(image), labels)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read as csv in UTF-8 ({error}): save it so") from error
