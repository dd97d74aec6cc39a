"""Exported files in place of their checkpoint: the commands give the same csv, metrics and text."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from documents import make_rows, write_jsonl
from export_programs import ENGINES, need_engine, share_program
from hydra import compose, initialize_config_module
from PIL import Image

from longseq.tasks import evaluate, generate, predict, train
from longseq.tasks.training.checkpoint import load
from longseq.tools import describe, export

SPLITS = ("data.validation=0.2", "data.test=0.2", "data.tokenizer=bytes")
TEXT = (*SPLITS, "model.d_model=16", "recipe.schedule.warmup_updates=0", "trainer=cpu")
Run = Callable[[Any], Any]


def call(command: Run, verb: str, *words: str) -> Any:
    with initialize_config_module("longseq.conf", version_base="1.3"):
        return command(compose(verb, list(words)))


def export_to(checkpoint: Path, name: str, *words: str) -> Path:
    path = checkpoint.parent / name
    call(export.run, "export", f"checkpoint={checkpoint}", f"output={path}", "latency=false", "batch_sizes=[1]", *words)
    return path


def measure(file: Path, *words: str) -> Mapping[str, float]:
    output = f"output={file}.metrics.json"
    found: Mapping[str, float] = call(evaluate.run, "evaluate", f"checkpoint={file}", "trainer=cpu", output, *words)
    return found


def classify(file: Path, source: Path, *words: str) -> list[dict[str, Any]]:
    """The rows of the csv, with probabilities as numbers."""
    output = Path(f"{file}.csv")
    call(predict.run, "predict", f"checkpoint={file}", f"input={source}", f"output={output}", "device=cpu", *words)
    with output.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    numbers = [name for name in rows[0] if name.startswith("probability")]
    return [{name: float(value) if name in numbers and value else value for name, value in row.items()} for row in rows]


def check_rows(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert len(found) == len(wanted)
    for row, other in zip(found, wanted, strict=True):
        numbers = [name for name in other if isinstance(other[name], float)]
        assert {**row, **dict.fromkeys(numbers)} == {**other, **dict.fromkeys(numbers)}
        assert [row[name] for name in numbers] == pytest.approx([other[name] for name in numbers], abs=3e-6)


@pytest.mark.slow
def test_images(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(5):
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    files = [export_to(checkpoint, "plain.onnx"), export_to(checkpoint, "pixels.pt", "preprocess=true", "softmax=true")]
    metrics, rows = measure(checkpoint, "split=val"), classify(checkpoint, tmp_path)
    assert len({row["class_1"] for row in rows}) > 1, "a constant would not show which file runs"
    facts = call(describe.run, "describe", f"checkpoint={checkpoint}")
    for file in files:
        assert measure(file, "split=val") == pytest.approx(metrics, abs=1e-5)
        check_rows(classify(file, tmp_path), rows)
        capsys.readouterr()
        told = call(describe.run, "describe", f"checkpoint={file}")
        assert {name: value for name, value in told.items() if name != "file"} == {**facts, "operations": {}}
        assert {"onnx": "onnx, opset 20, 0.", "pt": "torchscript, 0."}[file.suffix[1:]] in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_images_in_other_engines(engine: str, checkpoint: Path) -> None:
    file = export_to(checkpoint, f"engine{need_engine(engine)}")
    assert json.loads(Path(f"{file}.json").read_text())["class_names"]
    assert measure(file, "split=val") == pytest.approx(measure(checkpoint, "split=val"), abs=1e-5)


@pytest.mark.slow
def test_small_files(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(5):
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    wanted = classify(checkpoint, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        share_program(patch)
        with pytest.raises(ValueError, match=r"precision=int8: val/\w+ goes from .* allowed_drop=-1"):
            export_to(checkpoint, "worse.onnx", "precision=int8", "allowed_drop=-1")
        assert not list(checkpoint.parent.glob("worse*"))
        for words in ([], [f"calibrate={tmp_path}"]):
            small = export_to(checkpoint, "small.onnx", "precision=int8", "allowed_drop=0.2", *words)
            assert "int8: " in capsys.readouterr().out
            assert json.loads(Path(f"{small}.json").read_text())["precision"] == "int8"
            by_call = [node for node in onnx.load(small).graph.node if node.op_type == "DynamicQuantizeLinear"]
            assert bool(by_call) == (not words)
            rows = classify(small, tmp_path)
            differences = [row["probability_1"] - one["probability_1"] for row, one in zip(rows, wanted, strict=True)]
            assert 0 < max(map(abs, differences)) < 0.02


@pytest.mark.slow
def test_documents(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", make_rows(60))
    words = ("task=document", "data=documents", f"data.root={rows}", f"data.cache={tmp_path / 'cache'}")
    words += ("mixer=linear_attention", "model.depth=1", "recipe.batch_size=1024", "recipe.epochs=3", *TEXT)
    call(train.run, "train", *words, f"output={tmp_path / 'run'}")
    checkpoint = tmp_path / "run" / "checkpoints" / "best.ckpt"
    metrics, wanted = measure(checkpoint), classify(checkpoint, rows)
    file = export_to(checkpoint, "model.pt")
    assert measure(file) == pytest.approx(metrics, abs=1e-5)
    check_rows(classify(file, rows), wanted)
    assert "in float32" not in caplog.text
    measure(file, "trainer.precision=bf16-mixed")
    assert "model.pt computes in float32" in caplog.text


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The checkpoint of a language model, a file that reads any number of tokens, and one that reads one."""
    folder = tmp_path_factory.mktemp("language_model")
    documents = [{"text": f"Document {number} says: {'la ' * (number % 7)}and ends."} for number in range(60)]
    text = write_jsonl(folder / "text.jsonl", documents)
    words = ("task=lm", "data=text", f"data.root={text}", f"data.cache={folder / 'cache'}", "data.window=16")
    words += ("data.packing=documents", "mixer=hybrid", "mixer.name=linear_attention+attention", "model.depth=2")
    words += ("recipe.batch_size=64", "recipe.updates=3", *TEXT)
    call(train.run, "train", *words, f"output={folder / 'run'}")
    checkpoint = folder / "run" / "checkpoints" / "best.ckpt"
    read = export_to(checkpoint, "read.pt", "dynamic_length=true", "max_length=200")
    return checkpoint, read, export_to(checkpoint, "step.onnx", "max_length=200")


