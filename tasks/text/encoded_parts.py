"""Parts of the input that one process encodes into a file each; imported by all of them, so it imports little."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from longseq.tasks.text.documents import Document, Fractions, encode
from longseq.tasks.text.sources import Columns, Malformed, Part, read_part
from longseq.tasks.text.tokenizer import tokenizer_from_dict

NAMED = 3  # lines of a part that could not be read and are shown


def encode_part(
    index: int, part: Part, columns: Columns, tokenizer: Mapping[str, Any], fractions: Fractions, partial: Path
) -> None:
    """Write the tokens of a part, and then its counts: a part with counts is whole."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are as many as the cores
    counts: Counter[str] = Counter(documents=0, empty=0, malformed=0)
    malformed: list[str] = []

    def documents() -> Iterator[Document]:
        for one in read_part(part, columns):
            if isinstance(one, Malformed):
                counts["malformed"] += 1
                if len(malformed) < NAMED:
                    malformed.append(one.describe())
            elif not one.text:
                counts["empty"] += 1
            else:
                counts["documents"] += 1
                yield one

    encoded = encode(documents(), tokenizer_from_dict(tokenizer), fractions)
    with encoded_path(partial, index).open("wb") as file:
        np.savez(file, **encoded._asdict())
    told = told_path(partial, index)
    unfinished = told.with_suffix(".partial")
    unfinished.write_text(json.dumps({"counts": counts, "malformed": malformed}))
    os.replace(unfinished, told)


def encoded_path(partial: Path, index: int) -> Path:
    """The arrays of a part: the fields of `Encoded`."""
    return partial / f"{index:06}.npz"


def told_path(partial: Path, index: int) -> Path:
    """The counts of a part."""
    return partial / f"{index:06}.json"


def read_array(partial: Path, index: int, name: str) -> np.ndarray:
    """One of the arrays of a part."""
    with np.load(encoded_path(partial, index)) as arrays:
        return arrays[name]
