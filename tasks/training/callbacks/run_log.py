"""The validations of a run in its log."""

from __future__ import annotations

import logging

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

_log = logging.getLogger(__name__)


class RunLog(Callback):
    """Logs the metrics of each validation of a training, by Python's logging; `hydra.job_logging` says where to."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking or not trainer.is_global_zero:
            return
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        shown = ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())
        _log.info("epoch %d, update %d: %s", trainer.current_epoch + 1, trainer.global_step, shown)
