"""Documents as tokens: encoded, without duplicates, split by a hash of their content."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np

from longseq.tasks.text.store import SPLITS, Corpus, Integers, Tokens, TokenStore, token_type
from longseq.tasks.text.tokenizer import Tokenizer

T = TypeVar("T")

# The shares of the documents in the splits "validation" and "test".
Fractions = Mapping[str, float]


class Place(NamedTuple):
    """Where an input stands: a line of a file (or its first byte), a `row` of a table, or a whole file."""

    path: str
    line: int | None = None
    row: int | None = None
    byte: int | None = None

    def describe(self) -> str:
        """The place in words."""
        found = [
            f", {name} {getattr(self, name)}" for name in ("line", "row", "byte") if getattr(self, name) is not None
        ]
        # A name of bytes that are not UTF-8 has lone surrogates, which not every terminal takes.
        path = self.path.encode(errors="surrogateescape").decode(errors="backslashreplace")
        return path + "".join(found)


class Document(NamedTuple):
    """A text; `prompt` is the text before it, which is read but not trained on.

    `labels` are the values of the columns that `Columns.labels` names, as the file has them.
    """

    text: str
    prompt: str = ""
    labels: tuple[Any, ...] = ()
    place: Place | None = None

    @property
    def is_empty(self) -> bool:
        """True without any text: blanks and ends of lines are none."""
        return not self.text.strip()


class Encoded(NamedTuple):
    """Documents of a part of the input; all fields but `hashes` and `gzipped` are those of a store.

    hashes: `[N, 2]` uint64, of each document's content. gzipped: `[N]`, the bytes of the text after gzip -9; 0 of
    documents that are not in the test split.
    """

    tokens: Tokens
    lengths: Integers
    byte_counts: Integers
    prompts: Integers
    hashes: np.ndarray
    gzipped: Integers


def encode(documents: Iterable[Document], tokenizer: Tokenizer, fractions: Fractions) -> Encoded:
    """Encode documents; `prompt` and `text` are encoded separately. ValueError for one that holds the separator."""
    dtype, separator = token_type(tokenizer.vocab_size), [tokenizer.separator]
    parts: list[np.ndarray] = []
    numbers: list[tuple[int, int, int]] = []
    hashes, gzipped = [np.zeros((0, 2), np.uint64)], []
    for batch in batched(documents):
        encoded = tokenizer.encode_all([part for one in batch for part in (one.prompt, one.text)])
        found = hashes_of(batch)
        measured = split_numbers(found, fractions) == SPLITS.index("test")
        for index, one in enumerate(batch):
            prompt, text = encoded[2 * index], encoded[2 * index + 1]
            if tokenizer.separator in prompt or tokenizer.separator in text:
                where = "a document" if one.place is None else one.place.describe()
                raise ValueError(f"{where} holds the separator, token {tokenizer.separator}: give another separator")
            parts += [np.array(separator, dtype), prompt.astype(dtype), text.astype(dtype)]
            content = one.text.encode()
            numbers.append((1 + len(prompt) + len(text), len(content), len(prompt)))
            gzipped.append(len(gzip.compress(content, 9, mtime=0)) if measured[index] else 0)
        hashes.append(found)
    lengths, byte_counts, prompts = np.array(numbers, np.int64).reshape(-1, 3).T
    tokens = np.concatenate(parts) if parts else np.zeros(0, dtype)
    return Encoded(tokens, lengths, byte_counts, prompts, np.concatenate(hashes), np.array(gzipped, np.int64))


def hashes_of(documents: Sequence[Document]) -> np.ndarray:
    """`[N, 2]` uint64, the hashes of the contents of documents, the same on every machine."""
    return np.frombuffer(b"".join(map(_hash, documents)), "<u8").reshape(-1, 2)


def _hash(document: Document) -> bytes:
    prompt = document.prompt.encode()
    content = len(prompt).to_bytes(8, "little") + prompt + document.text.encode()
    return hashlib.blake2b(content, digest_size=16).digest()


def first_of_equal(hashes: np.ndarray) -> np.ndarray:
    """`[N]` bool, False for each document that equals an earlier one."""
    keep = np.zeros(len(hashes), bool)
    keep[np.unique(hashes, axis=0, return_index=True)[1]] = True
    return keep


def split_numbers(hashes: np.ndarray, fractions: Fractions) -> np.ndarray:
    """`[N]`, the number of each document's split in SPLITS; `fractions` are the shares of validation and test.

    Adding or removing other documents does not move a document to another split. Raising a fraction moves documents out
    of the training split alone.
    """
    # A hash is a number between 0 and 1: the lowest numbers are validation, the highest numbers are test.
    place = hashes[:, 0] / 2.0**64
    numbers = np.zeros(len(hashes), np.int8)
    numbers[place < fractions["validation"]] = SPLITS.index("validation")
    numbers[place >= 1 - fractions["test"]] = SPLITS.index("test")
    return numbers


def corpus_of(encoded: Encoded, chosen: np.ndarray) -> Corpus:
    """The chosen documents, those where `chosen` `[N]` bool is True, as a split in memory."""
    lengths = encoded.lengths[chosen]
    tokens = encoded.tokens[np.repeat(chosen, encoded.lengths)]
    prompts = encoded.prompts[chosen]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Corpus(tokens, offsets, encoded.byte_counts[chosen], prompts if encoded.prompts.any() else None)


def gzip_bits(gzipped: Integers, byte_counts: Integers) -> float | None:
    """The bits per byte of text after gzip -9 of each document by itself; None without documents."""
    held = int(byte_counts[gzipped > 0].sum())
    return 8 * int(gzipped.sum()) / held if held else None


def store_of(name: str, encoded: Encoded, tokenizer: Tokenizer, fractions: Fractions) -> TokenStore:
    """Encoded documents as a store in memory, without duplicates."""
    kept = first_of_equal(encoded.hashes)
    numbers = split_numbers(encoded.hashes, fractions)
    return TokenStore(
        name=name,
        tokenizer=tokenizer.to_dict(),
        vocab_size=tokenizer.vocab_size,
        separator=tokenizer.separator,
        splits={split: corpus_of(encoded, kept & (numbers == index)) for index, split in enumerate(SPLITS)},
        gzip_bits_per_byte=gzip_bits(encoded.gzipped[kept], encoded.byte_counts[kept]),
        fractions=dict(fractions),
    )


def batched(items: Iterable[T], size: int = 256) -> Iterator[list[T]]:
    """Lists of `size` items, and one of the rest."""
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch
