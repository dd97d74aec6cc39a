"""A run of `longseq train` whose checkpoint the tests of the tools use, and a program that export formats share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from torch import nn

from longseq.tasks import train
from longseq.tools.export import onnx_file, pt2_file
from longseq.tools.export.graph import capture


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


@pytest.fixture
def captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the two formats that begin with the same program share it in a test of one model: it takes most time."""
    programs: list[torch.export.ExportedProgram] = []

    def capture_once(
        module: nn.Module, example: tuple[Any, ...], axes: Sequence[Mapping[int, str]]
    ) -> torch.export.ExportedProgram:
        if not programs:
            programs.append(capture(module, example, axes))
        return programs[0]

    for format in (onnx_file, pt2_file):
        monkeypatch.setattr(format, "capture", capture_once)
