"""The sources of text: jsonl, csv, tsv and parquet files, text files, folders of these, Hugging Face sets.

An input is cut into parts that processes read in parallel. A part holds everything that its reader needs.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import json
import lzma
import os
import textwrap
import tokenize
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple

from longseq.tasks.data.class_lists import require_one_list
from longseq.tasks.data.folders import leads_above
from longseq.tasks.data.stamps import stamp
from longseq.tasks.text.compressed import open_bzip2, open_xz
from longseq.tasks.text.delimited import read_rows
from longseq.tasks.text.documents import Document, LineCounter, Place

# The endings of files with a JSON object in each line.
JSON_LINES = (".jsonl", ".ndjson")

# Bytes of a part. One process holds the text of some documents and the tokens of one part.
PART_SIZE = 1 << 25

# Changes where a reader gives other documents for the same file, so that older caches are not taken.
READING = 6

# Before the name of a set on the Hugging Face hub: hfids/OWNER/NAME, hfids/OWNER/NAME:CONFIGURATION@SPLIT.
STREAM = "hfids/"

# Lines of a file of JSON that tell its columns: any of them may lack one.
_FIRST_LINES = 300

_OF_ZSTD = "files that zstd has compressed"
_INSTALL = '{what} need the library {library}: pip install "longseq[text]"'


class Columns(NamedTuple):
    """The columns of a document: its text, optionally the prompt before it, which is not trained on, and its labels.

    `keys` are the names of the keys by which a user gives the columns and the input, for messages.
    """

    text: str = "text"
    prompt: str | None = None
    labels: tuple[str, ...] = ()
    keys: tuple[str, str, str, str] = ("column", "prompt_column", "label_column", "input")

    def texts(self) -> list[str]:
        return [self.text, *([] if self.prompt is None else [self.prompt])]

    def names(self) -> list[str]:
        return [*self.texts(), *self.labels]

    def spell(self, path: Path | str) -> str:
        """An input as the user gives it: input=FILE."""
        return f"{self.keys[3]}={path}"


TEXT = Columns()

# The keys of columns and input among those of `data`.
DATA_KEYS = ("data.column", "data.prompt_column", "data.label_column", "data.root")


class Part(NamedTuple):
    """A part of an input from `start` to `stop`: bytes (jsonl), row groups (parquet), rows (saved), shards (stream).

    `files` are the files of a part that consists of whole files, one document each, and of a stream one text, which is
    another one when the set has changed; `size` is the approximate number of bytes.
    """

    format: str
    path: str
    size: int
    start: int = 0
    stop: int = 0
    files: tuple[str, ...] = ()


class Malformed(NamedTuple):
    """An input that could not be read, and why."""

    place: Place
    reason: str

    def describe(self, lines: LineCounter | None = None) -> str:
        return f"{self.place.describe(lines)}: {self.reason}"


def find_parts(
    inputs: Sequence[str], columns: Columns, *, size: int = PART_SIZE, whole_files: bool = False
) -> list[Part]:
    """The parts of the inputs, in their order; with `whole_files` each file is a document, whatever its ending.

    ValueError, in one line: an input does not exist, is a pipe, is empty, or has no such column, or the columns of text
    and prompt are one.
    """
    if columns.prompt == columns.text:
        text, prompt, *_ = columns.keys
        raise ValueError(f"{prompt}={columns.prompt} is also {text}, the text to learn: name another column, or null")
    parts: list[Part] = []
    for given in inputs:
        if given.startswith(STREAM):
            parts += _parts_of_stream(given, columns)
            continue
        path = Path(given)
        if not path.exists():
            raise ValueError(f"{columns.spell(given)} does not exist")
        if not (path.is_file() or path.is_dir()):  # its first line is looked at before all are read
            raise ValueError(
                f"{columns.spell(given)} is a pipe or a device, which can be read once only: write it to a file, and "
                "give that"
            )
        found = list(_parts_of_files(path, size) if whole_files else _parts_of(path, columns, size))
        if not found:
            raise ValueError(f"{columns.spell(given)} is empty: it holds no file with text")
        parts += found
    return parts


def refuse_columns(columns: Columns, parts: Sequence[Part]) -> None:
    """Raise ValueError, in one line, for a column that the user named where no input has columns."""
    for key, value, default in zip(columns.keys, columns[:2], TEXT[:2], strict=False):
        if value != default and all(part.format in PLAIN for part in parts):
            raise ValueError(
                f"{key}={value} has no effect: the input is plain text, which has no columns; leave it out, or give a "
                ".jsonl, .csv, .tsv or .parquet"
            )


def read_part(part: Part, columns: Columns) -> Iterator[Document | Malformed]:
    """The documents of a part, and its lines or files that could not be read. Blank lines of jsonl are skipped."""
    return _READERS[part.format](part, columns)


def _parts_of(path: Path, columns: Columns, size: int) -> Iterator[Part]:
    if path.is_file():
        yield from _parts_of_file(path, columns, size)
    elif (path / "dataset_dict.json").is_file():
        splits = sorted(one.name for one in path.iterdir() if one.is_dir())
        raise ValueError(
            f"{columns.spell(path)} holds the splits {', '.join(splits)}: name those to read, such as "
            f"{columns.spell(path / splits[0])}"
            if splits
            else f"{columns.spell(path)} is a data set without splits"
        )
    elif (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        yield from _parts_of_saved(path, columns, size)
    else:
        yield from _parts_of_folder(path, columns, size)


def _parts_of_folder(path: Path, columns: Columns, size: int) -> Iterator[Part]:
    texts: list[str] = []
    for file in _files_below(path):
        if _format_of(file) == "text" or _leads_nowhere(file):
            texts.append(str(file))
        elif file.stat().st_size:
            yield from _parts_of_file(file, columns, size)
    yield from group_files(texts, size=size)


def _parts_of_files(path: Path, size: int) -> Iterator[Part]:
    yield from group_files([str(path)] if path.is_file() else [str(file) for file in _files_below(path)], size=size)


def _files_below(path: Path) -> Iterator[Path]:
    """The files below a folder in the order of their names, without hidden ones; also links that lead nowhere."""
    for folder, names in walk(str(path)):
        for name in names:
            file = Path(folder, name)
            if not name.startswith(".") and (file.is_file() or _leads_nowhere(file)):
                yield file


def walk(root: str, hidden: Callable[[str], object] = lambda _: None) -> Iterator[tuple[str, list[str]]]:
    """Each folder from `root` down, in the order of names, with the names in it that are no folders.

    Links are followed, but not to a folder that holds them, below which everything would be found again. `hidden` is
    called with the path of each folder that begins with a dot, in which nothing is searched.
    """
    for folder, folders, names in os.walk(root, followlinks=True):
        for name in [name for name in folders if name.startswith(".")]:
            hidden(os.path.join(folder, name, ""))
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and not leads_above(os.path.join(folder, name))
        )
        yield folder, sorted(names)


def _leads_nowhere(file: Path) -> bool:
    return file.is_symlink() and not file.exists()


def group_files(files: Sequence[str], *, size: int = PART_SIZE, format: str = "text") -> Iterator[Part]:
    """Parts of files that are one document each."""
    held: list[str] = []
    total = 0
    for file in files:
        held.append(file)
        total += os.path.getsize(file) if os.path.exists(file) else 0  # a link that leads nowhere: its reader tells
        if total >= size:
            yield Part(format, os.path.dirname(held[0]), total, files=tuple(held))
            held, total = [], 0
    if held:
        yield Part(format, os.path.dirname(held[0]), total, files=tuple(held))


def _format_of(path: Path) -> str:
    ending = path.suffix.lower()
    if ending in (*JSON_LINES, ".json"):
        return "jsonl"
    if ending in _OPENERS and _format_of(path.with_suffix("")) == "jsonl":
        return "compressed"
    return ending[1:] if ending in (".csv", ".tsv", ".parquet") else "text"


def _parts_of_file(path: Path, columns: Columns, size: int) -> Iterator[Part]:
    total, format = path.stat().st_size, _format_of(path)
    if total == 0:
        raise ValueError(f"{columns.spell(path)} is empty")
    if format == "text":
        yield Part("text", str(path.parent), total, files=(str(path),))
    elif format == "parquet":
        yield from _parts_of_parquet(path, columns, size)
    elif format == "jsonl" and is_array(path):
        yield Part("array", str(path), total)
    elif format == "jsonl":
        _check_first_lines(path, columns)
        for start in range(0, total, size):
            stop = min(total, start + size)
            yield Part("jsonl", str(path), stop - start, start, stop)
    elif format == "compressed":
        if path.suffix.lower() == ".zst":
            _pyarrow(_OF_ZSTD)  # no reason to pass the file over
        _check_first_lines(path, columns)
        yield Part(format, str(path), total)
    else:
        _, header = next(read_rows(path), (1, []))
        if not header:
            raise ValueError(f"{columns.spell(path)} is empty: its lines are blank")
        _check_columns(path, columns, header)
        yield Part(format, str(path), total)


def _parts_of_parquet(path: Path, columns: Columns, size: int) -> Iterator[Part]:
    try:
        file = _pyarrow().parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{columns.spell(path)} is no parquet file, or a truncated one: {error}") from error
    _check_columns(path, columns, file.schema_arrow.names)
    for name in columns.texts():
        kind = file.schema_arrow.field(name).type
        if not _is_text(kind):
            raise ValueError(f"the column {name!r} of {path} is of the type {kind}, which is no text")
    first, held = 0, 0
    for group in range(file.num_row_groups):
        held += file.metadata.row_group(group).total_byte_size
        if held >= size or group + 1 == file.num_row_groups:
            yield Part("parquet", str(path), held, first, group + 1)
            first, held = group + 1, 0


def _is_text(kind: Any) -> bool:
    """True for the types of Arrow that hold text, or nothing at all."""
    types = _pyarrow().types
    if types.is_dictionary(kind):
        kind = kind.value_type
    return any(holds(kind) for holds in (types.is_string, types.is_large_string, types.is_string_view, types.is_null))


def _parts_of_saved(path: Path, columns: Columns, size: int) -> Iterator[Part]:
    saved = _load_saved(str(path), columns)
    _check_columns(path, columns, saved.column_names)
    total = saved.data.nbytes
    count = max(1, -(-total // size))
    for index in range(count):
        start, stop = index * len(saved) // count, (index + 1) * len(saved) // count
        if stop > start:
            yield Part("saved", str(path), total // count, start, stop)


def _parts_of_stream(given: str, columns: Columns) -> Iterator[Part]:
    name, configuration, split = _name_stream(given)
    for column in columns.labels:
        require_one_list(columns.spell(given), name, [split], column=column, configuration=configuration)
    stream = _load_stream(given, columns)
    if stream.column_names is not None:
        _check_columns(given, columns, stream.column_names)
    version = _version_of_stream(given, columns)
    for shard in range(stream.num_shards):
        yield Part("stream", given, 0, shard, shard + 1, (version,))


def is_array(path: Path) -> bool:
    """True for a file .json that is one array in place of lines, such as many sets of instructions."""
    if path.suffix.lower() != ".json":
        return False
    with path.open("rb") as file:
        return file.read(1 << 10).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["


def _check_first_lines(path: Path, columns: Columns) -> None:
    """Refuse a file whose first objects all lack a column. Single such lines, and others, are counted when read."""
    names: dict[str, Any] = {}
    with suppress(*_BROKEN), _OPENERS.get(path.suffix.lower(), open)(path, "rb") as file:
        for line in islice((line for line in file if line.strip()), _FIRST_LINES):
            with suppress(ValueError, RecursionError):
                if isinstance(row := json.loads(line.decode("utf-8-sig")), dict):
                    names |= dict.fromkeys(row)
            if all(name in names for name in columns.names()):  # nearly always behind the first line
                return
    if names:
        _check_columns(path, columns, list(names))


def _check_columns(path: Path | str, columns: Columns, found: Sequence[str]) -> None:
    text, prompt, label, _ = columns.keys
    for key, name in ((text, columns.text), (prompt, columns.prompt), *((label, name) for name in columns.labels)):
        if name is not None and name not in found:
            names = textwrap.shorten(", ".join(map(str, found)), 200, placeholder=" ...")
            raise ValueError(f"{path} has no column {name!r}: give {key}=NAME, one of {names}")
        if name is not None and found.count(name) > 1:
            raise ValueError(f"{path} has {found.count(name)} columns {name!r}: leave one of them")


def _read_jsonl(part: Part, columns: Columns) -> Iterator[Document | Malformed]:
    """The lines that begin in the part."""
    with open(part.path, "rb") as file:
        if part.start:
            file.seek(part.start - 1)
            file.readline()
        while (offset := file.tell()) < part.stop and (line := file.readline()):
            if line.strip():
                yield _parse(line, columns, Place(part.path, offset=offset))


def _read_compressed(part: Part, columns: Columns) -> Iterator[Document | Malformed]:
    """All lines of a compressed file: none can be found without those before it."""
    number = 0
    try:
        with _OPENERS[Path(part.path).suffix.lower()](part.path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _parse(line, columns, Place(part.path, line=number))
    except _BROKEN as error:
        yield Malformed(Place(part.path, line=number + 1), f"the rest cannot be read ({error})")


def _open_zstd(path: str | Path, mode: str) -> IO[bytes]:
    """A file that zstd has compressed. pyarrow reads all of its frames, and tells where the last one is cut off."""
    return io.BufferedReader(_pyarrow(_OF_ZSTD).input_stream(str(path), compression="zstd"))


# Functions that open a compressed file as `open` does, by its ending, and what they raise for a broken one.
_OPENERS: dict[str, Any] = {
    ".gz": gzip.open,
    ".bz2": open_bzip2,
    ".xz": open_xz,
    ".zst": _open_zstd,
}
_BROKEN = (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError)


def _read_array(part: Part, columns: Columns) -> Iterator[Document | Malformed]:
    """The objects of a JSON array."""
    try:
        rows = json.loads(Path(part.path).read_bytes().decode("utf-8-sig"), object_pairs_hook=JsonObject)
    except UnicodeDecodeError:
        yield Malformed(Place(part.path), "bytes that are no UTF-8")
    except (ValueError, RecursionError) as error:
        yield Malformed(Place(part.path), f"no JSON ({error})")
    else:
        for number, row in enumerate(rows):
            place = Place(part.path, row=number)
            yield _of_json(row, columns, place)


def _parse(line: bytes, columns: Columns, place: Place) -> Document | Malformed:
    """The document of a line of JSON."""
    try:
        row = json.loads(line.decode("utf-8-sig"), object_pairs_hook=JsonObject)
    except UnicodeDecodeError:
        return Malformed(place, "bytes that are no UTF-8")
    except (ValueError, RecursionError) as error:
        return Malformed(place, f"no JSON ({error})")
    return _of_json(row, columns, place)


def _of_json(row: Any, columns: Columns, place: Place) -> Document | Malformed:
    """The document of a value of JSON. One with two values of a column is none: nobody knows which of them counts."""
    if not isinstance(row, JsonObject):
        return Malformed(place, _NO_OBJECT)
    if row.repeated and (twice := next((name for name in columns.names() if name in row.repeated), None)):
        return Malformed(place, f"the key {twice!r} twice")
    return _document(row, columns, place)


def _read_csv(part: Part, columns: Columns) -> Iterator[Document | Malformed]:
    rows = read_rows(Path(part.path))
    _, header = next(rows)
    for line, cells in rows:
        place = Place(part.path, line=line)
        if len(cells) != len(header):
            # The cells of such a row may stand in the wrong columns: a text with a delimiter needs quotes.
            yield Malformed(place, f"{len(cells)} cells under a header of {len(header)}")
        else:
            yield _document(dict(zip(header, cells, strict=True)), columns, place)


def _has_no_file(path: Path) -> bool:
    """True for a saved set without rows, which the library does not open."""
    try:
        return json.loads((path / "state.json").read_bytes()).get("_data_files") == []
    except (OSError, ValueError, AttributeError):
        return False


def _read_parquet(part: Part, columns: Columns) -> Iterator[Document | Malformed]:
    file = _pyarrow().parquet.ParquetFile(part.path)
    first = sum(file.metadata.row_group(group).num_rows for group in range(part.start))
    named = _class_names_of_schema(file.schema_arrow, columns, part.path)
    try:
        for batch in file.iter_batches(
            batch_size=256, row_groups=list(range(part.start, part.stop)), columns=columns.names()
        ):
            yield from _rows(part.path, batch.to_pylist(), columns, first, named)
            first += batch.num_rows
    except NoClassError:
        raise
    except (OSError, ValueError) as error:
        yield Malformed(Place(part.path), f"row groups {part.start} to {part.stop - 1} cannot be read ({error})")


def _read_saved(part: Part, columns: Columns) -> Iterator[Document | Malformed]:
    saved = _load_saved(part.path, columns).select_columns(columns.names())
    named = _class_names(saved.features, columns)
    for start in range(part.start, part.stop, 256):
        rows = saved[start : min(part.stop, start + 256)]
        dicts = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
        yield from _rows(part.path, dicts, columns, start, named)


def _read_stream(part: Part, columns: Columns) -> Iterator[Document | Malformed]:
    stream = _load_stream(part.path, columns)
    if stream.num_shards > 1:
        stream = stream.shard(num_shards=stream.num_shards, index=part.start)
    named = _class_names(stream.features or {}, columns)
    rows, number = iter(stream), -1
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # the library raises many kinds, also for a network that fails
            raise ValueError(f"{columns.spell(part.path)} broke off: {error}; the same command goes on") from error
        number += 1
        yield from _rows(part.path, [row], columns, number, named)


def _read_texts(part: Part, columns: Columns) -> Iterator[Document | Malformed]:
    for path in part.files:
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            yield Malformed(Place(path), str(error.strerror))
            continue
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError:
            yield Malformed(Place(path), _why_no_text(content))
            continue
        # Latin letters in UTF-16 are UTF-8 as well, with a NUL between them.
        yield Malformed(Place(path), _why_no_text(content)) if _is_wide(content) else Document(text, place=Place(path))


class JsonObject(dict[str, Any]):
    """An object of JSON, as `object_pairs_hook` makes it, with the keys that it has several times."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.repeated: set[str] = set()
        if len(self) < len(pairs):
            names = [name for name, _ in pairs]
            self.repeated = {name for name in names if names.count(name) > 1}


