"""Users' programs, as the type checker reads them; each of them runs."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

import longseq

HERE = Path(__file__).resolve().parent


def test_layers_and_models_of_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    names = runpy.run_path(str(HERE / "user_script.py"))
    assert names["token"].shape == (2, 64)
    assert "torch.Size([1, 10])" in capsys.readouterr().out


@pytest.mark.slow
def test_a_program_trains_with_lightnings_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path(str(HERE / "user_training.py"))
    assert names["trainer"].callback_metrics["test/top1"] > 0.6
    images, model = torch.randn(2, 1, 8, 8), names["model"].eval()
    torch.testing.assert_close(longseq.from_pretrained(tmp_path / "digits")(images), model(images))
