"""The progress of a run: a bar in a terminal, lines elsewhere, and one line per epoch."""

from __future__ import annotations

import errno
import logging
import math
import os
import textwrap
import time
from datetime import timedelta
from typing import Annotated, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from longseq.tasks.data.units import count_units
from longseq.tasks.training.callbacks.throughput import Throughput
from longseq.tasks.training.memory import peak_memory
from longseq.tasks.training.module import TrainedModule
from longseq.tasks.training.options import Range

_NARROWEST_BAR = 6  # columns
_UNBROKEN = "\N{NO-BREAK SPACE}"

_log = logging.getLogger(__name__)


class _Lines(Console):
    """A console whose closed pipe is an error as any other: rich's exits, and a run would end without its reason."""

    def on_broken_pipe(self) -> None:
        raise  # rich calls this where it has caught the error


class TrainingProgress(ProgressBar):
    """Shows the whole run as one bar in a terminal; elsewhere prints a line at least every `line_seconds`.

    Each epoch also has a line with its metrics, the rates of training and validation, the memory that was taken, and
    the time left; `last train/loss` in it is the loss of one update, beside means over the validation data. Lines have
    the values of a validation once, where it was. Values (the losses and `metric`) are read from the device only when
    the bar is redrawn, at most once in `refresh_seconds`, and when a line is printed. `unit` is the unit of
    `count_units`.
    """

    def __init__(
        self,
        refresh_seconds: Annotated[float, Range(0)] = 1.0,
        line_seconds: Annotated[float, Range(0)] = 60.0,
        metric: str = "val/top1",
        unit: str = "images",
    ) -> None:
        super().__init__()
        self.refresh_seconds = refresh_seconds
        self.line_seconds = line_seconds
        self.metric = metric
        self.unit = unit
        self.console = _Lines(stderr=True)
        self._enabled = True
        self._progress: Progress | None = None
        self._task: Any = None
        self._told = 0.0  # when the bar was drawn, or a line printed
        self._pace = _Pace()
        self._started = 0.0  # of the epoch
        self._units = 0
        self._epoch_rate: float | None = None
        self._unread: BrokenPipeError | None = None  # of a line that nobody reads
        self._has_terminal = False
        self._untold_validation = False  # since the last line

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._enabled:
            return
        self._told = self._started = time.monotonic()
        self._units = 0
        batches = trainer.num_training_batches
        epochs = trainer.max_epochs or 1
        unlimited = math.isinf(batches) or epochs < 0
        end = _last_update(pl_module)
        total = batches * epochs if end is None else end * trainer.accumulate_grad_batches
        done = 0 if unlimited else int(trainer.current_epoch * batches) + trainer.fit_loop.batch_idx + 1
        self._pace = _Pace(done, None if unlimited else int(total))
        self._has_terminal = self.console.is_terminal
        if not self._has_terminal:
            return
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            _Facts(self.console),
            console=self.console,
            expand=True,
        )
        self._task = self._progress.add_task(
            _epoch(trainer), total=self._pace.total, completed=done, rate="", left="", values=[]
        )
        self._progress.start()

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        self._started = time.monotonic()
        self._units = 0
        self._describe(_epoch(trainer))

    def on_train_batch_start(self, *_: Any) -> None:
        if self._unread is not None:  # between updates, where a run that ends is saved without a loss
            raise self._unread

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._enabled:
            return
        self._units += count_units(batch) * trainer.world_size
        self._pace.done += 1
        if trainer.is_last_batch:
            self._epoch_rate = self._rate()
        if self._progress is not None:
            self._progress.advance(self._task)
        if not self._is_due():
            return
        if self._progress is not None:
            values = _values(trainer, ("train/loss", self.metric))
            self._progress.update(
                self._task, rate=self._per_second(self._rate()), left=self._pace.left(), values=values
            )
        elif not trainer.is_last_batch:
            values = _values(trainer, ("train/loss",))
            place = (_epoch(trainer), _update(trainer, pl_module))
            self._print(*place, *values, self._per_second(self._rate()), self._pace.left())

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._describe("validating")

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._tell_evaluation("validating", batch_idx, trainer.num_val_batches[0])

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        self._tell_evaluation("testing", batch_idx, trainer.num_test_batches[0])

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print a line for a validation within an epoch; the one at an epoch's end is in the epoch's line."""
        self._describe(_epoch(trainer))
        self._untold_validation = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if not self._enabled or not self._untold_validation or trainer.is_last_batch:
            return
        self._print(_update(trainer, pl_module), *self._measured(trainer, pl_module, self._rate()))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._enabled:
            self._print(_epoch(trainer), *self._measured(trainer, pl_module, self._epoch_rate))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._progress is not None:
            values = _values(trainer, ("train/loss", self.metric))
            self._progress.update(self._task, left="", values=values)
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _describe(self, stage: str) -> None:
        if self._progress is not None:
            self._progress.update(self._task, description=stage)

    def _is_due(self) -> bool:
        """True if it is time to draw the bar, or to print a line, anew."""
        now = time.monotonic()
        due = now - self._told >= (self.line_seconds if self._progress is None else self.refresh_seconds)
        if due:
            self._told = now
        return due

    def _tell_evaluation(self, stage: str, batch_idx: int, batches: float) -> None:
        if self._enabled and self._progress is None and not self.console.is_terminal and self._is_due():
            self._print(f"{stage}: batch {batch_idx + 1}" + ("" if math.isinf(batches) else f" of {batches}"))

    def _measured(self, trainer: Trainer, module: LightningModule, rate: float | None) -> list[str]:
        """The facts of the line of an epoch or a validation."""
        self._told = time.monotonic()
        validated, self._untold_validation = self._untold_validation, False
        last = [f"last {value}" for value in _values(trainer, ("train/loss",))]
        values = _values(trainer, ("val/loss", self.metric)) if validated else []
        facts = [*last, *values, self._per_second(rate)]
        callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
        evaluated = next((one.evaluation_rate for one in callbacks if isinstance(one, Throughput)), None)
        if validated and evaluated is not None:
            facts.append(f"val {self._per_second(evaluated)}")
        if (memory := peak_memory(module.device)) is not None:
            facts.append(f"{memory / 2**30:.2f} GiB")
        return [*facts, self._pace.left()]

    def _print(self, *facts: str) -> None:
        line = "  ".join(fact.replace(" ", _UNBROKEN) for fact in facts if fact)
        if self.console.is_terminal:
            line = textwrap.fill(line, self.console.width - 1, subsequent_indent="  ")
        try:
            self.console.print(line.replace(_UNBROKEN, " "), highlight=False, soft_wrap=True)
        except BrokenPipeError as error:
            self._unread = error
        if getattr(self.console.file, "unread", False):  # of a command, whose streams outlive their readers
            self._unread = BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        if self._has_terminal and not self.console.is_terminal:
            self._has_terminal = False
            _log.info("the terminal is gone: the run goes on without it")

    def _rate(self) -> float | None:
        seconds = time.monotonic() - self._started
        return self._units / seconds if seconds > 0 else None

    def _per_second(self, rate: float | None) -> str:
        return "" if rate is None else f"{rate:.0f} {self.unit}/s"


_LONGEST = timedelta(days=36_500).total_seconds()  # that is told: a run whose end is to be early stopping may have more


class _Pace:
    """The batches of a run that are done, of how many, and since when; a resumed run begins with some."""

    def __init__(self, done: int = 0, total: int | None = None) -> None:
        self.begun = self.done = done
        self.total = total
        self.started = time.monotonic()

    def left(self) -> str:
        """The time left at the mean pace so far, validations included; empty at the end, and where none is known."""
        if self.total is None or not self.begun < self.done < self.total:
            return ""
        seconds = (time.monotonic() - self.started) / (self.done - self.begun) * (self.total - self.done)
        return f"{timedelta(seconds=round(min(seconds, _LONGEST)))} left"


class _Facts(ProgressColumn):
    """The time left, the rate and the values of a run: as many, in this order, as leave room for a bar."""

    def __init__(self, console: Console) -> None:
        super().__init__(Column(no_wrap=True))
        self.console = console

    def render(self, task: Task) -> Text:
        room = self.console.width - len(task.description) - _NARROWEST_BAR - 2
        shown: list[str] = []
        for fact in (task.fields["left"], task.fields["rate"], *reversed(task.fields["values"])):
            if fact and len("  ".join([*shown, fact])) <= room:
                shown.append(fact)
        return Text("  ".join(shown), no_wrap=True)


def _last_update(module: LightningModule) -> int | None:
    """The update after which the run ends, if the module knows it."""
    return module.last_update if isinstance(module, TrainedModule) else None


def _update(trainer: Trainer, module: LightningModule) -> str:
    end = _last_update(module)
    return f"update {trainer.global_step}" + ("" if end is None else f"/{end}")


def _epoch(trainer: Trainer) -> str:
    total = trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else "∞"
    return f"epoch {trainer.current_epoch + 1}/{total}"


def _values(trainer: Trainer, names: tuple[str, ...]) -> list[str]:
    metrics = trainer.callback_metrics
    return [f"{name} {float(metrics[name]):.4f}" for name in dict.fromkeys(names) if name in metrics]
