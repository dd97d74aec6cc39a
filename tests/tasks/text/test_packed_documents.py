"""Documents of a packed batch know nothing of each other, whatever mixer reads them; streams go on over batches."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from corpora import SEPARATOR, make_corpus
from torch import Tensor
from zeros import without_zeros

from longseq import mixers
from longseq.backbones.tokens import TokenBackbone
from longseq.tasks.lm.module import LanguageModelTask
from longseq.tasks.text.batch import IGNORED, TokenInputs, WindowBatches
from longseq.tasks.text.windows import Concatenated, Documents, EveryStream, EveryWindow, Windows

NAMES = mixers.mixer_names()
LENGTHS = [5, 2, 9, 1, 4, 3]
VOCABULARY = 64


def make_model(mixer: str) -> TokenBackbone:
    torch.manual_seed(0)
    return without_zeros(TokenBackbone(vocab_size=VOCABULARY, d_model=32, depth=1, mixer=mixer, mlp=None)).double()


def assemble(windows: Windows, rows: int, *, carries: bool = False, sequences: int = 16) -> WindowBatches:
    options: dict[str, Any] = {"separator": SEPARATOR, "reset_state": True, "carries": carries}
    return WindowBatches([windows], rows, sequences=sequences, **options)


def losses(model: TokenBackbone, inputs: TokenInputs, targets: Tensor, tokens: Tensor) -> Tensor:
    logits, _ = model(tokens, cu_seqlens=inputs.cu_seqlens, output_final_state=False)
    return torch.nn.functional.cross_entropy(logits[0], targets[0], ignore_index=IGNORED, reduction="none")


@pytest.mark.parametrize("mixer", NAMES)
def test_a_token_changes_no_loss_and_no_gradient_of_another_document(mixer: str) -> None:
    model = make_model(mixer)
    windows = Documents(make_corpus(LENGTHS), 13)
    assert windows.count == 2
    inputs, targets, _ = assemble(windows, 3)[next(iter(EveryWindow([2], 3)))]
    assert inputs.cu_seqlens is not None
    borders = inputs.cu_seqlens.tolist()
    assert borders.count(3 * 13) > 4, "the last border repeats"
    start, stop = next(pair for pair in pairwise(borders) if pair[1] - pair[0] == 5)
    others = torch.ones(3 * 13, dtype=torch.bool)
    others[start:stop] = False
    changed = inputs.tokens.clone()
    changed[0, start + 1] = VOCABULARY - 1
    found = []
    for tokens in (inputs.tokens, changed):
        loss = losses(model, inputs, targets, tokens)
        gradients = torch.autograd.grad(loss[others].sum(), list(model.parameters()))
        found.append((loss, gradients))
    (loss, gradients), (changed_loss, changed_gradients) = found
    assert loss.isfinite().all()
    assert (loss - changed_loss)[start + 1 : stop].abs().min() > 0
    torch.testing.assert_close(changed_loss[others], loss[others], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(changed_gradients, gradients, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("mixer", NAMES)
def test_borders_that_repeat_change_nothing(mixer: str) -> None:
    model = make_model(mixer)
    windows = Documents(make_corpus(LENGTHS), 13)
    batch = next(iter(EveryWindow([2], 2)))
    found = []
    for sequences in (16, 128):
        inputs, targets, _ = assemble(windows, 2, sequences=sequences)[batch]
        loss = losses(model, inputs, targets, inputs.tokens)
        found.append((len(inputs.cu_seqlens), loss, torch.autograd.grad(loss.sum(), list(model.parameters()))))  # type: ignore[arg-type]
    (few, *one), (many, *other) = found
    assert (few, many) == (17, 129)
    torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("mixer", [name for name in NAMES if not mixers.get(name).growing_state])
def test_streams_that_carry_their_state_are_documents_read_whole(mixer: str) -> None:
    model = make_model(mixer)
    corpus = make_corpus([30, 3, 15])
    windows = Concatenated(corpus, 7, whole=False)
    batches = assemble(windows, 2, carries=True)
    module = LanguageModelTask(model)
    parts: list[list[Tensor]] = [[], []]
    with torch.no_grad():
        for batch in EveryStream(windows.count, 2):
            inputs, targets, _ = batches[batch]
            logits = model.forward_head(module._features(inputs, "evaluation"))
            for row, part in enumerate(parts):
                asked = targets[0, 7 * row : 7 * row + 7] != IGNORED
                part.append(logits[0, 7 * row : 7 * row + 7][asked])
        streams = [torch.cat(part) for part in parts]
        # The second stream begins within a document, whose state is not known: place 28 is in the document of 30.
        whole = corpus.tokens.astype(int).tolist()
        for stream, first in zip(streams, (0, 28), strict=True):
            pieces = [(a, b) for a, b in ((0, 30), (30, 33), (33, 48)) if b > first]
            expected = [model(torch.tensor([whole[max(a, first) : b]]))[0][0] for a, b in pieces]
            torch.testing.assert_close(stream, torch.cat(expected)[: len(stream)], rtol=1e-9, atol=1e-10)
