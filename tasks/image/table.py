"""Images that a csv file lists: the name of each file, and its class or its labels."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from longseq.tasks.data.labels import LABEL_COLUMN, Labels, name_some, read_labels, targets_of
from longseq.tasks.image.decoding import decode
from longseq.tasks.image.folder import SPLIT_KEYS, SPLIT_NAMES, refuse_trained, sort_classes
from longseq.tasks.image.sources import Source, require_root

if TYPE_CHECKING:
    from longseq.tasks.image.config import ImageDataKeys

# The column of files where the user names none, as in Hugging Face's image folders.
FILE_COLUMN = "file_name"


class Listed(NamedTuple):
    """A line of a table: its number, the path of the image, and its labels."""

    line: int
    path: str
    labels: Labels


class TableSource:
    """The images that a table lists, with classes `[N]`, or for several labels targets `[N, C]` of 0 and 1."""

    has_files = True

    def __init__(self, path: Path, rows: Sequence[Listed], class_names: Sequence[str], *, multi_label: bool) -> None:
        self.label, self.class_names = str(path), list(class_names)
        self.class_to_idx = {name: index for index, name in enumerate(class_names)}
        for row in rows:
            if unknown := [name for name in row.labels if name not in self.class_to_idx]:
                raise ValueError(
                    f"{path}, line {row.line}: the label {unknown[0]} is not among {name_some(self.class_names)}"
                )
        self._paths = [row.path for row in rows]
        self._targets = targets_of(
            np.arange(len(rows)), [row.labels for row in rows], self.class_names, multi_label=multi_label
        )

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, index: int) -> tuple[Image.Image, Any]:
        return decode(self._paths[index]), self._targets[index]

    def read_file(self, index: int) -> tuple[bytes, Any]:
        """The bytes of the image's file, and its class or its labels."""
        return Path(self._paths[index]).read_bytes(), self._targets[index]

    def path(self, index: int) -> str:
        return self._paths[index]

    def targets(self) -> np.ndarray:
        return self._targets


def open_tables(keys: ImageDataKeys, names: Mapping[str, str | None]) -> tuple[TableSource, dict[str, Source]]:
    """The training images, and those of `validation` and `test` that have a table.

    `data.root` is a table, or a folder with train.csv and maybe val.csv and test.csv. ValueError for a table that
    cannot be read, and for labels that training does not have.
    """
    root = require_root(keys.root)
    tables = {kind: find_table(root, kind, name) for kind, name in names.items()}
    for kind, table in tables.items():
        if (
            table is None
            and names[kind] is not None
            and (kind == "train" or names[kind] != kind)
            and Path(root).is_dir()
        ):
            raise FileNotFoundError(f"data.{SPLIT_KEYS[kind]}={names[kind]}: {root} holds no {names[kind]}.csv")
    refuse_trained(names, {kind: None if path is None else str(path) for kind, path in tables.items()})
    path = tables["train"]
    assert path is not None
    rows = list(_read(path, keys))
    columns = keys.label_column
    several = isinstance(columns, list | tuple)
    class_names = list(columns) if several else sort_classes(name for row in rows for name in row.labels)  # type: ignore[arg-type]
    train = TableSource(path, rows, class_names, multi_label=keys.multi_label)
    held_out: dict[str, Source] = {
        kind: open_table(path, keys, class_names) for kind, path in tables.items() if kind != "train" and path
    }
    return train, held_out


def open_table(path: Path, keys: ImageDataKeys, class_names: Sequence[str]) -> TableSource:
    """The images of a table, with classes numbered as in `class_names`."""
    return TableSource(path, list(_read(path, keys)), class_names, multi_label=keys.multi_label)


def find_table(root: str, kind: str, name: str | None) -> Path | None:
    """The csv file of a split: `root` itself is that of the training, or of another split where `kind` is None."""
    path = Path(root)
    if not path.exists():
        raise FileNotFoundError(f"data.root={root} does not exist")
    if path.is_file():
        return path if kind == "train" else None
    if name is None:
        return None
    usual = SPLIT_NAMES[kind] if name == kind else (name.removesuffix(".csv"),)
    return next((file for file in (path / f"{one}.csv" for one in usual) if file.is_file()), None)


def _read(path: Path, keys: ImageDataKeys) -> Iterator[Listed]:
    """The lines of a table. ValueError, which names the line, for one that cannot be read."""
    given = keys.label_column or LABEL_COLUMN
    columns = [given] if isinstance(given, str) else list(given)
    named = keys.file_column or FILE_COLUMN
    seen: dict[str, int] = {}
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        present = list(reader.fieldnames or [])
        if missing := [one for one in (named, *columns) if one not in present]:
            raise ValueError(f"{path} has no column {missing[0]}, but {', '.join(present)}")
        if len(set(present)) < len(present):
            raise ValueError(f"{path} has two columns of one name")
        for row in reader:
            line = reader.line_num
            if None in row or not row[named]:
                raise ValueError(f"{path}, line {line}: {'too many cells' if None in row else 'no file'}")
            image = path.parent / row[named]  # "./a.png" and "a.png" are one
            if (first := seen.setdefault(str(image), line)) != line:
                raise ValueError(f"{path}, line {line}: {row[named]} is in line {first} already")
            options: dict[str, Any] = {"multi_label": keys.multi_label, "delimiter": keys.label_delimiter}
            try:
                labels = read_labels([row[one] for one in columns], given, **options)
            except ValueError as error:
                raise ValueError(f"{path}, line {line}: {error}") from None
            yield Listed(line, str(image), labels)
