"""Encoding of the parts of the input into a file each, in this process or in several."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

from longseq.tasks.text.documents import Document, Fractions, encode
from longseq.tasks.text.sources import Columns, Malformed, Part, read_part
from longseq.tasks.text.tokenizer import tokenizer_from_dict

# Lines and files that cannot be read, of a part and of all, whose places a manifest holds: it is read by each run.
KEPT = 10_000

# What is counted in a part.
COUNTS = ("documents", "empty", "malformed")


def encode_part(
    index: int, part: Part, columns: Columns, tokenizer: Mapping[str, Any], fractions: Fractions, partial: Path
) -> None:
    """Write the tokens of a part, with its counts and what cannot be read in it."""
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

    encoded = encode(documents(), tokenizer_from_dict(tokenizer), fractions)
    path = encoded_path(partial, index)
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        np.savez(file, **encoded._asdict(), counts=list(counts.values()), malformed=np.array(malformed, dtype=str))
    os.replace(unfinished, path)


def encode_side_by_side(
    waiting: Sequence[int],
    parts: Sequence[Part],
    columns: Columns,
    tokenizer: Mapping[str, Any],
    fractions: Fractions,
    partial: Path,
    processes: int,
) -> Iterator[int]:
    """Encode the parts `waiting` in several processes; yields the number of each part that is done."""
    # New processes, not forks, which would share this process's threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_use_one_thread) as pool:
        running = {
            pool.submit(encode_part, index, parts[index], columns, tokenizer, fractions, partial): index
            for index in waiting
        }
        try:
            for done in as_completed(running):
                done.result()
                yield running[done]
        finally:
            pool.shutdown(cancel_futures=True)


def _use_one_thread() -> None:
    """There are as many processes as cores."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def encoded_path(partial: Path, index: int) -> Path:
    """The arrays of a part: the fields of `Encoded`, the numbers of `COUNTS`, and what is malformed."""
    return partial / f"{index:06}.npz"


def read_array(partial: Path, index: int, name: str) -> np.ndarray:
    """One of the arrays of a part."""
    with np.load(encoded_path(partial, index)) as arrays:
        return arrays[name]
