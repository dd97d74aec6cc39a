"""Log-probabilities of rows of tokens, whatever shares a batch; and what windows of a text measure of its documents."""

from __future__ import annotations

import json
import math

import pytest
import torch
from representatives import REPRESENTATIVES

from longseq.backbones.tokens import TokenBackbone
from longseq.tasks import evaluate
from longseq.tasks.lm import likelihood
from longseq.tasks.lm.likelihood import Row, document_rows, score_rows
from longseq.tasks.text.tokenizer import tokenizer_from_dict, train_tokenizer

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
    for count in (1, 2, len(rows)):
        found = [one for start in range(0, len(rows), count) for one in score_rows(model, rows[start : start + count])]
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
    found = score_rows(model, rows)
    assert [one.log_probability for one in found] == pytest.approx([directly(model, row)[0] for row in rows])
    (cut,) = score_rows(model, [Row(tokens, 20)])
    assert cut.log_probability == pytest.approx(directly(model, Row(tokens[-9:], 6))[0])


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["documents", "concatenated", "streams"])
def test_windows_of_a_converted_model_begin_documents_as_the_documents_alone_do(packing, compose_config, tmp_path):
    """Llama begins a document with <s> and ends it with </s>."""
    texts = [f"{'x' * (number + 3)} is text {number}." for number in range(9)]
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    torch.manual_seed(0)
    model = TokenBackbone(vocab_size=300, d_model=16, depth=1, mixer="gated_deltanet").eval()
    with torch.no_grad():
        model.embedding.weight.mul_(10)
    words = ("trainer=cpu", f"checkpoint={tmp_path / 'model'}", f"output={tmp_path / 'out.json'}")
    words += ("data.source=files", f"data.root={path}", f"data.cache={tmp_path}", "data.validation=0", "data.test=1")
    words += (f"data.tokenizer={tmp_path / 'model'}", f"data.packing={packing}", "data.eval_batch_size=1")
    losses = []
    for own in ({}, {"start": "x"}):
        described = {**train_tokenizer(texts, 270).to_dict(), **own}
        model.text = {"tokenizer": described, "window": 64}
        model.save_pretrained(tmp_path / "model")
        tokenizer = tokenizer_from_dict(described)
        read = [[tokenizer.start, *tokens.tolist(), tokenizer.separator] for tokens in tokenizer.encode_all(texts)]
        alone = -sum(one.log_probability for one in score_rows(model, [Row(tokens) for tokens in read]))
        windows = evaluate.run(compose_config("evaluate", *words, "data.window=64"))
        losses.append(windows["test/loss"])
        if packing != "concatenated":  # which cuts documents, and begins their second parts without a state
            assert windows["test/loss"] == pytest.approx(alone / (sum(map(len, read)) - len(read)), rel=1e-5)
            size = len("".join(texts))
            assert windows["test/bits_per_byte"] == pytest.approx(alone / math.log(2) / size, rel=1e-5)
    assert abs(losses[0] - losses[1]) > 0.01
