"""`longseq compare`: its runs, files and messages, and how it ends."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import fields
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from forked import start_others_as_forks
from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from tiny_probe import TINY

from longseq.tasks import compare, comparison, registry
from longseq.tasks.circumstances import COMMIT_VARIABLE
from longseq.tasks.document.linear import LinearModelKeys
from longseq.tasks.training.configuration import command_word
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
    monkeypatch.setenv(COMMIT_VARIABLE, "0123abc 2026-01-02T03:04:05+00:00")
    assert comparing(monkeypatch, tmp_path, script, *sweep) == 0
    results = results_of(tmp_path)
    assert [entry["name"] for entry in results["summary"]] == ["linear_attention", "attention model.positions=learned"]
    assert {"measured", "seconds", "training_seconds", "command"} <= results.keys()
    assert results["measured"]["processor"]
    assert results["measured"]["commit"] == "0123abc 2026-01-02T03:04:05+00:00"
    assert (tmp_path / "compared" / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "| linear_attention | " in (tmp_path / "compared" / "table.md").read_text()
    assert len(list((tmp_path / "compared" / "samples").glob("mqar_*.npz"))) == 1
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
    monkeypatch.setenv(COMMIT_VARIABLE, "0123abc 2026-01-02T03:04:05+00:00")
    sweep = ("trainer.accelerator=auto", "seeds=[0,1]", "mixers=[deltanet]", "learning_rates=[0.1,0.2]", "plot=false",
             "sweep={model.depth: [1, 2]}", "jobs=2")  # fmt: skip
    assert comparing(monkeypatch, tmp_path, script, *sweep) == 2
    error = capsys.readouterr().err
    assert "4 of 8 runs failed, deltanet with seed 1 first: training diverged at step 3; the same" in error
    summary = results_of(tmp_path)["summary"]
    assert [(entry["learning_rate"], entry["failed"]) for entry in summary] == [(0.2, 2), (0.2, 2)]
    assert [entry["metrics"]["test/accuracy"]["mean"] for entry in summary] == [0.2, 0.4]

    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("compared/runs/*/metrics.json")}
    assert len(before) == 4
    (tmp_path / "mended").touch()
    (tmp_path / "compared" / "plot.png").write_text("of earlier results")
    monkeypatch.setenv(COMMIT_VARIABLE, "4567def 2026-01-02T03:04:05+00:00")
    assert comparing(monkeypatch, tmp_path, script, *sweep) == 0
    told = capsys.readouterr().out
    assert "8 runs, 4 of them finished before" in told
    assert "the runs are of several commits (0123abc, 4567def): another output=FOLDER trains all" in told
    assert all(path.stat().st_mtime_ns == changed for path, changed in before.items())
    assert all(entry["metrics"]["test/accuracy"]["runs"] == 2 for entry in results_of(tmp_path)["summary"])
    assert {path.read_text() for path in tmp_path.glob("compared/runs/*/gpu")} == {"4", "6"}
    assert not (tmp_path / "compared" / "plot.png").exists()
    assert comparing(monkeypatch, tmp_path, script, *sweep, "report=test/top1") == 2
    assert "report=test/top1 was not measured: choose one of test/accuracy" in capsys.readouterr().err
    assert results_of(tmp_path)["report"] == "test/accuracy"
    assert (tmp_path / "compared" / "table.md").exists()
    monkeypatch.setenv("SILENT", "1")
    assert comparing(monkeypatch, tmp_path, script, *sweep, "seeds=[2]") == 2
    assert (
        "val/accuracy does not say which values are better: give one of learning_rates=[0.1, "
        in capsys.readouterr().err
    )


@pytest.mark.slow
def test_a_thread_of_another_program_compares_too(tmp_path, monkeypatch):
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    codes: list[int] = []
    sweep = ("mixers=[deltanet]", "learning_rates=[0.1]", "plot=false")
    thread = threading.Thread(target=lambda: codes.append(comparing(monkeypatch, tmp_path, script, *sweep)))
    thread.start()
    thread.join()
    assert codes == [0]
    assert [row["status"] for row in results_of(tmp_path)["rows"]] == ["finished"]


# Stands for `longseq train`: the first attempt tells its error, the second is killed.
KILLED = """
import os, signal, sys
if not os.path.exists("tried"):
    open("tried", "w").close()
    sys.exit("longseq: error: training diverged at step 3")
