"""A run of `longseq train` whose checkpoint the tests of the tools use, and a program that export formats share."""

from __future__ import annotations

from pathlib import Path

import pytest
from export_programs import share_program
from hydra import compose, initialize_config_module

from longseq.tasks import train


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """best.ckpt of two updates on digits, with an average of the weights."""
    folder = tmp_path_factory.mktemp("run")
    words = (
        "mixer=attention trainer=cpu recipe.epochs=1 recipe.schedule.warmup_epochs=0 +trainer.limit_train_batches=2 "
        "+trainer.limit_val_batches=1 data.num_workers=0 model.depth=2"
    )
    overrides = [*words.split(), "++recipe.ema={decay: 0.9}", f"output={folder}"]
    with initialize_config_module("longseq.conf", version_base="1.3"):
        train.run(compose("train", overrides))
    return folder / "checkpoints" / "best.ckpt"


@pytest.fixture
def captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the two formats that begin with the same program share it in a test of one model: it takes most time."""
    share_program(monkeypatch)
