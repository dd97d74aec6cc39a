"""The documents of a split as tokens in the cache, prepared once and mapped into memory, and their division in splits.

A folder of the cache is one of `longseq.tasks.text.store`, with the labels and the hashes of the documents. Its only
split is called "documents". The manifest also has `label_sets`, the sets of labels that occur, and `left_out`, the
number of documents that cannot be read, which left_out.txt lists.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from longseq.tasks.data.labels import Labels
from longseq.tasks.document.sources import Reader, Sample
from longseq.tasks.text.corpora import in_cache
from longseq.tasks.text.documents import Document, batched, encode
from longseq.tasks.text.prepare import manifest_of
from longseq.tasks.text.sources import Malformed
from longseq.tasks.text.store import (
    MANIFEST,
    SPLITS,
    TOKENIZER,
    VERSION,
    Corpus,
    Integers,
    SplitWriter,
    file_types,
    open_store,
)
from longseq.tasks.text.tokenizer import ByteTokenizer, Tokenizer, read_tokenizer, train_tokenizer
from longseq.tasks.training.system import write_text

Hashes = npt.NDArray[np.uint64]

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


def divide(
    labels: Integers, sets: Sequence[Labels], hashes: Hashes, fractions: Mapping[str, float], *, multi_label: bool
) -> dict[str, Integers]:
    """The numbers of the documents of each split of SPLITS, stratified by label.

    Of the documents of a label the share `fractions["validation"]` goes to validation, `fractions["test"]` to test, and
    at least one to each where there are enough. Hashes of the contents select them, so that a split depends on neither
    the order of a file nor a seed, and equal documents go to the same split. A document of several labels counts as one
    of its rarest label.

    ValueError if a class has one document only: a split needs one to train on and one to measure.
    """
    strata = _rarest(labels, sets)
    same = np.unique(hashes, axis=0, return_index=True, return_inverse=True)
    first, group = same[1], same[2].reshape(-1)  # the first of equal documents, and the number of each one's group
    split = np.zeros(len(first), np.int8)
    for stratum in np.unique(strata[first]).tolist():
        members = np.flatnonzero(strata[first] == stratum)  # in the order of the hashes, which `unique` sorts
        if len(members) == 1 and not multi_label and fractions:
            raise ValueError(f"the class {sets[labels[first[members[0]]]][0]!r} has one document, too few for a split")
        room, start = len(members) - 1, 0
        for name in ("test", "validation"):
            if name in fractions and room:
                count = min(room, max(1, round(fractions[name] * len(members))))
                split[members[start : start + count]] = SPLITS.index(name)
                start, room = start + count, room - count
    return {name: np.flatnonzero(split[group] == index) for index, name in enumerate(SPLITS)}


def _rarest(labels: Integers, sets: Sequence[Labels]) -> Integers:
    """`[N]`, the number of the rarest label of each document; that of documents without one is -1."""
    counts: Counter[str] = Counter()
    for number, count in zip(*np.unique(labels, return_counts=True), strict=True):
        counts.update(dict.fromkeys(sets[number], int(count)))
    order = {name: index for index, (name, _) in enumerate(counts.most_common())}
    return np.array([max((order[name] for name in one), default=-1) for one in sets], np.int64)[labels]


def find_repeats(hashes: Mapping[str, Hashes]) -> dict[str, Integers]:
    """The numbers of the documents of training that validation or test have too, and of validation that test has."""
    keys = {split: _joined(found) for split, found in hashes.items()}
    repeats = {}
    for number, split in enumerate(SPLITS):
        held = [keys[name] for name in SPLITS[number + 1 :] if name in keys]
        if split in keys and held:
            repeats[split] = np.flatnonzero(np.isin(keys[split], np.concatenate(held)))
    return {split: numbers for split, numbers in repeats.items() if len(numbers)}


def _joined(hashes: Hashes) -> npt.NDArray[np.void]:
    """`[N]`, both numbers of a hash as one value."""
    return np.ascontiguousarray(hashes).view([("a", "<u8"), ("b", "<u8")]).reshape(-1)
