"""A task from outside the package runs through the commands like the tasks inside it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from examples import write_files
from forked import start_others_as_forks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from longseq import plugins
from longseq.tasks import compare, registry

PAGE = Path(__file__).resolve().parents[2] / "docs" / "pages" / "task.md"
WORDS = (
    "plugins=[majority]",
    "task=majority",
    "mixer=linear_attention",
    "trainer=cpu",
    "model.d_model=16",
    "model.depth=1",
    "recipe.epochs=3",
    "recipe.learning_rate=0.02",
    "task.metric=val/loss",
    "callbacks.early_stopping=null",
    "callbacks.checkpoint.every_n_train_steps=1",
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's working folder with the files that the page on tasks shows."""
    write_files(PAGE, tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(plugins, "_LOADED", {})
    yield tmp_path
    sys.modules.pop("majority", None)


@pytest.mark.slow
def test_a_task_from_outside_trains_resumes_and_evaluates(folder, command_here):
    words = ("train", *WORDS)
    whole, cut = folder / "whole", folder / "cut"
    done = command_here(folder, *words, f"hydra.run.dir={whole}")
    assert done.returncode == 0, done.stderr
    assert "on majority: 9 bits a sequence, 256 train, 256 val, 256 test" in done.stdout
    metrics = json.loads((whole / "metrics.json").read_text())
    assert metrics["test/loss"] < 0.69

    module = sys.modules["majority"].MajorityModule
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "training_step", interrupt_before(7, module.training_step))
        assert "RuntimeError: cut" in command_here(folder, *words, f"hydra.run.dir={cut}").stderr
    resumed = command_here(folder, *words, f"hydra.run.dir={cut}", "resume=true")
    assert resumed.returncode == 0, resumed.stderr
    assert "continuing from" in resumed.stdout
    first, second = (torch.load(run / "checkpoints" / "last.ckpt", weights_only=True) for run in (whole, cut))
    assert first["global_step"] == second["global_step"] > 7
    assert all(torch.equal(value, second["state_dict"][name]) for name, value in first["state_dict"].items())

    best = whole / "checkpoints" / "best.ckpt"
    words = ("evaluate", "plugins=[majority]", f"checkpoint={best}", "trainer=cpu", f"output={folder / 'm.json'}")
    measured = command_here(folder, *words)
    assert measured.returncode == 0, measured.stderr
    assert json.loads((folder / "m.json").read_text())["test/loss"] == pytest.approx(metrics["test/loss"])
    losses = [event.value for event in EventAccumulator(str(whole)).Reload().Scalars("val/loss")]
    assert metrics["val/loss"] == pytest.approx(min(losses)), "the best checkpoint has the lowest loss"


def interrupt_before(update, training_step):
    """A training step that fails before an update."""

    def step(module, *arguments):
        if module.global_step == update:
            raise RuntimeError("cut")
        return training_step(module, *arguments)

    return step


@pytest.mark.slow
def test_a_task_from_outside_is_compared(folder, command_here, monkeypatch):
    start_others_as_forks(monkeypatch, compare)
    words = [word for word in WORDS if not word.startswith("mixer=")]
    rates = "learning_rates=[0,0.02]"
    done = command_here(folder, "compare", *words, "mixers=[linear_attention]", rates, "plot=false", "output=compared")
    assert done.returncode == 0, done.stderr
    (chosen,) = json.loads((folder / "compared" / "results.json").read_text())["summary"]
    assert chosen["learning_rate"] == 0.02, "the lower loss is the better one"
