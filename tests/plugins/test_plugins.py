"""Users' code outside the package: installed with an entry point, or a module in the working folder."""

from __future__ import annotations

import functools
import importlib
import json
import multiprocessing
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked import SCRIPT, start_fork, start_others_as_forks
from lightning.pytorch.strategies.launchers import subprocess_script

import longseq
from longseq import plugins, timm_script
from longseq.tasks import compare
from longseq.tasks.training import checkpoint as checkpoints
from longseq.tools import cli

HERE = Path(__file__).resolve().parent

TINY = (
    "trainer=cpu model.embed_dim=16 model.depth=2 recipe=digits recipe.epochs=1 recipe.schedule.warmup_epochs=0 "
    "recipe.batch_size=32"
)
BEST = Path("installed/checkpoints/best.ckpt")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which commands ran with an installed plug-in, then with a module of that folder besides.

    `output.txt` there holds what they printed.
    """
    folder = tmp_path_factory.mktemp("working")
    shutil.copy(HERE / "my_module.py", folder)
    sources, site = shutil.copytree(HERE / "package", folder / "sources"), folder / "site"
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    install = [sys.executable, "-m", "pip", "install", *options, "--target", site, sources]
    installed = subprocess.run(install, cwd=folder, capture_output=True, text=True, check=False)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    parts = {"train_set": (0, 32), "val_set": (32, 16), "test_set": (48, 16)}
    sets = [f"data.{key}={{_target_:my_module.Halves,first:{a},count:{b}}}" for key, (a, b) in parts.items()]
    mine = f"plugins=[my_module] mixer=mine data=digits data.source=own {' '.join(sets)} {TINY}"
    stopped = "++callbacks.stop={_target_:StopOnce} recipe.epochs=2"
    commands = (
        f"train mixer=scaled_attention mixer.options.gain=0.25 task=stripes data=stripes {TINY} "
        "++callbacks.note={_target_:NoteEnd,name:note.txt} output=installed",
        f"evaluate checkpoint={BEST} trainer=cpu",
        f"export checkpoint={BEST} format=renamed latency=false batch_sizes=[1]",
        f"describe checkpoint={BEST}",
        "compare task=probe data=parity recipe=probe mixers=[scaled_attention] trainer=cpu recipe.epochs=1 "
        "recipe.batch_size=16 plot=false output=comparison",
        f"train {mine} {stopped} ++task.metrics.upper={{_target_:ShareOfUpper}} output=local",
        f"train {mine} {stopped} ++task.metrics.upper={{_target_:ShareOfUpper}} output=local resume=true",
        "evaluate checkpoint=local/checkpoints/best.ckpt plugins=[my_module] trainer=cpu data.num_workers=1",
        f"train {mine} trainer=ddp_sim ++callbacks.ranks={{_target_:CountRanks}} output=ranks",
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(site)}
    program = functools.partial(run_commands, site)
    process = start_fork([], folder, environment=environment, run=program, stdin=subprocess.PIPE)
    output, errors = process.communicate("\n".join(commands))
    assert process.returncode == 0, output + errors
    (folder / "output.txt").write_text(output)
    return folder


def run_commands(site: Path) -> int:
    """Run the commands of standard input in a fork that finds the packages in `site`.

    What it starts for a run on two devices and for loading data are new processes, and a fork for a comparison.
    """
    sys.path.insert(0, str(site))
    importlib.invalidate_caches()
    subprocess_script.subprocess = subprocess
    start_others_as_forks(pytest.MonkeyPatch(), compare)
    multiprocessing.set_start_method("spawn", force=True)  # workers know of the plug-in what they import themselves
    for line in sys.stdin:
        sys.argv = [str(SCRIPT), *shlex.split(line)]  # what further processes run
        print("+", line.strip(), flush=True)
        try:
            code = cli.main()
        except SystemExit as left:  # one that is told to end does not end the others
            code = 0 if left.code == 128 + signal.SIGTERM else int(left.code or 0)
        if code:
            return code
    return 0


def recorded(checkpoint: Path) -> dict:
    return torch.load(checkpoint, weights_only=True)["hyper_parameters"]["config"]


@pytest.mark.slow
def test_an_installed_plug_in_trains_evaluates_exports_describes_and_compares(runs: Path) -> None:
    config = recorded(runs / BEST)
    assert config["plugins"] == ["example_plugin"]
    assert config["mixer"]["name"] == "scaled_attention"
    assert config["mixer"]["options"] | {"num_heads": None, "gain": 0.25} == config["mixer"]["options"]
    assert (runs / "installed" / "note.txt").read_text() == "1 of 2"
    assert json.loads((runs / "installed" / "evaluation_test.json").read_text())["test/images"] == 16
    assert (runs / BEST).with_suffix(".renamed").is_file()
    assert "mixer scaled_attention" in (runs / "output.txt").read_text()
    assert len(list((runs / "comparison").rglob("metrics.json"))) == 1


@pytest.mark.slow
def test_a_module_of_the_working_folder_trains_resumes_and_is_in_every_process(runs: Path) -> None:
    output = (runs / "output.txt").read_text()
    assert "continuing from local/checkpoints/last.ckpt" in output
    last = torch.load(runs / "local" / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["global_step"] == 2
    assert last["hyper_parameters"]["config"]["plugins"] == ["my_module"]
    metrics = json.loads((runs / "local" / "metrics.json").read_text())
    assert metrics["updates"] == 2
    assert metrics["test/upper"] == sum(row[0] for row in metrics["test/confusion_matrix"]) / 16

    assert {file.name for file in (runs / "ranks").glob("rank*")} == {"rank0", "rank1"}
    assert recorded(runs / "ranks" / "checkpoints" / "best.ckpt")["plugins"] == ["my_module"]

    # A spawned data worker has read them.
    assert json.loads((runs / "local" / "evaluation_test.json").read_text())["test/images"] == 16


@pytest.mark.slow
def test_a_checkpoint_whose_plug_in_is_not_declared_is_one_line(runs: Path) -> None:
    for load in (checkpoints.load, longseq.from_pretrained):
        with pytest.raises(ValueError, match=r"needs a plug-in.*plugins=\[my_module\]"):
            load(runs / "local" / "checkpoints" / "best.ckpt")


def test_no_module_of_the_working_folder_takes_the_place_of_an_installed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "timm.py").write_text("raise RuntimeError")
    (tmp_path / "beside.py").write_text("import timm")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(plugins, "_LOADED", {})
    assert plugins.load(["beside"]) == ("beside",)
    assert longseq.__file__ is not None


def test_a_program_for_timm_has_the_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import argparse, timm, timm.utils\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--model')\n"
        "parser.add_argument('--model-kwargs', nargs='*', default={}, action=timm.utils.ParseKwargs)\n"
        "arguments = parser.parse_args()\n"
        "model = timm.create_model(arguments.model, **arguments.model_kwargs)\n"
        "print(__name__, {type(part).__name__ for part in model.modules()} & {'DeltaNet', 'Longhorn'})\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    words = ["--model", "longseq_tiny_patch16_224", "--model-kwargs", "mixer=deltanet", "depth=1"]
    monkeypatch.setattr(sys, "argv", ["timm_script", str(program), *words])
    timm_script.main()
    assert capsys.readouterr().out == "__main__ {'DeltaNet'}\n"


@pytest.mark.slow
def test_a_configuration_file_imports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "named.yaml").write_text("# @package _global_\nplugins: [named_module]\n")
    (tmp_path / "named_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["longseq", "train", "experiment=named", f"hydra.searchpath=[file://{tmp_path}]"])
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    assert leaving.value.code == 2
    assert "plugins=[named_module]" in capsys.readouterr().err
