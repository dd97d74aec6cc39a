"""Documents as tokens: encoded, without duplicates, split by a hash of their content."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from longseq.tasks.text.sources import Columns, Document, Malformed, Part, read_part
from longseq.tasks.text.store import SPLITS, Integers, Tokens, token_type
from longseq.tasks.text.tokenizer import Tokenizer, tokenizer_from_dict

T = TypeVar("T")

Fractions = Mapping[str, float]  # the shares of documents in validation and test
KEPT = 10_000  # malformed lines and files that a manifest lists
COUNTS = ("documents", "empty", "malformed")  # of a part


class Encoded(NamedTuple):
    """Documents of a part of the input; see the store for the other fields.

    hashes: `[N, 2]` uint64, of each document's content.
    """

    tokens: Tokens
    lengths: Integers
    byte_counts: Integers
    prompts: Integers
    hashes: np.ndarray


def encode(documents: Iterable[Document], tokenizer: Tokenizer) -> Encoded:
    """Encode documents; `prompt` and `text` are encoded separately. ValueError for one with the separator in it."""
    dtype = token_type(tokenizer.vocab_size)
    separator = np.array([tokenizer.separator], dtype)
    parts: list[np.ndarray] = []
    numbers: list[tuple[int, int, int]] = []
    hashes = [np.zeros((0, 2), np.uint64)]
    for batch in batched(documents):
        encoded = tokenizer.encode_all([part for one in batch for part in (one.prompt, one.text)])
        for one, prompt, text in zip(batch, encoded[::2], encoded[1::2], strict=True):
            if tokenizer.separator in prompt or tokenizer.separator in text:
                where = "a document" if one.place is None else one.place.describe()
                raise ValueError(f"{where} holds the separator, token {tokenizer.separator}: give another separator")
            parts += [separator, prompt.astype(dtype), text.astype(dtype)]
            numbers.append((1 + len(prompt) + len(text), len(one.text.encode()), len(prompt)))
        hashes.append(hashes_of(batch))
    lengths, byte_counts, prompts = np.array(numbers, np.int64).reshape(-1, 3).T
    tokens = np.concatenate(parts) if parts else np.zeros(0, dtype)
    return Encoded(tokens, lengths, byte_counts, prompts, np.concatenate(hashes))


def hashes_of(documents: Sequence[Document]) -> np.ndarray:
    """`[N, 2]` uint64, the hashes of the contents of documents, the same on every machine."""
    digests = []
    for one in documents:
        prompt = one.prompt.encode()
        content = len(prompt).to_bytes(8, "little") + prompt + one.text.encode()
        digests.append(hashlib.blake2b(content, digest_size=16).digest())
    return np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)


def first_of_equal(hashes: np.ndarray) -> np.ndarray:
    """`[N]` bool, False for each document that equals an earlier one."""
    keep = np.zeros(len(hashes), bool)
    keep[np.unique(hashes, axis=0, return_index=True)[1]] = True
    return keep


def split_numbers(hashes: np.ndarray, fractions: Fractions) -> np.ndarray:
    """`[N]`, the number of each document's split in SPLITS; `fractions` are the shares of validation and test.

    Adding or removing other documents does not move a document to another split. Raising a fraction only moves
    documents out of the training split.
    """
    # A hash is a number between 0 and 1: the lowest numbers are validation, the highest numbers are test.
    place = hashes[:, 0] / 2.0**64
    numbers = np.zeros(len(hashes), np.int8)
    numbers[place < fractions["validation"]] = SPLITS.index("validation")
    numbers[place >= 1 - fractions["test"]] = SPLITS.index("test")
    return numbers


def batched(items: Iterable[T]) -> Iterator[list[T]]:
    """Lists of 256 items, and one of the rest."""
    rest = iter(items)
    while batch := list(islice(rest, 256)):
        yield batch


def encode_part(index: int, part: Part, partial: Path, columns: Columns, tokenizer: Mapping[str, Any]) -> None:
    """Write the tokens of a part, its counts and its malformed lines to a file in the folder `partial`."""
    counts = dict.fromkeys(COUNTS, 0)
    malformed: list[str] = []

    def documents() -> Iterator[Document]:
        for one in read_part(part, columns):
            if isinstance(one, Malformed):
                counts["malformed"] += 1
                if len(malformed) < KEPT:
                    malformed.append(one.describe())
            elif one.is_empty:
                counts["empty"] += 1
            else:
                counts["documents"] += 1
                yield one

    encoded = encode(documents(), tokenizer_from_dict(tokenizer))
    path = encoded_path(partial, index)
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        np.savez(file, **encoded._asdict(), counts=list(counts.values()), malformed=np.array(malformed, dtype=str))
    os.replace(unfinished, path)


def encode_parts(waiting: Mapping[int, Part], processes: int, *options: Any) -> Iterator[int]:
    """Encode the parts `waiting`, by number; yields each number when its part is done.

    `options` are the other arguments of `encode_part`.
    """
    if processes <= 1:
        for index, part in waiting.items():
            encode_part(index, part, *options)
            yield index
        return
    context = multiprocessing.get_context("spawn")  # forks would share this process's threads
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_use_one_thread) as pool:
        running = {pool.submit(encode_part, index, part, *options): index for index, part in waiting.items()}
        try:
            for done in as_completed(running):
                done.result()
                yield running[done]
        finally:
            pool.shutdown(cancel_futures=True)


def _use_one_thread() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def encoded_path(partial: Path, index: int) -> Path:
    """The file of a part: the fields of `Encoded`, `counts` (the numbers of `COUNTS`) and `malformed`."""
    return partial / f"{index:06}.npz"
