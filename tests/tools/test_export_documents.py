"""Exported document classifiers: padded batches of any size and length, and a client without longseq."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from export_programs import ENGINES, SUFFIXES, need_engine, need_operators, share_program
from representatives import REPRESENTATIVES
from torch import Tensor, nn

from longseq.backbones.classifier import TextClassifier
from longseq.backbones.document_pairs import PairClassifier
from longseq.blocks.pooling import POOLINGS, Pooling
from longseq.tasks.document.batch import truncate
from longseq.tasks.text.tokenizer import tokenizer_from_dict, train_tokenizer
from longseq.tools.export import FORMATS, export_document_classifier
from longseq.tools.export.document_classifier import DocumentClassifierFile
from longseq.tools.export.metadata import document_metadata, encode

PROGRAM = Path(__file__).resolve().parents[2] / "docs" / "programs" / "classify_text.py"
DATA: dict[str, Any] = {
    "class_names": ["ant", "bee", "cat"],
    "multi_label": False,
    "vocab_size": 11,
    "separator": 10,
    "tokenizer": {"kind": "bytes"},
    "window": 64,
    "max_length": None,
    "truncation": "none",
}


def build(mixer: str = "deltanet", *, kind: type[TextClassifier] = TextClassifier, **options: Any) -> Any:
    """A small model whose probabilities depend on the tokens: with fresh weights, they would hardly do."""
    torch.manual_seed(0)
    window = {"mixer_options": {"window": 5}} if mixer == "window_attention" else {}
    model = kind(mixer=mixer, **{"num_classes": 3, "vocab_size": 11, "d_model": 16, "depth": 1, **window, **options})
    for module in model.modules():
        if type(module) is nn.Linear:
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
    return model.eval()


def check_file(model: Any, path: Path, format: str, **options: Any) -> None:
    """Export, and compare documents of other lengths in a batch of another size than any that the export compared."""
    report = export_document_classifier(model, path, format=format, data=DATA, batch_sizes=(1,), **options)
    assert {row.shape[0] for row in report.comparisons} == {1}
    assert len({row.shape[1] for row in report.comparisons}) > 1
    assert all(row.passed for row in report.comparisons)
    compare_with_single_documents(model, FORMATS[format].open_file(path))


def compare_with_single_documents(model: Any, call: Callable[..., Tensor]) -> None:
    tokens, lengths = torch.randint(11, (5, 101)), torch.tensor([101, 64, 1, 7, 65])
    with torch.no_grad():
        alone = torch.cat([model(row[:length][None]) for row, length in zip(tokens, lengths.tolist(), strict=True)])
    assert alone.softmax(-1).std(0).max() > 0.01, "documents must differ"
    torch.testing.assert_close(call(tokens, lengths), alone.softmax(-1), atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixers", "direction"), [([*REPRESENTATIVES[:5]], "bidirectional"), (["deltanet", "attention"], "forward")]
)
def test_files_read_padded_documents_of_any_number_and_length(
    mixers: list[str], direction: str, tmp_path: Path
) -> None:
    model = build("+".join(mixers), depth=len(mixers), direction=direction)
    check_file(model, tmp_path / "model.pt", "torchscript")


@pytest.mark.slow
def test_recurrences_over_padded_documents_can_be_single_nodes(tmp_path: Path) -> None:
    need_operators("onnxruntime")
    path = tmp_path / "model.onnx"
    check_file(build(direction="bidirectional"), path, "onnx", operators="onnxruntime")
    assert "LinearAttention" in [node.op_type for node in onnx.load(str(path)).graph.node]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_other_engines_read_padded_documents(engine: str, tmp_path: Path) -> None:
    check_file(build("attention"), tmp_path / f"model{need_engine(engine)}", engine)


class EveryPooling(nn.Module):
    """The sum of all poolings, so that one export shows that each can be exported."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Pooling(kind, d_model) for kind in POOLINGS)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return torch.stack([part(x, **options) for part in self.parts]).sum(0)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Path]]:
    """A model with n-grams and every pooling that reads both ways, and its files."""
    model = build("attention", direction="bidirectional", vocab_size=270, hashed_ngrams=3, ngram_buckets=100)
    model.pooling = EveryPooling(16)
    folder, files = tmp_path_factory.mktemp("exported"), {}
    with pytest.MonkeyPatch.context() as patch:
        share_program(patch)
        for format in ("torchscript", "onnx"):
            files[format] = folder / f"model{SUFFIXES[format]}"
            export_document_classifier(model, files[format], format=format, data=DATA, batch_sizes=(1, 3))
    return model, files


@pytest.mark.slow
def test_every_pooling(exported: tuple[Any, dict[str, Path]]) -> None:
    model, files = exported
    for format, path in files.items():
        call = FORMATS[format].open_file(path)
        compare_with_single_documents(model, call)
        assert call(torch.zeros(0, 5).long(), torch.zeros(0).long()).shape == (0, 3)


