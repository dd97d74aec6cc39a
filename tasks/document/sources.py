"""The sources of labelled documents: files, what a program registers, and the files of installed libraries.

A source of one's own gives documents as text, or as tokens that stand for no text:

import numpy as np
from longseq.tasks.document.sources import Opened, Reader, Sample, Source, register
from longseq.tasks.text.sources import Place

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

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from longseq.tasks.data.labels import Labels, read_labels
from longseq.tasks.text.sources import STREAM, Columns, Document, Malformed, Place, find_parts, read_part

if TYPE_CHECKING:
    from longseq.tasks.document.config import DocumentDataKeys


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


@dataclass(frozen=True)
class Source:
    """A source: the function that opens it, and the keys of `data` that it reads, of those that some sources read.

    `reads` may name root, train, text_column, label_column, label_delimiter, tokenizer, separator, options; and
    validation and test, where these can be fractions of train. `prepare` is what the source does to the text of a file
    beforehand: `longseq predict` does it, too.
    """

    open: Callable[[DocumentDataKeys], Opened]
    reads: tuple[str, ...] = ()
    prepare: Callable[[str], str] | None = None


_TEXT = ("tokenizer", "separator", "validation", "test")
_SOME = ("root", "train", "text_column", "label_column", "label_delimiter", "options", *_TEXT)

SOURCES: dict[str, Source] = {}


def register(name: str, source: Source) -> None:
    """Add a source. ValueError for a name that another source has."""
    if SOURCES.get(name, source) is not source:
        raise ValueError(f"the source {name!r} is there already")
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
        raise ValueError(f"the model was trained on data.source={name}, which nothing registers here")
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
        if getattr(keys, name) not in (None, {}) and name not in source.reads:
            raise ValueError(f"data.{name} is not read by data.source={keys.source}")
    return source


def _open_files(keys: DocumentDataKeys) -> Opened:
    """Files and folders: `root` alone, or `train`, `validation` and `test` below it."""
    splits = {"train": partial(_find_files, keys, keys.train)}
    for name in ("validation", "test"):
        if isinstance(given := getattr(keys, name), str):
            splits[name] = partial(_find_files, keys, given)
    return Opened(splits)


def _find_files(keys: DocumentDataKeys, given: str | None) -> Reader:
    path = keys.root or ""
    if given is not None and path.startswith(STREAM) and not os.path.isabs(given):
        path = f"{path}@{given}"
    elif given is not None:
        path = os.path.join("" if os.path.isfile(path) else path, given)  # a file has no others below it
    if not path:
        raise ValueError("data.root=PATH or data.train=PATH names the documents")
    if not path.startswith(STREAM):
        path = os.path.realpath(path)
    if given is None and os.path.isdir(path) and any(name.partition(".")[0] == "train" for name in os.listdir(path)):
        raise ValueError(f"{path} holds several splits: name them by data.train, data.validation and data.test")
    label = keys.label_column or "label"
    columns = Columns(keys.text_column or "text", labels=(label,) if isinstance(label, str) else tuple(label))
    parts = find_parts([path], columns)
    return Reader(
        lambda: (_labelled(one, keys, columns, path) for part in parts for one in read_part(part, columns)),
        stamp=[path, *([part.version, part.stamps()] for part in parts)],
    )


def _labelled(one: Document | Malformed, keys: DocumentDataKeys, columns: Columns, root: str) -> Sample | Malformed:
    """A document with its labels: those of its columns, or of a file the folder below `root` in which it is."""
    if isinstance(one, Malformed):
        return one
    assert one.place is not None
    if not one.labels:
        folders = Path(one.place.path).relative_to(root).parts
        return Sample(one.text, folders[:1], one.place) if len(folders) > 1 else Malformed(one.place, "no label")
    named = columns.labels[0] if keys.label_column is None else keys.label_column
    named = named if isinstance(named, str) else list(named)
    try:
        labels = read_labels(one.labels, named, multi_label=keys.multi_label, delimiter=keys.label_delimiter)
    except ValueError as error:
        return Malformed(one.place, str(error))
    return Sample(one.text, labels, one.place)


register("files", Source(_open_files, reads=_SOME[:5] + _TEXT))
