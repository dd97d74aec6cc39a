"""Log-probabilities of rows of tokens: they do not depend on what shares a batch, or on the pieces that are read."""

from __future__ import annotations

import pytest
import torch
from representatives import REPRESENTATIVES

from longseq.backbones.tokens import TokenBackbone
from longseq.tasks.lm import likelihood
from longseq.tasks.lm.likelihood import Row, document_rows, score_rows

V = 11


def make(mixer, **options):
    torch.manual_seed(0)
    return TokenBackbone(vocab_size=V, d_model=16, depth=2, mixer=mixer, mlp=None, **options).double().eval()


def some_rows():
    random = torch.Generator().manual_seed(1)
    starts = [(23, 1), (5, 3), (23, 22), (40, 17), (2, 1)]
    return [Row(torch.randint(V, (length,), generator=random).tolist(), start) for length, start in starts]


def directly(model, row):
    """By a softmax over the scores of the whole row."""
    tokens = torch.tensor([row.tokens])
    with torch.no_grad():
        scores = model(tokens[:, :-1])[0][0, row.start - 1 :].log_softmax(-1)
    wanted = tokens[0, row.start :]
    return scores.gather(1, wanted[:, None]).sum().item(), bool((scores.argmax(-1) == wanted).all())


@pytest.mark.parametrize("mixer", [*REPRESENTATIVES, "deltanet+attention"])
def test_rows_are_scored_as_if_each_were_alone_and_whole(mixer, monkeypatch):
    monkeypatch.setattr(likelihood, "PIECE_TOKENS", 16)
    monkeypatch.setattr(likelihood, "CHUNK_SCORES", 3 * V)
    model, rows = make(mixer), some_rows()
    wanted = [directly(model, row) for row in rows]
    for batch_size in (1, 2, 64):
        found = score_rows(model, rows, batch_size)
        for one, (log_probability, is_greedy) in zip(found, wanted, strict=True):
            assert one.log_probability == pytest.approx(log_probability, rel=1e-9)
            assert one.is_greedy == is_greedy


def test_a_model_of_learned_positions_reads_windows_of_a_document():
    model = make("attention", positions="learned", max_length=8)
    tokens = some_rows()[0].tokens
    rows = document_rows(model, tokens)
    assert [len(row.tokens) - row.start for row in rows] == [8, 8, 6]
    assert [row.tokens[row.start :] for row in rows] == [tokens[1:9], tokens[9:17], tokens[17:]]
    assert len(rows[-1].tokens) == 9, "the last window is filled with what stands before"
    found = score_rows(model, rows, 3)
    assert [one.log_probability for one in found] == pytest.approx([directly(model, row)[0] for row in rows])
    (cut,) = score_rows(model, [Row(tokens, 20)], 1)
    assert cut.log_probability == pytest.approx(directly(model, Row(tokens[-9:], 6))[0])
