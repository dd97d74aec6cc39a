"""Labelled documents of every format give the same tokens, classes and splits; batches resume and are whole."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longseq.kernels.packing import Packing
from longseq.tasks.document.batch import IGNORED, truncate
from longseq.tasks.document.config import DocumentInfo
from longseq.tasks.document.data import DocumentData
from tests.support.documents import make_rows, open_data, write_jsonl

Rows = list[dict[str, Any]]


def write_csv(path: Path, rows: Rows) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["label", "text"], *([row["label"], row["text"]] for row in rows)])
    return path


def write_folder(path: Path, rows: Rows) -> Path:
    for index, row in enumerate(rows):
        (path / row["label"]).mkdir(parents=True, exist_ok=True)
        (path / row["label"] / f"{index}.txt").write_text(row["text"])
    return path


def write_saved(path: Path, rows: Rows) -> Path:
    """A saved set whose labels are numbers with names."""
    _named_set(rows).save_to_disk(str(path))
    return path


def write_hub(path: Path, rows: Rows) -> Path:
    """The same set as a file of the Hugging Face hub."""
    _named_set(rows).to_parquet(str(path))
    return path


def _named_set(rows: Rows) -> Any:
    datasets = pytest.importorskip("datasets")
    names = sorted({row["label"] for row in rows})
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
    columns = {"text": [row["text"] for row in rows], "label": [names.index(row["label"]) for row in rows]}
    return datasets.Dataset.from_dict(columns, features=features)


FORMATS: dict[str, Callable[[Path, Rows], Path]] = {
    "a.jsonl": write_jsonl,
    "a.csv": write_csv,
    "folder": write_folder,
    "saved": write_saved,
    "hub.parquet": write_hub,
}


def contents(data: DocumentData, stage: str) -> set[tuple[str, str]]:
    """The texts of a split, each with the name of its class."""
    split, tokenizer = data.splits[stage], data.info.make_tokenizer()
    return {
        (tokenizer.decode(split.read(number).tolist()), data.info.class_names[split.targets[number]])
        for number in range(split.documents)
    }


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_splits(tmp_path: Path, name: str) -> None:
    rows = make_rows()
    FORMATS[name](tmp_path / name, rows)
    data = open_data(tmp_path, root=str(tmp_path / name))
    assert data.info.class_names == ["bird", "fish", "tree"]
    assert data.info.sizes == {"train": 36, "val": 12, "test": 12}
    assert data.info.class_counts == [12, 12, 12]
    splits = {stage: contents(data, stage) for stage in ("train", "val", "test")}
    assert set.union(*splits.values()) == {(row["text"], row["label"]) for row in rows}
    # The order of a file does not move a document to another split.
    other = open_data(tmp_path, root=str(write_jsonl(tmp_path / "reversed.jsonl", rows[::-1])))
    assert contents(other, "test") == splits["test"]


def test_batches_hold_each_document_with_its_class(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_rows())
    data = open_data(tmp_path, root=str(path), max_length=200, truncation="head", batch_size=1024)
    split = data.splits["test"]
    found = {}
    for inputs, targets in data.test_dataloader():
        assert inputs.units == int((inputs.numbers >= 0).sum())
        assert bool((targets[inputs.numbers < 0] == IGNORED).all())
        assert inputs.tokens.shape == (1, 1024)
        Packing(inputs.cu_seqlens, 1024, max_seqlen=inputs.max_seqlen)  # checks the borders
        parts = [inputs.tokens[0, a:b] for a, b in zip(inputs.cu_seqlens, inputs.cu_seqlens[1:], strict=False)]
        for place, number in enumerate(inputs.numbers.tolist()):
            if number >= 0:
                assert len(parts[place]) == inputs.lengths[place]
                assert inputs.whole_lengths[place] == split.whole_lengths[number] >= inputs.lengths[place]
                found[number] = (parts[place].tolist(), int(targets[place]))
    assert len(found) == split.documents
    assert found == {n: (split.read(n).tolist(), int(split.targets[n])) for n in range(split.documents)}


def test_truncation_keeps_the_separator() -> None:
    tokens = np.array([256, *range(10)])
    expected = {
        "head": [0, 1, 2, 3, 4],
        "tail": [5, 6, 7, 8, 9],
        "head_tail": [0, 1, 2, 8, 9],
        "middle": [2, 3, 4, 5, 6],
    }
    for truncation, read in expected.items():
        assert truncate(tokens, 6, truncation, 256).tolist() == [256, *read]
        assert truncate(tokens[1:], 5, truncation, None).tolist() == read
        assert truncate(tokens, 11, truncation, 256).tolist() == tokens.tolist()
    assert truncate(tokens, 2, "none", 256).tolist() == tokens.tolist()


def test_split_files_class_weights_and_documents_in_two_splits(tmp_path: Path) -> None:
    rows = make_rows()
    rows = [row for row in rows if row["label"] != "tree" or int(row["text"].split()[-1]) % 2]
    write_jsonl(tmp_path / "train.jsonl", rows)
    write_jsonl(tmp_path / "test.jsonl", [*rows[:4], *make_rows(12, seed=1)])
    keys = {"root": str(tmp_path), "train": "train.jsonl", "test": "test.jsonl", "class_weights": "balanced"}
    data = open_data(tmp_path, **keys)
    assert data.info.sizes["test"] == 16
    counts = data.info.class_counts
    assert data.info.class_weights == pytest.approx([sum(counts) / (3 * count) for count in counts])
    texts = {text for text, _ in contents(data, "test")}
    assert {row["text"] for row in rows[:4]} <= texts
    dropped = open_data(tmp_path, **keys, duplicates="drop")
    assert contents(dropped, "test") == contents(data, "test")
    for stage in ("train", "val"):
        assert not contents(dropped, stage) & contents(dropped, "test")


def test_equal_documents_go_to_one_split(tmp_path: Path) -> None:
    rows = make_rows(30)
    data = open_data(tmp_path, root=str(write_jsonl(tmp_path / "a.jsonl", rows * 3)))
    splits = [contents(data, stage) for stage in ("train", "val", "test")]
    assert sum(map(len, splits)) == len(set.union(*splits)) == 30


def test_a_tokenizer_is_trained_on_the_training_documents_alone(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_rows())
    data = open_data(tmp_path, root=str(path), tokenizer="train:300")
    plain = open_data(tmp_path, root=str(path))
    assert contents(data, "test") == contents(plain, "test")
    assert data.splits["train"].lengths.sum() < plain.splits["train"].lengths.sum()
    assert data.info.vocab_size == 300
    # Evaluation takes the tokenizer of the model, whose file may be gone, and refuses another one.
    config = {"data": {**vars(data.keys), "tokenizer": "gone.json"}, "seed": 0, "recipe": {"batch_size": 2048}}
    again = DocumentData.for_evaluation(config, {}, split="test", trained=data.info, batch_size=64)
    assert contents(again, "test") == contents(data, "test")
    with pytest.raises(ValueError, match=r"data\.tokenizer=bytes is another tokenizer"):
        DocumentData.for_evaluation(config, {"tokenizer": "bytes"}, split="test", trained=data.info, batch_size=64)


def test_bad_lines_are_left_out_and_listed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_jsonl(
        path, [*make_rows(30), "{", {"text": "", "label": "fish"}, {"text": "no label"}, {"text": 3, "label": "fish"}]
    )
    assert sum(open_data(tmp_path, root=str(path)).info.sizes.values()) == 30  # type: ignore[arg-type]
    (listed,) = (tmp_path / "cache").glob("*/left_out.txt")
    assert len(listed.read_text().splitlines()) == 4


def test_training_reads_other_windows_of_a_document_in_each_epoch(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_rows())
    keys: dict[str, Any] = {"max_length": 40, "truncation": "head", "batch_size": 1024, "random_crops": True}
    data = open_data(tmp_path, root=str(path), **keys)

    def windows(epoch: int, made: DocumentData = data) -> dict[int, list[int]]:
        loader = made.train_dataloader()
        loader.sampler.set_epoch(epoch)
        found = {}
        for inputs, _ in loader:
            for place, number in enumerate(inputs.numbers.tolist()):
                if number >= 0:
                    start = int(inputs.cu_seqlens[place])
                    found[number] = inputs.tokens[0, start : start + int(inputs.lengths[place])].tolist()
        return found

    first, second = windows(0), windows(1)
    split = data.splits["train"]
    whole = split._replace(max_length=None, truncation="none")
    for number, tokens in first.items():
        text = whole.read(number).tolist()
        assert len(tokens) == min(40, len(text))
        assert tokens[0] == text[0] == data.info.separator
        assert tokens[1:] in ([text[at : at + 39] for at in range(1, len(text) - 38)] or [text[1:]])
    both = [number for number in first if number in second]
    assert sum(first[number] != second[number] for number in both) > len(both) / 2
    assert windows(1, open_data(tmp_path, root=str(path), **keys)) == second


def test_several_labels_in_lists_in_cells_and_in_columns(tmp_path: Path) -> None:
    rows = [
        {"text": f"document {i} {'x' * i}", "label": [n for n, k in (("a", 2), ("b", 3)) if i % k == 0]}
        for i in range(30)
    ]
    write_jsonl(tmp_path / "lists.jsonl", rows)
    write_csv(tmp_path / "cells.csv", [{**row, "label": "; ".join(row["label"])} for row in rows])
    lines = [f"{row['text']},{int('a' in row['label'])},{float('b' in row['label'])},0" for row in rows]
    (tmp_path / "columns.csv").write_text("\n".join(["text,a,b,never", *lines, ""]))
    found = []
    for name, keys in (
        ("lists.jsonl", {}),
        ("cells.csv", {"label_delimiter": ";"}),
        ("columns.csv", {"label_column": ["a", "b", "never"]}),
    ):
        data = open_data(tmp_path, root=str(tmp_path / name), multi_label=True, class_weights="balanced", **keys)
        assert data.info.class_names == ["a", "b"]
        split = data.splits["train"]
        texts = [bytes(split.read(n)[1:].tolist()).decode() for n in range(split.documents)]
        found.append(dict(zip(texts, split.targets.tolist(), strict=True)))
        counts, size = split.targets.sum(0), split.documents
        assert data.info.class_weights == pytest.approx(((size - counts) / counts).tolist())
    assert found[0] == found[1] == found[2]
    for text, target in found[0].items():
        number = int(text.split()[1])
        assert target == [number % 2 == 0, number % 3 == 0]


def test_evaluation_on_another_file_opens_it_alone(tmp_path: Path) -> None:
    data = open_data(tmp_path, root=str(write_jsonl(tmp_path / "a.jsonl", make_rows())))
    config = {"data": vars(data.keys), "seed": 0, "recipe": {"batch_size": 2048}}
    (tmp_path / "a.jsonl").unlink()
    other = write_jsonl(tmp_path / "other.jsonl", make_rows(9, seed=5)[1:])

    def measure(config: dict[str, Any], trained: DocumentInfo = data.info) -> DocumentData:
        return DocumentData.for_evaluation(config, {"test": str(other)}, split="test", trained=trained, batch_size=64)

    found = measure(config)
    assert found.info.sizes["test"] == 8
    assert found.info.class_names == data.info.class_names
    assert contents(measure({}), "test") == contents(found, "test")
    # Without the run of a model, documents are cut as in its training.
    short = open_data(tmp_path, root=str(other), max_length=20, truncation="tail", segment=16)
    saved = measure({}, short.info)
    assert contents(saved, "test") == {(text[-19:], label) for text, label in contents(found, "test")}
    assert saved.info.segment == 16
    write_jsonl(other, [{"text": "a stone", "label": "stone"}])
    with pytest.raises(ValueError, match="stone"):
        measure(config)


def test_documents_of_the_training_are_not_measured_by_other_shares(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_rows(90))
    data = open_data(tmp_path, root=str(path), validation=0.2, test=0.2)

    def measure(split: str, **changes: Any) -> set[Any]:
        config = {"data": vars(data.keys), "recipe": {"batch_size": 2048}}
        found = DocumentData.for_evaluation(config, changes, split=split, trained=data.info, batch_size=64)
        return contents(found, split)

    for changes, split in (({"test": 0.3}, "test"), ({"test": 0.3}, "val"), ({"validation": 0.3}, "val")):
        with pytest.raises(ValueError, match=rf"^data\.{next(iter(changes))}=0\.3"):
            measure(split, **changes)
    assert measure("test", validation=0.4) == contents(data, "test")
    assert measure("test", test=0.1) < contents(data, "test")
    assert not measure("val", test=0.1) & contents(data, "train")


@pytest.mark.parametrize(
    ("rows", "keys"),
    [
        ([*make_rows(30), {"text": "a stone", "label": "stone"}], {}),  # a class of one document
        ([{**row, "label": "fish"} for row in make_rows(30)], {}),  # one class
        (make_rows(30), {"class_weights": {"stone": 2.0}}),  # a class that training lacks
        (make_rows(30), {"eval_batch_size": 30}),  # less than the longest document
    ],
)
def test_what_would_be_measured_wrongly_is_an_error(tmp_path: Path, rows: Rows, keys: dict[str, Any]) -> None:
    write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(ValueError):  # noqa: PT011
        open_data(tmp_path, root=str(tmp_path / "a.jsonl"), **keys).test_dataloader()