@pytest.mark.slow
def test_language_models(language_model: tuple[Path, Path, Path], tmp_path: Path) -> None:
    checkpoint, *files = language_model
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Document\nla la\nétat\nDocument 7 says\n")
    drawn = (f"input={prompts}", "max_new_tokens=12", "repetition_penalty=1.2", "seed=3")

    def continue_text(file: Path, *words: str) -> Any:
        return call(generate.run, "generate", f"checkpoint={file}", "device=cpu", *words)

    metrics, written = measure(checkpoint), continue_text(checkpoint, *drawn)
    for file in files:
        assert measure(file) == pytest.approx(metrics, abs=1e-4)
        assert continue_text(file, *drawn) == written
        with pytest.raises(ValueError, match=r"reads 200 tokens, not 301: export with a larger max_length"):
            continue_text(file, "prompt=", "max_new_tokens=300")


@pytest.mark.slow
def test_a_file_needs_its_own_description_weights_and_runtime(
    language_model: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, read, step = language_model
    with pytest.raises(ValueError, match=r"is of task=lm; this command takes image"):
        load(step)
    with pytest.raises(ValueError, match="holds weights=model"):
        load(step, weights="ema", tasks=["lm"])
    other = tmp_path / "other.pt"
    other.write_bytes(step.read_bytes())
    Path(f"{other}.json").write_bytes(Path(f"{read}.json").read_bytes())
    with pytest.raises(ValueError, match=r"another file than the one that other.pt.json describes"):
        load(other, tasks=["lm"])
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r"^ONNX files need onnxruntime: pip install onnxruntime$"):
        load(step, tasks=["lm"])
