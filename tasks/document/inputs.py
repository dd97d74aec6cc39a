"""The documents that `longseq predict` classifies: text files, rows of tables, folders."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from longseq.backbones.segments import find_obstacle, read_in_segments, whole_chunks
from longseq.kernels.packing import Packing
from longseq.tasks.data.module import Inputs, Predict, Prediction, Unreadable, decided_details, predictions_of
from longseq.tasks.document.batch import truncate
from longseq.tasks.document.config import DocumentInfo
from longseq.tasks.document.sources import find
from longseq.tasks.text.sources import TEXT, Columns, Malformed, find_in_order, read_parts
from longseq.tasks.text.store import file_type

SEGMENT = 8192  # the default of `segment`: tokens in memory at once


class _Document(NamedTuple):
    """The tokens of a document after truncation, and what is written of it."""

    path: str
    tokens: np.ndarray
    details: dict[str, Any]


class DocumentFiles(Inputs):
    """The documents of a file or of all files below a folder.

    A jsonl, csv, tsv or parquet file holds many documents, any other file one; only the column of the text is read.
    A prediction has the path; `document`, the number in the whole input from 0, unreadable documents included;
    `tokens`, the length; `cut`, the tokens that truncation leaves out; and `decision` as in `predictions_of`.

    A batch has up to `segment` tokens. Models with carried state read longer documents in segments.
    """

    details: tuple[str, ...] = ("document", "tokens", "cut")
    unit = "documents"

    def __init__(self, path: str, info: DocumentInfo, keys: Predict) -> None:
        self.info, self.tokenizer = info, info.make_tokenizer()
        self.columns = Columns(keys.column or info.text_column or TEXT.text)
        self.parts = find_in_order(path, self.columns)
        self.details = (*type(self).details, *decided_details(info))
        self._prepare = None if info.source is None else find(info.source).prepare

    def predict(self, model: nn.Module, keys: Predict) -> Iterator[Prediction | Unreadable]:
        most = keys.segment or self.info.segment or SEGMENT
        segment = None  # the model reads whole documents
        if find_obstacle(model) is None:
            segment = most = whole_chunks(model, most)  # type: ignore[arg-type]
        group: list[_Document] = []
        positions = getattr(getattr(model, "body", None), "max_length", None)
        for one in self._documents(keys.truncation or self.info.truncation, positions):
            if isinstance(one, Unreadable):
                yield one
                continue
            tokens = sum(len(document.tokens) for document in (*group, one))
            if group and (len(group) == keys.batch_size or tokens > most):
                yield from self._classify(model, group, segment, keys.top_k)
                group = []
            group.append(one)
        if group:
            yield from self._classify(model, group, segment, keys.top_k)

    def _documents(self, truncation: str, most: int | None) -> Iterator[_Document | Unreadable]:
        """The documents in order, truncated; `most` is the length that the model can read."""
        info, dtype = self.info, file_type("tokens", self.info.vocab_size)
        begin = np.array([] if info.separator is None else [info.separator], dtype)
        for number, one in enumerate(read_parts(self.parts, self.columns, "predicting")):
            path, details = one.place.path, {"document": number}
            if isinstance(one, Malformed):
                yield Unreadable(path, one.describe(), details)
                continue
            text = one.text if self._prepare is None else self._prepare(one.text)
            if not text.strip():
                yield Unreadable(path, f"{one.place.describe()}: empty", details)
                continue
            tokens = np.concatenate([begin, self.tokenizer.encode(text).astype(dtype)])
            kept = truncate(tokens, info.max_length, truncation, info.separator)
            details |= {"tokens": len(tokens), "cut": len(tokens) - len(kept)}
            if most is not None and len(kept) > most:
                yield Unreadable(path, f"{len(kept)} tokens, and the model has positions for {most}", details)
            else:
                yield _Document(path, kept, details)

    def _classify(
        self, model: Any, documents: list[_Document], segment: int | None, top_k: int | None
    ) -> Iterator[Prediction | Unreadable]:
        tokens = torch.from_numpy(np.concatenate([document.tokens for document in documents]))[None]
        borders = torch.tensor([0, *accumulate(len(document.tokens) for document in documents)])
        if segment is not None:
            logits = read_in_segments(model, tokens, cu_seqlens=borders, segment=segment)
        else:
            device = next((x.device for x in chain(model.parameters(), model.buffers())), torch.device("cpu"))
            logits = model(tokens.to(device, torch.long), cu_seqlens=Packing(borders, device=device))
        places = ((document.path, document.details) for document in documents)
        yield from predictions_of(places, logits, self.info, top_k or len(self.info.class_names))
