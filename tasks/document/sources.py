"""The sources of labelled documents: files, what a program registers, and the files of installed libraries.

A source of one's own gives documents as text, or as tokens that stand for no text:

import numpy as np
from longseq.tasks.document.sources import Opened, Reader, Sample, Source, register
from longseq.tasks.text.documents import Place

def read(keys):
    for index in range(1000):
        digits = np.array([int(digit) for digit in str(index)])
        yield Sample(digits, ("odd" if index % 2 else "even",), Place("numbers", row=index))

def numbers(keys):
    return Opened({"train": lambda: Reader(lambda: read(keys), stamp=[1000])}, vocab_size=10)

register("numbers", Source(numbers, reads=("validation", "test")))  # data.source=numbers

Of this one, data.validation and data.test are shares of the training documents.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from longseq.plugins import is_foreign
from longseq.tasks.data.folders import class_name, is_unicode, refuse_inside, refuse_pipe
from longseq.tasks.data.labels import Labels, name_some, read_labels
from longseq.tasks.data.stamps import stamp
from longseq.tasks.data.tables import find_split_column
from longseq.tasks.text.corpora import cache_folder
from longseq.tasks.text.documents import Document, Place
from longseq.tasks.text.sources import STREAM, Columns, Malformed, find_parts, read_part
from longseq.tasks.training.options import spell

if TYPE_CHECKING:
    from longseq.tasks.document.config import DocumentDataKeys

_log = logging.getLogger(__name__)


class Sample(NamedTuple):
    """A document, which is text or `[T]` tokens, its labels, and where it stands."""

    document: str | npt.NDArray[np.integer[Any]]
    labels: Labels
    place: Place


@dataclass(frozen=True)
class Reader:
    """The documents of a split; `stamp` changes when they change, and consists of lists, text and numbers."""

    read: Callable[[], Iterator[Sample | Malformed]]
    stamp: Any


@dataclass(frozen=True)
class Opened:
    """The splits of a source: train, and validation and test where they are not a part of train.

    Each is a function that finds the documents, so that a split that nobody asks for need not exist. `vocab_size` is
    the number of tokens of documents that are tokens; None for text.
    """

    splits: Mapping[str, Callable[[], Reader]]
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        for name, split in self.splits.items():
            if not callable(split):
                kind = type(split).__name__
                raise ValueError(f"the split {name!r} of a source is a {kind}, no function: give lambda: Reader(...)")


@dataclass(frozen=True)
class Source:
    """A source: the function that opens it, and the keys of `data` that it reads, of those that some sources read.

    `reads` may name root, train, text_column, label_column, label_delimiter, tokenizer, separator, options; and
    validation and test, where these can be fractions of train. `prepare` is what the source does to the text of a file
    beforehand: `longseq predict` does it, too. `require` raises ValueError for files that are not there.
    """

    open: Callable[[DocumentDataKeys], Opened]
    reads: tuple[str, ...] = ()
    prepare: Callable[[str], str] | None = None
    require: Callable[[DocumentDataKeys], None] | None = None


_TEXT = ("tokenizer", "separator", "validation", "test")
_SOME = ("root", "train", "text_column", "label_column", "label_delimiter", "options", *_TEXT)

SOURCES: dict[str, Source] = {}


def register(name: str, source: Source) -> None:
    """Add a source. ValueError for a name that another source has."""
    if SOURCES.get(name, source) is not source:
        raise ValueError(f"the source {name!r} is there already: register yours under another name")
    SOURCES[name] = source


def preparation_of(name: str | None) -> Callable[[str], str] | None:
    """What the source that a model states does to a text beforehand; None for nothing, and where it states no source.

    ValueError, in one line, for an unknown source: texts that it would prepare must not be taken as they are.
    """
    if name is None:
        return None
    # They register sources; imported here, because they import this module.
    from longseq.tasks.document import arena, libraries  # noqa: F401

    if name not in SOURCES:
        raise ValueError(
            f"the model was trained on data.source={name}, which nothing registers here: add plugins=[MODULE], the "
            "plug-in that registers it, to the command, or import it in a program"
        )
    return SOURCES[name].prepare


def describe_preparation(source: str, prepare: Callable[[str], str]) -> str:
    """The full name of a function that prepares texts; without one that can be imported, a few words."""
    module, name = getattr(prepare, "__module__", None), getattr(prepare, "__qualname__", "")
    if module not in (None, "__main__") and getattr(sys.modules.get(module), name, None) is prepare:
        return f"{module}.{name}"
    return f"that of data.source={source}"


def find(keys: DocumentDataKeys) -> Source:
    """The source that `data.source` names. ValueError for an unknown one, and for keys that it does not read."""
    if keys.source not in SOURCES:
        raise ValueError(f"data.source={keys.source} is unknown: choose one of {', '.join(sorted(SOURCES))}")
    source = SOURCES[keys.source]
    for name in _SOME:
        value = getattr(keys, name)
        if value not in (None, {}) and name not in source.reads:
            remedy = f"set data.{name}=null"
            if name in ("validation", "test") and is_foreign(source.open):
                # Only when it is opened does a source of one's own tell its splits.
                remedy += (
                    f" if its Opened has a function for {name!r}; else register it with reads=({name!r},), and the key "
                    "is a share of its training documents"
                )
            raise ValueError(f"data.{name}={spell(value)} is not read by data.source={keys.source}: {remedy}")
    return source


def _open_files(keys: DocumentDataKeys) -> Opened:
    """Files and folders: `root` alone, or `train`, `validation` and `test` below it."""
    if keys.root is None and keys.train is None and not isinstance(keys.test, str):
        raise ValueError(_no_root(keys))
    splits: dict[str, Callable[[], Reader]] = {"train": partial(_find_train, keys)}
    for name in ("validation", "test"):
        if isinstance(given := getattr(keys, name), str):
            splits[name] = partial(_find_files, keys, name, given)
    return Opened(splits)


def _no_root(keys: DocumentDataKeys) -> str:
    return f"data={keys.name} reads a file or a folder: give data.root=PATH, the documents"


def _require_files(keys: DocumentDataKeys) -> None:
    """ValueError, in one line, for a split whose file or folder is not there."""
    for split in ("train", "validation", "test"):
        given = getattr(keys, split)
        if split == "train" or isinstance(given, str):
            _path_of(keys, split, given)


# The usual names of splits.
_USUAL = {"train": ("train", "training"), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}


def _find_train(keys: DocumentDataKeys) -> Reader:
    if keys.train is None and keys.root is not None and os.path.isdir(keys.root):
        # A data set of the Hugging Face Hub has its files in the folder `data`.
        for below in ("", "data"):
            _refuse_pooled(keys.root, below)
    return _find_files(keys, "train", keys.train)


def _refuse_pooled(root: str, below: str) -> None:
    """ValueError, in one line, for a folder of splits: together they would be the documents of training.

    A folder `train`, or a file `train.`, is enough. Other names may be those of classes, and are taken for splits where
    those of training and of another split are there.
    """
    # A folder `data` may be a class, with texts of any names.
    inside = sorted(path.name for path in Path(root, below).glob("*") if not below or path.suffix.lower() != ".txt")
    found: dict[str, list[str]] = {}
    for name in inside:
        if (split := _split_of(name, is_folder=Path(root, below, name).is_dir())) is not None:
            found.setdefault(split, []).append(os.path.join(below, name))
    plain = any(name == "train" or name.startswith("train.") for name in inside)
    if "train" in found and (plain or len(found) > 1):
        given = " ".join(f"data.{split}={found[split][0]}" for split in _USUAL if split in found)
        more = "" if all(len(names) == 1 for names in found.values()) else "; several files of a split need a folder"
        raise ValueError(f"data.root={root} holds {', '.join(inside[:5])}: give {given}{more}")


def _split_of(name: str, *, is_folder: bool) -> str | None:
    """The split that a folder is called by, or a file before its ending, or in the first or last word before it."""
    stem = name.lower() if is_folder else name.lower().partition(".")[0]
    parts = re.split("[-_ ]", stem)
    words = (stem,) if is_folder else (parts[0], parts[-1])
    return next((split for split, usual in _USUAL.items() if any(word in usual for word in words)), None)


def _path_of(keys: DocumentDataKeys, split: str, given: str | None) -> str:
    """The path of a split's documents, or the name of their stream. ValueError, in one line, where there are none."""
    path, named = keys.root or "", f"data.root={keys.root}"
    if given is not None:
        below = "" if os.path.isfile(path) else path  # a file has no others below it
        path = f"{path}@{given}" if path.startswith(STREAM) else os.path.join(below, given)
        named = f"data.{split}={given}" + (f", below data.root={below}," if below else "")
    if not path:
        raise ValueError(_no_root(keys))
    if path.startswith(STREAM):
        return path
    if not os.path.exists(path):
        raise ValueError(f"{named} does not exist")
    refuse_pipe(path, named)
    return os.path.realpath(path)


