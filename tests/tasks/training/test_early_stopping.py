"""Early stopping: by the validations at and after the minimum of epochs and updates."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from longseq.tasks.training import targets, trainer  # noqa: F401  the module enters our callback

LOSSES = [3.0, 4.0, 4.0, 2.0, 1.0, 1.5, 0.5, 0.4]


class Scripted(BoringModel):
    """Validates to the next of `LOSSES`."""

    def on_validation_epoch_end(self) -> None:
        self.log("val/loss", LOSSES[self.trainer.current_epoch])


@pytest.mark.parametrize(("minimum", "epochs"), [({}, 2), ({"min_epochs": 4}, 6), ({"min_steps": 8}, 6)])
def test_no_validation_before_the_minimum_ends_a_run(
    minimum: dict[str, Any], epochs: int, capsys: pytest.CaptureFixture[str]
) -> None:
    node = {"_target_": "EarlyStopping", "monitor": "val/loss", "patience": 1}
    stopping = targets.build(node, targets.CALLBACKS, "stop")
    run = Trainer(
        **minimum, max_epochs=8, limit_train_batches=2, limit_val_batches=1, num_sanity_val_steps=0, accelerator="cpu",
        callbacks=[stopping], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    run.fit(Scripted())
    assert run.current_epoch == epochs
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "early stopping" in line]
    assert f"epoch {epochs}" in line
    assert "val/loss" in line
