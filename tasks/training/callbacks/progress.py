"""The progress of a run, as a bar in a terminal and as lines for logs."""

from __future__ import annotations

import logging
import sys
import time
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.trainer.states import TrainerFn

from longseq.tasks.data.loader import count_units
from longseq.tasks.training.system import peak_memory

_log = logging.getLogger(__name__)


class TrainingProgress(RichProgressBar):
    """Shows Lightning's bar in a terminal; elsewhere prints a line at least every `line_seconds`.

    Each epoch and each validation also prints a line: losses and `metric`, the rate of training, peak memory and
    the time left. The bar reads metrics from the device at most once in `refresh_seconds`. `unit` is the
    unit of `count_units`.
    """

    def __init__(
        self, refresh_seconds: float = 1.0, line_seconds: float = 60.0, metric: str = "val/top1", unit: str = "images"
    ) -> None:
        super().__init__(refresh_rate=4, console_kwargs={"stderr": True})
        self.refresh_seconds = refresh_seconds
        self.line_seconds = line_seconds
        self.metric = metric
        self.unit = unit
        self._shown: dict[str, Any] = {}  # metrics in the bar
        self._read_at = 0.0
        self._printed_at = 0.0
        self._has_validated = False  # since the last line
        self._printed_update = -1
        self._epoch_began = 0.0
        self._units = 0  # in this epoch
        self._began = 0.0
        self._updates_before = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if not sys.stderr.isatty():
            self.disable()

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        now = time.monotonic()
        if now - self._read_at >= self.refresh_seconds:
            self._shown, self._read_at = _read(trainer, "train/loss", self.metric), now
        return self._shown

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._began = self._printed_at = self._epoch_began = time.monotonic()  # a resumed epoch has no start
        self._updates_before = trainer.global_step

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        self._epoch_began, self._units = time.monotonic(), 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._units += count_units(batch) * trainer.world_size
        due = self.is_disabled and time.monotonic() - self._printed_at >= self.line_seconds
        if due and not trainer.is_last_batch:
            self._print_line(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        self._has_validated = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if self._has_validated and not trainer.is_last_batch:
            self._print_line(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        if trainer.global_step != self._printed_update:  # a run may end within an epoch, after its validation
            self._print_line(trainer, pl_module)

    def _print_line(self, trainer: Trainer, module: LightningModule) -> None:
        now, last = time.monotonic(), getattr(module, "last_update", None)
        done, seconds = trainer.global_step - self._updates_before, now - self._epoch_began
        most = trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else "∞"
        end = "" if last is None else f"/{last}"
        facts = [f"epoch {trainer.current_epoch + 1}/{most}", f"update {trainer.global_step}{end}"]
        names = ["train/loss", *(["val/loss", self.metric] if self._has_validated else [])]
        facts += [f"{name} {value:.4f}" for name, value in _read(trainer, *names).items()]
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


def _read(trainer: Trainer, *names: str) -> dict[str, float]:
    metrics = trainer.callback_metrics
    return {name: float(metrics[name]) for name in names if name in metrics}
