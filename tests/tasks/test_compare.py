"""`longseq compare`: its runs and files, and how it ends."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forked import start_others_as_forks
from hydra import compose, initialize_config_module
from tiny_probe import TINY

from longseq.tasks import compare, comparison, registry
from longseq.tasks.costs import count_without_embedding, match_parameters
from longseq.tasks.training.configuration import resolve
from longseq.tools import cli


def comparing(monkeypatch: pytest.MonkeyPatch, folder: Path, script: Path, *overrides: str) -> int:
    """Run `longseq compare` in this process; its runs are started with `script`."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", [str(script), "compare", *TINY, "output=compared", *overrides])
    try:
        return cli.main()
    except SystemExit as leaving:
        return int(leaving.code or 0)


def results_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "compared" / "results.json").read_text())


@pytest.mark.slow
def test_mixers_are_compared(tmp_path, monkeypatch, capsys):
    start_others_as_forks(monkeypatch, compare)
    sweep = ("recipe.epochs=1", "mixers=[linear_attention,'attention model.positions=learned']", "jobs=2")
    script = Path(sys.executable).with_name("longseq")
    assert comparing(monkeypatch, tmp_path, script, *sweep) == 0
    results = results_of(tmp_path)
    assert [entry["name"] for entry in results["summary"]] == ["linear_attention", "attention model.positions=learned"]
    assert {"measured", "training_seconds"} <= results.keys()
    assert shlex.split(results["command"])[:2] == ["longseq", "compare"]
    for name in ("plot.png", "curves.png"):
        assert (tmp_path / "compared" / name).read_bytes().startswith(b"\x89PNG")
    ended = {entry["seconds"]: "equal_time" in entry for entry in results["costs"]}  # the only validation is at the end
    assert [ended[seconds] for seconds in sorted(ended)] == [True, *[False] * (len(ended) - 1)]
    assert "| linear_attention | " in (tmp_path / "compared" / "table.md").read_text()
    assert len(list((tmp_path / "compared" / "runs").glob("*/checkpoints/best.ckpt"))) == 2
    assert comparing(monkeypatch, tmp_path, Path("nothing_is_started"), *sweep) == 0
    assert "2 runs, 2 of them finished before" in capsys.readouterr().out
    assert results_of(tmp_path)["rows"] == results["rows"]


# Stands for `longseq train`: fails at seed 1 unless the file `mended` is there, and notes its GPU.
STAND_IN = """
import json, os, pathlib, sys
options = dict(argument.split("=", 1) for argument in sys.argv[2:] if "=" in argument)
if options["seed"] == "1" and not os.path.exists("mended"):
    sys.exit("longseq: error: training diverged at step 3")
accuracy = float(options["recipe.learning_rate"]) * int(options["model.depth"])
metrics = {"val/accuracy": accuracy, "test/accuracy": accuracy, "seconds": 1.0}
if "SILENT" not in os.environ:
    metrics["higher_is_better"] = {"val/accuracy": True, "test/accuracy": True}
folder = pathlib.Path(options["hydra.run.dir"])
(folder / "gpu").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
(folder / "metrics.json").write_text(json.dumps(metrics))
"""


@pytest.mark.slow
def test_failed_runs_are_told_and_tried_again(tmp_path, monkeypatch, capsys):
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    sweep = ("trainer.accelerator=auto", "seeds=[0,1]", "mixers=[deltanet]", "plot=false", "jobs=2",
             "sweep={model.depth: [1, 2]}", "learning_rates=[0.2]")  # fmt: skip
    assert comparing(monkeypatch, tmp_path, script, *sweep) == 2
    error = capsys.readouterr().err
    assert "2 of 4 runs failed, first: training diverged at step 3" in error
    summary = results_of(tmp_path)["summary"]
    assert [(entry["learning_rate"], entry["failed"]) for entry in summary] == [(0.2, 1), (0.2, 1)]
    assert [entry["metrics"]["test/accuracy"]["mean"] for entry in summary] == [0.2, 0.4]

    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("compared/runs/*/metrics.json")}
    assert len(before) == 2
    (tmp_path / "mended").touch()
    assert comparing(monkeypatch, tmp_path, script, *sweep) == 0
    assert "4 runs, 2 of them finished before" in capsys.readouterr().out
    assert all(path.stat().st_mtime_ns == changed for path, changed in before.items())
    assert all(entry["metrics"]["test/accuracy"]["runs"] == 2 for entry in results_of(tmp_path)["summary"])
    assert {path.read_text() for path in tmp_path.glob("compared/runs/*/gpu")} == {"4", "6"}
    monkeypatch.setenv("SILENT", "1")
    assert comparing(monkeypatch, tmp_path, script, *sweep, "seeds=[2]", "learning_rates=[0.1,0.2]") == 2
    assert "val/accuracy does not say which values are better" in capsys.readouterr().err


