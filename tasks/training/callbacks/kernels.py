"""The kernels that a training needs."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from longseq.blocks.sharding import has_shards
from longseq.kernels.operation import prepare_kernels
from longseq.kernels.self_test import is_tested
from longseq.mixers import Mixer

_log = logging.getLogger(__name__)


class KernelPreparation(Callback):
    """Compiles the Triton kernels of a run on a GPU side by side, and tests them, before the first update.

    It runs the model on the first batch for training and evaluation, which would wait for one kernel after another.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Shards are gathered only for the module's own training step.
        mixes = any(isinstance(part, Mixer) for part in pl_module.modules())
        self.is_due = mixes and is_tested(pl_module.device.type) and not has_shards(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self.is_due:
            return
        self.is_due = False
        backbone, device, started = pl_module.backbone, pl_module.device, time.monotonic()
        buffers = [(buffer, buffer.clone()) for buffer in backbone.buffers()]
        gpus = [device] if device.type == "cuda" else []
        with prepare_kernels(device), trainer.precision_plugin.forward_context(), torch.random.fork_rng(gpus):
            # What is computed here is meaningless, and may be refused (eigenvalues of NaN). The training itself raises
            # all other errors again.
            with suppress(Exception):
                found = pl_module.preview(batch)
                trained = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
                torch.autograd.grad(found.float().sum(), trained, allow_unused=True)
            with suppress(Exception), evaluating(backbone):
                pl_module.preview(batch)
        with torch.no_grad():
            for buffer, kept in buffers:
                buffer.copy_(kept)
        _log.info("prepared the kernels in %.0f s", time.monotonic() - started)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run `model` in evaluation mode without gradients; restore its mode and the random generators afterwards."""
    trained = [module for module in model.modules() if module.training]
    devices = {tensor.device for tensor in model.parameters() if tensor.device.type == "cuda"}
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(list(devices)):
            yield
    finally:
        for module in trained:
            module.training = True
