"""Norms of states, saturation of gates and whatever else the mixers report."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from longseq.blocks.sharding import has_shards
from longseq.mixers import Mixer, named_readings
from longseq.tasks.training.callbacks.updates import updated
from longseq.tasks.training.logger import log_metrics

# TensorBoard sorts groups by name: this one of many charts comes after train and val.
GROUP = "watch"


class Telemetry(Callback):
    """Logs `watch/LAYER/NAME` for everything that the mixers report (see `longseq.mixers.Mixer.observe`).

    Every `every_n_steps` updates, the first process runs `examples` of the batch through the body of the model once
    more (see `TrainedModule.observe`): in evaluation mode, without gradients, in the precision of the training. The
    training pass does not change, compiled or not. LAYER is the block; if a block has a mixer for each of several
    orders, LAYER also names the order: `blocks.3.backward`.
    """

    def __init__(self, every_n_steps: int = 100, examples: int = 8) -> None:
        self.every_n_steps = every_n_steps
        self.examples = examples

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        due = updated(trainer, batch_idx) and trainer.global_step % self.every_n_steps == 0
        module: Any = pl_module
        backbone = module.backbone
        # A sharded model is whole only while all processes run it.
        takes_part = trainer.is_global_zero or has_shards(backbone)
        if not due or not takes_part or trainer.logger is None or not name_mixers(backbone):
            return
        with trainer.precision_plugin.forward_context(), evaluating(backbone), watching(backbone) as reports:
            module.observe(batch, self.examples)
        named = {
            f"{GROUP}/{layer}/{name}": value for layer, report in reports.items() for name, value in report.items()
        }
        if named and trainer.is_global_zero:
            # one transfer from the device for all numbers
            values = torch.stack(list(named.values())).tolist()
            log_metrics(trainer.loggers, dict(zip(named, values, strict=True)), trainer.global_step - 1)


@contextmanager
def watching(model: nn.Module) -> Iterator[dict[str, dict[str, Tensor]]]:
    """Collect what the mixers of `model` report inside the context, by layer and name."""
    mixers = name_mixers(model)
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


def name_mixers(model: nn.Module) -> dict[str, Mixer]:
    """Name the mixers of `model` by their layers, and by their orders where a layer has several."""
    named: dict[str, Mixer] = {}
    for path, reading in named_readings(model):
        layer = path.removesuffix(".mixer")
        for order, mixer in zip(reading.orders, reading.readers, strict=True):
            named[layer if len(set(reading.readers)) == 1 else f"{layer}.{order}"] = mixer
    return named