@pytest.mark.slow
def test_rates_are_tried_in_shorter_runs_of_models_of_one_size(tmp_path, monkeypatch, capsys):
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    words = ("seeds=[0,2]", "mixers=[deltanet,mamba]", "learning_rates=[0.1,0.2]", "rates_at=0.5",
             "model.d_model=64", "model.mlp=gelu", "plot=false")  # fmt: skip
    assert comparing(monkeypatch, tmp_path, script, *words, "parameters=50000") == 0
    results = results_of(tmp_path)
    assert [(row["learning_rate"], row["seed"]) for row in results["tries"]] == [(0.1, 0), (0.2, 0)] * 2
    assert all("recipe.epochs=1" in row["overrides"] for row in results["tries"])
    assert [(row["learning_rate"], row["seed"]) for row in results["rows"]] == [(0.2, 0), (0.2, 2)] * 2
    assert all("recipe.epochs=1" not in row["overrides"] for row in results["rows"])
    ratios = {word for row in results["rows"] for word in row["overrides"] if word.startswith("model.mlp_ratio=")}
    assert len(ratios) == 2
    assert comparing(monkeypatch, tmp_path, script, *words, "parameters=100") == 2
    assert "parameters=100: the nearest width of the MLP gives" in capsys.readouterr().err
    assert comparing(monkeypatch, tmp_path, script, *words, "seeds=[1]") == 2
    assert "4 of 4 runs failed, first: training diverged at step 3" in capsys.readouterr().err


@pytest.mark.slow
def test_models_of_a_number_of_parameters():
    with initialize_config_module("longseq.conf", version_base="1.3"):
        for mixer in ("attention", "lattice"):
            config = resolve(
                compose("train", [*TINY, f"mixer={mixer}", "model.d_model=64", "model.mlp=gelu", "output=x"])
            )
            config["model"]["mlp_ratio"] = match_parameters(config, 50_000)
            task = registry.of(config)
            model = task.model.build(config, task.data.from_config(config, batch_size=1).info)
            assert abs(count_without_embedding(model) - 50_000) <= 500


# Stands for `longseq train`: runs until it is told to end, and notes that it was.
ENDLESS = """
import os, pathlib, signal, sys, time
options = dict(argument.split("=", 1) for argument in sys.argv[2:] if "=" in argument)
folder = pathlib.Path(options["hydra.run.dir"])
def leave(*_):
    (folder / "told").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, leave)
(folder / "started").touch()
time.sleep(60)
"""


def plan_of(folder: Path, *given: str, **keys: Any) -> compare.Trial:
    """The only trial of a comparison of one mixer."""
    absent = dict.fromkeys(("learning_rates", "rows", "jobs", "report", "sweep", "overrides", "parameters"))
    fixed = {"output": str(folder), "mixers": ["gla"], "seeds": [0], "plot": False}
    own: Any = SimpleNamespace(**{**absent, **fixed, **keys})
    (trial,) = compare.plan(own, ["task=probe", "data=mqar", *given])
    return trial


def test_a_length_replaces_that_of_the_comparison(tmp_path: Path) -> None:
    with initialize_config_module("longseq.conf", version_base="1.3"):
        recipe = plan_of(tmp_path, "recipe.updates=3", overrides=["recipe.epochs=40"]).config["recipe"]
    assert (recipe["epochs"], recipe["updates"]) == (None, 3)


def row(mixer: str, depth: int, rate: float, seed: int, **metrics: float) -> dict[str, Any]:
    told = {"higher_is_better": {"val/accuracy": True, "test/accuracy": True, "val/loss": False}}
    found = {"metrics": {name.replace("__", "/"): value for name, value in metrics.items()} | told} if metrics else {}
    status = {"status": "finished"} if metrics else {"status": "failed", "error": "diverged"}
    return {"name": mixer, "setting": {"model.depth": depth}, "learning_rate": rate, "seed": seed, **status, **found}


