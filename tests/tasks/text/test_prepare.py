"""`longseq prepare`: every format gives the same tokens, an interruption loses nothing, and mistakes are one line."""

from __future__ import annotations

import bz2
import csv
import errno
import gzip
import json
import lzma
import os
import pickle
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from longseq.tasks.text import prepare as module
from longseq.tasks.text.documents import Document, hashes_of, split_numbers
from longseq.tasks.text.prepare import prepare
from longseq.tasks.text.sources import Columns, Malformed, find_parts, read_part, walk
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


def write_array(path: Path, texts: list[str]) -> None:
    path.write_bytes(b"\xef\xbb\xbf\n" + json.dumps([{"text": text} for text in texts], indent=1).encode())


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
    "a.json": write_array,
    "a.csv": write_csv,
    "a.tsv": write_csv,
    "a.parquet": write_parquet,
    "folder": write_folder,
    "saved": write_saved,
}


def run(source: Path, output: Path, *, size: int = 500, **options: Any) -> TokenStore:
    columns = options.pop("columns", Columns())
    options = {"fractions": FRACTIONS, "processes": 1, "show_progress": False, **options}
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
    os.symlink(tmp_path / "nowhere", tmp_path / "code" / "broken")
    with pytest.raises(ValueError, match=r"a.json has no column 'text'"):
        find_parts([str(tmp_path / "code")], Columns())
    parts = find_parts([str(tmp_path / "code")], Columns(), whole_files=True)
    read = [one for part in parts for one in read_part(part, Columns())]
    assert [one.text for one in read if isinstance(one, Document)] == list(files.values())
    (broken,) = (one for one in read if isinstance(one, Malformed))
    assert broken.describe() == f"{tmp_path / 'code' / 'broken'}: No such file or directory"


