"""Export of language models: one file that reads a token, or any number, and hands its state on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from longseq.backbones.tokens import TokenBackbone
from longseq.mixers.compression import CompressionMixer
from longseq.state import fill_state, state_tensors
from longseq.tools.export.checked_file import (
    TRACED_BATCH,
    float_copy,
    no_rows,
    tokens_of,
    write_checked,
)
from longseq.tools.export.metadata import check_vocabulary, language_metadata
from longseq.tools.export.parity import Comparison, Expected, compare, expect, probe_tokens
from longseq.tools.export.report import ExportReport
from longseq.tools.export.spec import FileSpec
from longseq.tools.export.states import StateSpec, state_spec

# Tokens of a compared sequence: more than one of the chunks of 64 tokens in which recurrences are computed. A file of
# open length reads them in pieces: the third is longer than what was traced, and that is longer than a chunk.
STEPPED_TOKENS = 75
READ_TOKENS = 150
PIECE_ENDS = (1, 3, 132)
TRACED_TOKENS = 70
# Tokens before the traced ones, so that a state which grows is not empty.
EARLIER_TOKENS = 7


class LanguageModelFile(nn.Module):
    """The function that an exported file computes: tokens and the states before them give logits and the states after.

    The states are a list in the order of `longseq.state.state_tensors`. With `one_token` the tokens are `[batch]` and
    the logits `[batch, vocabulary]`, else `[batch, length]` and `[batch, length, vocabulary]`.
    """

    def __init__(self, model: TokenBackbone, *, one_token: bool, max_length: int) -> None:
        super().__init__()
        self.model = model
        self.one_token = one_token
        self.template = model.preallocate(model.initial_state(1), max_length)

    def forward(self, tokens: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        if torch.jit.is_tracing():
            # Some operators of TorchScript would repeat a single row; other formats check the shape themselves.
            states = [state.reshape(tokens.shape[0], *state.shape[1:]) for state in states]
        state = fill_state(self.template, states)
        tokens = tokens_of(tokens, self.model.vocab_size)
        logits, following = self.model.step(tokens, state) if self.one_token else self.model(tokens, state)
        return logits, [tensor for _, tensor in state_tensors(following)]


def export_language_model(
    model: TokenBackbone,
    output: str | Path,
    *,
    format: str = "onnx",
    data: Mapping[str, Any] = MappingProxyType({}),
    dynamic_length: bool = False,
    max_length: int = 2048,
    opset: int = 20,
    operators: str = "standard",
    batch_sizes: Sequence[int] = (1, 3, 8),
    tolerance: float = 1e-4,
    measure_latency: bool = False,
    extra_metadata: Mapping[str, Any] = MappingProxyType({}),
) -> ExportReport:
    """Write `model` as one file, and compare the file with the model's parallel form, which reads whole sequences.

    The file takes one token int64 [batch] and the states before it, and gives logits [batch, vocabulary] and the states
    after it. With `dynamic_length` it takes tokens [batch, length] and gives logits [batch, length, vocabulary]; the
    states of both files are alike. Any batch size fits. Attention has room for `max_length` tokens, or as many as the
    model has learned positions, and the file refuses more; other layers read any number. `state_spec` and
    the file's metadata list the states and their values before the first token.

    The file is written in float32 from a copy on the CPU; the model does not change. `data` is what a checkpoint knows
    of its text (see `longseq.tasks.text.tokenizer.TextInfo`).

    `operators` of ONNX is standard, onnxruntime or opset27 (see `longseq.tools.export.operators`).
    `longseq.tools.export.parity.compare` defines how far the file may be from the model.

    Raises:
        ValueError: the model does not read forward, or the file differs from the model; an existing file of that name
            then remains as it is.
    """
    max_length = min(max_length, model.max_length or max_length)
    if model.direction != "forward":
        raise ValueError(f"direction={model.direction!r}: only models that read forward have a state")
    if any(isinstance(layer, CompressionMixer) and layer.chunk_size > 1 for layer in model.modules()):
        raise ValueError("chunk_size must be 1: with larger chunks, single tokens give other numbers than whole texts")
    check_vocabulary(data, model.vocab_size)
    copied = float_copy(model)
    start = copied.preallocate(copied.initial_state(TRACED_BATCH), max_length)
    limit = max_length if copied.room(start) is not None else model.max_length
    states = state_spec(copied, max_length)
    module = LanguageModelFile(copied, one_token=not dynamic_length, max_length=max_length).eval()

    probed = READ_TOKENS if dynamic_length else STEPPED_TOKENS
    probed = probed if limit is None else min(probed, limit)
    expected = expect(
        copied,
        [probe_tokens(batch, probed, model.vocab_size) for batch in batch_sizes],
        lambda model, tokens: model(tokens, output_final_state=False)[0],
    )
    tokens = probe_tokens(TRACED_BATCH, probed, model.vocab_size)
    # Where there is little room, half of it for the traced tokens, and half of the rest for those before them.
    earlier, tokens = tokens[:, : min(EARLIER_TOKENS, probed // 4)], tokens[:, -min(TRACED_TOKENS, (probed + 1) // 2) :]
    if earlier.shape[1]:
        with torch.no_grad():
            _, start = copied(earlier, start)
    input_name, axes = ("tokens", {0: "batch", 1: "length"}) if dynamic_length else ("token", {0: "batch"})
    example = (tokens if dynamic_length else tokens[:, 0]), [tensor for _, tensor in state_tensors(start)]
    spec = FileSpec(
        inputs={input_name: axes, **{state.input_name: state.axes for state in states}},
        outputs=["logits", *(state.output_name for state in states)],
        metadata=language_metadata(
            model, data, states, limit=limit, dynamic_length=dynamic_length, extra=extra_metadata
        ),
        opset=opset,
        operators=operators,
        reads=no_rows(module, example),
    )
    read: Reader = _read_pieces if dynamic_length else _read_one_by_one
    one = tokens[:1, :1] if dynamic_length else tokens[:1, 0]
    return write_checked(
        module,
        example,
        Path(output),
        spec,
        format=format,
        compare=lambda call: [_compare(call, module, read, rows, states, tolerance) for rows in expected],
        unit="token",
        timed=(one, [state.starts(1) for state in states]) if measure_latency else None,
    )


# Reads tokens [B, T] with a file, or with the module that it was written from: logits [B, T, V].
Reader = Callable[[Callable[..., Any], Tensor, list[Tensor]], Tensor]


def _compare(
    call: Callable[..., Any],
    module: nn.Module,
    read: Reader,
    expected: Expected,
    states: Sequence[StateSpec],
    tolerance: float,
) -> Comparison:
    """Compare what the file reads piece by piece with what the model gives for the whole sequences.

    Reading piece by piece rounds differently. If the file differs too much, its own rounding error is added to the
    parallel form's: layers that normalise outputs near zero make it large.
    """
    starts = [state.starts(len(expected.batch)) for state in states]
    found = compare(lambda batch: read(call, batch, starts), expected, tolerance)
    if found.passed:
        return found
    with torch.no_grad():
        wide = [start.double() if start.is_floating_point() else start for start in starts]
        exact = read(copy.deepcopy(module).double(), expected.batch, wide)
        rounding = (read(module, expected.batch, starts) - exact).abs().max().item()
    return compare(
        lambda batch: read(call, batch, starts), replace(expected, rounding=expected.rounding + rounding), tolerance
    )


def _read_one_by_one(call: Callable[..., Any], tokens: Tensor, states: list[Tensor]) -> Tensor:
    logits = []
    for token in tokens.unbind(1):
        scores, states = call(token.contiguous(), states)
        logits.append(scores)
    return torch.stack(logits, dim=1)


def _read_pieces(call: Callable[..., Any], tokens: Tensor, states: list[Tensor]) -> Tensor:
    """One token, two tokens, two chunks and a token, and the rest."""
    logits = []
    for piece in tokens.tensor_split(PIECE_ENDS, dim=1):
        if piece.shape[1]:
            scores, states = call(piece.contiguous(), states)
            logits.append(scores)
    return torch.cat(logits, dim=1)