print("epoch 1", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_the_error_told_is_that_of_the_last_attempt(tmp_path, monkeypatch, capsys):
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    sweep = ("mixers=[deltanet]", "plot=false")
    (tmp_path / "compared").mkdir()
    (tmp_path / "compared" / "table.md").write_text("of an earlier comparison")
    (tmp_path / "compared" / "results.json").write_text('{"command": "", "selected_by": "", "rows": []}')
    assert comparing(monkeypatch, tmp_path, script, *sweep) == 2
    told = capsys.readouterr()
    assert "first: training diverged at step 3; the same" in told.err
    assert "table.md" not in told.out
    assert comparing(monkeypatch, tmp_path, script, *sweep) == 2
    error = capsys.readouterr().err
    assert "first: signal 9; the last line of " in error
    assert "log.txt: epoch 1; the same" in error


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


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_comparison_that_is_stopped_ends_its_runs(number, tmp_path, monkeypatch, capsys):
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    runs = tmp_path / "compared" / "runs"

    def stop() -> None:
        while len(list(runs.glob("*/started"))) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_DFL)  # also where the tests run in the background
    thread = threading.Thread(target=stop)
    thread.start()
    assert (
        comparing(monkeypatch, tmp_path, script, "seeds=[0,1,2]", "mixers=[gla]", "jobs=2", "plot=false")
        == 128 + number
    )
    thread.join()
    assert len(list(runs.glob("*/told"))) == len(list(runs.glob("*/started"))) == 2
    assert "stopping; the same command continues" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["outputs/a-1_2.3/best.ckpt", "mein Lauf ä, (b)=c's/best.ckpt"])
def test_the_commands_that_a_run_prints_can_be_copied(path):
    for report in (registry.get(name).report for name in registry.names()):
        for command in report.next_commands(command_word("checkpoint", path)):
            program, _, word, *_ = shlex.split(command)
            override = OverridesParser.create().parse_override(word)
            assert (program, override.key_or_group, override.value()) == ("longseq", "checkpoint", path)
    assert command_word("checkpoint", "a/best.ckpt") == "checkpoint=a/best.ckpt"


@pytest.mark.parametrize("output", ["compared", "a b, (c)=d's"])
@pytest.mark.slow
def test_values_and_folders_are_spelled_so_that_hydra_reads_them(output, tmp_path):
    slices = [{"samples": 50, "name": "a b"}, {"samples": 60}]
    own = compare.CompareKeys(
        output=str(tmp_path / output),
        mixers=["gla"],
        seeds=[0],
        sweep={"data.test": [slices], "recipe": ["vla"], "model.tie_embeddings": [False]},
        overrides=["task=probe", "recipe=mad"],
        **dict.fromkeys(("learning_rates", "rows", "jobs", "report")),
        plot=False,
    )
    with initialize_config_module("longseq.conf", version_base="1.3"):
        (trial,) = compare.plan(own, [])
        composed = compose("train", trial.overrides)
    assert composed.data.test == slices
    assert composed.recipe.name == "vla"
    assert composed.model.tie_embeddings is False
    assert composed.data.cache == str(tmp_path / output / "samples")


def plan_of(folder: Path, *given: str, **keys: Any) -> compare.Trial:
    """The only trial of a comparison of one mixer."""
    absent = dict.fromkeys(("learning_rates", "rows", "jobs", "report", "sweep", "overrides"))
    own = compare.CompareKeys(
        **{**absent, "output": str(folder), "mixers": ["gla"], "seeds": [0], "plot": False, **keys}
    )
    (trial,) = compare.plan(own, ["task=probe", "data=mqar", *given])
    return trial


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("~data.options", "+data.options={vocab_size: 64}"),
        ("~data.options", "++data.options={vocab_size: 64}"),
        ("~data.options", "+data.options={vocab_size: 64}", "data.options={vocab_size: 32}"),
        ("~data.options", "+data.options={vocab_size: 64}", "data.options.vocab_size=32", "+data.options={tokens: 32}"),
        ("data.options=null", "data.options={vocab_size: 64}"),
        ("~data.options.filler", "+data.options.filler=random"),
        ("~data.options.filler", "++data.options.filler=random"),
        ("~data.test", "+data.test=[{samples: 5}]"),
        ("data.options={vocab_size: 64}", "data.options={tokens: 32}"),
        ("data.options={vocab_size: 64}", "data.options={vocab_size: 32}"),
        ("data={draw_seed: 3}", "data=copy"),
        ("data=copy", "data={draw_seed: 3}"),
        ("data.options.tokens=32", "~data.options.tokens"),
        ("~data.options.filler", "+data.options.filler=random", "data.options.filler=zero"),
        ("+trainer.profiler=simple", "trainer.profiler=advanced"),
        ("+trainer.profiler=simple", "~trainer.profiler"),
    ],
    ids=" ".join,
)
def test_a_run_has_the_configuration_that_the_same_words_train(words, tmp_path):
    with initialize_config_module("longseq.conf", version_base="1.3"):
        planned = compose("train", plan_of(tmp_path, *words).overrides)
        trained = compose("train", ["task=probe", "data=mqar", *words, "mixer=gla"])
    trained.data.cache = planned.data.cache
    assert planned == trained


