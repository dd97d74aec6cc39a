"""`longseq compare` in the folder of an earlier one: which runs stand beside each other in a table."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import start_others_as_forks

from longseq.tasks import compare, comparison_runs
from longseq.tools import cli

NOTHING = Path("nothing_is_started")

IMAGES = (
    *("data=image_folder", "data.root=img", "data.img_size=8", "trainer=cpu", "model.embed_dim=16", "model.depth=1"),
    *("recipe.batch_size=8", "data.num_workers=0", "plot=false"),
)
RECIPE = """
defaults: [digits, _self_]
tasks: [image]
name: mine
epochs: 1
learning_rate: {rate}
schedule: {{warmup_epochs: 0}}
"""


def comparing(monkeypatch: pytest.MonkeyPatch, folder: Path, script: Path, *words: str) -> int:
    """Run `longseq compare` in this process; its runs are started with `script`."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", [str(script), "compare", *words])
    try:
        return cli.main()
    except SystemExit as leaving:
        return int(leaving.code or 0)


def results_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


@pytest.mark.slow
def test_a_run_of_another_configuration_is_refused(image_folder, tmp_path, monkeypatch, capsys):
    for place in ("first", "second"):
        shutil.copytree(image_folder, tmp_path / place / "img")
        (tmp_path / place / "own" / "recipe").mkdir(parents=True)
    first, second, output = tmp_path / "first", tmp_path / "second", tmp_path / "compared"

    def write_recipe(rate: float) -> None:
        for place in (first, second):
            (place / "own" / "recipe" / "mine.yaml").write_text(RECIPE.format(rate=rate))

    def expect(place: Path, message: str) -> None:
        assert comparing(monkeypatch, place, NOTHING, *words) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
        assert results_of(output) == results

    words = ("--config-dir=own", "recipe=mine", "mixers=[linear_attention]", f"output={output}", *IMAGES)
    write_recipe(0.001)
    with pytest.MonkeyPatch.context() as patch:
        start_others_as_forks(patch, compare)
        assert comparing(monkeypatch, first, Path("longseq"), *words) == 0
    results, (run,) = results_of(output), (output / "runs").iterdir()
    rate = f"{run.relative_to(tmp_path)} was trained with another configuration (recipe.learning_rate: 0.001 there, "
    way_out = "): give another output=FOLDER, or remove that folder to train anew"

    write_recipe(0.002)
    monkeypatch.setattr(comparison_runs, "shorten", lambda path: os.path.relpath(path, tmp_path))
    expect(first, f"{rate}0.002 here{way_out}")
    (run / "metrics.json").rename(run / "kept")  # an interrupted run would be continued
    expect(first, f"{rate}0.002 here{way_out}")
    (run / "kept").rename(run / "metrics.json")
    write_recipe(0.001)
    expect(second, f"(data.root: '{first / 'img'}' there, '{second / 'img'}' here{way_out}")
    assert comparing(monkeypatch, first, NOTHING, *words) == 0

    shutil.rmtree(run / "checkpoints")  # config.yaml tells less: it has the values of the model in place of null
    assert comparing(monkeypatch, first, NOTHING, *words) == 0
    shutil.rmtree(second / "img")
    assert comparing(monkeypatch, second, NOTHING, *words) == 0, "finished runs do not need their data"
    write_recipe(0.002)
    capsys.readouterr()
    results = results_of(output)
    expect(first, f"{rate}0.002 here")