@pytest.mark.slow
def test_the_size_of_parts_and_the_order_of_files_change_nothing(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    made = [documents(run(tmp_path / "a.jsonl", tmp_path / f"out{size}", size=size)) for size in (40, 300, 10**9)]
    assert made[0] == made[1] == made[2] == split_texts(TEXTS)


def test_a_document_stays_in_its_split_when_others_come(tmp_path: Path) -> None:
    small = split_texts(TEXTS[:30])
    for split, texts in split_texts(TEXTS).items():
        assert set(small[split]) <= set(texts)


def test_a_tokenizer_is_trained_and_kept_with_the_tokens(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    store = run(tmp_path / "a.jsonl", tmp_path / "out", tokenizer="train:300")
    assert documents(store) == split_texts(TEXTS)
    assert store.vocab_size == 300
    assert store.splits["train"].tokens.dtype == np.uint16
    again = run(tmp_path / "a.jsonl", tmp_path / "again", tokenizer=str(tmp_path / "out"))
    assert np.array_equal(again.splits["train"].tokens, store.splits["train"].tokens)


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    told = json.loads(train_tokenizer(TEXTS, 300).to_dict()["json"])
    vocabulary = told["model"]["vocab"]
    vocabulary[max(vocabulary, key=vocabulary.get)] = 70000
    (tmp_path / "tokenizer.json").write_text(json.dumps(told))
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    store = run(tmp_path / "a.jsonl", tmp_path / "out", tokenizer=str(tmp_path / "tokenizer.json"))
    assert (store.splits["train"].tokens.dtype, store.vocab_size) == (np.uint32, 70001)
    assert documents(store) == split_texts(TEXTS)


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
    assert manifest["malformed"][0].startswith(f"{path}, line 4: no JSON (")
    assert manifest["malformed"][1] == f"{path}, line 5: no text in column 'text'"
    assert sum(map(len, documents(store).values())) == 3
    told = [one for part in find_parts([str(path)], Columns()) for one in read_part(part, Columns())]
    reasons = [one.describe().split(": ", 1)[1] for one in told if isinstance(one, Malformed)]
    assert reasons[-2:] == ["no Unicode text in column 'text'", "bytes that are no UTF-8"]


@pytest.mark.slow
def test_all_that_cannot_be_read_is_in_the_manifest_and_a_part_of_it_on_the_terminal(tmp_path: Path) -> None:
    write_folder(tmp_path / "input", TEXTS)
    for number in range(9):
        (tmp_path / "input" / f"bad{number}.txt").write_bytes(b"\x80\xfe")
    (tmp_path / "input" / "lines.jsonl").write_text('{"text": "a"}\n' + '\n{\n{"text": 1}' * 4)
    run(tmp_path / "input", tmp_path / "out", size=30)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["counts"]["malformed"] == len(manifest["malformed"]) == 9 + 8
    named = [line for line in manifest["malformed"] if "bytes that are no UTF-8" in line]
    assert named == [f"{tmp_path / 'input' / f'bad{number}.txt'}: bytes that are no UTF-8" for number in range(9)]
    places = [line.partition(": ")[0].rpartition(" ")[2] for line in manifest["malformed"] if "lines.jsonl" in line]
    assert places == ["3", "4", "5", "6", "7", "8", "9", "10"]
    told = module.describe(manifest).splitlines()
    assert "17 malformed" in told[1]
    assert told[2:5] == manifest["malformed"][:3]
    assert told[5] == "and 14 more, all named in manifest.json"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_line_of_json_without_a_column_is_one_that_is_left_out_wherever_it_stands(tmp_path: Path, name: str) -> None:
    columns = Columns(labels=("label",))
    lines = ['{"txt": "a"}', '{"text": "b"}', "{", '{"text": "c", "label": "d"}', '{"text": "e"}']
    with (gzip.open if name.endswith("gz") else open)(tmp_path / name, "wt") as file:
        file.write("\n".join(lines))
    read = [one for part in find_parts([str(tmp_path / name)], columns) for one in read_part(part, columns)]
    found = [one.labels if isinstance(one, Document) else "malformed" for one in read]
    assert found == ["malformed", (None,), "malformed", ("d",), (None,)]
    with pytest.raises(ValueError, match=r"has no column 'genre': give label_column=NAME, one of txt, text, label"):
        find_parts([str(tmp_path / name)], Columns(labels=("genre",)))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_a_text_in_another_unicode_is_malformed(tmp_path: Path, encoding: str) -> None:
    """Without a mark at its beginning, Latin text in UTF-16 is UTF-8 with NULs, which nobody means."""
    (tmp_path / "input").mkdir()
    (tmp_path / "input" / "a.txt").write_text("plain text", encoding)
    (tmp_path / "input" / "b.txt").write_text("a NUL \0 in a text is a character")
    store = run(tmp_path / "input", tmp_path / "out", fractions={"validation": 0, "test": 0})
    assert documents(store)["train"] == ["a NUL \0 in a text is a character"]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["malformed"] == [f"{tmp_path / 'input' / 'a.txt'}: UTF-16, or no text at all: save text as UTF-8"]


def test_json_without_keys_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('["a", "b"]\n\n"text"\n{"text": "a"}\n')
    (tmp_path / "b.json").write_text('["text", {"text": "b"}]')
    told = []
    for name in ("a.jsonl", "b.json"):
        (part,) = find_parts([str(tmp_path / name)], Columns())
        told += [one.describe() for one in read_part(part, Columns()) if isinstance(one, Malformed)]
    reason = "no JSON object, whose keys are the columns"
    places = ("a.jsonl, line 1", "a.jsonl, line 3", "b.json, row 0")
    assert told == [f"{tmp_path / place}: {reason}" for place in places]


def test_a_key_that_stands_twice_in_a_line_is_told(tmp_path: Path) -> None:
    """Which of the two texts counts is not known. A key that nobody reads may stand twice."""
    twice = '{"text": "a", "text": "b"}'
    unread = '{"text": "c", "id": 1, "id": 2, "more": {"text": 1, "text": 2}}'
    (tmp_path / "a.jsonl").write_text(f"{unread}\n{twice}\n")
    (tmp_path / "b.json").write_text(f"[{twice}, {unread}]")
    for name, place in (("a.jsonl", "line 2"), ("b.json", "row 0")):
        (part,) = find_parts([str(tmp_path / name)], Columns())
        read = list(read_part(part, Columns()))
        malformed = [one.describe() for one in read if isinstance(one, Malformed)]
        assert malformed == [f"{tmp_path / name}, {place}: the key 'text' twice"]
        assert [one.text for one in read if not isinstance(one, Malformed)] == ["c"]


def test_links_are_followed_but_not_in_circles_and_those_that_lead_nowhere_are_counted(tmp_path: Path) -> None:
    write_folder(tmp_path / "elsewhere", TEXTS)
    (tmp_path / "input" / "deep").mkdir(parents=True)
    (tmp_path / "input" / "deep" / "link").symlink_to(tmp_path / "elsewhere" / "below")
    (tmp_path / "input" / "deep" / "circle").symlink_to(tmp_path / "input")
    (tmp_path / "input" / "one").mkdir()
    (tmp_path / "input" / "other").mkdir()
    (tmp_path / "input" / "one" / "to_other").symlink_to(tmp_path / "input" / "other")
    (tmp_path / "input" / "other" / "to_one").symlink_to(tmp_path / "input" / "one")
    (tmp_path / "input" / "lost.txt").symlink_to(tmp_path / "nowhere.txt")
    (tmp_path / "input" / "lost.csv").symlink_to(tmp_path / "nowhere.csv")
    depths = [len(Path(folder).relative_to(tmp_path).parts) for folder, _ in walk(str(tmp_path / "input"))]
    assert sorted(depths) == [1, 2, 2, 2, 3, 3, 3]
    store = run(tmp_path / "input", tmp_path / "out")
    assert documents(store) == split_texts(TEXTS)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    lost = [f"{tmp_path / 'input' / name}: No such file or directory" for name in ("lost.csv", "lost.txt")]
    assert manifest["malformed"] == lost
    assert manifest["counts"]["malformed"] == 2


def test_bytes_of_csv_and_text_files_that_are_no_utf8_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text\ngood\nb\xffd\nbetter\n")
    (tmp_path / "b.txt").write_bytes(b"\x80\xfe")
    (tmp_path / "c.txt").write_bytes(b"\xef\xbb\xbfmarked")
    run(tmp_path, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["counts"]["documents"], manifest["counts"]["malformed"]) == (3, 2)
    assert manifest["malformed"] == [
        f"{tmp_path / 'a.csv'}, line 3: no Unicode text in column 'text'",
        f"{tmp_path / 'b.txt'}: bytes that are no UTF-8",
    ]


def test_an_interrupted_preparation_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    expected = run(tmp_path / "a.jsonl", tmp_path / "whole", tokenizer="train:300")
    encode, done = module.encode_part, []

    def interrupted(index: int, *rest: Any) -> None:
        if len(done) == 2:
            raise KeyboardInterrupt
        encode(index, *rest)
        done.append(index)

    monkeypatch.setattr(module, "encode_part", interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "a.jsonl", tmp_path / "out", tokenizer="train:300")
    with pytest.raises(ValueError, match="was not prepared to its end: give the same `longseq prepare` again"):
        open_store(tmp_path / "out")
    with pytest.raises(ValueError, match="unfinished preparation of other input or with other keys"):
        run(tmp_path / "a.jsonl", tmp_path / "out", tokenizer="bytes")
    done.clear()
    done.extend([-1] * 9)  # no longer interrupted
    store = run(tmp_path / "a.jsonl", tmp_path / "out", tokenizer="train:300")
    assert not {0, 1} & set(done), "parts that were there are not encoded again"
    assert documents(store) == documents(expected)
    assert np.array_equal(store.splits["train"].tokens, expected.splits["train"].tokens)


def test_a_full_disk_is_told_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS)

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module.SplitWriter, "_write", full)
        with pytest.raises(ValueError, match="the disk is full; make room, and the same command goes on"):
            run(tmp_path / "a.jsonl", tmp_path / "out")
    assert documents(run(tmp_path / "a.jsonl", tmp_path / "out")) == split_texts(TEXTS)