def _find_files(keys: DocumentDataKeys, split: str, given: str | None) -> Reader:
    path = _path_of(keys, split, given)
    if not path.startswith(STREAM):
        refuse_inside(cache_folder() if keys.cache is None else keys.cache, [path], "data.cache")
    label = keys.label_column or "label"
    labels = (label,) if isinstance(label, str) else tuple(label)
    named = ("data.text_column", "", "data.label_column", "data.root" if given is None else f"data.{split}")
    columns = Columns(keys.text_column or "text", labels=labels, keys=named)
    parts = find_parts([path], columns)
    paths = [file for part in parts for file in (part.files or [part.path])]
    if split == "train":
        _tell_empty(path, paths)
    for file in paths if split == "train" else []:
        if (mark := {".csv": ",", ".tsv": "\t"}.get(Path(file).suffix.lower())) is not None:
            used = [column for column in (columns.text, *columns.labels) if column is not None]
            if told := find_split_column(file, used, mark):
                _log.warning(
                    "%s: write a file for each split, and give data.train, data.validation and data.test", told
                )
    return Reader(
        lambda: (_labelled(one, keys, columns, path) for part in parts for one in read_part(part, columns)),
        stamp=[[path, *stamp(path)] for path in dict.fromkeys(paths)],
    )


def _tell_empty(path: str, files: Sequence[str]) -> None:
    """Warn, in one line, of folders that would be classes and hold no file."""
    if not os.path.isdir(path):
        return
    used = {os.path.relpath(file, path).split(os.sep)[0] for file in files}
    if not any(os.path.isdir(os.path.join(path, name)) for name in used):
        return
    empty = sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and entry.name not in used)
    if shown := [name for name in empty if not name.startswith(".")]:
        _log.warning("%s: no text in %s: no class is named so", path, name_some([f"{name}/" for name in shown]))


def _labelled(one: Document | Malformed, keys: DocumentDataKeys, columns: Columns, root: str) -> Sample | Malformed:
    """A document with its labels: those of its columns, or of a file the folder below `root` in which it is."""
    if isinstance(one, Malformed):
        return one
    assert one.place is not None
    try:
        if one.labels:
            named = keys.label_column if isinstance(keys.label_column, list | tuple) else columns.labels[0]
            labels = read_labels(one.labels, named, multi_label=keys.multi_label, delimiter=keys.label_delimiter)
        else:
            folders = Path(one.place.path).relative_to(root).parts
            if len(folders) < 2:
                return Malformed(one.place, "a text without a label: put each class's files into a folder of its name")
            labels = (class_name(folders[0]),)
            if not is_unicode(labels[0]):
                return Malformed(one.place, "its folder, which names the class, has a name that is no UTF-8: rename it")
    except ValueError as error:
        return Malformed(one.place, str(error))
    return Sample(one.text, labels, one.place)


register("files", Source(_open_files, reads=_SOME[:5] + _TEXT, require=_require_files))