@pytest.mark.slow
def test_the_name_of_a_run_leaves_out_what_is_replaced(tmp_path):
    """Finished runs are found by it."""
    replaced = (
        (("recipe.epochs=2",), ("recipe.epochs=1", "++recipe.epochs=3", "recipe.epochs=2")),
        (("data=copy",), ("data=mqar", "data=copy")),
        (("++data.options.tokens=32",), ("~data.options.tokens", "++data.options.tokens=32")),
        (("+data.test=[{samples: 5}]",), ("~data.test", "+data.test=[{samples: 5}]")),
        (("data.options={tokens: 32}",), ("data.options={tokens: 16}", "data.options={tokens: 32}")),
        (("~data.cache",), ("data.cache=samples", "~data.cache")),
        (("mixer.options.num_heads=2",), ("+mixer.options.num_heads=1", "mixer.options.num_heads=2")),
    )
    with initialize_config_module("longseq.conf", version_base="1.3"):
        for short, long in replaced:
            assert plan_of(tmp_path, *long) == plan_of(tmp_path, *short)
        swept = plan_of(tmp_path, overrides=["recipe.epochs=4"], sweep={"recipe.epochs": [5]}).overrides
    assert [word for word in swept if "epochs" in word] == ["recipe.epochs=5"]


@pytest.mark.slow
def test_the_name_of_a_run_does_not_depend_on_the_order_of_its_words(tmp_path):
    alike = (
        ("recipe.epochs=2", "model.d_model=16"),
        ("recipe.epochs=2", "data=copy", "model.d_model=16", "init=weights.ckpt"),
        ("data.options.tokens=32", "data.options.vocab_size=64", "data=copy"),
        ("+trainer.profiler=simple", "recipe.epochs=2", "model.d_model=16"),
    )
    different = (
        ("data.options={vocab_size: 64}", "data.options.vocab_size=32"),
        ("data={draw_seed: 3}", "data.draw_seed=4"),
        ("+callbacks.one._target_=a.A", "+callbacks.two._target_=b.B"),  # the order of callbacks
    )
    with initialize_config_module("longseq.conf", version_base="1.3"):
        for words in alike:
            trials = [plan_of(tmp_path, *order) for order in permutations(words)]
            assert len({trial.folder for trial in trials}) == 1, words
            assert len({tuple(trial.overrides) for trial in trials}) > 1, "they are given as the words are"
        for words in different:
            assert plan_of(tmp_path, *words).folder != plan_of(tmp_path, *reversed(words)).folder, words
        changed = plan_of(tmp_path, "recipe.epochs=16", "model.d_model=2")
        assert changed.folder != plan_of(tmp_path, *alike[0]).folder
        # A run of an earlier version, whose name kept the order, is found by the same words.
        given = plan_of(tmp_path, *alike[0])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compare, "_in_one_order", list)
            earlier = plan_of(tmp_path, *alike[0]).folder
        assert earlier != given.folder
        earlier.mkdir(parents=True)
        assert plan_of(tmp_path, *alike[0]).folder == earlier
        given.folder.mkdir()
        assert plan_of(tmp_path, *alike[0]).folder == given.folder


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("mixer=deltanet", "give mixers=[...]"),
        ("seed=3", "give seeds=[...]"),
        ("mixers=[]", "mixers is empty"),
        ("sweep={model.depth: 3}", "sweep.model.depth=3 must be a list of at least 1"),
        ("sweep=[1,2]", "sweep=[1, 2] must be a dictionary or null"),
        ("sweep={mixer: [gla, mamba]}", "sweep: mixer is set by longseq compare itself: give mixers=[...]"),
        ("jobs=0", "jobs=0 must be a whole number of at least 1 or null"),
        ("jobs=many", "jobs=many must be a whole number of at least 1 or null"),
        ("rows=[a]", "rows=['a'] must be a dictionary or null"),
        ("mixers=deltanet", "mixers=deltanet must be a list, each entry text"),
        ("mixers=[deltanet,deltanet]", "mixers names deltanet more than once"),
        ("mixers=['']", "mixers=[''] has an entry without a word"),
        (
            "seeds=[first]",
            "seeds=['first'] must be a list of at least 1, each entry a whole number from 0 to 4294967295",
        ),
        (
            "learning_rates=small",
            "learning_rates=small must be a list of at least 1, each entry a number of at least 0 or null",
        ),
        ("report=val/accuracy", "must be a metric of the test"),
        ("output=null", "output=null must be text"),
        ("trainer.fast_dev_run=true", "try with recipe.epochs=1"),
        ("report=1", "report=1 must be text or null"),
    ],
)
def test_a_comparison_that_cannot_be_is_refused(overrides, message, monkeypatch, capsys, tmp_path):
    assert comparing(monkeypatch, tmp_path, Path("nothing_is_started"), overrides) == 2
    assert message in capsys.readouterr().err


