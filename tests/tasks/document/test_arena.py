"""Long Range Arena: its sources read the published formats, and its commands train on them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from arena_files import write_cifar10, write_pairs, write_paths

from longseq.tasks.data.generators import CLOSE, MAX, MED, MIN, SM
from longseq.tasks.document.config import DocumentDataKeys
from longseq.tasks.document.data import DocumentData
from longseq.tasks.document.inputs import DocumentFiles


def open_data(source: str, tmp_path: Path, **keys: Any) -> DocumentData:
    data = DocumentData(
        DocumentDataKeys(name=source, source=source, cache=str(tmp_path / "cache"), **keys), batch_size=4096
    )
    data.setup()
    return data


def evaluate(tokens: list[int]) -> int:
    """The result of an expression, by reading it from its end."""
    stack: list[int] = []
    for token in reversed(tokens):
        if token in (MIN, MAX, MED, SM):
            values = []
            while stack[-1] != CLOSE:
                values.append(stack.pop())
            stack.pop()
            middle = sorted(values)
            half = (middle[(len(values) - 1) // 2] + middle[len(values) // 2]) // 2
            stack.append({MIN: min(values), MAX: max(values), MED: half, SM: sum(values) % 10}[token])
        else:
            stack.append(token)
    assert len(stack) == 1
    return stack[0]


def test_listops_has_the_results_of_its_expressions(tmp_path: Path) -> None:
    options = {"train": 60, "validation": 10, "test": 10, "shortest": 20, "longest": 60}
    data = open_data("lra_listops", tmp_path, options=options)
    assert data.info.class_names == [str(digit) for digit in range(10)]
    assert (data.info.vocab_size, data.info.separator, data.info.tokenizer) == (CLOSE + 1, None, None)
    assert data.info.sizes == {"train": 60, "val": 10, "test": 10}
    split = data.splits["test"]
    documents = [split.read(index).tolist() for index in range(10)]
    assert all(20 < len(tokens) < 60 for tokens in documents)
    assert [evaluate(tokens) for tokens in documents] == np.asarray(split.targets).tolist()


def test_images_are_grey_levels_row_by_row(tmp_path: Path) -> None:
    grey = write_cifar10(tmp_path / "cifar")
    data = open_data("lra_image", tmp_path, root=str(tmp_path / "cifar"))
    split = data.splits["test"]
    assert data.info.vocab_size == 256
    assert data.info.class_names == [f"class{label}" for label in range(10)]
    for index in range(10):
        found = split.read(index).astype(int)
        assert len(found) == 1024
        assert np.abs(found - grey[int(split.targets[index])].reshape(-1)).max() <= 1
    assert data.info.sizes["train"] + data.info.sizes["val"] == 60


def test_pairs_are_two_texts_that_each_begin_with_a_separator(tmp_path: Path) -> None:
    write_pairs(tmp_path / "aan")
    data = open_data("lra_retrieval", tmp_path, root=str(tmp_path / "aan"))
    split = data.splits["test"]
    found = {(bytes_of(split.read(index)), data.info.class_names[int(split.targets[index])]) for index in range(12)}
    assert ((b'a "text" test 3', "été test 3".encode()), "1") in found
    assert len(found) == 12
    keys: Any = SimpleNamespace(num_workers=0, column=None)
    with pytest.raises(ValueError, match="tokens that stand for no text"):
        DocumentFiles(str(tmp_path / "aan" / "new_aan_pairs.test.tsv"), data.info, keys)
    short = open_data("lra_retrieval", tmp_path, root=str(tmp_path / "aan"), options={"text_bytes": 5})
    assert {bytes_of(short.splits["val"].read(index)) for index in range(12)} == {(b'a "te', "été".encode())}


def bytes_of(tokens: np.ndarray) -> tuple[bytes, bytes]:
    first, second = np.flatnonzero(tokens == 256).tolist()
    assert first == 0
    return tokens[1:second].astype(np.uint8).tobytes(), tokens[second + 1 :].astype(np.uint8).tobytes()


def test_pathfinder_reads_the_published_folders(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_paths(tmp_path / "pathfinder32")
    data = open_data("lra_pathfinder", tmp_path, root=str(tmp_path / "pathfinder32"))
    assert sum(data.info.sizes.values()) == 29
    assert "sample_3.png" in caplog.text
    levels = set()
    for stage in ("train", "val", "test"):
        split = data.splits[stage]
        for index in range(data.info.sizes[stage]):
            tokens = split.read(index)
            assert len(tokens) == 64
            assert data.info.class_names[int(split.targets[index])] == ("1" if tokens[0] < 100 else "0")
            levels.add(int(tokens[0]))
    assert len(levels) == 29, "each image is in one split"
