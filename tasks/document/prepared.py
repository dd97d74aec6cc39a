"""The documents of a split as tokens in the cache: prepared once, then mapped into memory.

A folder of the cache is one of `longseq.tasks.text.store`, with the labels and the hashes of the documents. Its only
split is called "documents". The manifest also has `label_sets`, the sets of labels that occur, and `left_out`, the
number of documents that cannot be read, which left_out.txt lists.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from longseq.tasks.data.labels import Labels
from longseq.tasks.document.sources import Reader, Sample
from longseq.tasks.text.corpora import in_cache
from longseq.tasks.text.documents import Document, batched, encode
from longseq.tasks.text.prepare import manifest_of
from longseq.tasks.text.sources import Malformed
from longseq.tasks.text.store import MANIFEST, TOKENIZER, VERSION, Corpus, SplitWriter, file_types, open_store
from longseq.tasks.text.tokenizer import ByteTokenizer, Tokenizer, read_tokenizer, train_tokenizer
from longseq.tasks.training.files import write_text

LEFT_OUT = "left_out.txt"

_SPLIT = "documents"
_WHOLE = {"validation": 0.0, "test": 0.0}


@dataclass(frozen=True)
class Bare:
    """What a store has in place of a tokenizer where documents are tokens that stand for no text."""

    vocab_size: int


@dataclass(frozen=True)
class Labelled:
    """The documents of a split: their tokens, and their labels, which are `sets[corpus.labels]`."""

    corpus: Corpus
    sets: list[Labels]
    left_out: int
    folder: Path


def prepare_documents(
    name: str,
    reader: Reader,
    tokenizer: Tokenizer | Bare,
    *,
    reading: Mapping[str, Any],
    cache: str | None,
    check: bool,
) -> Labelled:
    """The documents of a reader as tokens, from the cache if it has them.

    `reading` are the keys that decide what the reader gives, beside its stamp. ValueError without any document.
    """
    made_by = (
        {"kind": "bare", "vocab_size": tokenizer.vocab_size} if isinstance(tokenizer, Bare) else tokenizer.to_dict()
    )
    plan = [VERSION, reader.stamp, dict(reading), made_by]
    folder = in_cache(name, plan, cache, MANIFEST, lambda folder: _write(reader, tokenizer, folder))
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    if not manifest["splits"][_SPLIT]["documents"]:
        lines = (folder / LEFT_OUT).read_text(encoding="utf-8").splitlines()
        raise ValueError(f"{name} holds no document" + (f"; {lines[0]}" if lines else ""))
    corpus = open_store(folder, check=check).splits[_SPLIT]
    return Labelled(corpus, [tuple(one) for one in manifest["label_sets"]], manifest["left_out"], folder)


def trained_tokenizer(prepared: Labelled, numbers: Any, size: int, cache: str | None) -> Tokenizer:
    """A tokenizer of `size` tokens, trained on the documents `numbers` of a split of bytes, or from the cache."""
    corpus, decode = prepared.corpus, ByteTokenizer().decode
    texts = (
        decode(corpus.tokens[corpus.offsets[number] : corpus.offsets[number + 1]].tolist())
        for number in numbers.tolist()
    )
    plan = [prepared.folder.name, hashlib.sha256(numbers.tobytes()).hexdigest(), size]

    def write(folder: Path) -> None:
        write_text(folder / TOKENIZER, train_tokenizer(texts, size).to_dict()["json"])

    return read_tokenizer(str(in_cache("tokenizer", plan, cache, TOKENIZER, write)))


def _write(reader: Reader, tokenizer: Tokenizer | Bare, folder: Path) -> None:
    """Write the files of a split, and last its manifest."""
    writer = SplitWriter(folder, _SPLIT, file_types(tokenizer.vocab_size, labels=True))
    numbers: dict[Labels, int] = {}
    left_out: list[str] = []
    for batch in batched(_readable(reader.read(), left_out)):
        labels = np.array([numbers.setdefault(one.labels, len(numbers)) for one in batch], np.int64)
        tokens, lengths, byte_counts, hashes = _encode(batch, tokenizer)
        writer.add(tokens, lengths, byte_counts, labels=labels, hashes=hashes)
    (folder / LEFT_OUT).write_text("".join(f"{line}\n" for line in left_out), encoding="utf-8")
    if isinstance(tokenizer, Bare):
        kind = {"kind": "bare"}
        entries = {"version": VERSION, "vocab_size": tokenizer.vocab_size, "separator": None, "tokenizer": kind}
    else:
        entries = manifest_of(tokenizer, folder)
    manifest = {
        **entries,
        "gzip_bits_per_byte": None,
        "splits": {_SPLIT: writer.close()},
        "label_sets": list(numbers),
        "left_out": len(left_out),
    }
    write_text(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def _encode(batch: list[Sample], tokenizer: Tokenizer | Bare) -> tuple[Any, Any, Any, Any]:
    """Tokens end to end, lengths, bytes and hashes of documents."""
    if isinstance(tokenizer, Bare):
        documents = [np.asarray(one.document) for one in batch]
        digests = [hashlib.blake2b(one.astype("<i8").tobytes(), digest_size=16).digest() for one in documents]
        lengths = np.array([len(one) for one in documents], np.int64)
        hashes = np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)
        return np.concatenate(documents), lengths, np.zeros_like(lengths), hashes
    encoded = encode((Document(str(one.document), place=one.place) for one in batch), tokenizer, _WHOLE)
    return encoded.tokens, encoded.lengths, encoded.byte_counts, encoded.hashes


def _readable(samples: Iterable[Sample | Malformed], left_out: list[str]) -> Iterator[Sample]:
    """The documents that can be read; the descriptions of the others are added to `left_out`."""
    for one in samples:
        if isinstance(one, Malformed):
            left_out.append(one.describe())
        elif not len(one.document.strip() if isinstance(one.document, str) else one.document):
            left_out.append(f"{one.place.describe()}: an empty document")
        else:
            yield one
