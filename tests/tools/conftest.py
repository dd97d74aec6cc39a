"""A run of `longseq train` whose checkpoint the tools are tested on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from longseq.tasks import train

LONGSEQ = Path(sys.executable).with_name("longseq")

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def longseq_command(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Runs the console script as a user would, in a folder of its own."""
    folder = tmp_path_factory.mktemp("command")

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([LONGSEQ, *arguments], cwd=folder, capture_output=True, text=True, check=False)

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