ABSENT = {
    "data=image_folder data.root=nowhere": "data.root=nowhere does not exist: give the folder",
    "data=image_folder data.source=csv data.root=nowhere": "data.root=nowhere does not exist: give a csv file",
    "data=image_shards data.root=nowhere": "data.root=nowhere does not exist: give the folder that `longseq prepare",
    "data=cifar10 data.root=nowhere": "data.root=nowhere does not hold CIFAR10",
    "task=lm data=text data.root=nowhere": "data.root=nowhere does not exist",
    "task=lm data=tokens data.root=nowhere": "nowhere is no folder: give one that `longseq prepare` has written",
    "task=document data=documents data.root=. data.test=nowhere": "data.test=nowhere, below data.root=., does not",
    "task=document data=documents data.test=nowhere": "data=documents reads a file or a folder: give data.root=PATH",
    "task=lm data=text data.root=. data.tokenizer=nowhere": "data.tokenizer=nowhere is no file: give bytes, train:SIZE",
    "task=document data=documents data.root=. data.tokenizer=nowhere": "data.tokenizer=nowhere is no file: give bytes",
    "task=document data=documents data.root=. data.tokenizer=.": "data.tokenizer=. holds no tokenizer.json",
    "task=document data=documents data.root=. data.tokenizer=init": "data.tokenizer=init is the tokenizer of the",
    "init=nowhere": "init=nowhere: no such file or folder",
}


@pytest.mark.parametrize("words", ABSENT)
def test_data_that_are_not_there_are_told_before_a_run_begins(words, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["nothing_is_started", "compare", "output=compared", *words.split()])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    captured = capsys.readouterr()
    assert captured.err.startswith(f"longseq: error: {ABSENT[words]}")
    assert captured.err.count("\n") == 1
    assert not captured.out
    assert not list(tmp_path.iterdir())


