"""Streams of packed documents go on over batches."""

from __future__ import annotations

import pytest
import torch
from corpora import SEPARATOR, make_corpus
from representatives import REPRESENTATIVES
from torch import Tensor
from zeros import without_zeros

from longseq import mixers
from longseq.backbones.tokens import TokenBackbone
from longseq.tasks.lm.module import LanguageModelTask
from longseq.tasks.text.windows import IGNORED, Concatenated, EveryStream, WindowBatches

VOCABULARY = 64


def make_model(mixer: str) -> TokenBackbone:
    torch.manual_seed(0)
    return without_zeros(TokenBackbone(vocab_size=VOCABULARY, d_model=32, depth=1, mixer=mixer, mlp=None)).double()


@pytest.mark.parametrize("mixer", [name for name in REPRESENTATIVES if not mixers.get(name).growing_state])
def test_streams_that_carry_their_state_are_documents_read_whole(mixer: str) -> None:
    model = make_model(mixer)
    corpus = make_corpus([30, 3, 15])
    windows = Concatenated(corpus, 7, whole=False)
    batches = WindowBatches([windows], 2, separator=SEPARATOR, reset_state=True, carries=True)
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
