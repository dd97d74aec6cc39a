"""The log-probability of each document of a text: `longseq evaluate checkpoint=FILE input=TEXT`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from longseq.backbones.tokens import TokenBackbone
from longseq.files import replacing
from longseq.tasks.lm.likelihood import document_rows, score_rows
from longseq.tasks.lm.metrics import perplexity_of
from longseq.tasks.report import progress_bar
from longseq.tasks.text.documents import Document
from longseq.tasks.text.sources import Columns, Malformed, Part, read_part
from longseq.tasks.text.tokenizer import Tokenizer

# Documents whose text is in memory; those of similar lengths among them are read together.
_BLOCK = 1024


@dataclass
class Totals:
    """The sums over the documents of a text, and what could not be read."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    log_probability: float = 0.0
    malformed: int = 0
    empty: int = 0

    def metrics(self) -> dict[str, float]:
        """The loss of a token in nats, its exponential, and the bits of a byte, over all documents."""
        loss = -self.log_probability / self.tokens
        bits = _bits(self.log_probability, self.bytes)
        return {"loss": loss, "perplexity": perplexity_of(loss), "bits_per_byte": bits}


def score_documents(
    model: TokenBackbone,
    tokenizer: Tokenizer,
    parts: Sequence[Part],
    columns: Columns,
    output: Path,
    *,
    batch_size: int,
    context: AbstractContextManager[Any],
) -> Totals:
    """Write a line of JSON for each document of `parts`, in their order, and return the sums.

    A document is read after the token with which texts begin. Its log-probability is that of its text and of the
    separator that ends it, as in training; a prompt (`columns.prompt`) is read and not scored. A line holds `document`
    (its number, from 0), `log_probability` (in nats), `tokens`, `bytes`, `bits_per_byte` and `perplexity`; or
    `document` and `error`, where a document is malformed or empty. `context` is entered while the model computes.
    """
    totals = Totals()
    with (
        replacing(output) as partial,
        partial.open("w", encoding="utf-8") as file,
        progress_bar("evaluating", len(parts)) as advance,
        context,
    ):
        documents = _read(parts, columns, advance)
        while block := list(islice(documents, _BLOCK)):
            for row in _score_block(model, tokenizer, block, batch_size, totals):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return totals


def _read(parts: Sequence[Part], columns: Columns, advance: Any) -> Iterator[Document | Malformed]:
    for part in parts:
        yield from read_part(part, columns)
        advance(1)


def _score_block(
    model: TokenBackbone,
    tokenizer: Tokenizer,
    block: Sequence[Document | Malformed],
    batch_size: int,
    totals: Totals,
) -> Iterator[dict[str, Any]]:
    documents = [one for one in block if isinstance(one, Document) and not one.is_empty]
    encoded = tokenizer.encode_all([text for one in documents for text in (one.prompt, one.text)])
    start, end = [tokenizer.start], [tokenizer.separator]
    rows, lengths, owners = [], [], []
    for index in range(len(documents)):
        prompt, text = (part.tolist() for part in encoded[2 * index : 2 * index + 2])
        own = document_rows(model, start + prompt + text + end, 1 + len(prompt))
        rows += own
        owners += [index] * len(own)
        lengths.append(len(text) + 1)
    sums = [0.0] * len(documents)
    for index, scored_row in zip(owners, score_rows(model, rows, batch_size), strict=True):
        sums[index] += scored_row.log_probability
    scored = iter(zip(documents, lengths, sums, strict=True))
    for one in block:
        number = totals.documents + totals.malformed + totals.empty
        if isinstance(one, Malformed):
            totals.malformed += 1
            yield {"document": number, "error": one.describe()}
        elif one.is_empty:
            totals.empty += 1
            yield {"document": number, "error": "empty"}
        else:
            document, tokens, log_probability = next(scored)
            size = len(document.text.encode())
            totals.documents += 1
            totals.tokens += tokens
            totals.bytes += size
            totals.log_probability += log_probability
            yield {
                "document": number,
                "log_probability": log_probability,
                "tokens": tokens,
                "bytes": size,
                "bits_per_byte": _bits(log_probability, size),
                "perplexity": perplexity_of(-log_probability / tokens),
            }


def _bits(log_probability: float, size: int) -> float:
    return -log_probability / math.log(2) / size
