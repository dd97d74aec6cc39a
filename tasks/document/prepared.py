"""The documents of a split as tokens in the cache: prepared once, then mapped into memory.

A folder of the cache is one of `longseq.tasks.text.store`, with the labels and the hashes of the documents. Its only
split is called "documents". The manifest also has `label_sets`, the sets of labels that occur, and `label_places`, the
place of the first document of each. What could not be read is listed in left_out.txt.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_only

from longseq.tasks.data.labels import Labels
from longseq.tasks.document.sources import Reader, Sample
from longseq.tasks.text.corpora import cache_folder
from longseq.tasks.text.documents import Document, LineCounter, encode
from longseq.tasks.text.prepare import manifest_of, told_in_one_line
from longseq.tasks.text.round_trip import describe_loss
from longseq.tasks.text.sources import Malformed
from longseq.tasks.text.store import MANIFEST, TOKENIZER, VERSION, Corpus, SplitWriter, file_types, open_store
from longseq.tasks.text.tokenizer import FileTokenizer, Tokenizer, read_tokenizer, tokenizer_from_dict, train_tokenizer
from longseq.tasks.training.files import write_text

_log = logging.getLogger(__name__)

_SPLIT = "documents"
_LEFT_OUT = "left_out.txt"
_NAMED = 3  # of what could not be read, in messages
_BATCH = 256
_WHOLE = {"validation": 0.0, "test": 0.0}


@dataclass(frozen=True)
class Bare:
    """What a store has in place of a tokenizer where documents are tokens that stand for no text."""

    vocab_size: int


@dataclass(frozen=True)
class Labelled:
    """The documents of a split: their tokens, and their labels, which are `sets[corpus.labels]`.

    `places` has the place of the first document of each set, by its number as text.
    """

    corpus: Corpus
    sets: list[Labels]
    places: Mapping[str, str]
    folder: Path


def prepare_documents(
    name: str,
    reader: Reader,
    tokenizer: Tokenizer | Bare,
    *,
    reading: Mapping[str, Any],
    cache: str | None,
    check: bool,
    stop: bool,
    warn: bool = True,
    told: set[Path] | None = None,
) -> Labelled:
    """The documents of a reader as tokens, from the cache if it has them.

    `reading` are the keys that decide what the reader gives, beside its stamp. Lines and files that cannot be read, and
    empty documents, are left out; with `warn` a warning lists the first ones, and with `stop` they are a ValueError.
    `told` has the folders of the cache of which a warning has told already, and gets this one: splits may share files.
    One process prepares while others wait.
    """
    made_by = (
        {"kind": "bare", "vocab_size": tokenizer.vocab_size} if isinstance(tokenizer, Bare) else tokenizer.to_dict()
    )
    folder = _folder(name, cache, [VERSION, reader.stamp, dict(reading), made_by])
    with _alone(folder):
        if not (folder / MANIFEST).exists():
            _log.info("preparing %s in %s", name, folder)
            with told_in_one_line(folder):
                lost = _write(reader, tokenizer, folder)
            if lost is not None and warn and not told:  # of the first split; that of others says the same
                _warn(f"{name}: {lost}")
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    _tell(manifest, folder, name, stop=stop, warn=warn and (told is None or folder not in told))
    if warn and told is not None:
        told.add(folder)
    try:
        corpus = open_store(folder, check=check).splits[_SPLIT]
    except ValueError as error:
        raise ValueError(f"{error}; remove the folder {folder}, and the next run makes it again") from error
    return Labelled(corpus, [tuple(one) for one in manifest["label_sets"]], manifest["label_places"], folder)


def trained_tokenizer(prepared: Labelled, numbers: Any, size: int, cache: str | None) -> FileTokenizer:
    """A tokenizer of `size` tokens, trained on the documents `numbers` of a split of bytes, or from the cache."""
    folder = _folder("tokenizer", cache, [prepared.folder.name, hashlib.sha256(numbers.tobytes()).hexdigest(), size])
    with _alone(folder):
        path = folder / TOKENIZER
        if not path.exists():
            with told_in_one_line(folder):
                found = train_tokenizer(_texts(prepared.corpus, numbers), size)
                write_text(path, found.to_dict()["json"])
    found = read_tokenizer(str(path))  # type: ignore[assignment]
    assert isinstance(found, FileTokenizer)
    return found


def _texts(corpus: Corpus, numbers: Any) -> Iterator[str]:
    bytes_ = tokenizer_from_dict({"kind": "bytes"})
    for number in numbers.tolist():
        yield bytes_.decode(corpus.tokens[corpus.offsets[number] : corpus.offsets[number + 1]].tolist())


def _folder(name: str, cache: str | None, plan: list[Any]) -> Path:
    base = cache_folder() if cache is None else Path(cache)
    return base / f"{name}_{hashlib.sha256(json.dumps(plan).encode()).hexdigest()[:16]}"


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder of the cache, which is made. ValueError where nothing can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = (folder.parent / f"{folder.name}.lock").open("w")
    except OSError as error:
        raise ValueError(f"{folder.parent} cannot be written ({error.strerror}): give data.cache=FOLDER") from error
    with opened as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(reader: Reader, tokenizer: Tokenizer | Bare, folder: Path) -> str | None:
    """Write the files of a split, and last its manifest; returns what the tokenizer loses of the first documents."""
    writer = SplitWriter(folder, _SPLIT, file_types(tokenizer.vocab_size, labels=True))
    numbers: dict[Labels, int] = {}
    places: dict[str, str] = {}
    left_out: list[str] = []
    lost: str | None = None
    # Both look forward only: what is left out is read a batch ahead of the first document of a label.
    lines, first_lines = LineCounter(), LineCounter()
    for number, batch in enumerate(_batches(_readable(reader.read(), left_out, lines))):
        if number == 0 and not isinstance(tokenizer, Bare):
            lost = describe_loss((str(one.document) for one in batch), tokenizer)
        for one in batch:
            if one.labels not in numbers:
                numbers[one.labels] = len(numbers)
                places[str(numbers[one.labels])] = one.place.describe(first_lines)
        labels = np.array([numbers[one.labels] for one in batch], np.int64)
        tokens, lengths, byte_counts, hashes = _encode(batch, tokenizer)
        writer.add(tokens, lengths, byte_counts, labels=labels, hashes=hashes)
    (folder / _LEFT_OUT).write_text("".join(f"{line}\n" for line in left_out), encoding="utf-8")
    if isinstance(tokenizer, Bare):
        told = {
            "version": VERSION,
            "vocab_size": tokenizer.vocab_size,
            "separator": None,
            "tokenizer": {"kind": "bare"},
        }
    else:
        told = manifest_of(tokenizer, folder)
    manifest = {
        **told,
        "gzip_bits_per_byte": None,
        "splits": {_SPLIT: writer.close()},
        "label_sets": list(numbers),
        "label_places": places,
        "left_out": len(left_out),
    }
    write_text(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    return lost


def _encode(batch: list[Sample], tokenizer: Tokenizer | Bare) -> tuple[Any, Any, Any, Any]:
    """Tokens end to end, lengths, bytes and hashes of documents."""
    if isinstance(tokenizer, Bare):
        documents = [np.asarray(one.document) for one in batch]
        for one, found in zip(batch, documents, strict=True):
            if found.min() < 0 or found.max() >= tokenizer.vocab_size:
                raise ValueError(f"{one.place.describe()}: a token is not from 0 to {tokenizer.vocab_size - 1}")
        digests = [hashlib.blake2b(one.astype("<i8").tobytes(), digest_size=16).digest() for one in documents]
        lengths = np.array([len(one) for one in documents], np.int64)
        hashes = np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)
        return np.concatenate(documents), lengths, np.zeros_like(lengths), hashes
    encoded = encode((Document(str(one.document), place=one.place) for one in batch), tokenizer, _WHOLE)
    return encoded.tokens, encoded.lengths, encoded.byte_counts, encoded.hashes


def _readable(samples: Iterable[Sample | Malformed], left_out: list[str], lines: LineCounter) -> Iterator[Sample]:
    """The documents that can be read; the descriptions of the others are added to `left_out`."""
    for one in samples:
        if isinstance(one, Malformed):
            left_out.append(one.describe(lines))
        elif (not one.document.strip()) if isinstance(one.document, str) else not len(one.document):
            left_out.append(f"{one.place.describe(lines)}: an empty document")
        else:
            yield one


def _batches(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    batch: list[Sample] = []
    for one in samples:
        batch.append(one)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _tell(manifest: Mapping[str, Any], folder: Path, name: str, *, stop: bool, warn: bool) -> None:
    """With `warn`, warn of what could not be read; ValueError with `stop`, and where nothing could be read."""
    count, documents = manifest["left_out"], manifest["splits"][_SPLIT]["documents"]
    path = folder / _LEFT_OUT
    lines = path.read_text(encoding="utf-8").splitlines() if count else []
    named = "; ".join(lines[:_NAMED]) + (f"; all in {path}" if count > _NAMED else "")
    if not documents:
        raise ValueError(f"{name} holds no document" + (f", and {count} that cannot be read: {named}" if count else ""))
    if count and stop:
        raise ValueError(
            f"{count} of {count + documents} documents of {name} cannot be read (data.on_bad_line=stop): {named}"
        )
    if count and warn:
        _warn(f"{count} of {count + documents} documents of {name} cannot be read and are left out: {named}")


@rank_zero_only
def _warn(message: str) -> None:
    _log.warning(message)