@pytest.mark.slow
def test_lengths_of_another_number_of_documents_are_refused(exported: tuple[Any, dict[str, Path]]) -> None:
    for format, path in exported[1].items():
        call = FORMATS[format].open_file(path)
        for rows, counted in ((3, 1), (1, 3)):
            with pytest.raises(Exception, match=r"cannot be reshaped|is invalid for input of size|to be equal|Guard"):
                call(torch.ones(rows, 6).long(), torch.full((counted,), 4))


@pytest.mark.slow
def test_only_the_padding_may_have_numbers_of_no_token(exported: tuple[Any, dict[str, Path]]) -> None:
    model, files = exported
    tokens, padded = torch.tensor([[3, 4, 5, 6]]), torch.tensor([[3, 4, -1, 999]])
    with torch.no_grad():
        alone, whole = model(tokens[:, :2]).softmax(-1), model(tokens).softmax(-1)
    for format, path in files.items():
        call = FORMATS[format].open_file(path)
        torch.testing.assert_close(call(padded, torch.tensor([2])), alone, atol=1e-5, rtol=0)
        torch.testing.assert_close(call(tokens, torch.tensor([9])), whole, atol=1e-5, rtol=0)
        with pytest.raises(Exception, match=r"(?i)out of (data )?(bounds|range)"):
            call(padded, torch.tensor([3]))


@pytest.mark.slow
def test_pairs_of_documents(tmp_path: Path) -> None:
    model = build(kind=PairClassifier, separator=10)
    path = tmp_path / "model.pt"
    export_document_classifier(model, path, format="torchscript", data=DATA, batch_sizes=(1,))
    pairs = torch.tensor([[10, 1, 2, 3, 10, 4, 5], [10, 6, 10, 7, 0, 0, 0]])
    found = FORMATS["torchscript"].open_file(path)(pairs, torch.tensor([7, 4]))
    torch.testing.assert_close(found[1:], model(pairs[1:, :4]).softmax(-1), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_several_labels_have_a_probability_each(tmp_path: Path) -> None:
    model, path = build(), tmp_path / "model.pt"
    export_document_classifier(model, path, format="torchscript", data={**DATA, "multi_label": True}, batch_sizes=(1,))
    tokens = torch.randint(11, (2, 9))
    found = FORMATS["torchscript"].open_file(path)(tokens, torch.tensor([9, 9]))
    torch.testing.assert_close(found, model(tokens).sigmoid(), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_file_that_reads_the_padding_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_all(self: DocumentClassifierFile, tokens: Tensor, lengths: Tensor) -> Tensor:
        return self.model(tokens, mask=lengths.unsqueeze(1).expand_as(tokens) > 0).softmax(-1)

    monkeypatch.setattr(DocumentClassifierFile, "forward", read_all)
    with pytest.raises(ValueError, match="the torchscript file differs"):
        export_document_classifier(build(), tmp_path / "model.pt", format="torchscript", batch_sizes=(3,))
    assert not list(tmp_path.iterdir())


def load_client() -> Any:
    """The program of the page on exports, which uses neither torch nor longseq."""
    imported = set(re.findall(r"^ *(?:import|from) (\w+)", PROGRAM.read_text(), re.M))
    assert imported == {"json", "numpy", "onnxruntime", "tokenizers"}
    spec = importlib.util.spec_from_file_location("classify_text", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TEXTS = ["so it was", "and so it été", "it", "was it so, or was it not so at all?"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "truncation", "most"),
    [("bytes", "none", None), ("bytes", "middle", 8), ("bytes", "tail", 9), ("learnt", "head_tail", 8),
     ("learnt", "head", 5)],
)  # fmt: skip
def test_a_program_without_longseq_classifies_texts(
    kind: str, truncation: str, most: int | None, exported: tuple[Any, dict[str, Path]], tmp_path: Path
) -> None:
    if kind == "bytes":
        tokenizer = tokenizer_from_dict({"kind": "bytes"})
    else:
        pytest.importorskip("tokenizers")
        tokenizer = train_tokenizer(["so it was, and so it is"] * 3, 270)
    model, files = exported
    data = {
        **DATA,
        "separator": tokenizer.separator,
        "tokenizer": tokenizer.to_dict(),
        "truncation": truncation,
        "max_length": most,
    }
    file = onnx.load(str(files["onnx"]))  # the metadata of a file does not change what it computes
    onnx.helper.set_model_props(file, encode(document_metadata(model, data, extra={})))
    onnx.save(file, str(tmp_path / "model.onnx"))
    wanted = []
    for text in TEXTS:
        tokens = np.array([tokenizer.separator, *tokenizer.encode(text).tolist()])
        read = torch.from_numpy(truncate(tokens, most, truncation, tokenizer.separator))
        wanted.append(model(read[None]).softmax(-1)[0])
    found = load_client().classify(str(tmp_path / "model.onnx"), TEXTS)
    assert [list(one) for one in found] == [["ant", "bee", "cat"]] * len(TEXTS)
    values = torch.tensor([list(one.values()) for one in found])
    torch.testing.assert_close(values, torch.stack(wanted).detach(), atol=1e-4, rtol=0)
