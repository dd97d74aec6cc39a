"""Classifiers are built from a configuration, and start from language models and from other classifiers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import cases

from longseq.backbones.classifier import TextClassifier
from longseq.backbones.tokens import TokenBackbone
from longseq.tasks.document.info import DocumentInfo
from longseq.tasks.document.model import DocumentModel
from longseq.tasks.training.checkpoint import Loaded
from longseq.tasks.training.configuration import resolve
from longseq.tokenizer_files import BYTES

WORDS = ("task=lm", "model=document", "mixer=gla", "model.d_model=16", "model.depth=2", "model.mlp=none")
INFO = DocumentInfo(
    class_names=["a", "b", "c"],
    multi_label=False,
    vocab_size=257,
    separator=256,
    window=12,
    tokenizer=dict(BYTES),
)


@pytest.fixture
def configure(compose_config: Any) -> Any:
    return lambda *overrides: resolve(compose_config("train", *WORDS, "output=run", *overrides))


def text_model(config: Mapping[str, Any], **options: Any) -> TokenBackbone:
    """A language model with the options of the configured classifier."""
    body = DocumentModel().build(config, INFO).body
    return TokenBackbone(**{**body.arguments, "direction": "forward", **options})


def as_loaded(model: Any, task: str = "lm", **data: Any) -> Loaded:
    path = Path("run.ckpt")
    return Loaded(path, path, model, task, {}, {"tokenizer": dict(BYTES), **data}, "model", 0, 0)


def test_the_head_of_a_classifier_is_copied_for_the_same_classes(configure: Any) -> None:
    config = configure("model.pooling=attention")
    trained = DocumentModel().build(config | {"seed": 1}, INFO)
    for names, copied in ((INFO.class_names, True), (["c", "b", "a"], False)):
        model = DocumentModel().build(config, INFO)
        DocumentModel().start_from(model, as_loaded(trained, "document", class_names=names), INFO)
        same = {name: torch.equal(value, trained.state_dict()[name]) for name, value in model.state_dict().items()}
        assert same.pop("head.weight") is copied
        assert all(same.values()), same
        assert DocumentModel().notes(model) == ([] if copied else ["new beside the weights of run.ckpt: head"])


@cases(
    ("options", "data", "message"),
    [
        (
            {},
            {"tokenizer": {"kind": "file", "json": "{}", "separator": "x"}},
            "another tokenizer than that of the data",
        ),
        ({"norm_eps": 1e-3}, {}, r"norm_eps is 1e-05 in the new model and 0.001 in .*: give model\.norm_eps=0.001$"),
        ({"mixer_options": {"gate_rank": 3}}, {}, r"gate_rank of gla is .*: give mixer\.options\.gate_rank=3$"),
        (
            {"direction": "bidirectional", "share_directions": "all"},
            {},
            "share_directions is none here and all in",
        ),
    ],
)
@pytest.mark.slow
def test_a_model_that_does_not_fit_is_one_line(
    configure: Any, options: dict[str, Any], data: dict[str, Any], message: str
) -> None:
    config = configure("model.share_directions=none")
    with pytest.raises(ValueError, match=message) as raised:
        DocumentModel().start_from(
            DocumentModel().build(config, INFO), as_loaded(text_model(config, **options), **data), INFO
        )
    assert "\n" not in str(raised.value)


def test_documents_of_another_tokenizer_are_not_read() -> None:
    model = TextClassifier(num_classes=3, vocab_size=257, d_model=16, depth=1)
    DocumentModel().check_reads(model, INFO, INFO)
    other = DocumentInfo(**{**INFO.to_dict(), "tokenizer": None})
    with pytest.raises(ValueError, match="the data has another tokenizer"):
        DocumentModel().check_reads(model, INFO, other)
