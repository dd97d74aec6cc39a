"""The scripts of benchmarks/: small runs on the CPU, and tables that agree with their rows."""

from __future__ import annotations

import json
import math
import random
import runpy
import statistics
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from forked import start_fork

from longseq.backbones.tokens import TokenBackbone

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """Imports a script of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def find(name: str) -> ModuleType:
        return __import__(name)

    return find


def run(folder: Path, name: str, *words: str) -> str:
    """The output of a script, which runs in a fork of this process."""

    def program() -> None:
        sys.path.insert(0, str(FOLDER))
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")

    process = start_fork(words, folder, run=program)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    return output


def rows_of(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text())["rows"]


@pytest.mark.slow
def test_operations_are_compared_and_timed(tmp_path):
    words = ["--ops", "delta_rule", "longhorn_pair", "--device=cpu", "--seconds=0.01", "--output=rows.json"]
    said = run(tmp_path, "kernels", *words)
    rows = rows_of(tmp_path / "rows.json")
    torch_rows = [row for row in rows if row["implementation"] == "torch"]
    assert {row["op"] for row in torch_rows} == {"delta_rule", "longhorn_pair"}
    assert all(row["verdict"].startswith("right") and row["both_of_torch"] == 1 for row in torch_rows)
    assert all(row["verdict"].startswith("refused") for row in rows if row["implementation"] == "triton")
    assert said.strip() == (tmp_path / "rows.md").read_text().strip()


@pytest.mark.parametrize("factor", [1.0, 1.05])
def test_a_wrong_result_is_not_timed(script, monkeypatch, factor):
    gate, work = script("gate"), script("work")
    call = work.read_call("linear_attention plain B=1 T=40 H=2 K=16 V=16")
    judge = gate.Gate(call, torch.float32, torch.device("cpu"))
    right = gate.call_op

    def slightly_wrong(*arguments: Any) -> Any:
        return lambda tensors: tuple(factor * y for y in right(*arguments)(tensors))

    monkeypatch.setattr(gate, "call_op", slightly_wrong)
    assert judge.judge_backend("torch").passed == (factor == 1.0)


@pytest.mark.slow
def test_models_are_timed_in_training_inference_and_decoding(tmp_path):
    common = ["--mixers", "linear_attention", "--device=cpu", "--seconds=0.01", "--output=rows.json"]
    image = ["--models", "longseq_vit_tiny_patch16_224", "--peers", "--sizes", "32x1"]
    run(tmp_path, "models", "image", *common, *image)
    (row,) = rows_of(tmp_path / "rows.json")
    assert (row["mixer"], row["training_images_of_first"], row["inference_images_of_first"]) == (
        "linear_attention",
        1.0,
        1.0,
    )
    text = ["--d-model=16", "--depth=1", "--vocabulary=50", "--lengths=8", "--document-lengths=5", "--step-tokens=16"]
    text += ["--decoding-batches=2", "--prompt=4", "--new-tokens=3", "--peers"]
    run(tmp_path, "models", "text", *common, *text)
    training, packed, decoding = rows_of(tmp_path / "rows.json")
    assert training["training_tokens_of_first"] == packed["training_tokens_of_first"] == 1.0
    assert decoding["decoding_tokens_of_first"] == decoding["generation_tokens_of_first"] == 1.0


def test_texts_have_no_near_duplicates(script):
    texts = script("texts")
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefgh", k=5)) for _ in range(4000)]
    edited = [word if number % 40 else "edited" for number, word in enumerate(words[:2000])]
    documents = {"whole": words, "part of it": edited, "a third of it": edited[:600] + words[:100:-1][:1400]}
    joined = {name: "\n ".join(words) for name, words in documents.items()}
    found = [texts.Found(text, name, texts.shingles_of(text)) for name, text in joined.items()]
    assert [one.source for one in texts.without_near_duplicates(found)] == ["a third of it", "whole"]


def test_ngram_model_is_interpolated_kneser_ney(script):
    texts = script("texts")
    train, test = np.random.default_rng(0).integers(0, 7, (2, 600), dtype=np.uint16).cumsum(1, dtype=np.uint16) % 8
    counts = {texts.ORDER: Counter(_ngrams(train, texts.ORDER))}
    for order in range(texts.ORDER - 1, 0, -1):
        counts[order] = Counter(ngram[1:] for ngram in counts[order + 1])

    def probability(ngram):
        if not ngram:
            return 1 / 8
        own = counts[len(ngram)]
        once, twice = (sum(count == number for count in own.values()) for number in (1, 2))
        after = [count for key, count in own.items() if key[:-1] == ngram[:-1]]
        if not after:
            return probability(ngram[1:])
        discount = (once + 1) / (once + 2 * twice + 2)
        kept = max(own[ngram] - discount, 0) + discount * len(after) * probability(ngram[1:])
        return kept / sum(after)

    bits = [-math.log2(probability(ngram)) for ngram in _ngrams(test, texts.ORDER)]
    assert texts.ngram_bits(train, test, 8) == pytest.approx(statistics.mean(bits) * len(test))


def _ngrams(tokens, order):
    return [tuple(tokens[end - order : end].tolist()) for end in range(order, len(tokens) + 1)]


@pytest.mark.slow
def test_tables_are_those_of_the_rows(script):
    pages = script("table").list_pages()
    stale = [page.relative_to(ROOT).as_posix() for page, make in pages.items() if page.read_text() != make()]
    assert stale == [], "run python benchmarks/table.py"


@pytest.mark.slow
def test_from_the_same_weights_a_peer_and_our_model_end_alike(tmp_path, command_here):
    lines = [json.dumps({"text": "a grey cat and a black dog " * number}) for number in range(1, 90)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    shares = ("validation=0.1", "test=0.1")
    made = command_here(tmp_path, "prepare", "input=text.jsonl", "output=tokens", "tokenizer=train:272", *shares)
    assert made.returncode == 0, made.stderr
    words = ["experiment=lm/text", f"data.root={tmp_path}/tokens", "data.window=32", "data.reset_state=false"]
    words += ["data.num_workers=0", "recipe.batch_size=256", "recipe.updates=60", "recipe.schedule.warmup_updates=5"]
    words += ["model.d_model=64", "model.depth=1", "recipe.validate_every_updates=60"]
    run(tmp_path, "peer_training", "llama", "llama.json", *words)
    row = json.loads((tmp_path / "llama.json").read_text())
    assert row["test_loss"] < 0.7 * math.log(272)
    converted = command_here(tmp_path, "convert", "source=llama", "output=start")
    assert converted.returncode == 0, converted.stderr
    trained = command_here(tmp_path, "train", *words, "init=start", "trainer=cpu", "output=ours")
    assert trained.returncode == 0, trained.stderr
    ours = json.loads((tmp_path / "ours" / "metrics.json").read_text())
    assert ours["test/loss"] == pytest.approx(row["test_loss"], rel=1e-2)


@torch.no_grad()
def test_losses_with_less_context(script):
    context = script("context")
    model = TokenBackbone(vocab_size=16, d_model=32, depth=1, mixer="window_attention", mixer_options={"window": 32})
    found = dict(context.figures(model.eval(), torch.randint(16, (4200,))))
    torch.testing.assert_close(found["context 64"], found["context all"], rtol=0, atol=0.1)  # bfloat16
    starts = torch.randint(16, (2, 65))
    in_steps = context.losses_in_steps(model, starts)
    torch.testing.assert_close(in_steps, context.losses_of(model, starts), rtol=0, atol=0.1)
    assert context.distances([1, 2, 1, 2, 3]).tolist() == [0, 0, 2, 0]
