"""The log of a run: a file in its folder with what the run prints, its validations, and warnings."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from longseq.tasks.training.runs import CONFIG_FILE

_log = logging.getLogger(__name__)
_FORMAT = "[%(asctime)s][%(name)s][%(levelname)s] - %(message)s"  # as Hydra's


class _RunLogFile(MemoryHandler):
    """Keeps records until the run has written its configuration: a wrong command leaves no file."""

    def __init__(self, file: Path) -> None:
        target = logging.FileHandler(file, encoding="utf-8", errors="backslashreplace", delay=True)
        target.setFormatter(logging.Formatter(_FORMAT))
        super().__init__(capacity=0, target=target, flushOnClose=False)
        self._begun = file.with_name(CONFIG_FILE)

    def shouldFlush(self, record: logging.LogRecord) -> bool:
        return self._begun.is_file()


@contextmanager
def logged(file: Path | None) -> Iterator[None]:
    """Append log records of the block to `file` in a run folder: all of this package, and warnings of others.

    None: nothing is written.
    """
    if file is None:
        yield
        return
    handler = _RunLogFile(file)
    root, package = logging.getLogger(), logging.getLogger("longseq")
    level = package.level
    root.addHandler(handler)
    package.setLevel(logging.INFO)
    try:
        yield
    finally:
        package.setLevel(level)
        root.removeHandler(handler)
        target = handler.target
        handler.close()
        if target is not None:
            target.close()


class RunLog(Callback):
    """Logs the metrics of each validation of a training, by Python's logging."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking and trainer.is_global_zero:
            shown = ", ".join(f"{name} {float(value):.6g}" for name, value in trainer.callback_metrics.items())
            _log.info("epoch %d, update %d: %s", trainer.current_epoch + 1, trainer.global_step, shown)
