"""`longseq prepare`: every format gives the same tokens."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import multiprocessing
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from longseq.tasks.text.prepare import hashes_of, prepare, split_numbers
from longseq.tasks.text.sources import DELIMITERS, Columns, Document, Malformed, find_parts, read_part, read_rows
from longseq.tasks.text.store import SPLITS, TokenStore, open_store
from longseq.tasks.text.tokenizer import tokenizer_from_dict, train_tokenizer
from longseq.tools import cli

FRACTIONS = {"validation": 0.2, "test": 0.2}
TEXTS = [f'document {i}: żółw {"x" * (i % 7)}\nand, a "second" line' for i in range(60)]


def write_jsonl(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text, "more": 1}, ensure_ascii=False) + "\n" for text in texts))


def write_csv(path: Path, texts: list[str]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writerows([["more", "text"], *([1, text] for text in texts)])


def write_parquet(path: Path, texts: list[str]) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"more": list(range(len(texts))), "text": texts}), path, row_group_size=7)


def write_folder(path: Path, texts: list[str]) -> None:
    (path / "below").mkdir(parents=True)
    (path / ".hidden").write_text("not read")
    for index, text in enumerate(texts):
        (path / "below" / f"{index:03}.txt").write_text(text)


def write_saved(path: Path, texts: list[str]) -> None:
    pytest.importorskip("datasets").Dataset.from_dict({"text": texts}).save_to_disk(str(path))


def compress_zstd(content: bytes) -> bytes:
    return pytest.importorskip("pyarrow").compress(content, codec="zstd", asbytes=True)


COMPRESSORS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": compress_zstd}


def write_compressed(path: Path, texts: list[str]) -> None:
    """In two pieces, as programs write that compress in parallel."""
    write_jsonl(path, texts)
    content, compress = path.read_bytes(), COMPRESSORS[path.suffix]
    path.write_bytes(compress(content[: len(content) // 3]) + compress(content[len(content) // 3 :]))


WRITERS: dict[str, Callable[[Path, list[str]], None]] = {
    "a.jsonl": write_jsonl,
    **{f"a.jsonl{ending}": write_compressed for ending in COMPRESSORS},
    "a.csv": write_csv,
    "a.tsv": write_csv,
    "a.parquet": write_parquet,
    "folder": write_folder,
    "saved": write_saved,
}


def run(source: Path, output: Path, *, size: int = 500, **options: Any) -> TokenStore:
    columns = options.pop("columns", Columns())
    options = {"fractions": FRACTIONS, "processes": 1, **options}
    prepare(find_parts([str(source)], columns, size=size), output, columns=columns, **options)
    return open_store(output)


def documents(store: TokenStore) -> dict[str, list[str]]:
    """The texts of each split, as the tokenizer decodes them."""
    tokenizer = tokenizer_from_dict(store.tokenizer)
    found = {}
    for split, corpus in store.splits.items():
        spans = zip(corpus.offsets[:-1].tolist(), corpus.offsets[1:].tolist(), strict=True)
        rows = [corpus.tokens[start:stop].tolist() for start, stop in spans]
        assert all(row[0] == store.separator and store.separator not in row[1:] for row in rows)
        found[split] = [tokenizer.decode(row) for row in rows]
        assert corpus.byte_counts.tolist() == [len(text.encode()) for text in found[split]]
    return found


def split_texts(texts: list[str]) -> dict[str, list[str]]:
    numbers = split_numbers(hashes_of([Document(text) for text in texts]), FRACTIONS)
    return {
        split: [text for text, number in zip(texts, numbers, strict=True) if number == index]
        for index, split in enumerate(SPLITS)
    }


@pytest.mark.parametrize("name", WRITERS)
def test_each_format_gives_the_same_documents(tmp_path: Path, name: str) -> None:
    texts = [*TEXTS, TEXTS[3], "", TEXTS[0], " \n ", "\u3000"]
    WRITERS[name](tmp_path / name, texts)
    store = run(tmp_path / name, tmp_path / "out")
    expected = split_texts(TEXTS)
    assert documents(store) == expected
    assert all(expected.values())
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["counts"] == {"documents": 60, "duplicates": 2, "empty": 3, "malformed": 0}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        ["manifest.json", *(f"{split}.{ending}" for split in SPLITS for ending in ("tokens", "offsets", "bytes"))]
    )


def test_each_file_of_source_code_is_a_document(tmp_path: Path) -> None:
    files = {"a.json": '{"a": 1}', "b.csv": "1,2\n", "c.py": "import c\n"}
    (tmp_path / "code").mkdir()
    for name, text in files.items():
        (tmp_path / "code" / name).write_text(text)
    parts = find_parts([str(tmp_path / "code")], Columns(), whole_files=True)
    read = [one for part in parts for one in read_part(part, Columns())]
    assert [one.text for one in read if isinstance(one, Document)] == list(files.values())


@pytest.mark.slow
def test_the_size_of_parts_and_the_order_of_files_change_nothing(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    made = [documents(run(tmp_path / "a.jsonl", tmp_path / f"out{size}", size=size)) for size in (40, 300, 10**9)]
    assert made[0] == made[1] == made[2] == split_texts(TEXTS)


def test_a_tokenizer_is_trained_and_kept_with_the_tokens(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    store = run(tmp_path / "a.jsonl", tmp_path / "out", tokenizer="train:300")
    assert documents(store) == split_texts(TEXTS)
    assert store.vocab_size == 300
    assert store.splits["train"].tokens.dtype == np.uint16
    again = run(tmp_path / "a.jsonl", tmp_path / "again", tokenizer=str(tmp_path / "out"))
    assert np.array_equal(again.splits["train"].tokens, store.splits["train"].tokens)


def test_instructions_train_on_answers_only(tmp_path: Path) -> None:
    rows = [{"question": f"why {i}?", "answer": f"so {i}"} for i in range(30)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    store = run(tmp_path / "a.jsonl", tmp_path / "out", columns=Columns("answer", "question"))
    corpus = store.splits["train"]
    assert corpus.prompts is not None
    first = bytes(corpus.tokens[1 : corpus.offsets[1]].astype(np.uint8)).decode()
    row = rows[int(first.split("?")[0].split()[1])]
    assert first == row["question"] + row["answer"]
    assert (corpus.prompts[0], corpus.byte_counts[0]) == (len(row["question"]), len(row["answer"]))


def test_what_cannot_be_read_is_counted_and_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    bad = ["{", '{"text": 3}', '{"other": "a"}', '["a"]', '{"text": "\\ud800"}']
    lines = [json.dumps({"text": text}).encode() for text in TEXTS[:3]]
    path.write_bytes(b"\n".join([*lines, *(line.encode() for line in bad), b'{"text": "\xff"}', b"", lines[0]]))
    store = run(path, tmp_path / "out", size=30)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["counts"] == {"documents": 3, "duplicates": 1, "empty": 0, "malformed": 6}
    assert len(manifest["malformed"]) == 6
    assert sum(map(len, documents(store).values())) == 3
    read = [one for part in find_parts([str(path)], Columns()) for one in read_part(part, Columns())]
    lines = [one.place.where for one in read if isinstance(one, Malformed)]
    assert lines == [f"line {number}" for number in range(4, 10)]


@pytest.mark.slow
def test_several_processes_write_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork = multiprocessing.get_context("fork")  # a new process imports for many seconds
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: fork)
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    run(tmp_path / "a.jsonl", tmp_path / "out1")
    run(tmp_path / "a.jsonl", tmp_path / "out2", processes=2)
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / f"out{n}").iterdir()} for n in (1, 2))
    assert one == two


def test_the_command_tells_what_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("a.jsonl"), TEXTS)
    write_folder(Path("folder"), [*TEXTS[30:], "one more"])
    words = ["input=[a.jsonl,folder]", "output=out", "validation=0.2", "test=0.2", "processes=1"]
    monkeypatch.setattr(sys, "argv", ["longseq", "prepare", *words])
    assert cli.main() == 0
    expected = split_texts([*TEXTS, "one more"])
    assert documents(open_store("out")) == expected
    found = capsys.readouterr().out
    assert f"train {len(expected['train'])} documents of " in found
    assert "left out: 30 duplicates" in found
    assert "longseq train task=lm data=tokens data.root=out" in found


def test_a_separator_that_stands_in_a_text_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["no such letter", "a Quill"])
    (tmp_path / "tokenizer.json").write_text(train_tokenizer(TEXTS, 300).to_dict()["json"], encoding="utf-8")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2 holds the separator"):
        run(tmp_path / "a.jsonl", tmp_path / "out", tokenizer=str(tmp_path / "tokenizer.json"), separator="Q")


def test_a_changed_store_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    root = tmp_path / "out"
    run(tmp_path / "a.jsonl", root)
    with pytest.raises(ValueError, match="holds prepared tokens already"):
        run(tmp_path / "a.jsonl", root)
    path = root / "train.tokens"
    content = path.read_bytes()
    path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    with pytest.raises(ValueError, match=r"train\.tokens was truncated or changed"):
        open_store(root)
    open_store(root, check=False)
    path.write_bytes(content[:-2])
    with pytest.raises(ValueError, match=r"train\.tokens was truncated or changed"):
        open_store(root, check=False)


def test_a_stream_is_read_shard_by_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    files = [str(tmp_path / f"{number}.jsonl") for number in range(3)]
    for number, file in enumerate(files):
        write_jsonl(Path(file), TEXTS[20 * number : 20 * number + 20])
    load = datasets.load_dataset
    asked = []

    def local(name: str, configuration: str | None, *, split: str, streaming: bool) -> Any:
        """The set of the hub, read from files."""
        asked.append((name, configuration, split))
        return load("json", data_files=files, split="train", streaming=streaming, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", local)
    hub = SimpleNamespace(hash="a commit", config=SimpleNamespace(data_files=None))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *rest, **options: hub)
    columns = Columns()
    parts = find_parts(["hfids/owner/name:small@validation"], columns)
    assert (len(parts), asked) == (3, [("owner/name", "small", "validation")])
    prepare(parts, tmp_path / "out", columns=columns, fractions=FRACTIONS, processes=1)
    assert documents(open_store(tmp_path / "out")) == split_texts(TEXTS)


@pytest.mark.parametrize("ending", [".csv", ".tsv"])
def test_quoted_cells_are_read_as_they_were_written(tmp_path: Path, ending: str) -> None:
    """Also those with delimiters, quotation marks and ends of lines."""
    generator = random.Random(0)
    letters = ["a", "b", " ", '"', ",", "\t", "\n", "\r\n", "ä", "'", "\\"]
    cells = [["".join(generator.choices(letters, k=generator.randrange(9))) for _ in range(3)] for _ in range(1000)]
    path = tmp_path / f"rows{ending}"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter=DELIMITERS[ending]).writerows(cells)
    assert [row for _, row in read_rows(path)] == cells


@pytest.mark.parametrize("text", ['a,"word" 1\nb,c\n', 'a,"word 1\nb,c\n'], ids=["closed inside", "not closed"])
def test_a_stray_quotation_mark_is_an_error_with_file_and_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("label,text\nb,c\n" + text)
    with pytest.raises(ValueError, match=r"rows\.csv, line 3: "):
        list(read_rows(path))
