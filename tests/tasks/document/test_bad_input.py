"""Mistakes in labelled documents are told in one line that says where, and nothing is lost without a word."""

from __future__ import annotations

import csv
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.documents import make_rows, open_data, write_jsonl

ROWS = make_rows(30)


def _folder(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    return path


def _csv(path: Path, text: str) -> None:
    (path / "a.csv").write_text(text)


def _jsonl(path: Path, rows: Any) -> None:
    write_jsonl(path / "a.jsonl", rows)


# What is written, the keys, and the message.
REFUSED: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str]] = {
    "no root": (lambda path: None, {"root": None}, "give data.root=PATH"),
    "no file": (lambda path: None, {"root": "b.jsonl"}, "data.root=.*b.jsonl does not exist"),
    "no split file": (
        lambda path: _jsonl(path, ROWS),
        {"root": ".", "train": "a.jsonl", "test": "b.jsonl"},
        "data.test=b.jsonl, below data.root=.*, does not exist",
    ),
    "splits in the root": (
        lambda path: [write_jsonl(path / name, ROWS) for name in ("train.jsonl", "test.jsonl")],
        {"root": "."},
        "holds test.jsonl, train.jsonl: give data.train=train.jsonl data.test=test.jsonl",
    ),
    "splits by the first word": (
        lambda path: [
            write_jsonl(_folder(path / "data") / f"{split}-0-of-1.jsonl", ROWS) for split in ("train", "test")
        ],
        {"root": "."},
        "holds test-0-of-1.jsonl, train-0-of-1.jsonl: give data.train=data/train-0-of-1.jsonl data.test=data/test-0-of",
    ),
    "splits by the last word": (
        lambda path: [write_jsonl(path / f"film_{split}.jsonl", ROWS) for split in ("train", "valid", "test")],
        {"root": "."},
        "give data.train=film_train.jsonl data.validation=film_valid.jsonl data.test=film_test.jsonl$",
    ),
    "splits with capitals": (
        lambda path: [write_jsonl(_folder(path / split) / "a.jsonl", ROWS) for split in ("Train", "Test")],
        {"root": "."},
        "holds Test, Train: give data.train=Train data.test=Test$",
    ),
    "unknown column": (
        lambda path: _jsonl(path, ROWS),
        {"label_column": "genre"},
        "a.jsonl has no column 'genre': give data.label_column=NAME, one of text, label",
    ),
    "missing column": (
        lambda path: _jsonl(path, [{"body": "x", "label": "a"}]),
        {},
        "a.jsonl has no column 'text': give data.text_column=NAME, one of body, label",
    ),
    "unknown label": (
        lambda path: [_jsonl(path, ROWS), write_jsonl(path / "b.jsonl", [*ROWS[:2], {"text": "t", "label": "stone"}])],
        {"test": "b.jsonl", "train": "a.jsonl", "root": "."},
        r"the label 'stone' \(.*b.jsonl, line 3\) is none of the 3 classes of the training documents: bird, fish, tree",
    ),
    "one document of a class": (
        lambda path: _jsonl(path, [*ROWS, {"text": "a stone", "label": "stone"}]),
        {},
        r"the class 'stone' has one document \(.*a.jsonl, line 31\), and a split .* needs one",
    ),
    "equal labels": (
        lambda path: _jsonl(path, [{**row, "label": "fish"} for row in ROWS]),
        {},
        "all 18 training documents have the label 'fish': a classifier needs two",
    ),
    "stop at a bad line": (
        lambda path: _jsonl(path, [*ROWS, "{", {"text": "  ", "label": "fish"}]),
        {"on_bad_line": "stop"},
        r"2 of 32 documents of .* \(data.on_bad_line=stop\): .*a.jsonl, line 31: no JSON .*line 32: an empty document",
    ),
    "ragged csv": (
        lambda path: _csv(path, "text,label\none, two,fish\nthree\n"),
        {"root": "a.csv"},
        "2 that cannot be read: .*a.csv, line 2: 3 cells under a header of 2; .*line 3: 1 cells under a header of 2",
    ),
    "no label": (
        lambda path: _jsonl(path, [{"text": "one", "label": " "}, {"text": "two", "label": ["a", "b"]}]),
        {},
        "line 1: no label in column 'label'; .*line 2: a list in column 'label': give data.multi_label=true",
    ),
    "label of another type": (
        lambda path: _jsonl(path, [{"text": "one", "label": {"name": "a"}}, {"text": "two", "label": [["a"]]}]),
        {"multi_label": True},
        "line 1: an object in column 'label', where text, a number, true or false is expected; .*line 2: a list in",
    ),
    "text outside of class folders": (
        lambda path: [
            (path / "texts" / "class").mkdir(parents=True),
            (path / "texts" / "class" / "a.txt").write_text("t"),
            (path / "texts" / "b.txt").write_text("t"),
        ],
        {"root": "texts", "on_bad_line": "stop"},
        "b.txt: a text without a label: put each class's files into a folder of its name",
    ),
    "cache among the documents": (
        lambda path: _jsonl(path, ROWS),
        {"root": "."},
        "data.cache=.*cache lies in the folder .*, which is read: the next run would read what is written there, too",
    ),
    "no truncation": (lambda path: _jsonl(path, ROWS), {"max_length": 10}, "data.max_length=10 cuts .*truncation=head"),
    "long document": (
        lambda path: _jsonl(path, ROWS),
        {"eval_batch_size": 30},
        r"longest document to evaluate has \d+ tokens, and a batch holds 30: give data.eval_batch_size=\d+ or more",
    ),
    "no such tokenizer": (lambda path: _jsonl(path, ROWS), {"tokenizer": "b.json"}, "tokenizer=b.json is no file"),
    "init without init": (
        lambda path: _jsonl(path, ROWS),
        {"tokenizer": "init"},
        "data.tokenizer=init .* give init=FILE",
    ),
    "no test": (lambda path: _jsonl(path, ROWS), {"test": None}, "data.test=null: give data.test=FILE, or the share"),
    "unknown source": (lambda path: None, {"source": "hub"}, "data.source=hub is unknown: choose one of files, "),
    "file for another source": (
        lambda path: None,
        {"source": "libraries", "root": None, "test": "b.jsonl"},
        "data.test=b.jsonl is a file, which data.source=libraries does not read: give data.source=files too",
    ),
    "one column for both": (
        lambda path: _jsonl(path, ROWS),
        {"label_column": "text", "validation": "a.jsonl", "test": "a.jsonl"},
        "data.text_column and data.label_column both name the column 'text', which .*: give data.label_column=NAME",
    ),
    "one column among labels": (
        lambda path: _jsonl(path, ROWS),
        {"label_column": ["label", "body"], "text_column": "body", "multi_label": True},
        "both name the column 'body'",
    ),
    "empty delimiter": (
        lambda path: _jsonl(path, ROWS),
        {"multi_label": True, "label_delimiter": ""},
        "data.label_delimiter is empty and divides nothing: give the text between labels",
    ),
    "weight of a class that training lacks": (
        lambda path: [_jsonl(path, [row for row in ROWS if row["label"] != "tree"])],
        {"class_weights": {"fish": 1.0, "tree": 2.0}},
        "data.class_weights.tree is unknown: the keys of data.class_weights are bird, fish",
    ),
    "key of another source": (
        lambda path: None,
        {"source": "libraries", "root": "."},
        "data.root=.* is not read by data.source=libraries: set data.root=null",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_one_line(tmp_path: Path, name: str) -> None:
    write, keys, message = REFUSED[name]
    write(tmp_path)
    root = keys.get("root", "a.jsonl")
    with pytest.raises(ValueError, match=message) as error:
        open_data(tmp_path, **{**keys, "root": None if root is None else str(tmp_path / root)})
    assert "\n" not in str(error.value)


def test_classes_that_only_look_alike_are_told(tmp_path: Path, caplog: Any) -> None:
    spelled = {"fish": ["1", "1.0 ", "01"], "bird": ["\u00e9", "e\u0301", "0.5"], "tree": ["tree", "Tree", ".50"]}
    rows = [{**row, "label": spelled[row["label"]][index // 3 % 3]} for index, row in enumerate(make_rows(60))]
    _jsonl(tmp_path, rows)
    assert open_data(tmp_path, root=str(tmp_path / "a.jsonl")).info.num_classes == 9
    (told,) = (record.message for record in caplog.records if "alike" in record.message)
    assert "different ones: '.50' and '0.5', '01' and '1' and '1.0 ', 'Tree' and 'tree'; 1 more (blanks" in told


@pytest.mark.parametrize(
    ("labels", "keys", "expected"),
    [
        (["1", "2"], {}, None),
        ([1, 10**400], {}, None),  # more than a float holds
        ([1, 10**4299, "9" * 5000], {}, None),  # more digits than Python reads as an int
        (["1e400", "12e34567890123456789", "2"], {}, None),
        (["a", "b", "NaN"], {}, "'NaN' is a class of its own: leave out these samples if it means that the label is"),
        (["a", "b", "none"], {}, None),
        (["1" * 40 + "1", "1" * 40 + "2"], {}, None),  # that differ beyond the digits of a Decimal
        (["1.5", "n", "a/b"], {}, None),
        ([0.5, 1, 2.25], {}, "labels are numbers with a fraction, such as 0.5: each of the 3 is a class of its own"),
        (
            ["a", "b", "b; a"],
            {},
            "'b; a' .* 'b' and 'a': .* give data.multi_label=true \"data.label_delimiter=';'\"",
        ),
        (["a", "b", "a|b"], {"multi_label": True}, "'a|b' is .* several labels, give \"data.label_delimiter='|'\""),
        (["a", "b", "a|b"], {"multi_label": True, "label_delimiter": "|"}, None),
    ],
)
def test_labels_that_may_mean_something_else_are_told(
    tmp_path: Path, caplog: Any, labels: list[Any], keys: dict[str, Any], expected: str | None
) -> None:
    _jsonl(tmp_path, [{**row, "label": labels[index % len(labels)]} for index, row in enumerate(make_rows(60))])
    open_data(tmp_path, root=str(tmp_path / "a.jsonl"), **keys)
    told = [record.message for record in caplog.records]
    assert len(told) == (0 if expected is None else 1), told
    assert expected is None or re.search(expected.replace("|", r"\|"), told[0])


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_a_column_of_splits_that_is_not_read_is_told(tmp_path: Path, caplog: Any, kind: str) -> None:
    """All lines are training lines otherwise, also those that are called test."""
    for held_out, count in (("test", 1), ("train", 0)):
        rows = [{**row, "Split": "Train" if index % 3 else held_out} for index, row in enumerate(make_rows(60))]
        with (tmp_path / f"a.{kind}").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0], delimiter="," if kind == "csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
        caplog.clear()
        open_data(tmp_path, root=str(tmp_path / f"a.{kind}"))
        told = [
            record.message
            for record in caplog.records
            if "calls 20 lines test, and all lines are read as" in record.message
        ]
        assert len(told) == count, caplog.text


def test_folders_without_a_text_are_told(tmp_path: Path, caplog: Any) -> None:
    for index, row in enumerate(make_rows(60)):
        file = tmp_path / "texts" / row["label"] / f"{index}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(row["text"], encoding="utf-8")
    (tmp_path / "texts/.git").mkdir()
    open_data(tmp_path, root=str(tmp_path / "texts"))
    assert not caplog.records
    (tmp_path / "texts/whale/deep").mkdir(parents=True)
    open_data(tmp_path, root=str(tmp_path / "texts"))
    (told,) = (record.message for record in caplog.records)
    assert told == f"{tmp_path / 'texts'}: no text in whale/: no class is named so"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems take names in Unicode alone")
def test_a_class_whose_folder_has_no_unicode_name_is_told(tmp_path: Path) -> None:
    for index, row in enumerate(make_rows(60)):
        folder = os.fsencode(tmp_path / "texts") + (b"/caf\xe9" if row["label"] == "tree" else b"/other")
        os.makedirs(folder, exist_ok=True)
        Path(os.fsdecode(folder), f"{index}.txt").write_text(row["text"], encoding="utf-8")
    with pytest.raises(ValueError, match="have the label 'other'"):
        open_data(tmp_path, root=str(tmp_path / "texts"))
    (listed,) = (tmp_path / "cache").glob("*/left_out.txt")
    assert "its folder, which names the class, has a name that is no UTF-8: rename it" in listed.read_text()


def test_bad_lines_are_counted_listed_and_left_out(tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [*ROWS, "{", {"text": "", "label": "fish"}, {"text": "no label"}, {"text": 3, "label": "fish"}])
    with path.open("ab") as file:
        file.write(b'{"text": "b\xff", "label": "fish"}\n')
    data = open_data(tmp_path, root=str(path))
    assert sum(data.info.sizes.values()) == 30  # type: ignore[arg-type]
    (told,) = (record.message for record in caplog.records if "left out" in record.message)
    assert told.startswith("5 of 35 documents of a cannot be read and are left out: ")
    (listed,) = (tmp_path / "cache").glob("*/left_out.txt")
    assert f"all in {listed}" in told
    reasons = [line.removeprefix(f"{path}, line ") for line in listed.read_text().splitlines()]
    assert [one.split(":")[0] for one in reasons] == ["31", "32", "33", "34", "35"]
    for part, reason in zip(
        ("no JSON", "an empty document", "no label in", "no text in", "no UTF-8"), reasons, strict=True
    ):
        assert part in reason
    caplog.clear()
    open_data(tmp_path, root=str(path))
    assert any("left out" in record.message for record in caplog.records)  # from the cache too
    for tokenizer in ("bytes", "train:300"):  # which reads the training documents twice
        caplog.clear()
        open_data(
            tmp_path,
            root=str(tmp_path),
            **dict.fromkeys(("train", "validation", "test"), "a.jsonl"),
            tokenizer=tokenizer,
        )
        assert sum("left out" in record.message for record in caplog.records) == 1, "splits share the file"