def test_a_comparison_that_has_finished_does_not_need_its_data(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(compare.runs, "finished", lambda folder: {"test/top1": 1.0, "seconds": 2.0})
    monkeypatch.chdir(tmp_path)
    words = "compare output=compared plot=false data=image_folder data.root=nowhere init=nowhere"
    monkeypatch.setattr("sys.argv", ["nothing_is_started", *words.split()])
    assert cli.main() == 0
    assert "2 runs, 2 of them finished before" in capsys.readouterr().out


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
def test_slices_are_columns(tmp_path):
    rows = [row("a", 1, 0.1, 0, test__accuracy=0.5, test__accuracy_64x4=0.75, test__accuracy_512x64=0.25)]
    rows.append(row("b", 1, 0.1, 0, test__accuracy=0.6, test__accuracy_64x4=0.9, test__accuracy_512x64=0.3))
    rows += [row("a", 1, 0.1, 1), row("c", 1, 0.1, 0)]
    results = {
        "rows": rows,
        "summary": comparison.summarize(rows, "test/accuracy", "val/accuracy"),
        "report": "test/accuracy",
        "selected_by": "val/accuracy",
        "command": "longseq compare",
        "measured": {"commit": None, "date": "2026-01-01", "processor": "one", "versions": {"torch": "2"}},
        "training_seconds": 1.0,
        "jobs": 1,
    }
    table = comparison.markdown(results)
    assert table.splitlines()[0] == "| model | depth=1 | depth=1, 64x4 | depth=1, 512x64 |"
    assert table.splitlines()[3] == "| b | 0.600 | 0.900 | 0.300 |"
    assert table.splitlines()[4] == "| c | failed | failed | failed |"
    assert "Over fewer seeds or learning rates, as runs failed: a depth=1 (1 run(s))." in table
    comparison.plot(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


@pytest.mark.slow
def test_the_column_of_an_only_slice_is_that_of_the_whole_test():
    rows = [row("a", depth, 0.1, 0, test__accuracy=0.5, test__accuracy_up_to_512=0.5) for depth in (1, 2)]
    rows[1]["metrics"]["test/accuracy_longer"] = 0.25
    results = {"summary": comparison.summarize(rows, "test/accuracy", "val/accuracy"), "report": "test/accuracy"}
    heading = ["model", "depth=1", "depth=2", "depth=2, up_to_512", "depth=2, longer"]
    assert comparison.table(results) == [heading, ["a", *["0.500"] * 3, "0.250"]]
    alone = {"summary": [{**results["summary"][0], "setting": {}}], "report": "test/accuracy"}
    assert comparison.table(alone)[0] == ["model", "test/accuracy"]


@pytest.mark.slow
def test_a_mistaken_report_is_told_after_the_first_run_and_one_of_other_data_is_none(tmp_path, monkeypatch, capsys):
    script = tmp_path / "train.py"
    extra = 'if options.get("data.draw_seed") == "1":\n    metrics["test/extra"] = 0.5\nfolder = '
    script.write_text(STAND_IN.replace("folder = ", extra))
    words = ("trainer.accelerator=cpu", "learning_rates=[0.1]", "plot=false", "jobs=1")
    assert comparing(monkeypatch, tmp_path, script, *words, "seeds=[0,2,3,4]", "report=test/extra") == 2
    assert "report=test/extra was not measured: choose one of test/accuracy" in capsys.readouterr().err
    assert len(list(tmp_path.glob("compared/runs/*/metrics.json"))) < 4
    assert not (tmp_path / "compared" / "results.json").exists()
    rows = "rows={one: 'mixer=deltanet', two: 'mixer=deltanet data.draw_seed=1'}"
    assert comparing(monkeypatch, tmp_path, script, *words, "seeds=[0]", "mixers=[]", rows, "report=test/extra") == 0
    assert (tmp_path / "compared" / "table.md").read_text().splitlines()[2:4] == ["| one |  |", "| two | 0.500 |"]


@pytest.mark.slow
def test_metrics_that_the_user_names_are_no_slices(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    measured = "".join(f'"{name}": 0.5, ' for name in ("val/f1", "test/f1", "test/f1_weighted", "test/f1_b"))
    script.write_text(STAND_IN.replace('"seconds"', f'{measured}"seconds"'))
    named = "+task.metrics.f1_b={_target_: MulticlassFBetaScore, beta: 2.0, average: macro}"
    words = ["task.metric=val/f1", "+task.metrics.f1_weighted=true", named, "trainer=cpu", "scale=nano", "plot=false"]
    words += ["model.depth=1", "output=compared", "seeds=[0]", "mixers=[deltanet]", "learning_rates=[0.1]"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(script), "compare", *words])
    assert cli.main() == 0
    assert (tmp_path / "compared" / "table.md").read_text().splitlines()[0] == "| model | test/f1 |"


@pytest.mark.slow
def test_the_table_says_that_rows_have_other_tokenizers(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text(STAND_IN)
    rows = "rows={more: 'mixer=deltanet', fewer: 'mixer=deltanet data.tokenizer=train:512'}"
    words = ["task=document", "trainer=cpu", "scale=nano", "plot=false", "model.depth=1", "seeds=[0]", rows]
    words += ["output=compared", "mixers=[]", "learning_rates=[0.1]"]
    monkeypatch.chdir(tmp_path)

    def read_notes(*more: str) -> str:
        monkeypatch.setattr("sys.argv", [str(script), "compare", *words, *more])
        assert cli.main() == 0
        return (tmp_path / "compared" / "table.md").read_text()

    assert (
        "\n\nThe runs have other tokenizers (train:4096, train:512): lengths and losses by token have " in read_notes()
    )
    assert "tokenizers" not in read_notes("data.tokenizer=train:512")


@pytest.mark.slow
def test_a_slice_that_a_finished_row_does_not_have_is_an_empty_cell(tmp_path):
    slices = {"test__accuracy_up_to_512": 0.25, "test__accuracy_longer": 1.0}
    rows = [row("bytes", 1, 0.1, 0, test__accuracy=0.5, **slices)]
    rows += [row("words", 1, 0.1, 0, test__accuracy=0.6, test__accuracy_up_to_512=0.6), row("none", 1, 0.1, 0)]
    results = {"summary": comparison.summarize(rows, "test/accuracy", "val/accuracy"), "report": "test/accuracy"}
    listed = {name: cells for name, *cells in comparison.table(results)}
    assert listed["words"] == ["0.600", "0.600", ""]
    assert listed["none"] == ["failed"] * 3
    comparison.plot(results | {"selected_by": "val/accuracy"}, tmp_path / "plot.png")


def test_a_missing_matplotlib_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"longseq\[plot\]"):
        comparison.require_matplotlib()


@pytest.mark.slow
def test_rows_replace_what_every_run_has_and_runs_take_as_many_gpus_as_they_need(tmp_path, monkeypatch, capsys):
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
    (wide,) = {tuple(row["overrides"]) for row in found["rows"] if row["name"] == "wide" and row["seed"] == 0}
    assert "model.d_model=48" in wide
    assert "model.d_model=32" not in wide
    assert found["jobs"] == 2
    assert {path.read_text() for path in tmp_path.glob("compared/runs/*/gpu")} == {"0,1", "2,3"}
    one_row = (*words, *several, "report=test/accuracy", "~rows.wide", "++rows.third='mixer=gla'")
    assert comparing(monkeypatch, tmp_path, script, *one_row) == 0
    assert [entry["name"] for entry in results_of(tmp_path)["summary"]] == ["deep one", "third"]
    assert comparing(monkeypatch, tmp_path, script, *words, "trainer.accelerator=gpu", "trainer.devices=6") == 2
    assert "a run takes 6 GPUs, and there are 5" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "cifar10"])
