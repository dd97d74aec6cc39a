"""A task from outside the package goes through the commands as the tasks inside it do."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from longseq.tasks import registry

TOY = Path(__file__).parent / "toy" / "majority"
WORDS = ("task=majority", "mixer=linear_attention", "trainer=cpu", "model.d_model=16", "model.depth=1")
LONG = ("recipe.epochs=3", "callbacks.checkpoint.every_n_train_steps=1", "trainer.log_every_n_steps=2")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's working folder with the module of the task."""
    shutil.copytree(TOY, tmp_path / "majority")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_registered", {})
    yield tmp_path
    sys.modules.pop("majority", None)


def test_a_task_from_outside_trains_resumes_and_evaluates(folder, command_here):
    importlib.import_module("majority")
    assert registry.names() == ["image", "probe", "majority"]
    words = ("--config-dir", str(folder / "majority" / "conf"), *WORDS, *LONG)
    whole, cut = folder / "whole", folder / "cut"
    done = command_here(folder, "train", *words, f"hydra.run.dir={whole}")
    assert done.returncode == 0, done.stderr
    assert "majority: 9 bits a sequence, 256 train, 256 val, 256 test" in done.stdout
    metrics = json.loads((whole / "metrics.json").read_text())
    assert metrics["bits"] == 9
    assert metrics["sequences_per_second"] > 0

    stopped = command_here(folder, "train", *words, f"hydra.run.dir={cut}", "+trainer.max_steps=6")
    assert stopped.returncode == 0, stopped.stderr
