"""The linear model: scikit-learn's numbers without scikit-learn, from files without pickle."""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
from safetensors import safe_open
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

import longseq
from longseq.tasks.document.config import DocumentInfo, LinearModelKeys
from longseq.tasks.document.model import fit_linear

TEXTS = [
    "def read(self, path): return open(path)",
    "class Reader: pass  # reads (a file)",
    "x = [1, 2, 3]; y = x[0] + 1",
    "Return the file, open it: read(path)",
    "y = [x * 2 for x in y]",
    "class Path: def open(self): return self",
] * 3
CLASSES = np.array([0, 1, 2, 0, 2, 1] * 3)
LABELS = np.array([[1, 0], [1, 1], [0, 0], [1, 0], [0, 1], [1, 1]] * 3, dtype=np.float32)


def make_info(multi_label=False, classes=3):
    return DocumentInfo(
        class_names=[str(number) for number in range(classes)],
        multi_label=multi_label,
        vocab_size=257,
        separator=256,
        tokenizer={"kind": "bytes"},
        window=64,
        sizes={"train": len(TEXTS)},
    )


def documents(targets):
    return [([256, *text.encode()], target) for text, target in zip(TEXTS, targets, strict=True)]


def fit(targets, info):
    return fit_linear(documents(targets), [], info, LinearModelKeys(inverse_regularization=[10.0]))


def by_scikit_learn(targets):
    """The decision of each document by scikit-learn: its vectorizer has a pattern, and ours a function."""
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), token_pattern=r"\w+|[^\w\s]", sublinear_tf=True, min_df=2)
    values = vectorizer.fit_transform(TEXTS)
    return LogisticRegression(C=10.0, max_iter=1000).fit(values, targets).decision_function(values)


def test_it_scores_as_scikit_learn_does():
    model = fit(CLASSES, make_info())
    np.testing.assert_allclose(model.score(TEXTS).detach(), by_scikit_learn(CLASSES), atol=2e-3)
    two = fit(CLASSES % 2, make_info(classes=2))
    scores = two.score(TEXTS).detach()
    np.testing.assert_allclose(scores[:, 1] - scores[:, 0], by_scikit_learn(CLASSES % 2), atol=2e-3)
    several = fit(LABELS, make_info(True, 2))
    for label in range(2):
        np.testing.assert_allclose(
            several.score(TEXTS).detach()[:, label], by_scikit_learn(LABELS[:, label]), atol=2e-3
        )


def test_the_regularization_with_the_lowest_validation_loss_is_chosen():
    keys = LinearModelKeys(inverse_regularization=[0.01, 10.0])
    chosen = fit_linear(documents(CLASSES), documents(CLASSES), make_info(), keys)
    assert torch.equal(chosen.score(TEXTS), fit(CLASSES, make_info()).score(TEXTS))
    wrong = documents((CLASSES + 1) % 3)
    assert fit_linear(documents(CLASSES), wrong, make_info(), keys).coefficients.abs().max() < 0.1


def test_packed_and_padded_documents_and_texts_have_the_same_scores():
    model = fit(CLASSES, make_info())
    rows = [torch.tensor(tokens) for tokens, _ in documents(CLASSES)[:3]]
    wanted = model.score(TEXTS[:3])
    borders = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    assert torch.equal(model(torch.cat(rows)[None], borders), wanted)
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.arange(padded.shape[1]) < borders.diff()[:, None]
    assert torch.equal(model(padded, mask=mask), wanted)
    # a document without a known word has the scores of the bias, and an empty one, too
    assert torch.equal(model.score(["", "~~"]), model.bias.expand(2, -1))


def test_a_saved_model_predicts_without_scikit_learn(tmp_path, monkeypatch):
    model = fit(CLASSES, make_info())
    model.save_pretrained(tmp_path)
    vocabulary = json.loads((tmp_path / "config.json").read_text())["model_args"]["vocabulary"]
    assert "( path" in vocabulary
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.get_tensor("coefficients").shape == (len(vocabulary), 3)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    loaded = longseq.from_pretrained(tmp_path)
    tokens = torch.tensor([documents(CLASSES)[0][0]])
    assert torch.equal(loaded(tokens), model(tokens))
