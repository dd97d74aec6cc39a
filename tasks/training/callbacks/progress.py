"""The progress bar: rate, remaining time of the whole run, and one line per epoch."""

import math
import time
from typing import Annotated, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from longseq.tasks.data.units import count_units
from longseq.tasks.training.module import TrainedModule
from longseq.tasks.training.options import Range


class TrainingProgress(ProgressBar):
    """Shows the whole run as one bar in a terminal, and prints one line per epoch everywhere.

    Values (the losses and `metric`) are read from the device only when the bar is redrawn, at most once in
    `refresh_seconds`. `unit` is the unit of `count_units`.
    """

    def __init__(
        self, refresh_seconds: Annotated[float, Range(0)] = 1.0, metric: str = "val/top1", unit: str = "images"
    ) -> None:
        super().__init__()
        self.refresh_seconds = refresh_seconds
        self.metric = metric
        self.unit = unit
        self.console = Console(stderr=True)
        self._enabled = True
        self._progress: Progress | None = None
        self._task: Any = None
        self._refreshed = 0.0
        self._started = 0.0
        self._units = 0
        self._epoch_rate = ""

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._enabled:
            return
        self._refreshed = self._started = time.monotonic()
        self._units = 0
        if not self.console.is_terminal:
            return
        batches = trainer.num_training_batches
        epochs = trainer.max_epochs or 1
        unlimited = math.isinf(batches) or epochs < 0
        end = _last_update(pl_module)
        total = batches * epochs if end is None else end * trainer.accumulate_grad_batches
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[values]}"),
            console=self.console,
            expand=True,
        )
        self._task = self._progress.add_task(
            _epoch(trainer),
            total=None if unlimited else total,
            completed=0 if unlimited else int(trainer.current_epoch * batches) + trainer.fit_loop.batch_idx + 1,
            rate="",
            values="",
        )
        self._progress.start()

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        self._started = time.monotonic()
        self._units = 0
        if self._progress is not None:
            self._progress.update(self._task, description=_epoch(trainer))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._enabled:
            return
        self._units += count_units(batch) * trainer.world_size
        if trainer.is_last_batch:
            self._epoch_rate = self._rate()
        if self._progress is None:
            return
        self._progress.advance(self._task)
        now = time.monotonic()
        if now - self._refreshed >= self.refresh_seconds:
            self._refreshed = now
            values = _values(trainer, ("train/loss", self.metric))
            self._progress.update(self._task, rate=self._rate(), values=values)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print a line for a validation within an epoch; the one at an epoch's end is in the epoch's line."""
        if not self._enabled or trainer.state.fn != TrainerFn.FITTING or trainer.is_last_batch:
            return
        end = _last_update(pl_module)
        update = f"update {trainer.global_step}" + ("" if end is None else f"/{end}")
        values = _values(trainer, ("train/loss", "val/loss", self.metric))
        self.console.print(f"{update}  {values}  {self._rate()}", highlight=False, soft_wrap=True)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._enabled:
            return
        values = _values(trainer, ("train/loss", "val/loss", self.metric))
        self.console.print(f"{_epoch(trainer)}  {values}  {self._epoch_rate}", highlight=False, soft_wrap=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _rate(self) -> str:
        seconds = time.monotonic() - self._started
        return f"{self._units / seconds:.0f} {self.unit}/s" if seconds > 0 else ""


def _last_update(module: LightningModule) -> int | None:
    """The update after which the run ends, if the module knows it."""
    return module.last_update if isinstance(module, TrainedModule) else None


def _epoch(trainer: Trainer) -> str:
    total = trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else "∞"
    return f"epoch {trainer.current_epoch + 1}/{total}"


def _values(trainer: Trainer, names: tuple[str, ...]) -> str:
    metrics = trainer.callback_metrics
    return "  ".join(f"{name} {float(metrics[name]):.4f}" for name in dict.fromkeys(names) if name in metrics)