# A value of JSON without columns: a text, a number, or a list of what should be lines.
_NO_OBJECT = "no JSON object, whose keys are the columns"

# The first bytes of compressed files.
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\3\4": "zip"}


# The first bytes of Arrow's files: with random access (Feather), and streams, as in the folders of data sets.
_ARROW = (b"ARROW1", b"\xff\xff\xff\xff")


def _is_wide(content: bytes) -> bool:
    """True for text in UTF-16: it begins with a mark, or most of its characters have a byte of zeros."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return True
    head = content[:1024]
    return len(head) >= 4 and any(2 * half.count(0) > len(half) for half in (head[::2], head[1::2]))


def compression_of(content: bytes) -> str | None:
    """The program that has compressed the content of a file, by its first bytes; None if none has."""
    return next((kind for begin, kind in _COMPRESSED.items() if content.startswith(begin)), None)


def _why_no_text(content: bytes) -> str:
    """Why the content of a file is no UTF-8."""
    kind = compression_of(content)
    if content.startswith(_ARROW):
        return "a file of Arrow: give parquet, or the folder of the Hugging Face data set that it is a part of"
    if kind is None:
        return "UTF-16, or no text at all: save text as UTF-8" if _is_wide(content) else "bytes that are no UTF-8"
    return f"compressed by {kind}: decompress it; of compressed files those of jsonl are read, as .jsonl.zst"


def _read_python(part: Part, columns: Columns) -> Iterator[Document | Malformed]:
    """Python files, in the encodings that they declare."""
    for path in part.files:
        try:
            with tokenize.open(path) as file:
                yield Document(file.read(), place=Place(path))
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            yield Malformed(Place(path), f"no Python source ({error})")


# The formats of files that have no columns.
PLAIN = ("text", "python")

_READERS: dict[str, Callable[[Part, Columns], Iterator[Document | Malformed]]] = {
    "jsonl": _read_jsonl,
    "compressed": _read_compressed,
    "array": _read_array,
    "csv": _read_csv,
    "tsv": _read_csv,
    "parquet": _read_parquet,
    "saved": _read_saved,
    "stream": _read_stream,
    "text": _read_texts,
    "python": _read_python,
}


def _rows(
    path: str,
    rows: Sequence[dict[str, Any]],
    columns: Columns,
    first: int,
    named: Mapping[str, Callable[[Any], Any]] = MappingProxyType({}),
) -> Iterator[Document | Malformed]:
    """The documents of rows; `first` is the number of the first row, `named` gives the names of numbered classes."""
    for number, row in enumerate(rows, start=first):
        for column, name in named.items():
            row[column] = name(row[column])
        yield _document(row, columns, Place(path, row=number))


def _document(row: dict[str, Any], columns: Columns, place: Place) -> Document | Malformed:
    texts = []
    for name in columns.texts():
        value = row.get(name)
        if not isinstance(value, str):
            return Malformed(place, f"no text in column {name!r}")
        try:
            value.encode()
        except UnicodeEncodeError:
            return Malformed(place, f"no Unicode text in column {name!r}")
        texts.append(value)
    return Document(
        texts[0], texts[1] if len(texts) > 1 else "", tuple(row.get(name) for name in columns.labels), place
    )


class NoClassError(ValueError):
    """A file has names for the numbers of its labels, and a label of another number."""


def _class_names_of_schema(schema: Any, columns: Columns, path: str) -> dict[str, Callable[[Any], Any]]:
    """`_class_names` of a parquet file: the library datasets, and so the hub, writes the names into its schema."""
    types = _pyarrow().types
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError):
        return {}
    found: dict[str, Callable[[Any], Any]] = {}
    for column in columns.labels:
        feature, kind = features.get(column), schema.field(column).type
        while types.is_list(kind) or types.is_large_list(kind):
            feature = feature[0] if isinstance(feature, list) else (feature or {}).get("feature")
            kind = kind.value_type
        # Another program may have put text into the column, and kept the names.
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and types.is_integer(kind):
            found[column] = partial(_name_at, feature["names"], f"{path}: the label {{}} of column {column!r}")
    return found


def _name_at(names: Sequence[str], told: str, value: Any) -> Any:
    """The name of a class, or of each in a list; None where there is no label (see `_name_of`)."""
    if isinstance(value, list):
        return [_name_at(names, told, one) for one in value]
    if value is None or value < 0:
        return None
    if value >= len(names):
        raise NoClassError(f"{told.format(value)} is none of the {len(names)} names that its schema has")
    return names[value]


def _class_names(features: Mapping[str, Any], columns: Columns) -> dict[str, Callable[[Any], Any]]:
    """For each column of labels that a set keeps as numbers of named classes: the function from numbers to names."""
    found: dict[str, Callable[[Any], Any]] = {}
    for column in columns.labels:
        feature = features.get(column)
        inner = getattr(feature, "feature", None)  # of a list
        if hasattr(feature, "int2str"):
            found[column] = partial(_name_of, feature)
        elif hasattr(inner, "int2str"):
            found[column] = partial(_names_of, inner)
    return found


def _name_of(feature: Any, value: Any) -> Any:
    """The name of a class; None where there is no label, which sets also write as -1."""
    return None if value is None or value < 0 else feature.int2str(value)


def _names_of(feature: Any, values: Any) -> Any:
    return None if values is None else [_name_of(feature, value) for value in values]


def _pyarrow(what: str = "parquet files") -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(_INSTALL.format(what=what, library="pyarrow")) from error
    return pyarrow


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(_INSTALL.format(what="Hugging Face data sets", library="datasets")) from error
    return datasets


def _name_stream(given: str) -> tuple[str, str | None, str]:
    """The name of a set on the hub, its configuration and its split."""
    name, _, split = given.removeprefix(STREAM).partition("@")
    name, _, configuration = name.partition(":")
    return name, configuration or None, split or "train"


def _load_stream(given: str, columns: Columns) -> Any:
    """The stream of a set on the hub, which is fetched while it is read."""
    name, configuration, split = _name_stream(given)
    load = _datasets().load_dataset
    try:
        return load(name, configuration, split=split, streaming=True)
    except Exception as error:  # the library raises many kinds, also for a missing network
        raise ValueError(f"{columns.spell(given)} cannot be opened: {error}") from error


def _version_of_stream(given: str, columns: Columns) -> str:
    """A text for a set and a split, another one when the set has other files; the hub names these with their commit."""
    name, configuration, _ = _name_stream(given)
    try:
        builder = _datasets().load_dataset_builder(name, configuration)
    except Exception as error:  # as in `_load_stream`
        raise ValueError(f"{columns.spell(given)} cannot be opened: {error}") from error
    splits = builder.config.data_files or {}
    files = [[str(split), str(file), *stamp(str(file))] for split, listed in splits.items() for file in listed]
    return hashlib.sha256(json.dumps([given, builder.hash, files]).encode()).hexdigest()


def _load_saved(path: str, columns: Columns) -> Any:
    datasets = _datasets()
    try:
        return datasets.load_from_disk(path)
    except Exception as error:  # the library and pyarrow raise many kinds
        if _has_no_file(Path(path)):
            raise ValueError(f"{columns.spell(path)} is empty") from error
        raise ValueError(f"{columns.spell(path)} cannot be read as a saved data set: {error}") from error
