"""`longseq predict` on documents: files and folders, what cannot be read, truncation, and reading in segments."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import write_jsonl

from longseq.backbones.classifier import TextClassifier
from longseq.tasks.commands import Predict
from longseq.tasks.data.module import Prediction, Unreadable
from longseq.tasks.document.config import DocumentInfo
from longseq.tasks.document.inputs import DocumentFiles

NAMES = ["fable", "letter", "poem"]


def make_info(**changes: Any) -> DocumentInfo:
    known = {"class_names": NAMES, "multi_label": False, "vocab_size": 257, "separator": 256, "sizes": {}}
    return DocumentInfo(**{**known, "tokenizer": {"kind": "bytes"}, "window": 10, **changes})


def make_model(mixer: str = "deltanet", **options: Any) -> TextClassifier:
    torch.manual_seed(0)
    model = TextClassifier(num_classes=3, vocab_size=257, d_model=16, depth=1, mixer=mixer, **options).double().eval()
    with torch.no_grad():
        model.head.weight.mul_(50)
    return model


@torch.inference_mode()
def classify(
    path: Path, model: TextClassifier | None = None, info: DocumentInfo | None = None, **changes: Any
) -> tuple[list[Prediction | Unreadable], DocumentFiles]:
    keys = Predict(checkpoint="model.ckpt", input=str(path), **changes)
    files = DocumentFiles(str(path), info or make_info(), keys)
    return list(files.predict(model or make_model(), keys)), files


def expect(text: str, model: TextClassifier | None = None) -> dict[str, float]:
    """The probabilities of a text that is read at once."""
    tokens = torch.tensor([[256, *text.encode()]])
    with torch.inference_mode():
        probabilities = (model or make_model())(tokens).softmax(1)[0].tolist()
    return dict(zip(NAMES, probabilities, strict=True))


def check_probabilities(one: Prediction | Unreadable, expected: dict[str, float]) -> None:
    assert isinstance(one, Prediction)
    assert dict(one.classes) == pytest.approx(expected, rel=1e-5)
    values = [value for _, value in one.classes]
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("multi_label", [True, False])
def test_a_document_whose_scores_are_not_finite_gets_no_class(multi_label: bool, tmp_path: Path) -> None:
    model = make_model()
    with torch.no_grad():
        model.body.embedding.weight[ord("z")] = torch.nan
    write_jsonl(tmp_path / "rows.jsonl", [{"text": "a"}, {"text": "zoo"}, {"text": "b"}])
    found, _ = classify(tmp_path / "rows.jsonl", model, make_info(multi_label=multi_label))
    assert [isinstance(one, Prediction) for one in found] == [True, False, True]


def test_rows_of_tables_are_classified(tmp_path: Path) -> None:
    texts = ["once upon a time", "dear reader", "so long lives this"]
    rows = [{"words": text} for text in texts]
    write_jsonl(tmp_path / "a.jsonl", rows)
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    # The column is that of the training, unless the command names one.
    for name, column, info in (("a.jsonl", "words", make_info()), ("a.csv", None, make_info(text_column="words"))):
        found, _ = classify(tmp_path / name, info=info, column=column, batch_size=2)
        for number, (one, text) in enumerate(zip(found, texts, strict=True)):
            check_probabilities(one, expect(text))
            assert one.path == str(tmp_path / name)
            assert one.details == {"document": number, "tokens": len(text) + 1, "cut": 0}


def test_texts_are_prepared_as_by_the_source_of_the_training(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("# A licence\nimport torch\nfrom timm.layers import x\nprint(torch.ones(3), x)\n")
    ((one,), _) = classify(tmp_path / "a.py", info=make_info(source="libraries"))
    check_probabilities(one, expect("print(library.ones(3), x)\n"))


def test_documents_are_cut_as_in_training_and_read_whole_in_segments_where_asked_for(tmp_path: Path) -> None:
    path, text = tmp_path / "long.txt", "the quick brown fox jumps"
    path.write_text(text)
    info = make_info(max_length=11, truncation="tail")
    ((one,), _) = classify(path, info=info)
    check_probabilities(one, expect(text[-10:]))
    assert one.details == {"document": 0, "tokens": 26, "cut": 15}
    for direction in ("forward", "bidirectional"):
        model = make_model(direction=direction)
        ((one,), _) = classify(path, model, info, truncation="none", segment=4, top_k=2)
        expected = expect(text, model)
        check_probabilities(one, {name: expected[name] for name in sorted(expected, key=expected.get)[1:]})  # type: ignore[arg-type]
        assert one.details["cut"] == 0


def test_a_model_that_sees_all_tokens_reads_documents_whole(tmp_path: Path) -> None:
    path, model = tmp_path / "long.txt", make_model("attention")
    path.write_text("the quick brown fox jumps")
    info = make_info(max_length=11, truncation="head")
    ((one,), _) = classify(path, model, info, segment=4)
    check_probabilities(one, expect("the quick ", model))
    limited = make_model(positions="learned", max_length=8)
    ((one,), _) = classify(path, limited)
    assert isinstance(one, Unreadable)


def test_the_tokenizer_must_be_that_of_the_model(tmp_path: Path) -> None:
    """Of another file in the model's folder, tokens would be unknown to the model, or mean something else."""
    (tmp_path / "a.txt").write_text("dear reader")
    for changes in ({"vocab_size": 200}, {"separator": 0}):
        with pytest.raises(ValueError, match="the saved tokenizer is not the one of the training"):
            classify(tmp_path / "a.txt", info=make_info(**changes))


def test_the_readable_texts_of_a_folder_are_classified(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_text("dear reader")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    (tmp_path / "c.jsonl").write_text('{"text": "so long"}\nno json\n{"text": 3}\n{"text": "lives"}\n')
    (tmp_path / "deep" / "f.py").write_text("print()\n")
    found, _ = classify(tmp_path)
    read = [one for one in sorted(found, key=lambda one: one.details["document"]) if isinstance(one, Prediction)]
    for one, text in zip(read, ("dear reader", "so long", "lives", "print()\n"), strict=True):
        check_probabilities(one, expect(text))
    assert [Path(one.path).name for one in found if isinstance(one, Unreadable)] == ["b.txt", "c.jsonl", "c.jsonl"]
