"""Small sets of labelled documents: the words of a document tell its class."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from longseq.tasks.document.config import DocumentDataKeys
from longseq.tasks.document.data import DocumentData

WORDS = {"fish": "gill fin scale", "bird": "wing beak feather", "tree": "leaf root bark"}


def make_rows(count: int = 60, seed: int = 0) -> list[dict[str, Any]]:
    """`count` rows with text and label, each class as often, of 20 to 400 characters."""
    random = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        label = list(WORDS)[index % len(WORDS)]
        words = [*WORDS[label].split(), "the", "of", f"n{index}"]
        rows.append({"text": " ".join(random.choice(words, random.integers(6, 70))) + f" {index}", "label": label})
    return rows


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any] | str]) -> Path:
    """Rows as lines of JSON; a row that is text is a line as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def open_data(
    folder: Path, *, batch_size: int = 2048, seed: int = 0, init: str | None = None, **keys: Any
) -> DocumentData:
    """The data module of a folder whose cache is inside it, set up; validation and test are a fifth each."""
    values = {"name": "documents", "source": "files", "validation": 0.2, "test": 0.2, "cache": str(folder / "cache")}
    data = DocumentData(DocumentDataKeys(**{**values, **keys}), batch_size=batch_size, seed=seed, init=init)
    data.setup()
    return data
