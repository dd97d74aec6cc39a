"""Classifiers of documents in transformers: the same folder, the same scores, the pipeline and the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import longseq
from longseq.backbones.classifier import TextClassifier
from longseq.tasks.document.config import DocumentInfo
from longseq.tasks.training.checkpoint import load
from longseq.tokenizer_files import BYTES

pytest.importorskip("transformers", reason='needs transformers: pip install "longseq[text]"')

from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from longseq.tools.hugging_face.sequence_classification import LongseqDocumentConfig, LongseqForSequenceClassification

NAMES = ["dull", "fair", "good"]
TEXTS = ["a short one", "another, which is longer", "état"]


def make(direction: str = "bidirectional", *, multi_label: bool = False, **text: Any) -> TextClassifier:
    torch.manual_seed(0)
    model = TextClassifier(
        num_classes=3, vocab_size=257, d_model=16, depth=1, mlp=None, mixer="deltanet", direction=direction
    )
    with torch.no_grad():
        model.head.weight.mul_(50)
    cut = {"max_length": None, "truncation": "none", **text}
    known = {"vocab_size": 257, "separator": 256, "class_names": NAMES, "multi_label": multi_label, **cut}
    model.text = {"tokenizer": dict(BYTES), "window": 64, **known}
    return model.eval()


def encode(text: str) -> Tensor:
    return torch.tensor([[256, *text.encode()]])


@pytest.mark.parametrize("multi_label", [False, True])
def test_the_pipeline_scores_what_longseq_saved(multi_label: bool, tmp_path: Path) -> None:
    model = make(multi_label=multi_label)
    model.save_pretrained(tmp_path)
    classify = pipeline("text-classification", model=str(tmp_path), device="cpu")
    found = classify(TEXTS, batch_size=2, top_k=None)  # padded to the longest of two
    for text, scores in zip(TEXTS, found, strict=True):
        logits = model(encode(text))[0].detach()
        wanted = logits.sigmoid() if multi_label else logits.softmax(-1)
        assert {one["label"] for one in scores} == set(NAMES)
        for one in scores:
            assert one["score"] == pytest.approx(float(wanted[NAMES.index(one["label"])]), abs=1e-5)
    assert not (tmp_path / "generation_config.json").exists()
    assert 'pipeline("text-classification"' in (tmp_path / "README.md").read_text()


def test_one_folder_serves_both_libraries(tmp_path: Path) -> None:
    model = make("forward", max_length=20, truncation="tail")
    model.save_pretrained(tmp_path / "ours")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours")
    assert isinstance(theirs, LongseqForSequenceClassification)
    assert theirs.config.id2label == dict(enumerate(NAMES))
    assert (theirs.config.vocab_size, theirs.config.hidden_size, theirs.config.num_hidden_layers) == (257, 16, 1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    tokenizer.save_pretrained(tmp_path / "theirs")
    back = longseq.from_pretrained(tmp_path / "theirs")
    assert back.text == model.text
    assert all(torch.equal(back.state_dict()[name], value) for name, value in model.state_dict().items())
    long = "a text of more than twenty bytes"
    assert tokenizer(long, truncation=True)["input_ids"] == [256, *long.encode()[-19:]]
    for folder in ("ours", "theirs"):  # as `longseq evaluate` and `predict` load it
        loaded = load(tmp_path / folder, tasks=["document"])
        info = DocumentInfo.from_dict(loaded.data)
        assert (info.class_names, info.separator, info.window, info.vocab_size) == (NAMES, 256, 64, 257)
        assert (info.truncation, info.max_length, info.multi_label) == ("tail", 20, False)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_score_and_the_loss_is_that_of_the_problem(side: str) -> None:
    model = LongseqForSequenceClassification(
        LongseqDocumentConfig(model_args={"vocab_size": 257, "d_model": 16, "depth": 1, "mlp": None}, num_labels=3)
    )
    model.model.load_state_dict(make("forward").state_dict())
    model = model.double().eval()
    rows = [encode(text)[0].tolist() for text in TEXTS]
    longest = max(map(len, rows))
    padding = [[0] * (longest - len(row)) for row in rows]
    batch = [pad + row if side == "left" else row + pad for row, pad in zip(rows, padding, strict=True)]
    mask = torch.tensor([[1] * len(row) + [0] * len(pad) for row, pad in zip(rows, padding, strict=True)])
    inputs = {"input_ids": torch.tensor(batch), "attention_mask": mask.flip(1) if side == "left" else mask}
    alone = torch.cat([model(encode(text)).logits for text in TEXTS])
    labels = torch.tensor([2, 0, 1])
    output = model(**inputs, labels=labels)
    torch.testing.assert_close(output.logits, alone)
    torch.testing.assert_close(output.loss, functional.cross_entropy(alone, labels))
    model.config.problem_type = "multi_label_classification"
    several = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]).double()
    wanted = functional.binary_cross_entropy_with_logits(alone, several)
    torch.testing.assert_close(model(**inputs, labels=several, return_dict=False)[0], wanted)


@pytest.mark.parametrize("targets", ["all-linear", ["in_proj"], ["in_proj", "head"]])
@pytest.mark.slow
def test_a_new_head_is_trained_and_saved_with_an_adapter(targets: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    make().save_pretrained(tmp_path / "model")

    def load(seed: int) -> Any:
        torch.manual_seed(seed)
        options = {"num_labels": 5, "ignore_mismatched_sizes": True}
        return AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", **options)

    model, tokens, labels = load(1), torch.randint(0, 256, (5, 6)), torch.arange(5)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, task_type="SEQ_CLS", target_modules=targets))
    learning = [value for value in adapted.parameters() if value.requires_grad]
    optimizer = torch.optim.SGD(learning, 0.1)
    before = adapted(input_ids=tokens, labels=labels).loss
    before.backward()
    assert all(value.grad is not None for value in learning)
    optimizer.step()
    adapted.eval()
    logits = adapted(input_ids=tokens).logits.detach()
    adapted.save_pretrained(tmp_path / "adapter")
    if "head" not in targets:  # then the head has an adapter, and its new weights are the user's to save
        assert {name for name, _ in adapted.named_parameters() if "head" in name} == {
            f"base_model.model.model.head.{part}.{name}"
            for part in ("original_module", "modules_to_save.default")
            for name in ("weight", "bias")
        }
        again = peft.PeftModel.from_pretrained(load(2), tmp_path / "adapter").eval()
        torch.testing.assert_close(again(input_ids=tokens).logits, logits)
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(longseq.from_pretrained(tmp_path / "merged")(tokens), logits)
