"""The sources of text: jsonl, csv, tsv and parquet files, text files, folders of these, Hugging Face sets.

`find_parts` cuts inputs into parts, which processes may read in parallel; `read_part` yields the documents of a part.
"""

import bz2
import csv
import gzip
import hashlib
import io
import json
import lzma
import os
import sys
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from longseq.tasks.data.labels import Labels, read_labels, require_one_list
from longseq.tasks.report import progress_bar
from longseq.tasks.text.store import stamp

DELIMITERS = {".csv": ",", ".tsv": "\t"}
PART_SIZE = 1 << 25  # bytes; a process holds the text of some documents and the tokens of one part
STREAM = "hfids/"  # before a set on the Hugging Face hub: hfids/OWNER/NAME:CONFIGURATION@SPLIT
_ROWS = 256  # rows of a table in memory
# Folders of Python's modules that are left out.
_LEFT_OUT = {"test", "tests", "idle_test", "idlelib", "__pycache__", "site-packages", "dist-packages"}


class Columns(NamedTuple):
    """The columns of a document: its text, optionally the prompt before it, which is not trained on, and its labels.

    `labels`, `multi_label` and `delimiter` are as in `read_labels`.
    """

    text: str = "text"
    prompt: str | None = None
    labels: str | Sequence[str] = ()
    multi_label: bool = False
    delimiter: str | None = None

    def texts(self) -> list[str]:
        return [self.text] if self.prompt is None else [self.text, self.prompt]

    def of_labels(self) -> list[str]:
        return [self.labels] if isinstance(self.labels, str) else list(self.labels)

    def names(self) -> list[str]:
        return [*self.texts(), *self.of_labels()]


TEXT = Columns()


class Place(NamedTuple):
    """The file of an input, and where in it: `line 3`, `row 3` of a table, or the line at `byte 900`."""

    path: str
    where: str | None = None

    def describe(self) -> str:
        """The place in words."""
        return self.path if self.where is None else f"{self.path}, {self.where}"


class Document(NamedTuple):
    """A text or `[T]` tokens, its labels, where it was read, and the prompt before it, which is not trained on."""

    text: Any
    labels: Labels = ()
    place: Place = Place("a document")
    prompt: str = ""


class Malformed(NamedTuple):
    """An input that cannot be read, and why."""

    place: Place
    reason: str

    def describe(self) -> str:
        return f"{self.place.describe()}: {self.reason}"


Found = Iterator[Document | Malformed]


class Part(NamedTuple):
    """A part of an input from `start` to `stop`: bytes (jsonl), row groups (parquet), rows (saved), shards (stream).

    A `stop` of 0 is the end. `files` are documents of whole files. `version` of a stream identifies its files.
    """

    format: str
    path: str
    start: int = 0
    stop: int = 0
    files: tuple[str, ...] = ()
    version: str = ""

    def stamps(self) -> list[Any]:
        """The sizes and times of its files."""
        return [[path, *stamp(path)] for path in self.files or (self.path,)]


def find_parts(
    inputs: Sequence[str], columns: Columns, *, size: int = PART_SIZE, whole_files: bool = False
) -> list[Part]:
    """The parts of the inputs, in their order; with `whole_files` each file is a document, whatever its ending.

    FileNotFoundError for an input that does not exist, ValueError if no input has text.
    """
    parts: list[Part] = []
    for given in inputs:
        path = Path(given)
        if given.startswith(STREAM):
            parts += _parts_of_stream(given, columns)
        elif not path.exists():
            raise FileNotFoundError(f"{given} does not exist")
        elif _is_saved(path) and not whole_files:
            parts += _parts_of_saved(path, size)
        else:
            formats = {file: "text" if whole_files else _format_of(Path(file)) for file in files_below(path)}
            parts += [part for file in formats if formats[file] != "text" for part in _parts_of_file(Path(file), size)]
            parts += group_files([file for file in formats if formats[file] == "text"], size=size)
    if not parts:
        raise ValueError(f"{', '.join(inputs)}: no file with text")
    return parts


def find_in_order(path: str, columns: Columns) -> list[Part]:
    """The parts of one input; files of all formats below a folder keep their order."""
    listed = [] if path.startswith(STREAM) or _is_saved(Path(path)) else list(files_below(Path(path)))
    return find_parts(listed or [path], columns)


def read_part(part: Part, columns: Columns) -> Found:
    """The documents of a part, and its lines or files that cannot be read. Blank lines of jsonl are skipped."""
    return _READERS[part.format](part, columns)


def read_parts(parts: Sequence[Part], columns: Columns, description: str) -> Found:
    """The documents of all parts, with a progress bar."""
    with progress_bar(description, len(parts)) as advance:
        for part in parts:
            yield from read_part(part, columns)
            advance(1)


