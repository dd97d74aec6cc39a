"""Gradients are clipped under every optimizer and precision that a run may have."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback

from longseq.tasks import train
from longseq.tasks.training.trainer import build_trainer

BOUND = 1e-3


class Norms(Callback):
    """Notes the norm of the gradients with which each update was made."""

    def __init__(self):
        self.found = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        gradients = [x.grad.flatten() for x in pl_module.parameters() if x.grad is not None]
        self.found.append(float(torch.cat(gradients).norm()))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.slow
def test_a_fused_optimizer_clips_too(fused, precision, tiny):
    config = tiny(
        f"+recipe.optimizer.fused={str(fused).lower()}",
        f"recipe.gradient_clip={BOUND}",
        f"trainer.precision={precision}",
        "recipe.epochs=null",
        "recipe.updates=2",
    )
    datamodule, task = train.build(config)
    norms = Norms()
    build_trainer(config, [norms]).fit(task, datamodule=datamodule)
    assert norms.found == pytest.approx([BOUND, BOUND], rel=1e-2)
