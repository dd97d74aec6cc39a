"""The documents that `longseq predict` classifies: files of text, rows of tables, folders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from longseq.backbones.classifier import TextClassifier
from longseq.backbones.segments import (
    check_segments,
    find_obstacle,
    memory_per_token,
    read_in_segments,
    whole_chunks,
)
from longseq.kernels.packing import Packing
from longseq.tasks.data.inputs import (
    Predict,
    Inputs,
    PassedOver,
    Prediction,
    Unreadable,
    decided_details,
    tell_predictions,
)
from longseq.tasks.document.info import DocumentInfo
from longseq.tasks.document.sources import preparation_of
from longseq.tasks.document.truncation import truncate
from longseq.tasks.report import progress_bar
from longseq.tasks.text.documents import Document, LineCounter, Place
from longseq.tasks.text.sources import TEXT, Columns, Malformed, Part, find_parts, read_part, walk
from longseq.tasks.text.store import token_type
from longseq.tasks.text.tokenizer import Tokenizer
from longseq.tasks.training.memory import peak_memory

# Tokens in memory at once, unless the user or the training says otherwise.
SEGMENT = 8192

_NAMED = 3  # documents that cannot be read, in what the command prints


class _Document(NamedTuple):
    """The tokens that are read of a document, and what is written of it."""

    path: str
    tokens: np.ndarray
    details: dict[str, Any]


class DocumentFiles(Inputs):
    """The documents of a file or of all files below a folder.

    A file of jsonl, csv, tsv or parquet holds many documents, any other file one. Other columns than the text are not
    read, labels among them. Written are the path; `document`, its number in the whole input from 0, which also counts
    what cannot be read; `tokens`, its length; `cut`, how many of them truncation leaves out; and `decision`, where
    there are several labels or thresholds, as of `InputFiles`. With one label a
    document, probabilities are those of classes that exclude each other; with several, each label has its own.

    Documents are read together up to `segment` tokens. A model that can be read in segments reads longer ones with
    carried state (see `longseq.backbones.segments`).
    """

    details: tuple[str, ...] = ("document", "tokens", "cut")
    unit = "documents"

    def __init__(
        self,
        parts: list[Part | Malformed],
        passed_over: list[PassedOver],
        columns: Columns,
        info: DocumentInfo,
        tokenizer: Tokenizer,
    ) -> None:
        self.parts, self.passed_over, self.columns, self.info = parts, passed_over, columns, info
        self.tokenizer = tokenizer
        self._prepare = preparation_of(info.source)
        self.details = (*type(self).details, *decided_details(info))
        self._notes: list[str] = []
        self._left_out: list[str] = []

    @classmethod
    def open(cls, path: str, info: DocumentInfo, keys: Predict) -> DocumentFiles:
        if keys.num_workers:
            raise ValueError(f"num_workers={keys.num_workers}: documents are read by one process; leave it out")
        if keys.saliency is not None:
            raise ValueError(
                f"saliency={keys.saliency} draws images, and this model classifies documents: leave it out"
            )
        tokenizer = info.make_tokenizer()  # refuses before a file of another kind is blamed
        columns = Columns(keys.column or info.text_column or TEXT.text)
        if not Path(path).is_dir() or _is_saved(Path(path)):
            return cls([*find_parts([path], columns)], [], columns, info, tokenizer)
        parts, passed_over = _find_files(path, columns)
        if not parts:
            raise ValueError(f"input={path} is empty: it holds no file with text")
        return cls(parts, passed_over, columns, info, tokenizer)

    def predict(self, model: nn.Module, keys: Predict) -> Iterator[Prediction | Unreadable]:
        info = self.info
        segment = keys.segment or info.segment or SEGMENT
        truncation, obstacle = keys.truncation or info.truncation, find_obstacle(model)
        if obstacle is not None and truncation != info.truncation and isinstance(model, TextClassifier):
            raise ValueError(
                f"truncation={truncation}: {obstacle} cannot be read in segments: leave truncation out, and documents "
                f"are cut to {info.max_length} tokens as in training"
            )
        if obstacle is None:
            check_segments(model, segment=segment)
            segment = whole_chunks(model, segment)  # type: ignore[arg-type]
        device = _device_of(model)
        self._notes = [_describe_reading(model, segment, obstacle)]
        if self._prepare is not None:
            self._notes.append(f"texts are prepared as those of the training, data.source={info.source}")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        group: list[_Document] = []
        for one in self._documents(truncation, _most_tokens(model)):
            if isinstance(one, Unreadable):
                yield from self._noted([one])
                continue
            tokens = sum(len(document.tokens) for document in (*group, one))
            if group and (len(group) == keys.batch_size or tokens > segment):
                yield from self._noted(self._classify(model, group, None if obstacle else segment, keys.top_k))
                group = []
            group.append(one)
        if group:
            yield from self._noted(self._classify(model, group, None if obstacle else segment, keys.top_k))
        self._notes.append(_measure_memory(device))

    def notes(self) -> list[str]:
        return [*self._notes, *self._left_out]

    def _noted(self, found: Iterable[Prediction | Unreadable]) -> Iterator[Prediction | Unreadable]:
        """The predictions, with the first documents that have none kept for `notes`."""
        for one in found:
            if isinstance(one, Unreadable) and len(self._left_out) < _NAMED:
                self._left_out.append(f"not classified: {one.path}: {one.reason}")
            yield one

    def _documents(self, truncation: str, most: int | None) -> Iterator[_Document | Unreadable]:
        """The documents in their order, cut as `truncation` says; `most` is the length that the model can read."""
        info, number = self.info, 0
        dtype = token_type(info.vocab_size)
        begin = np.array([] if info.separator is None else [info.separator], dtype)
        lines = LineCounter()
        for one in self._texts():
            assert one.place is not None, "documents that are read from files have a place"
            path, details = one.place.path, {"document": number}
            number += 1
            text = one.text if isinstance(one, Document) else ""
            if self._prepare is not None:
                text = self._prepare(text)
            if isinstance(one, Document) and not text.strip():
                one = Malformed(one.place, "empty")
            if isinstance(one, Malformed):
                yield Unreadable(path, one.describe(lines).removeprefix(path).lstrip(",: "), details)
                continue
            tokens = np.concatenate([begin, self.tokenizer.encode(text).astype(dtype)])
            kept = truncate(tokens, info.max_length, truncation, info.separator)
            details |= {"tokens": len(tokens), "cut": len(tokens) - len(kept)}
            if most is not None and len(kept) > most:
                yield Unreadable(path, f"{len(kept)} tokens, and the model has positions for {most}", details)
            else:
                yield _Document(path, kept, details)

    def _texts(self) -> Iterator[Document | Malformed]:
        with progress_bar("predicting", len(self.parts)) as advance:
            for part in self.parts:
                yield from [part] if isinstance(part, Malformed) else read_part(part, self.columns)
                advance(1)

    def _classify(
        self, model: Any, documents: list[_Document], segment: int | None, top_k: int | None
    ) -> Iterator[Prediction | Unreadable]:
        tokens = torch.from_numpy(np.concatenate([document.tokens for document in documents]))[None]
        borders = torch.tensor([0, *accumulate(len(document.tokens) for document in documents)])
        if segment is not None:
            logits = read_in_segments(model, tokens, cu_seqlens=borders, segment=segment)
        else:
            device = _device_of(model)
            logits = model(tokens.to(device, torch.long), cu_seqlens=Packing(borders, device=device))
        places = ((document.path, document.details) for document in documents)
        count = top_k or len(self.info.class_names)
        yield from tell_predictions(places, self._probabilities(logits), self.info, count)

    def _probabilities(self, logits: Tensor) -> Tensor:
        return logits.float().sigmoid() if self.info.multi_label else logits.float().softmax(dim=1)


def _is_saved(path: Path) -> bool:
    """Whether a folder is a data set that the library datasets has saved."""
    return any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _find_files(root: str, columns: Columns) -> tuple[list[Part | Malformed], list[PassedOver]]:
    """The parts of all files below a folder, among them the files that cannot be read; and what is hidden."""
    parts: list[Part | Malformed] = []
    hidden: list[PassedOver] = []
    for folder, names in walk(root, lambda path: hidden.append(PassedOver(path, "hidden"))):
        for name in names:
            path = str(Path(folder, name))  # as messages and documents spell it, also below "."
            if name.startswith("."):
                hidden.append(PassedOver(path, "hidden"))
                continue
            try:
                parts += find_parts([path], columns)
            except ValueError as error:
                parts.append(Malformed(Place(path), str(error).removeprefix(f"input={path} ").removeprefix(f"{path} ")))
    return parts, hidden


def _device_of(model: nn.Module) -> torch.device:
    return next((x.device for x in chain(model.parameters(), model.buffers())), torch.device("cpu"))


def _most_tokens(model: Any) -> int | None:
    """The longest document that a model with learned positions reads; None for any length."""
    return model.body.max_length if isinstance(model, TextClassifier) else None


def _describe_reading(model: Any, segment: int, obstacle: str | None) -> str:
    """How documents are read, and what that does to the memory."""
    if obstacle is not None:
        return f"documents are read whole ({obstacle} is not read in segments): memory grows with their length"
    way = f"direction={model.body.direction}: read in segments of {segment:,} tokens"
    per_token = memory_per_token(model)
    if not per_token:
        return f"{way} with carried state: the memory does not grow with the length of a document"
    return f"{way}, layer by layer: a document takes {per_token:,} bytes of memory for each of its tokens"


def _measure_memory(device: torch.device) -> str:
    peak = peak_memory(device)
    if peak is None:
        return "peak memory: not measured on Windows"
    place = f"on {device}" if device.type == "cuda" else "of this process"
    return f"peak memory {place}: {peak / 2**20:,.0f} MiB"