def _is_saved(path: Path) -> bool:
    """True for a folder that the library `datasets` has saved."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def files_below(path: Path) -> Iterator[str]:
    """The file, or the files below a folder and linked folders in the order of their names, without hidden ones."""
    if path.is_file():
        yield str(path)
    for folder, folders, names in os.walk(path, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (os.path.join(folder, name) for name in sorted(names) if not name.startswith("."))


def standard_library_files() -> list[str]:
    """The modules of the standard library of this Python, without tests and idlelib, in the order of their paths."""
    return sorted(modules_of(sysconfig.get_paths()["stdlib"]))


def modules_of(root: str) -> Iterator[str]:
    """The Python files below a folder, without installed packages and tests."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        yield from (os.path.join(folder, name) for name in names if name.endswith(".py"))


def group_files(files: Iterable[str], *, size: int = PART_SIZE, format: str = "text") -> Iterator[Part]:
    """Parts of files that are one document each."""
    held: list[str] = []
    total = 0
    for file in files:
        if total >= size:
            yield Part(format, os.path.dirname(held[0]), files=tuple(held))
            held, total = [], 0
        held.append(file)
        total += os.path.getsize(file)
    if held:
        yield Part(format, os.path.dirname(held[0]), files=tuple(held))


def _format_of(path: Path) -> str:
    ending = path.suffix.lower()
    lines = ending in (".jsonl", ".ndjson", ".json")
    if lines or (ending in _OPENERS and _format_of(path.with_suffix("")) == "jsonl"):
        return "jsonl"
    return ending[1:] if ending in (*DELIMITERS, ".parquet") else "text"


def _parts_of_file(path: Path, size: int) -> Iterator[Part]:
    total, format = path.stat().st_size, _format_of(path)
    if format == "parquet":
        yield from _parts_of_parquet(path, size)
    elif format == "jsonl" and path.suffix.lower() not in _OPENERS:
        for start in range(0, total, size):
            yield Part(format, str(path), start, min(total, start + size))
    else:
        yield Part(format, str(path))


def _parts_of_parquet(path: Path, size: int) -> Iterator[Part]:
    from pyarrow import parquet

    file = parquet.ParquetFile(path)
    first, held = 0, 0
    for group in range(file.num_row_groups):
        held += file.metadata.row_group(group).total_byte_size
        if held >= size or group + 1 == file.num_row_groups:
            yield Part("parquet", str(path), first, group + 1)
            first, held = group + 1, 0


