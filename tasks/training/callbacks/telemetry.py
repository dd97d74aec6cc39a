"""What the mixers report about themselves, and the kernels that this and the training need."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from longseq.blocks.sharding import has_shards
from longseq.kernels.operation import prepare_kernels
from longseq.kernels.self_test import is_tested
from longseq.mixers import Mixer, named_readings
from longseq.tasks.training.distributed import updated
from longseq.tasks.training.logger import log_metrics

_log = logging.getLogger(__name__)


class Telemetry(Callback):
    """Logs `watch/LAYER/state_norm`, the norm of the memory in each mixer's state.

    Every `every_n_steps` updates, the first process runs `examples` of the batch through the body of the model once
    more (see `TrainedModule.observe`): in evaluation mode, without gradients, in the precision of the training. The
    training itself does not change. LAYER is the block, and for a block with a mixer for each reading order also the
    order: `blocks.3.backward`.
    """

    def __init__(self, every_n_steps: int = 100, examples: int = 8) -> None:
        self.every_n_steps = every_n_steps
        self.examples = examples

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        due = updated(trainer, batch_idx) and trainer.global_step % self.every_n_steps == 0
        backbone = pl_module.backbone
        # A sharded model is whole only while all processes run it.
        takes_part = trainer.is_global_zero or has_shards(backbone)
        if not due or not takes_part or trainer.logger is None or not _name_mixers(backbone):
            return
        with trainer.precision_plugin.forward_context(), evaluating(backbone), watching(backbone) as reports:
            pl_module.observe(batch, self.examples)
        named = {f"watch/{layer}/{name}": value for layer, report in reports.items() for name, value in report.items()}
        if named and trainer.is_global_zero:
            values = torch.stack(list(named.values())).tolist()
            log_metrics(trainer.loggers, dict(zip(named, values, strict=True)), trainer.global_step - 1)


class KernelPreparation(Callback):
    """Compiles the Triton kernels of a run on a GPU side by side, and tests them, before the first update.

    It runs the body of the model on the first batch for training, for evaluation and for `Telemetry`, which would
    otherwise each wait for their kernels, one after the other.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Shards are gathered only for the module's own training step.
        self.is_due = is_tested(pl_module.device.type) and not has_shards(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        backbone, device = pl_module.backbone, pl_module.device
        if not self.is_due or not _name_mixers(backbone):
            return
        self.is_due = False
        started = time.monotonic()
        buffers = [(buffer, buffer.clone()) for buffer in backbone.buffers()]
        gpus = [device] if device.type == "cuda" else []
        with prepare_kernels(device), trainer.precision_plugin.forward_context(), torch.random.fork_rng(gpus):
            # What is computed here is meaningless, and may be refused (eigenvalues of NaN). The training itself raises
            # all other errors again.
            with suppress(Exception):
                features = pl_module.observe(batch)
                trained = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
                torch.autograd.grad(features.float().sum(), trained, allow_unused=True)
            with suppress(Exception), evaluating(backbone):
                pl_module.observe(batch)
                with watching(backbone):
                    pl_module.observe(batch, 8)
        with torch.no_grad():
            for buffer, kept in buffers:
                buffer.copy_(kept)
        _log.info("prepared the kernels in %.0f s", time.monotonic() - started)


@contextmanager
def watching(model: nn.Module) -> Iterator[dict[str, dict[str, Tensor]]]:
    """Collect what the mixers of `model` report inside the context, by layer and name."""
    mixers = _name_mixers(model)
    reports: dict[str, dict[str, Tensor]] = {layer: {} for layer in mixers}
    for layer, mixer in mixers.items():
        mixer.observed = reports[layer]
    try:
        yield reports
    finally:
        for mixer in mixers.values():
            del mixer.observed  # the class attribute is None


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


def _name_mixers(model: nn.Module) -> dict[str, Mixer]:
    """The mixers of `model` by layer, and by reading order where a layer has several."""
    named: dict[str, Mixer] = {}
    for path, reading in named_readings(model):
        layer = path.removesuffix(".mixer")
        for order, mixer in zip(reading.orders, reading.readers, strict=True):
            named[layer if len(set(reading.readers)) == 1 else f"{layer}.{order}"] = mixer
    return named
