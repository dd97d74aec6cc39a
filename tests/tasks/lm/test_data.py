"""The data of language models: where text comes from, exact resume, and evaluation on other text."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from longseq.tasks.config import read
from longseq.tasks.lm import data as lm_data
from longseq.tasks.lm.config import TextDataKeys
from longseq.tasks.lm.data import LanguageModelData, open_corpora
from longseq.tasks.text.prepare import prepare
from longseq.tasks.text.sources import TEXT, find_parts
from longseq.tasks.text.tokenizer import TextInfo, train_tokenizer
from longseq.tasks.text.windows import TokenBatch

TEXTS = [f"document {i}: " + "the cat sat on the mat; " * (i % 9) for i in range(80)]


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture
def tokens(jsonl: Path) -> Path:
    output = jsonl.with_name("tokens")
    prepare(find_parts([str(jsonl)], TEXT), output, fractions={"validation": 0.1, "test": 0.1}, processes=1)
    return output


def make(batch_size: int = 4, **keys: Any) -> LanguageModelData:
    data = LanguageModelData(read(TextDataKeys, {"name": "made", "window": 16, **keys}, "data"), batch_size=batch_size)
    data.setup()
    return data


def test_a_model_gives_its_tokens_and_not_how_it_begins_and_ends_a_text(jsonl: Path) -> None:
    keys = TextDataKeys(name="made", source="files", root=str(jsonl), window=16, cache=str(jsonl.parent))
    plain = train_tokenizer(TEXTS, 300).to_dict()
    (store,) = open_corpora(keys, {**plain, "start": "a", "ends": [5], "bare_prompts": True})
    assert store.tokenizer == plain
    (other,) = open_corpora(keys.model_copy(update={"separator": "a"}), plain)
    assert other.tokenizer["separator"] == "a"


def as_lists(batches: Iterator[TokenBatch]) -> list[tuple[Any, ...]]:
    return [(inputs.tokens.tolist(), targets.tolist(), inputs.units) for inputs, targets in batches]


@pytest.mark.parametrize("packing", ["concatenated", "documents", "streams"])
def test_every_byte_of_a_split_is_measured_once(tokens: Path, packing: str) -> None:
    data = make(source="tokens", root=str(tokens), packing=packing)
    told = json.loads((tokens / "manifest.json").read_text())["splits"]
    for name, loader in (("validation", data.val_dataloader()), ("test", data.test_dataloader())):
        batches = list(loader)
        assert sum(inputs.byte_count for inputs, _ in batches) == told[name]["bytes"]
        assert sum(inputs.units for inputs, _ in batches) == told[name]["tokens"]
        assert len({(inputs.tokens.shape, targets.shape) for inputs, targets in batches}) == 1


@pytest.mark.parametrize("changes", [{}, {"eval_batch_size": 3}])
def test_a_run_of_streams_is_measured_again_in_as_many(tokens: Path, changes: dict[str, int]) -> None:
    keys = {"name": "made", "source": "tokens", "root": str(tokens), "window": 16, "packing": "streams"}
    config = {"data": keys, "recipe": {"batch_size": 64}, "seed": 0}
    trained = LanguageModelData.from_config({**config, "data": {**keys, **changes}}, 64)
    again = LanguageModelData.for_evaluation(config, changes, split="test", trained=trained.info, batch_size=64)
    assert as_lists(again.test_dataloader()) == as_lists(trained.test_dataloader())


def test_corpora_of_different_tokenizers_are_not_mixed(tokens: Path, jsonl: Path) -> None:
    other = jsonl.with_name("trained")
    fractions = {"validation": 0.1, "test": 0.1}
    prepare(find_parts([str(jsonl)], TEXT), other, tokenizer="train:300", fractions=fractions, processes=1)
    with pytest.raises(ValueError, match="different tokenizers"):
        make(source="tokens", root=[str(tokens), str(other)])


def test_a_changed_text_of_training_is_known(jsonl: Path, tokens: Path) -> None:
    """The same documents in another order are as many windows, and a resumed run would read others."""
    lines = jsonl.read_text().splitlines(keepends=True)
    jsonl.write_text("".join(reversed(lines)))
    output = jsonl.with_name("again")
    prepare(find_parts([str(jsonl)], TEXT), output, fractions={"validation": 0.1, "test": 0.1}, processes=1)
    trained, found = (make(source="tokens", root=str(root)).info for root in (tokens, output))
    assert found.sizes == trained.sizes
    assert found.find_change(trained, "train") is not None
    assert trained.find_change(trained, "train") is None


@pytest.mark.slow
def test_a_model_is_measured_on_other_text_and_in_other_windows(jsonl: Path, tokens: Path, tmp_path: Path) -> None:
    trained = make(source="standard_library", validation=0.02, test=0.02, cache=str(tmp_path / "cache")).info
    config = {"seed": 0, "data": {"name": "made", "source": "standard_library", "window": 16, "validation": 0.02}}
    given = {"source": "files", "root": str(jsonl), "test": 0.9, "validation": 0.0, "cache": str(tmp_path / "cache")}
    for told, changes in (
        (config, {**given, "window": 32}),
        ({}, given),
        (config, {"source": "tokens", "root": str(tokens)}),
    ):
        data = LanguageModelData.for_evaluation(told, changes, split="test", trained=trained, batch_size=4)
        batches = list(data.test_dataloader())
        assert batches[0][0].tokens.numel() == 4 * 16
        assert batches[0][0].max_seqlen == changes.get("window", 16)
        whole = data._stores[0].splits["test"].byte_counts.sum()
        assert sum(inputs.byte_count for inputs, _ in batches) == whole > 0
    with pytest.raises(ValueError, match="the validation split of the text is empty"):
        LanguageModelData.for_evaluation(config, given, split="val", trained=trained, batch_size=4)


def test_text_of_the_training_is_not_measured_by_other_shares(jsonl: Path, tmp_path: Path) -> None:
    keys = {"name": "made", "source": "files", "root": str(jsonl), "cache": str(tmp_path / "cache"), "window": 16}
    run = {**keys, "validation": 0.2, "test": 0.3}
    config, trained = {"seed": 0, "data": run}, make(**run).info

    def measure(split: str, **changes: Any) -> TextInfo:
        options: dict[str, Any] = {"split": split, "trained": trained, "batch_size": 4}
        return LanguageModelData.for_evaluation(config, changes, **options).info

    for split, key, share in (("test", "test", 0.5), ("val", "validation", 0.4)):
        with pytest.raises(ValueError, match=rf"^data\.{key}={share}: "):
            measure(split, **{key: share})
    assert measure("test", validation=0.4).checksums["test"] == trained.checksums["test"]
    assert measure("test", test=0.2).sizes["test"] < trained.sizes["test"]


def test_corpora_are_mixed_by_weights(tokens: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.mkdir()
    for index in range(60):
        (other / f"{index}.txt").write_text(f"{index} 0123456789" * 8)
    second = tmp_path / "second"
    prepare(find_parts([str(other)], TEXT), second, fractions={"validation": 0.1, "test": 0.1}, processes=1)
    data = make(source="tokens", root=[str(tokens), str(second)], weights=[1, 3], batch_size=2)
    rows = torch.cat([inputs.tokens.view(-1, 16) for inputs, _ in data.train_dataloader()])
    digits = ((rows >= ord("0")) & (rows <= ord("9"))).sum(dim=1) > 8
    assert abs(float(digits.double().mean()) - 0.75) < 0.02


def test_text_is_prepared_once_and_again_when_it_changes(
    jsonl: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"source": "files", "root": str(jsonl), "validation": 0.1, "test": 0.1, "cache": str(tmp_path / "cache")}
    data = make(**options)
    assert data.info.checksums == make(source="tokens", root=str(tokens)).info.checksums
    with monkeypatch.context() as patch:
        patch.setattr(lm_data, "prepare", None)  # a second preparation would fail
        again = make(**options)
    assert as_lists(iter(again.train_dataloader())) == as_lists(iter(data.train_dataloader()))
    time = jsonl.stat().st_mtime_ns
    jsonl.write_text(jsonl.read_text().replace("cat", "dog"))
    os.utime(jsonl, ns=(time, time))  # unpacked archives may give all files one time
    assert make(**options).info.checksums != data.info.checksums
    sizes = []
    for size in (270, 300):  # another tokenizer in the same file
        (tmp_path / "tokenizer.json").write_text(train_tokenizer(TEXTS, size).to_dict()["json"])
        sizes.append(make(**options, tokenizer=str(tmp_path / "tokenizer.json")).info.vocab_size)
    assert sizes == [270, 300]