@pytest.mark.slow
def test_several_processes_write_the_same_files(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    run(tmp_path / "a.jsonl", tmp_path / "out1")
    partial = tmp_path / "out2" / ".partial"
    partial.mkdir(parents=True)
    # What a process cannot do, it tells: here a folder is where it writes the tokens of the last part.
    last = len(find_parts([str(tmp_path / "a.jsonl")], Columns(), size=500)) - 1
    (partial / f"{last:06}.npz").mkdir()
    with pytest.raises(ValueError, match=r"\.npz'?: Is a directory"):
        run(tmp_path / "a.jsonl", tmp_path / "out2", processes=2)
    # All that came before is kept, but for the part that the other process may have been at.
    assert len(list(partial.glob("*.npz"))) in (last, last + 1)
    (partial / f"{last:06}.npz").rmdir()
    run(tmp_path / "a.jsonl", tmp_path / "out2")
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / f"out{n}").iterdir()} for n in (1, 2))
    assert one == two


def command(*overrides: str) -> int:
    """The exit code of `longseq prepare` in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["longseq", "prepare", *overrides, "processes=1"])
        try:
            return cli.main()
        except SystemExit as ended:
            return int(str(ended.code))


def test_the_command_tells_what_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("a.jsonl"), TEXTS)
    write_folder(Path("folder"), [*TEXTS[30:], "one more"])
    assert command("input=[a.jsonl,folder]", "output=out", "validation=0.2", "test=0.2") == 0
    expected = split_texts([*TEXTS, "one more"])
    assert documents(open_store("out")) == expected
    found = capsys.readouterr().out
    assert f"train {len(expected['train'])} documents of " in found
    assert "left out: 30 duplicates" in found
    assert "longseq train task=lm data=tokens data.root=out" in found
    assert command("input=a.jsonl", "output='to k=1'", "validation=0.2", "test=0.2") == 0
    *_, printed = capsys.readouterr().out.splitlines()
    assert shlex.split(printed)[-1] == "data.root='to k=1'"  # quoted for the shell and for Hydra
    assert command("task=lm", "input=a.jsonl", "output=none", "validation=0", "tokenizer=train:9999") == 0
    found = capsys.readouterr().out
    assert "validation has no document, which training needs" in found
    assert re.search(r"the vocabulary has \d+ tokens and not 9,999", found)


def test_a_name_that_is_no_text_can_be_printed(tmp_path: Path) -> None:
    name = os.fsdecode(b"a\xff.txt")
    (tmp_path / name).write_bytes(b"\xff")
    (tmp_path / "b.txt").write_text("text")
    run(tmp_path, tmp_path / "out")
    (told,) = json.loads((tmp_path / "out" / "manifest.json").read_text())["malformed"]
    assert told.encode().endswith(b"a\\xff.txt: bytes that are no UTF-8")


def test_a_separator_that_stands_in_a_text_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["no such letter", "a Quill"])
    (tmp_path / "tokenizer.json").write_text(train_tokenizer(TEXTS, 300).to_dict()["json"], encoding="utf-8")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2 holds the separator, token \d+: give separator=TOKEN"):
        run(tmp_path / "a.jsonl", tmp_path / "out", tokenizer=str(tmp_path / "tokenizer.json"), separator="Q")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["output=out"], "give input=FILE, input=FOLDER or input="),
        (["input=a.jsonl"], "give output=FOLDER"),
        (["input=nothing", "output=out"], "input=nothing does not exist"),
        (["input=empty.jsonl", "output=out"], "input=empty.jsonl is empty"),
        (["input=empty", "output=out"], "input=empty is empty: it holds no file with text"),
        (["input=pipe", "output=out"], "input=pipe is a pipe or a device, which can be read once only: write it to"),
        (["input=pipe", "output=out", "whole_files=true"], "input=pipe is a pipe or a device"),
        (["input=blank.csv", "output=out"], "input=blank.csv is empty: its lines are blank"),
        (["input=a.jsonl", "output=out", "column=body"], "a.jsonl has no column 'body': give column=NAME, one of text"),
        (["input=a.csv", "output=out", "prompt_column=q"], "a.csv has no column 'q': give prompt_column=NAME, one of"),
        (
            ["input=bad.jsonl", "output=out"],
            "holds no document, 2 malformed lines or files: bad.jsonl, line 1",
        ),
        (["input=a.parquet", "output=out"], "input=a.parquet is no parquet file, or a truncated one"),
        (["input=.", "output=out"], "output=out lies in the folder ., which is read: the next run would read what is"),
        (["input=[a.jsonl,empty]", "output=empty/out"], "output=empty/out lies in the folder empty, which is read"),
        (["input=a.jsonl", "output=a.csv/out"], "output=a.csv/out is or lies below a file: give a folder"),
        (["input=a.jsonl", "output=out", "tokenizer=nowhere"], "tokenizer=nowhere is no file"),
        (["input=a.jsonl", "output=out", "tokenizer=train:many"], "give train:SIZE, such as train:16384"),
        (["input=a.jsonl", "output=out", "tokenizer=train:100"], "a vocabulary needs the 256 bytes and the separator"),
        (["input=a.jsonl", "output=out", "separator=x"], "separator=x: the tokens of tokenizer=bytes have a separator"),
        (["input=a.jsonl", "output=out", "tokenizer=train:300", "separator=x"], "tokenizer=train:300 have a separator"),
        (["input=a.txt.xz", "output=out"], "a.txt.xz: compressed by xz: decompress it; of compressed files those"),
        (["input=a.feather", "output=out"], "a.feather: a file of Arrow: give parquet, or the folder of the Hugging"),
        (["input=twice.csv", "output=out"], "twice.csv has 2 columns 'text': leave one of them"),
        (["input=twice.parquet", "output=out"], "twice.parquet has 2 columns 'text': leave one of them"),
        (["input=long.csv", "output=out"], "long.csv has no column 'text': give column=NAME, one of long, ..."),
        (["input=bytes.parquet", "output=out"], "the column 'text' of bytes.parquet is of the type binary, which is"),
        (["input=a.jsonl", "output=out", "test=0.6", "validation=0.4"], "leave nothing to train on"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    overrides: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("a.jsonl"), TEXTS)
    write_csv(Path("a.csv"), TEXTS)
    Path("a.parquet").write_bytes(b"PAR1 and no more")
    write_parquet(Path("bytes.parquet"), [b"text"])  # type: ignore[list-item]
    Path("bad.jsonl").write_text("{\n[\n")
    Path("a.txt.xz").write_bytes(lzma.compress(b"{}"))
    Path("a.feather").write_bytes(b"ARROW1\0\0\xff\xff\xff\xff")
    Path("long.csv").write_text(f"long,{'x' * 1000}\n")
    Path("twice.csv").write_text("text,more,text\na,b,c\n")
    arrow = pytest.importorskip("pyarrow")
    arrow.parquet.write_table(arrow.Table.from_arrays([["a"], ["b"]], names=["text", "text"]), "twice.parquet")
    Path("empty.jsonl").touch()
    Path("blank.csv").write_text("\n\n")
    Path("empty").mkdir()
    os.mkfifo("pipe")
    before = sorted(os.listdir())
    assert command(*overrides) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("longseq: error: ")
    assert error.count("\n") == 0
    assert message in error
    assert sorted(os.listdir()) == before, "the corrected command finds nothing in its way"


@pytest.mark.slow
def test_a_store_goes_to_another_process_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS * 20)
    monkeypatch.chdir(tmp_path)
    run(tmp_path / "a.jsonl", tmp_path / "out", tokenizer="train:300")
    store = open_store("out")
    monkeypatch.chdir("/")
    corpus = store.splits["train"]
    sent = pickle.dumps(corpus)
    assert len(sent) < 1000 < corpus.tokens.nbytes
    for one, other in zip(pickle.loads(sent), corpus, strict=True):
        assert np.array_equal(one, other)
    assert np.array_equal(pickle.loads(pickle.dumps(corpus.tokens[5:9])), corpus.tokens[5:9])


def test_a_changed_store_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    root = tmp_path / "out"
    run(tmp_path / "a.jsonl", root)
    with pytest.raises(ValueError, match="holds prepared tokens already"):
        run(tmp_path / "a.jsonl", root)
    with pytest.raises(ValueError, match=r"holds no manifest.json: give a folder that `longseq prepare` has written"):
        open_store(tmp_path)
    path = root / "train.tokens"
    content = path.read_bytes()
    path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    with pytest.raises(ValueError, match=r"train.tokens was changed: its checksum is not that of its manifest"):
        open_store(root)
    open_store(root, check=False)
    path.write_bytes(content[:-2])
    with pytest.raises(ValueError, match=r"train.tokens has .* bytes, its manifest tells .*: it is truncated"):
        open_store(root, check=False)
    path.unlink()
    with pytest.raises(ValueError, match=r"train.tokens is missing"):
        open_store(root)
    manifest = json.loads((root / "manifest.json").read_text())
    (root / "manifest.json").write_text(json.dumps({**manifest, "version": 9}))
    with pytest.raises(ValueError, match="is of version 9, this longseq reads 1"):
        open_store(root)
    (root / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="is no manifest of prepared tokens"):
        open_store(root)
    del manifest["vocab_size"]
    (root / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"manifest.json lacks vocab_size: prepare the tokens again"):
        open_store(root)


@pytest.mark.parametrize("tokenizer", ["bytes", "train:270"])
def test_a_manifest_of_another_vocabulary_is_refused(tmp_path: Path, tokenizer: str) -> None:
    """A model of fewer tokens would fail in the middle of a run, another separator would join all documents."""
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    root = tmp_path / "out"
    store = run(tmp_path / "a.jsonl", root, tokenizer=tokenizer)
    manifest = json.loads((root / "manifest.json").read_text())
    for name, value in (("vocab_size", 256), ("vocab_size", 50304), ("separator", 1)):
        own = manifest[name]
        (root / "manifest.json").write_text(json.dumps({**manifest, name: value}))
        told = f"manifest.json tells {name}={value}, and its tokenizer has {name}={own}: prepare the tokens again"
        with pytest.raises(ValueError, match=told):
            open_store(root)
    (root / "manifest.json").write_text(json.dumps({**manifest, "tokenizer": {"kind": "bare"}, "vocab_size": 999}))
    assert open_store(root).vocab_size == 999
    assert (store.vocab_size, store.separator) == (manifest["vocab_size"], manifest["separator"])


def test_a_tokenizer_that_loses_text_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    library = pytest.importorskip("tokenizers")
    write_jsonl(tmp_path / "a.jsonl", ["Document one", "document two", "document three"])
    tokenizer = library.Tokenizer.from_str(train_tokenizer(TEXTS, 300).to_dict()["json"])
    tokenizer.normalizer = library.normalizers.Lowercase()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    words = [f"input={tmp_path / 'a.jsonl'}", "validation=0", "test=0", "processes=1"]
    lossy, begin = str(tmp_path / "tokenizer.json"), "1 of 3 compared documents do not come back"
    for choice, expected in (("bytes", []), (lossy, [begin])):
        output = tmp_path / f"out{len(expected)}"
        monkeypatch.setattr("sys.argv", ["longseq", "prepare", *words, f"tokenizer={choice}", f"output={output}"])
        assert cli.main() == 0
        told = [line for line in capsys.readouterr().out.splitlines() if "come back" in line]
        assert [line[: len(begin)] for line in told] == expected


def test_a_saved_set_of_splits_asks_which(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_dict({"text": TEXTS})
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ValueError, match="holds the splits test, train: name those to read"):
        find_parts([str(tmp_path / "saved")], Columns())
    assert documents(run(tmp_path / "saved" / "train", tmp_path / "out")) == split_texts(TEXTS)


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
    prepare(parts, tmp_path / "out", columns=columns, fractions=FRACTIONS, processes=1, show_progress=False)
    assert documents(open_store(tmp_path / "out")) == split_texts(TEXTS)
    broken = datasets.IterableDataset.from_generator(lambda: (1 / 0 for _ in range(3)))
    monkeypatch.setattr(datasets, "load_dataset", lambda *rest, **options: broken)
    with pytest.raises(ValueError, match=r"input=hfids/a broke off: .*; the same command goes on"):
        prepare(find_parts(["hfids/a"], columns), tmp_path / "none", fractions=FRACTIONS, processes=1)
    monkeypatch.setattr(datasets, "load_dataset", lambda *rest, **options: 1 / 0)
    with pytest.raises(ValueError, match="input=hfids/owner/name cannot be opened: division by zero"):
        find_parts(["hfids/owner/name"], columns)


@pytest.mark.slow
def test_a_stream_with_other_files_is_other_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of a training and an unfinished preparation are known by the parts; a set keeps its name."""
    pytest.importorskip("datasets")
    for name, texts in (("a", TEXTS[:20]), ("b", TEXTS[20:40])):
        (tmp_path / name / "set").mkdir(parents=True)
        write_jsonl(tmp_path / name / "set" / "train.jsonl", texts)
    found = {}
    for name in "ab":
        monkeypatch.chdir(tmp_path / name)
        found[name] = find_parts(["hfids/set"], Columns())
        assert found[name] == find_parts(["hfids/set"], Columns())
    assert found["a"] != found["b"], "one name in two folders"
    write_jsonl(tmp_path / "b" / "set" / "train.jsonl", TEXTS[40:50])
    assert find_parts(["hfids/set"], Columns()) != found["b"], "written again"
    monkeypatch.setattr(module, "encode_part", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare(find_parts(["hfids/set"], Columns()), tmp_path / "out", fractions=FRACTIONS, processes=1)
    write_jsonl(tmp_path / "b" / "set" / "train.jsonl", TEXTS[:10])
    with pytest.raises(ValueError, match="unfinished preparation of other input"):
        prepare(find_parts(["hfids/set"], Columns()), tmp_path / "out", fractions=FRACTIONS, processes=1)


@pytest.mark.slow
def test_a_saved_set_without_rows_is_told(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["one"]}).select([]).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ValueError, match=r"input=.*saved is empty$"):
        find_parts([str(tmp_path / "saved")], Columns())