def _parts_of_saved(path: Path, size: int) -> Iterator[Part]:
    from datasets import load_from_disk

    if (path / "dataset_dict.json").is_file():
        raise ValueError(f"{path} holds several splits: name the folder of one")
    saved = load_from_disk(str(path))
    count = max(1, -(-saved.data.nbytes // size))
    for index in range(count):
        start, stop = index * len(saved) // count, (index + 1) * len(saved) // count
        if stop > start:
            yield Part("saved", str(path), start, stop)


def _parts_of_stream(given: str, columns: Columns) -> Iterator[Part]:
    from datasets import load_dataset_builder

    name, configuration, _ = _name_stream(given)
    for column in columns.of_labels():
        require_one_list(given, name, column=column, configuration=configuration)
    builder = load_dataset_builder(name, configuration)
    listed = (builder.config.data_files or {}).items()
    files = [[str(one), str(file), *stamp(str(file))] for one, files in listed for file in files]
    version = hashlib.sha256(json.dumps([builder.hash, files]).encode()).hexdigest()
    for shard in range(_load_stream(given).num_shards):
        yield Part("stream", given, shard, shard + 1, version=version)


def _name_stream(given: str) -> tuple[str, str | None, str]:
    """The name of a set on the hub, its configuration and its split."""
    name, _, split = given.removeprefix(STREAM).partition("@")
    name, _, configuration = name.partition(":")
    return name, configuration or None, split or "train"


def _load_stream(given: str) -> Any:
    """The stream of a set on the hub, which is downloaded while it is read."""
    from datasets import load_dataset

    name, configuration, split = _name_stream(given)
    return load_dataset(name, configuration, split=split, streaming=True)


def _read_jsonl(part: Part, columns: Columns) -> Found:
    """The lines that begin in the part. Line numbers are only known in the first part of a file."""
    with _OPENERS.get(Path(part.path).suffix.lower(), partial(open, mode="rb"))(part.path) as file:
        offset = part.start
        if part.start:
            file.seek(part.start - 1)
            offset += len(file.readline()) - 1
        for number, line in enumerate(file, start=1):
            if offset >= part.stop > 0:
                return
            place = Place(part.path, f"byte {offset}" if part.start else f"line {number}")
            offset += len(line)
            if line.strip():
                try:
                    yield _document(json.loads(line.decode("utf-8-sig")), columns, place)
                except ValueError as error:
                    yield Malformed(place, f"no JSON ({error})")


def _open_zstd(path: str) -> IO[bytes]:
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(path, compression="zstd"))


# Compressed files of lines, by their ending.
_OPENERS: dict[str, Callable[[str], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zstd}


def _read_table(part: Part, columns: Columns) -> Found:
    rows = read_rows(Path(part.path))
    _, header = next(rows, (0, []))
    if twice := [name for name in columns.names() if header.count(name) > 1]:
        raise ValueError(f"{part.path} has several columns {twice[0]!r}")
    if header and (missing := [name for name in columns.names() if name not in header]):
        raise ValueError(f"{part.path} has no column {missing[0]!r}; it has {', '.join(map(repr, header))}")
    for line, cells in rows:
        place = Place(part.path, f"line {line}")
        if len(cells) != len(header):  # an unquoted delimiter in a text moves the label to another column
            yield Malformed(place, f"{len(cells)} cells under a header of {len(header)}")
        else:
            yield _document(dict(zip(header, cells, strict=True)), columns, place)


def read_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The rows of a csv or tsv file, the header first, each with the number of its last line; blank lines are skipped.

    Invalid UTF-8 becomes lone surrogates. ValueError for a quoted cell that is not closed, or that text follows.
    """
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        rows = csv.reader(file, delimiter=DELIMITERS.get(path.suffix.lower(), ","), strict=True)
        begin = 1
        try:
            for cells in rows:
                if cells:
                    yield rows.line_num, cells
                begin = rows.line_num + 1
        except csv.Error as error:
            raise ValueError(f"{path}, line {begin}: {error}") from error


def _read_parquet(part: Part, columns: Columns) -> Found:
    from pyarrow import parquet

    file = parquet.ParquetFile(part.path)
    number = sum(file.metadata.row_group(group).num_rows for group in range(part.start))
    groups = list(range(part.start, part.stop))
    # The library `datasets`, and so the hub, writes the names of classes into the schema.
    features: Mapping[str, Any] = {}
    if columns.labels and b"huggingface" in (file.schema_arrow.metadata or {}):
        from datasets import Features

        features = Features.from_arrow_schema(file.schema_arrow)
    batches = file.iter_batches(batch_size=_ROWS, row_groups=groups, columns=columns.names())
    rows = (row for batch in batches for row in batch.to_pylist())
    yield from _documents(part.path, rows, columns, number, features)


def _read_saved(part: Part, columns: Columns) -> Found:
    from datasets import load_from_disk

    saved = load_from_disk(part.path).select_columns(columns.names())
    rows = saved.select(range(part.start, part.stop))
    yield from _documents(part.path, rows, columns, part.start, saved.features)


def _read_stream(part: Part, columns: Columns) -> Found:
    stream = _load_stream(part.path)
    if stream.num_shards > 1:
        stream = stream.shard(num_shards=stream.num_shards, index=part.start)
    yield from _documents(part.path, stream, columns, 0, stream.features or {})


def _read_files(part: Part, columns: Columns) -> Found:
    """Whole files in UTF-8; files of Python in the encodings that they declare."""
    read = tokenize.open if part.format == "python" else partial(open, encoding="utf-8-sig", newline="")
    for path in part.files:
        try:
            with read(path) as file:
                yield Document(file.read(), place=Place(path))
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            yield Malformed(Place(path), str(error))


_READERS: dict[str, Callable[[Part, Columns], Found]] = {
    "jsonl": _read_jsonl,
    "csv": _read_table,
    "tsv": _read_table,
    "parquet": _read_parquet,
    "saved": _read_saved,
    "stream": _read_stream,
    "text": _read_files,
    "python": _read_files,
}


def _documents(
    path: str, rows: Iterable[dict[str, Any]], columns: Columns, first: int, features: Mapping[str, Any]
) -> Found:
    """The documents of rows, counted from `first`; numbered classes get their names."""
    for number, row in enumerate(rows, start=first):
        for column in columns.of_labels():
            row[column] = _name_classes(row.get(column), features.get(column))
        yield _document(row, columns, Place(path, f"row {number}"))


def _name_classes(value: Any, feature: Any) -> Any:
    """The name of a numbered class, or of each in a list; None for -1, by which sets mark a missing label."""
    if isinstance(value, list):
        inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
        return [_name_classes(one, inner) for one in value]
    if not hasattr(feature, "int2str") or not isinstance(value, int):
        return value
    return None if value < 0 else feature.int2str(value)


def _document(row: Any, columns: Columns, place: Place) -> Document | Malformed:
    if not isinstance(row, dict):
        return Malformed(place, "no JSON object")
    for name in columns.texts():
        if not isinstance(row.get(name), str):
            return Malformed(place, f"no text in column {name!r}")
    cells, labels = [row.get(name) for name in columns.of_labels()], Labels()
    try:
        for cell in (*map(row.get, columns.texts()), *cells):
            str(cell).encode()
        if cells:
            labels = read_labels(cells, columns.labels, multi_label=columns.multi_label, delimiter=columns.delimiter)
    except ValueError as error:
        return Malformed(place, str(error))
    return Document(row[columns.text], labels, place, "" if columns.prompt is None else row[columns.prompt])
