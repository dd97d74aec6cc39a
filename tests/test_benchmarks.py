"""The scripts of benchmarks/: small runs on the CPU, and tables that agree with their rows."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

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
    """The output of a script in a process of its own."""
    command = [sys.executable, str(FOLDER / f"{name}.py"), *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


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


@pytest.mark.slow
def test_training_from_files_stands_next_to_its_bare_step(tmp_path):
    words = ["--device=cpu", "--mixer=linear_attention", "--batch=2", "--updates=4", "--repeats=1", "--seconds=0.01"]
    words += ["--pictures=2000", "--picture-size", "16", "16", "--output=rows.json", "data.num_workers=0"]
    run(tmp_path, "files", *words)
    (row,) = rows_of(tmp_path / "rows.json")
    assert row["images_per_s"] > 0
    assert row["step_per_s"] > 0
    assert row["of_step"] == pytest.approx(row["images_per_s"] / row["step_per_s"], abs=1e-3)


@pytest.mark.slow
def test_launches_are_tuned_in_the_interpreter(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    call = "recursive_least_squares plain B=1 T=20 H=1 K=16"
    said = run(tmp_path, "tune", "recursive_least_squares", "--calls", call, "--inference", "--seconds=0.001")
    assert json.loads((tmp_path / "outputs/benchmark/launches.json").read_text()) == json.loads(
        said[said.index("\n[") :]
    )
    assert '"warps"' in said


@pytest.mark.slow
def test_the_bytes_that_a_layer_keeps_are_those_of_the_page(tmp_path):
    pytest.importorskip("triton")
    said = run(tmp_path, "kept_bytes", "--mixers", "deltanet", "--recompute", "none")
    page = (ROOT / "docs" / "pages" / "results.md").read_text()
    table = page.split("python benchmarks/kept_bytes.py")[1].split("\n\n")[1]
    of_page = [line.split(" | ")[:2] for line in table.splitlines()[:3]]
    assert of_page == [line.removesuffix(" |").split(" | ") for line in said.splitlines()]


def test_pictures_are_photographs_by_size(script):
    picture = script("files").draw_picture(0, (375, 500))
    assert 0.1 < len(picture) / (375 * 500) < 0.6
    assert np.frombuffer(picture[:2], np.uint8).tolist() == [0xFF, 0xD8]


def test_new_rows_replace_those_of_the_same_model_and_others_stay(script):
    keep = script("keep")
    old = [{"mixer": "a", "tokens": 8, "speed": 1}, {"mixer": "b", "tokens": 8, "speed": 1}]
    kept = {"what": "models", "command": "first", "notes": ["by hand"], "rows": old}
    rows = [{"mixer": "b", "tokens": 8, "speed": 2}]
    result = {"what": "Whole models", "command": "second", "notes": [], "rows": rows}
    merged = keep.merge(kept, result, {})
    assert merged["rows"] == [old[0], *result["rows"]]
    assert (merged["what"], merged["notes"], merged["command"]) == ("models", ["by hand"], "first; second")
    assert keep.merge(merged, result, {})["command"] == "first; second"
    recomputed = keep.merge(kept, result, {"recompute": "mixer"})
    assert recomputed["rows"] == [*old, {**result["rows"][0], "recompute": "mixer"}]


@pytest.mark.slow
def test_tables_are_those_of_the_rows(script):
    pages = script("table").list_pages()
    stale = [page.relative_to(ROOT).as_posix() for page, make in pages.items() if page.read_text() != make()]
    assert stale == [], "run python benchmarks/table.py"


def test_every_row_says_what_it_was_measured_on(script):
    table = script("table")
    assert {"cifar10", "digits", "image_models", "kernels", "mad"} <= set(table.list_tables())
    for name in table.list_tables():
        result = table.read(name)
        for command in result["command"].split("; "):
            assert shlex.split(command)[0] in ("longseq", "python"), f"{name}: {command}"
        for row in result["rows"]:
            measured = row["measured"]
            assert ("commit" in measured) != ("recorded" in measured), f"{name}: {row}"
            assert measured["date"], f"{name}: {row}"
            assert "torch" in measured["versions"], f"{name}: {row}"
            assert measured.get("processor") or ("recorded" in measured and measured["gpu"]), f"{name}: {row}"


def test_a_row_is_older_than_a_later_change_of_its_mixer_only(script, monkeypatch):
    table = script("table")
    change = {"what": "a mend", "commit": "b", "date": "2026-01-02T00:00:00+00:00", "moves": ["accuracy"]}
    of_a_table = {**change, "names": [], "tables": ["recall"]}
    of_chunks = {**change, "names": ["gla"], "spares": ["decoding"]}
    of_a_size = {**change, "names": [], "rows": [{"mixer": "longhorn", "pixels": 512}]}
    known = [{**change, "names": ["deltanet"]}, of_a_table, of_chunks, of_a_size]
    monkeypatch.setattr(table, "changes", lambda: known)

    def later(kind: str = "accuracy", day: str = "2026-01-01", name: str = "", **row: Any) -> list[int]:
        return table.find_later_changes({**row, "measured": {"commit": f"a {day}T00:00:00+00:00"}}, kind, name)

    assert later(mixer="deltanet convolution_width=0") == [1]
    assert later(mixer="deltanet", kind="speed") == later(mixer="deltanet", day="2026-01-03") == []
    assert later(mixer="gated_deltanet", name="recall") == [2]
    assert later(op="deltanet", implementation="fla") == []
    assert (later(mixer="gla", task="text"), later(mixer="gla", task="decoding")) == ([3], [])
    assert (later(mixer="longhorn", pixels=512), later(mixer="longhorn", pixels=224)) == ([4], [])