def test_comparisons_of_the_tables_can_be_planned(name, tmp_path):
    with initialize_config_module("longseq.conf", version_base="1.3"):
        own = compare._own_keys(compose("compare", [f"comparison={name}", f"output={tmp_path}"]))
        trials = compare.plan(own, ["data.root=FOLDER"] if name == "cifar10" else [])
        composed = [compose("train", trial.overrides) for trial in trials if trial.seed == 0]
        labels = {(config.model.name, config.mixer.name) for config in composed}
    assert len(trials) == {"digits": 30, "cifar10": 48}[name]
    assert len(labels) == {"digits": 6, "cifar10": 7}[name]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rows"), [("imdb", 11), ("lra_listops", 10), ("lra_image", 10)])
def test_comparisons_of_documents_can_be_planned(name, rows, tmp_path):
    root = [] if name == "lra_listops" else ["data.root=FOLDER"]
    with initialize_config_module("longseq.conf", version_base="1.3"):
        own = compare._own_keys(compose("compare", [f"comparison={name}", f"output={tmp_path}", *root]))
        trials = compare.plan(own, root)
        # Of rows that are alike in all three, one is composed.
        first = compose("train", trials[0].overrides) if name == "imdb" else None
    assert len(trials) == rows
    assert all(f"experiment=document/{name}" in trial.overrides for trial in trials)
    assert all("callbacks.linear=null" in trial.overrides for trial in trials), "each would fit the same linear model"
    if first is not None:
        assert (first.task.name, first.data.name, first.model.name) == ("document", "imdb", "linear")
        assert set(first.model) - {"tasks"} == {field.name for field in fields(LinearModelKeys)}


# Stands for `longseq train`: follows its comparison, and lives until that is gone.
FOLLOWER = """
import os, pathlib, sys, time
from longseq.tasks.training.processes import follow_parent
follow_parent()
pathlib.Path("child").write_text(str(os.getpid()))
time.sleep(60)
"""

COMPARISON = """
import subprocess, sys, os
from longseq.tasks.training.processes import followed_by_child
subprocess.Popen([sys.executable, "follower.py"], env={**os.environ, **followed_by_child()}).wait()
"""


@pytest.mark.slow
def test_the_runs_of_a_comparison_that_is_killed_end_too(tmp_path):
    (tmp_path / "follower.py").write_text(FOLLOWER)
    parent = subprocess.Popen([sys.executable, "-c", COMPARISON], cwd=tmp_path)
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        assert parent.poll() is None
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    child = int((tmp_path / "child").read_text())
    for _ in range(500):
        if not is_alive(child):
            return
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the run goes on without its comparison")


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] not in "ZX"