@pytest.mark.slow
@pytest.mark.parametrize("many", [False, True])
def test_a_stream_whose_files_number_labels_otherwise_is_refused(many: bool, tmp_path: Path) -> None:
    """The library reads the numbers of all files with the names of the first one."""
    datasets = pytest.importorskip("datasets")
    for split, names in (("train", ["cat", "dog"]), ("test", ["cat", "dog", "emu"]), ("validation", ["dog", "cat"])):
        label, values = datasets.ClassLabel(names=names), [0, 1]
        if many:
            label, values = datasets.List(label), [[0], [0, 1]]
        features = datasets.Features({"text": datasets.Value("string"), "tags": label})
        rows = datasets.Dataset.from_dict({"text": ["one", "two"], "tags": values}, features=features)
        rows.to_parquet(tmp_path / "data" / f"{split}.parquet")
    columns = Columns(labels=("tags",))
    assert len(find_parts([f"hfids/{tmp_path / 'data'}@test"], columns)) == 1
    assert len(find_parts([f"hfids/{tmp_path / 'data'}@validation"], Columns())) == 1
    told = (
        r"input=hfids/.*@validation: class 0 is 'cat' in t\w+.parquet \(split t\w+\), and 'dog' in validation.parquet"
    )
    with pytest.raises(ValueError, match=told):
        find_parts([f"hfids/{tmp_path / 'data'}@validation"], columns)


