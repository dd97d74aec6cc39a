"""Documents become numbers: encoded, without duplicates, split by a hash of their content."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from longseq.tasks.text.store import SPLITS, Corpus, Integers, Tokens, token_type
from longseq.tasks.text.tokenizer import Tokenizer

# Documents that a tokenizer is given at a time, which bounds the memory.
_BATCH = 256


class Document(NamedTuple):
    """A text; with a `prompt`, what precedes it and is read but not trained on."""

    text: str
    prompt: str = ""


class Encoded(NamedTuple):
    """Documents of a part of the input: tokens as in a store, a hash of each document's content `[N, 2]` uint64."""

    tokens: Tokens
    lengths: Integers
    byte_counts: Integers
    prompts: Integers
    hashes: np.ndarray


def encode(documents: Iterable[Document], tokenizer: Tokenizer) -> Encoded:
    """Encode documents; `prompt` and `text` are encoded each by itself."""
    dtype, separator = token_type(tokenizer.vocab_size), [tokenizer.separator]
    parts: list[np.ndarray] = []
    lengths, byte_counts, prompts, hashes = [], [], [], []
    for batch in _batches(documents):
        encoded = tokenizer.encode_all([part for one in batch for part in (one.prompt, one.text)])
        for index, one in enumerate(batch):
            prompt, text = encoded[2 * index], encoded[2 * index + 1]
            parts += [np.array(separator, dtype), prompt.astype(dtype), text.astype(dtype)]
            lengths.append(1 + len(prompt) + len(text))
            byte_counts.append(len(one.text.encode()))
            prompts.append(len(prompt))
            hashes.append(hash_of(one))
    return Encoded(
        np.concatenate(parts) if parts else np.zeros(0, dtype),
        np.array(lengths, np.int64),
        np.array(byte_counts, np.int64),
        np.array(prompts, np.int64),
        np.frombuffer(b"".join(hashes), "<u8").reshape(-1, 2),
    )


def hash_of(document: Document) -> bytes:
    """16 bytes that tell the content of a document, the same on every machine."""
    prompt = document.prompt.encode()
    content = len(prompt).to_bytes(8, "little") + prompt + document.text.encode()
    return hashlib.blake2b(content, digest_size=16).digest()


def first_of_equal(hashes: np.ndarray) -> np.ndarray:
    """`[N]` bool, False for each document that an earlier one equals."""
    keep = np.zeros(len(hashes), bool)
    keep[np.unique(hashes, axis=0, return_index=True)[1]] = True
    return keep


def split_numbers(hashes: np.ndarray, fractions: Mapping[str, float]) -> np.ndarray:
    """`[N]`, the number of each document's split in SPLITS; `fractions` of validation and test are set apart.

    A document stays in its split when others come and go, and when a fraction grows.
    """
    # A hash is a place between 0 and 1: validation takes the places from 0 on, test those up to 1.
    place = hashes[:, 0] / 2.0**64
    numbers = np.zeros(len(hashes), np.int8)
    numbers[place < fractions["validation"]] = SPLITS.index("validation")
    numbers[place >= 1 - fractions["test"]] = SPLITS.index("test")
    return numbers


def corpus_of(encoded: Encoded, chosen: np.ndarray) -> Corpus:
    """The chosen documents, `[N]` bool, as a split in memory."""
    lengths = encoded.lengths[chosen]
    tokens = encoded.tokens[np.repeat(chosen, encoded.lengths)]
    prompts = encoded.prompts[chosen]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Corpus(tokens, offsets, encoded.byte_counts[chosen], prompts if encoded.prompts.any() else None)


def gzip_bits(texts: Iterable[str]) -> float | None:
    """The bits for a byte of texts that gzip -9 needs, which compresses each by itself; None without texts."""
    written = held = 0
    for text in texts:
        content = text.encode()
        written, held = written + len(gzip.compress(content, 9, mtime=0)), held + len(content)
    return 8 * written / held if held else None


def _batches(documents: Iterable[Document]) -> Iterator[Sequence[Document]]:
    batch: list[Document] = []
    for document in documents:
        batch.append(document)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