def test_versions_and_working_folders_of_runs_are_compared(tmp_path, monkeypatch):
    for place in ("first", "second"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "best.ckpt").touch()
    run = tmp_path / "run"
    recipe: dict[str, Any] = {"learning_rate": 0.1, "ema": None, "layers": {}}
    saved = {"output": str(run), "recipe": recipe, "init": "best.ckpt", "data": {}, "model": {"depth": 2}}
    planned = {**saved, "model": {"depth": None}}
    newer = {**planned, "recipe": {**recipe, "beta": 0.9, "layers": {"first": 1}}}
    averaged = {**planned, "recipe": {**recipe, "ema": {"decay": 0.9}}}
    without = {**planned, "recipe": {"learning_rate": 0.1}}
    run.mkdir()
    (run / "config.yaml").write_text(json.dumps(saved))
    (run / "metrics.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "first")
    monkeypatch.setattr(comparison_runs, "find_circumstances", lambda device: {"commit": "abc", "date": "today"})
    comparison_runs.record_measured(run, compare._device(None))
    assert comparison_runs.read_measured(run) == {"commit": "abc", "date": "today"}, "as in the results"

    def told(config: dict[str, Any], commit: str = "abc") -> str:
        try:
            comparison_runs.refuse_others([(run, config)], commit)
        except ValueError as error:
            return str(error)
        return ""

    assert not told(planned)
    assert "(recipe.beta: None there, 0.9 here; recipe.layers.first: None there, 1 here)" in told(newer)
    assert not told(newer, "def"), "a key that an earlier version lacks"
    assert not told(without, "def")
    assert "(recipe.ema.decay: None there, 0.9 here)" in told(averaged, "def"), "the earlier version has recipe.ema"
    monkeypatch.chdir(tmp_path / "second")
    assert f"(init: '{tmp_path}/first/best.ckpt' there, '{tmp_path}/second/best.ckpt' here)" in told(planned)
    (run / "measured.json").write_text('{"commit": "abc"}')  # of a version that did not record the working folder
    assert not told(planned)
    assert not told(newer)


@pytest.mark.slow
def test_rows_of_data_that_have_grown_are_told(image_folder, tmp_path, monkeypatch, capsys):
    shutil.copytree(image_folder, tmp_path / "img")
    start_others_as_forks(monkeypatch, compare)
    words = ("recipe=digits", "recipe.epochs=1", "recipe.schedule.warmup_epochs=0", *IMAGES, "output=compared")
    assert comparing(monkeypatch, tmp_path, Path("longseq"), *words, "mixers=[linear_attention]") == 0
    assert "changed" not in capsys.readouterr().err
    picture = tmp_path / "img" / "train" / "class0" / "0.jpg"
    shutil.copy(picture, picture.with_name("new.jpg"))
    both = (*words, "mixers=[linear_attention,gla]")
    assert comparing(monkeypatch, tmp_path, Path("longseq"), *both) == 0
    later, earlier = (next((tmp_path / "compared" / "runs").glob(f"{name}*")).name for name in ("gla", "linear"))
    change = f"train has 24 samples in compared/runs/{earlier}, and 25 in {later}; another output=FOLDER"
    error = capsys.readouterr().err
    assert f"longseq: warning: the data have changed between the runs: {change}" in error
    assert error.count("warning: the data have changed") == 1
    assert change in (tmp_path / "compared" / "table.md").read_text()
    assert comparing(monkeypatch, tmp_path, NOTHING, *both) == 0
    assert change in capsys.readouterr().err, "both are finished"


# Stands for `longseq train`: a run that ends at once. Its updates are those of the file `updates`; seed 9 never ends.
STAND_IN = """
import json, pathlib, sys, time
options = dict(word.split("=", 1) for word in sys.argv[2:] if "=" in word)
folder = pathlib.Path(options["hydra.run.dir"])
(folder / "words.json").write_text(json.dumps(sys.argv[1:]))
if options["seed"] == "9":
    (folder / "started").touch()
    time.sleep(60)
updates = int(pathlib.Path("updates").read_text()) if pathlib.Path("updates").exists() else 5
metrics = {"val/top1": 1.0, "test/top1": 1.0, "seconds": 1.0, "updates": updates}
metrics["higher_is_better"] = {"val/top1": True, "test/top1": True}
if not (folder / "metrics.json").exists():
    (folder / "metrics.json").write_text(json.dumps(metrics))
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    return tmp_path / "stand_in.py"


@pytest.mark.slow
def test_the_command_of_the_results_can_be_repeated(stand_in, tmp_path, monkeypatch, capsys):
    own = tmp_path / "my own" / "recipe"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text(RECIPE.format(rate=0.001))
    monkeypatch.setenv("SIZE", "16")
    words = (
        "recipe=mine",
        "mixers=[]",
        "rows={a b: \"mixer=gla optimized_metric='test/top1'\"}",
        "optimized_metric=${task.metric}",
        "recipe.batch_size=${model.embed_dim}",
        "model.embed_dim=${oc.env:SIZE}",
        "model.label='a `b` $HOME [1]'",
        "sweep={model.embed_dim: [16, 32]}",
        "output=compared",
        "plot=false",
    )
    assert comparing(monkeypatch, tmp_path, stand_in, "--config-dir=my own", *words) == 0
    results = results_of(tmp_path / "compared")
    program, verb, flag, *given = shlex.split(results["command"])
    assert (program, verb, flag, given) == ("longseq", "compare", f"--config-dir={tmp_path / 'my own'}", list(words))
    assert f"`` {results['command']} ``" in (tmp_path / "compared" / "table.md").read_text()
    # `${...}` is of each run, and not of this command, whose model is another one
    assert all("recipe.batch_size=${model.embed_dim}" in row["overrides"] for row in results["rows"])
    assert comparing(monkeypatch, tmp_path, NOTHING, flag, *given) == 0
    assert "2 runs, 2 of them finished before" in capsys.readouterr().out


@pytest.mark.slow
def test_files_in_place_of_ours_are_those_of_the_runs_too(stand_in, tmp_path, monkeypatch):
    conf = Path(cli.__file__).resolve().parents[1] / "conf"
    shutil.copytree(conf, tmp_path / "conf")
    (tmp_path / "conf" / "others.yaml").write_text("defaults: [compare, _self_]\nmixers: [gla]\nplot: false\n")
    flags = [f"--config-path={tmp_path / 'conf'}", "--config-name=others"]
    assert comparing(monkeypatch, tmp_path, stand_in, *flags, "output=compared", "trainer=cpu") == 0
    results = results_of(tmp_path / "compared")
    assert shlex.split(results["command"])[2:4] == flags
    (words,) = (tmp_path / "compared" / "runs").glob("*/words.json")
    assert flags[0] in json.loads(words.read_text())


@pytest.mark.slow
def test_a_run_without_an_update_has_failed_and_is_tried_again(stand_in, tmp_path, monkeypatch, capsys):
    words = ("mixers=[gla]", "trainer=cpu", "plot=false", "output=compared")
    (tmp_path / "updates").write_text("0")
    for _ in range(2):
        assert comparing(monkeypatch, tmp_path, stand_in, *words) == 2
        told = capsys.readouterr()
        assert "1 runs, 0 of them finished before" in told.out
        assert "1 of 1 runs failed, gla with seed 0 first: the run ended after 0 updates, so that nothing" in told.err
    (row,) = results_of(tmp_path / "compared")["rows"]
    assert (row["status"], "metrics" in row) == ("failed", False)
    assert not (tmp_path / "compared" / "table.md").exists()
    (checkpoint := tmp_path / "compared" / row["folder"] / "checkpoints" / "last.ckpt").parent.mkdir()
    torch.save({"optimizer_states": []}, checkpoint)
    assert comparing(monkeypatch, tmp_path, NOTHING, *words) == 0, "a model without gradients needs no updates"
    checkpoint.unlink()
    (tmp_path / "updates").write_text("3")
    assert comparing(monkeypatch, tmp_path, stand_in, *words) == 0
    (row,) = results_of(tmp_path / "compared")["rows"]
    assert row["metrics"]["updates"] == 3


@pytest.mark.slow
def test_an_interrupted_comparison_leaves_no_table_of_another_one(stand_in, tmp_path, monkeypatch):
    words = ("trainer=cpu", "plot=false", "output=compared", "jobs=1")
    assert comparing(monkeypatch, tmp_path, stand_in, *words, "mixers=[gla,mamba]") == 0
    assert (tmp_path / "compared" / "table.md").exists()

    def stop() -> None:
        while not list(tmp_path.glob("compared/runs/*/started")):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    assert comparing(monkeypatch, tmp_path, stand_in, *words, "mixers=[gla]", "seeds=[0,9]") == 128 + signal.SIGTERM
    thread.join()
    results = results_of(tmp_path / "compared")
    assert (results["planned"], len(results["rows"])) == (2, 1)
    assert not (tmp_path / "compared" / "table.md").exists(), "its rows are others"


HEAD = "# @package _global_\nmixers: [gla]\n"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            f"{HEAD}recipe:\n  epochs: 3\n",
            "sets recipe, which its runs do not read: write overrides: [recipe.KEY=VALUE]",
        ),
        (f"{HEAD}init: a.ckpt\n", "sets init, which its runs do not read: write overrides: [init=VALUE]"),
        ("mixers: [gla]\n", "its first line must be # @package _global_"),
    ],
)
@pytest.mark.slow
def test_a_comparisons_file_sets_nothing_that_its_runs_do_not_read(tmp_path, monkeypatch, capsys, content, told):
    (tmp_path / "mine" / "comparison").mkdir(parents=True)
    (tmp_path / "mine" / "comparison" / "own.yaml").write_text(content)
    words = (f"--config-dir={tmp_path / 'mine'}", "comparison=own", "output=compared")
    assert comparing(monkeypatch, tmp_path, NOTHING, *words) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "compared").exists()
