"""Export of document classifiers: one file that gives the probabilities of documents of any number and length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from longseq.tools.export.checked_file import (
    TRACED_BATCH,
    float_copy,
    no_rows,
    probabilities,
    tokens_of,
    write_checked,
)
from longseq.tools.export.metadata import check_class_names, check_vocabulary, document_metadata
from longseq.tools.export.parity import compare, expect, probe_tokens
from longseq.tools.export.report import ExportReport
from longseq.tools.export.spec import FileSpec

# Tokens of the batch that is traced, and of the compared ones: one token, less than a chunk of 64 tokens, in which
# recurrences are computed, a whole chunk, and more than what was traced.
TRACED_TOKENS = 70
COMPARED_TOKENS = (1, 40, 64, 150)
# The file and the model are compared by the logarithms of probabilities, as scores are: of many classes, or of a model
# that has hardly learned, all probabilities are alike. Smaller ones than this count as equal.
LEAST = 1e-12


class DocumentClassifierFile(nn.Module):
    """The function that an exported file computes: tokens and the lengths of documents give probabilities.

    Documents `[batch, length]` are padded at their end by any numbers; `lengths [batch]` counts the real ones. The
    probabilities `[batch, classes]` of a row add up to 1; with `multi_label` each class has its own.
    """

    def __init__(self, model: Any, *, multi_label: bool) -> None:
        super().__init__()
        self.model = model
        self.vocab_size = model.body.vocab_size
        self.multi_label = multi_label

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        if torch.jit.is_tracing():
            # TorchScript would broadcast a single length; the other formats check the shape themselves.
            lengths = lengths.reshape(tokens.shape[0])
        mask = torch.arange(tokens.shape[1], device=tokens.device) < lengths.unsqueeze(1)
        # The padding may hold numbers that are no tokens.
        tokens = tokens_of(tokens.masked_fill(~mask, 0), self.vocab_size)
        return probabilities(self.model(tokens, mask=mask), multi_label=self.multi_label)


def _logarithms(values: Tensor) -> Tensor:
    return values.clamp_min(LEAST).log()


def export_document_classifier(
    model: Any,
    output: str | Path,
    *,
    format: str = "onnx",
    data: Mapping[str, Any] = MappingProxyType({}),
    opset: int = 20,
    operators: str = "standard",
    batch_sizes: Sequence[int] = (1, 3, 8),
    tolerance: float = 1e-4,
    measure_latency: bool = False,
    extra_metadata: Mapping[str, Any] = MappingProxyType({}),
) -> ExportReport:
    """Write a `TextClassifier` as one file, and compare the file with what the model gives for single documents.

    The file takes `tokens` int64 [batch, length] and `lengths` int64 [batch], and gives probabilities [batch, classes].
    Batch and length are open; a model with learned positions reads at most as many tokens as it has positions. What
    follows a document's length does not matter.

    The file is written in float32 from a copy on the CPU; the model does not change. `data` is what a checkpoint knows
    of its documents (see `longseq.tasks.document.config.DocumentInfo`); class names, tokenizer and truncation become
    metadata, with which a program without longseq classifies text.

    `operators` of ONNX is standard, onnxruntime or opset27 (see `longseq.tools.export.operators`).
    `longseq.tools.export.parity.compare` defines how far the file may be from the model, in the logarithms of
    probabilities.

    Raises:
        ValueError: the file differs from the model; an existing file of that name then remains as it is.
    """
    check_class_names(data, model.num_classes)
    check_vocabulary(data, model.body.vocab_size)
    copied = float_copy(model)
    multi_label = bool(data.get("multi_label"))
    limit, vocab_size = copied.body.max_length, copied.body.vocab_size
    shapes = sorted({(batch, min(tokens, limit or tokens)) for batch in batch_sizes for tokens in COMPARED_TOKENS})

    def read_one_by_one(model: Any, tokens: Tensor) -> Tensor:
        """The logarithms of the probabilities, reading each document without padding."""
        lengths = _compared_lengths(tokens).tolist()
        logits = [model(row[:length].unsqueeze(0)) for row, length in zip(tokens, lengths, strict=True)]
        return _logarithms(probabilities(torch.cat(logits), multi_label=multi_label))

    expected = expect(copied, [probe_tokens(*shape, vocab_size) for shape in shapes], read_one_by_one)
    traced = probe_tokens(TRACED_BATCH, min(TRACED_TOKENS, limit or TRACED_TOKENS), vocab_size)
    module = DocumentClassifierFile(copied, multi_label=multi_label).eval()
    example = traced, _compared_lengths(traced)
    compared = [(batch.batch, _compared_lengths(batch.batch)) for batch in expected]
    spec = FileSpec(
        inputs={"tokens": {0: "batch", 1: "length"}, "lengths": {0: "batch"}},
        outputs=("probabilities",),
        metadata=document_metadata(copied, data, extra=extra_metadata),
        opset=opset,
        operators=operators,
        reads=[*compared, *no_rows(module, example)],
    )
    whole = traced[:1], torch.tensor([traced.shape[1]])
    return write_checked(
        module,
        example,
        Path(output),
        spec,
        format=format,
        compare=lambda call: [
            compare(lambda tokens: _logarithms(call(tokens, _compared_lengths(tokens))), batch, tolerance)
            for batch in expected
        ],
        unit="document",
        timed=whole if measure_latency else None,
    )


def _compared_lengths(tokens: Tensor) -> Tensor:
    """The lengths [B] of compared documents [B, T]: the first fills its row, the others are shorter and shorter."""
    batch, length = tokens.shape
    return torch.tensor([max(1, length - row * length // batch) for row in range(batch)])
