"""`longseq evaluate input=TEXT`: the log-probability of each document, and what cannot be read."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from longseq.backbones.tokens import TokenBackbone
from longseq.tasks import evaluate
from longseq.tasks.lm.likelihood import score_documents
from longseq.tasks.text.sources import Columns, find_parts
from longseq.tasks.text.tokenizer import ByteTokenizer, train_tokenizer

LINES = ['{"text": "été"}', '{"text": 3}', "no json", '{"text": ""}', '{"text": "a longer line", "ask": "why?"}', '"x"']


def make_model():
    torch.manual_seed(0)
    return TokenBackbone(vocab_size=257, d_model=16, depth=1, mixer="gated_deltanet").eval()


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_document_has_its_log_probability_and_what_is_malformed_its_place(tmp_path):
    path, output, model = tmp_path / "text.jsonl", tmp_path / "out.jsonl", make_model()
    path.write_text("\n".join(LINES) + "\n")
    totals = score_documents(model, ByteTokenizer(), find_parts([str(path)], Columns()), Columns(), output, 2)
    rows = rows_of(output)
    assert [row["document"] for row in rows if "error" in row] == [1, 2, 3, 5]
    losses = 0.0
    for row, text in ((rows[0], "été"), (rows[4], "a longer line")):
        tokens = torch.tensor([[256, *text.encode(), 256]])
        with torch.no_grad():
            loss = cross_entropy(model(tokens[:, :-1])[0][0], tokens[0, 1:], reduction="sum").item()
        size = len(text.encode())
        assert row["log_probability"] == pytest.approx(-loss, rel=1e-5)
        assert (row["tokens"], row["bytes"]) == (size + 1, size)
        assert row["perplexity"] == pytest.approx(math.exp(loss / (size + 1)), rel=1e-5)
        losses += loss
    assert (totals["documents"], totals["left_out"], totals["bytes"]) == (2, 4, 5 + 13)
    assert totals["bits_per_byte"] == pytest.approx(losses / math.log(2) / 18, rel=1e-5)


def test_a_prompt_is_read_and_not_scored(tmp_path):
    path, output, model = tmp_path / "text.jsonl", tmp_path / "out.jsonl", make_model()
    path.write_text(LINES[4] + "\n")
    columns = Columns("text", "ask")
    score_documents(model, ByteTokenizer(), find_parts([str(path)], columns), columns, output, 2)
    (row,) = rows_of(output)
    tokens = torch.tensor([[256, *b"why?", *b"a longer line", 256]])
    with torch.no_grad():
        loss = cross_entropy(model(tokens[:, :-1])[0][0, 4:], tokens[0, 5:], reduction="sum").item()
    assert row["log_probability"] == pytest.approx(-loss, rel=1e-5)
    assert (row["tokens"], row["bytes"]) == (14, 13)


@pytest.mark.slow
def test_the_documents_of_a_text_add_up_to_what_its_windows_measure(trained, compose_config, tmp_path):
    path = tmp_path / "other.jsonl"
    texts = [f"{'x' * (number + 3)} is text {number}." for number in range(9)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts) + "broken\n")
    words = (f"checkpoint={trained.checkpoint}", "trainer=cpu")
    found = evaluate.run(compose_config("evaluate", *words, f"input={path}", f"output={tmp_path / 'out.jsonl'}"))
    assert ["error" in row for row in rows_of(tmp_path / "out.jsonl")] == [False] * 9 + [True]
    data = ("data.source=files", f"data.root={path}", f"data.cache={tmp_path}", "data.window=64")
    splits = ("data.test=0.999999", "data.validation=0", "data.packing=documents", f"output={tmp_path / 'out.json'}")
    windows = evaluate.run(compose_config("evaluate", *words, *data, *splits))
    for name, value in found.items():
        assert windows[f"test/{name}"] == pytest.approx(value, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["documents", "concatenated", "streams"])
def test_windows_of_a_converted_model_begin_documents_as_the_documents_alone_do(packing, compose_config, tmp_path):
    """Llama begins a document with <s> and ends it with </s>."""
    texts = [f"{'x' * (number + 3)} is text {number}." for number in range(9)]
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    torch.manual_seed(0)
    model = TokenBackbone(vocab_size=300, d_model=16, depth=1, mixer="gated_deltanet")
    words = ("trainer=cpu", f"checkpoint={tmp_path / 'model'}")
    data = ("data.source=files", f"data.root={path}", f"data.cache={tmp_path}", "data.window=64")
    data += (f"data.tokenizer={tmp_path / 'model'}", f"data.packing={packing}", "data.eval_batch_size=1")
    splits = ("data.test=0.999999", "data.validation=0", f"output={tmp_path / 'out.json'}")
    losses = []
    for own in ({}, {"start": "x"}):
        model.text = {"tokenizer": {**train_tokenizer(texts, 270).to_dict(), **own}, "window": 64}
        model.save_pretrained(tmp_path / "model")
        alone = evaluate.run(compose_config("evaluate", *words, f"input={path}", f"output={tmp_path / 'out.jsonl'}"))
        windows = evaluate.run(compose_config("evaluate", *words, *data, *splits))
        losses.append(windows["test/loss"])
        if packing != "concatenated":  # which cuts documents, and begins their second parts without a state
            assert windows["test/loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert abs(losses[0] - losses[1]) > 0.01
