"""The lines that a run prints."""

from __future__ import annotations

import logging
import sys
import time
from datetime import timedelta
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from longseq.tasks.data.loader import count_units
from longseq.tasks.training.system import peak_memory

_log = logging.getLogger(__name__)


class TrainingProgress(Callback):
    """Prints a line after each epoch and each validation, and at least every `line_seconds`.

    It has losses and `metric`, the rate of training, peak memory and the time left. `unit` is the unit of
    `count_units`.
    """

    def __init__(self, line_seconds: float = 60.0, metric: str = "val/top1", unit: str = "images") -> None:
        self.line_seconds, self.metric, self.unit = line_seconds, metric, unit
        self._printed_at = 0.0
        self._has_validated = False  # since the last line
        self._printed_update = -1
        self._epoch_began = 0.0
        self._units = 0  # in this epoch
        self._began = 0.0
        self._updates_before = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = self._printed_at = self._epoch_began = time.monotonic()  # a resumed epoch has no start
        self._updates_before = trainer.global_step

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._epoch_began, self._units = time.monotonic(), 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._units += count_units(batch) * trainer.world_size
        if time.monotonic() - self._printed_at >= self.line_seconds and not trainer.is_last_batch:
            self._print_line(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._has_validated = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if self._has_validated and not trainer.is_last_batch:
            self._print_line(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step != self._printed_update:  # a run may end within an epoch, after its validation
            self._print_line(trainer, pl_module)

    def _print_line(self, trainer: Trainer, module: LightningModule) -> None:
        now, last = time.monotonic(), getattr(module, "last_update", None)
        done, seconds = trainer.global_step - self._updates_before, now - self._epoch_began
        most = trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else "∞"
        end = "" if last is None else f"/{last}"
        facts = [f"epoch {trainer.current_epoch + 1}/{most}", f"update {trainer.global_step}{end}"]
        names = ["train/loss", *(["val/loss", self.metric] if self._has_validated else [])]
        metrics = trainer.callback_metrics
        facts += [f"{name} {float(metrics[name]):.4f}" for name in names if name in metrics]
        if seconds > 0:
            facts.append(f"{self._units / seconds:.0f} {self.unit}/s")
        if (memory := peak_memory(module.device)) is not None:
            facts.append(f"{memory / 2**30:.2f} GiB")
        if last is not None and done > 0 and trainer.global_step < last:
            left = (now - self._began) / done * (last - trainer.global_step)  # at the mean pace since the start
            facts.append(f"{timedelta(seconds=round(left))} left")
        self._has_validated, self._printed_at, self._printed_update = False, now, trainer.global_step
        if trainer.is_global_zero:
            line = "  ".join(facts)
            print(line, file=sys.stderr, flush=True)
            _log.info(line)