def test_the_best_learning_rate_by_validation_is_reported():
    rows = [
        row("a", 1, 0.1, 0, val__accuracy=0.9, test__accuracy=0.5),
        row("a", 1, 0.1, 1, val__accuracy=0.7, test__accuracy=0.7),
        row("a", 1, 0.2, 0, val__accuracy=0.5, test__accuracy=0.9),
        row("a", 1, 0.2, 1, val__accuracy=0.5, test__accuracy=0.9),
        row("a", 1, 0.3, 0, val__accuracy=1.0, test__accuracy=1.0),
        row("a", 1, 0.3, 1),
        row("a", 2, 0.1, 0),
    ]
    summary = comparison.summarize(rows, "test/accuracy", "val/accuracy")
    assert [entry["learning_rate"] for entry in summary] == [0.1, 0.1]
    assert summary[0]["metrics"]["test/accuracy"] == {"mean": 0.6, "std": pytest.approx(0.141421), "runs": 2}
    assert summary[0]["failed"] == 1
    losses = [row("a", 1, rate, 0, val__loss=rate, test__accuracy=rate) for rate in (0.2, 0.1, 0.3)]
    assert [entry["learning_rate"] for entry in comparison.summarize(losses, "test/accuracy", "val/loss")] == [0.1]
    results = {"summary": summary, "report": "test/accuracy"}
    assert comparison.table(results) == [["model", "depth=1", "depth=2"], ["a", "0.600 ± 0.141", "failed"]]


@pytest.mark.parametrize("order", [(0.1, 0.2), (0.2, 0.1)])
def test_a_learning_rate_with_nan_is_never_the_best_one_and_infinity_is_reported(order):
    metrics = {0.1: {"val__loss": math.nan, "test__loss": 1.0}, 0.2: {"val__loss": 3.0, "test__loss": math.inf}}
    rows = [row("a", 1, rate, seed, **metrics[rate]) for rate in order for seed in (0, 1)]
    (entry,) = comparison.summarize(rows, "test/loss", "val/loss")
    assert entry["learning_rate"] == 0.2
    assert entry["metrics"]["test/loss"] == {"mean": math.inf, "std": pytest.approx(math.nan, nan_ok=True), "runs": 2}
    assert comparison.table({"summary": [entry], "report": "test/loss"})[1] == ["a", "inf ± nan"]


@pytest.mark.slow
def test_rows_replace_what_every_run_has_and_runs_take_as_many_gpus_as_they_need(tmp_path, monkeypatch):
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,5")
    rows = "rows={wide: 'mixer=mamba model.d_model=48', deep one: 'mixer=gla model.depth=5'}"
    words = ("mixers=[]", rows, "overrides=['recipe.learning_rate=2','model.d_model=32']", "plot=false", "seeds=[0,3]")
    several = ("trainer.accelerator=gpu", "trainer.devices=2")
    assert comparing(monkeypatch, tmp_path, script, *words, *several, "report=test/accuracy") == 0
    found = results_of(tmp_path)
    assert [entry["name"] for entry in found["summary"]] == ["wide", "deep one"]
    assert [entry["metrics"]["test/accuracy"]["mean"] for entry in found["summary"]] == [2.0, 10.0]
    assert found["jobs"] == 2
    assert {path.read_text() for path in tmp_path.glob("compared/runs/*/gpu")} == {"0,1", "2,3"}
    one_row = (*words, *several, "report=test/accuracy", "~rows.wide", "++rows.third='mixer=gla'")
    assert comparing(monkeypatch, tmp_path, script, *one_row) == 0
    assert [entry["name"] for entry in results_of(tmp_path)["summary"]] == ["deep one", "third"]


@pytest.mark.slow
def test_a_comparison_that_is_stopped_ends_its_runs(tmp_path, monkeypatch):
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    runs = tmp_path / "compared" / "runs"

    def stop() -> None:
        while len(list(runs.glob("*/started"))) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    words = ("seeds=[0,1,2]", "mixers=[gla]", "jobs=2", "plot=false")
    assert comparing(monkeypatch, tmp_path, script, *words) == 143
    thread.join()
    assert len(list(runs.glob("*/told"))) == len(list(runs.glob("*/started"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("~data.options", "+data.options={vocab_size: 64}", "data.options.vocab_size=32", "+data.options={tokens: 32}"),
        ("data.test=[{samples: 50, name: a b}, {samples: 60}]",),
    ],
    ids=" ".join,
)
def test_a_run_has_the_configuration_that_the_same_words_train(words, tmp_path):
    with initialize_config_module("longseq.conf", version_base="1.3"):
        planned = compose("train", plan_of(tmp_path / "a b, (c)=d's", *words).overrides)
        trained = compose("train", ["task=probe", "data=mqar", *words, "mixer=gla"])
    assert planned == trained
