"""A run of `longseq train` whose checkpoint the tests of the tools use."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from longseq.tasks import train
from longseq.tools import cli

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def longseq_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `longseq` in this process, in a folder of its own; `test_cli.py` starts the script itself."""

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["longseq", *arguments])
        try:
            code = cli.main()
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        output, errors = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, output, errors)

    return call


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """best.ckpt of two updates on digits, with an average of the weights."""
    folder = tmp_path_factory.mktemp("run")
    overrides = [
        "mixer=attention",
        "trainer=cpu",
        "recipe.epochs=1",
        "recipe.schedule.warmup_epochs=0",
        "+trainer.limit_train_batches=2",
        "+trainer.limit_val_batches=1",
        "++recipe.ema={decay: 0.9}",
        "data.num_workers=0",
        f"output={folder}",
    ]
    with initialize_config_module("longseq.conf", version_base="1.3"):
        train.run(compose("train", overrides))
    return folder / "checkpoints" / "best.ckpt"