@pytest.mark.parametrize("ending", COMPRESSORS)
def test_a_truncated_compressed_file_gives_what_it_has(ending: str, tmp_path: Path) -> None:
    path, draws = tmp_path / f"a.jsonl{ending}", np.random.default_rng(0)
    texts = [draws.bytes(1000).hex() for _ in range(600)]  # more than one buffer of a reader
    write_compressed(path, texts)
    path.write_bytes(path.read_bytes()[:-2000])
    run(path, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["counts"]["malformed"] == 1
    assert len(texts) > manifest["counts"]["documents"] >= len(texts) // 4
    assert "the rest cannot be read" in manifest["malformed"][0]


BEHIND = {"garbage": b"garbage", "few bytes": b"g", "a damaged stream": b"\xfd7zXZ\0\0\xff and more", "a NUL": b"\0"}


@pytest.mark.slow
@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("ending", COMPRESSORS)
def test_what_follows_a_compressed_stream_and_is_none_is_told(ending: str, behind: str, tmp_path: Path) -> None:
    if (ending, behind) == (".gz", "a NUL"):
        pytest.skip("gzip takes zeros behind a stream for padding")
    path = tmp_path / f"a.jsonl{ending}"
    write_compressed(path, TEXTS)
    whole = [one for part in find_parts([str(path)], Columns()) for one in read_part(part, Columns())]
    path.write_bytes(path.read_bytes() + BEHIND[behind])
    *found, last = [one for part in find_parts([str(path)], Columns()) for one in read_part(part, Columns())]
    assert isinstance(last, Malformed)
    assert "the rest cannot be read" in last.reason
    assert found == whole or ending == ".zst"  # of which pyarrow reads all frames at once


@pytest.mark.slow
def test_a_damaged_second_stream_is_told(tmp_path: Path) -> None:
    """Python's readers drop it."""
    for ending, compress in COMPRESSORS.items():
        path, row = tmp_path / f"a.jsonl{ending}", b'{"text": "one"}\n'
        second = bytearray(compress(row))
        second[:2] = b"??"
        path.write_bytes(compress(row) + second)
        last = [one for part in find_parts([str(path)], Columns()) for one in read_part(part, Columns())][-1]
        assert isinstance(last, Malformed), ending
        assert "the rest cannot be read" in last.reason


@pytest.mark.slow
def test_padding_of_xz_is_no_damage(tmp_path: Path) -> None:
    path, row = tmp_path / "a.jsonl.xz", lzma.compress(b'{"text": "one"}\n')
    for zeros in (4, 8, 1 << 17):
        path.write_bytes(row + bytes(zeros) + row + bytes(zeros))
        found = [one for part in find_parts([str(path)], Columns()) for one in read_part(part, Columns())]
        assert [one.text for one in found if isinstance(one, Document)] == ["one", "one"]
        assert len(found) == 2
    path.write_bytes(row + bytes(6) + row)
    found = [one for part in find_parts([str(path)], Columns()) for one in read_part(part, Columns())]
    assert isinstance(found[1], Malformed)
    assert "6 bytes of zeros behind a stream" in found[1].reason


@pytest.mark.slow
@pytest.mark.parametrize("line", [0, 1])
@pytest.mark.parametrize("ending", ["", *COMPRESSORS])
def test_json_of_many_levels_is_counted(line: int, ending: str, tmp_path: Path) -> None:
    lines = ['{"text": "one"}'] * 2
    lines[line] = '{"text": ' + "[" * 100_000 + "]" * 100_000 + "}"
    content = "\n".join(lines).encode()
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(COMPRESSORS[ending](content) if ending else content)
    run(path, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["counts"]["malformed"] == manifest["counts"]["documents"] == 1
    assert f"line {line + 1}: no JSON (maximum recursion depth" in manifest["malformed"][0]


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    partial = tmp_path / "out" / ".partial"
    with module.locked(partial, "output"), pytest.raises(ValueError, match=r"is being written by .* another output"):
        run(tmp_path / "a.jsonl", tmp_path / "out")
    assert not partial.exists()
