"""The duration of a run."""

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

_KEY = "seconds"


class RunClock(Callback):
    """Counts the seconds of a run from the start of its training to the end of its test, with those before a resume.

    Other callbacks may measure after the test; their time does not count. If a run was killed, the time after its last
    checkpoint does not count.
    """

    def __init__(self) -> None:
        self._before = 0.0
        self._started: float | None = None

    @property
    def seconds(self) -> float:
        return self._before + (0.0 if self._started is None else time.monotonic() - self._started)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == TrainerFn.FITTING:
            self._started = time.monotonic()

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._before, self._started = self.seconds, None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[_KEY] = self.seconds

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # Lightning calls this also before the test, for the best checkpoint.
        if trainer.state.fn == TrainerFn.FITTING:
            self._before = checkpoint.get(_KEY, 0.0)
