"""The checkpoints of a run: the best one, and the last one, from which the run continues."""

import logging
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from longseq.tasks.training.callbacks.weights import NonFiniteError
from longseq.tasks.training.distributed import updated

_log = logging.getLogger(__name__)

_DUE = "validation_due"  # key of a checkpoint whose update is not validated yet


class BestCheckpoint(ModelCheckpoint):
    """Keeps `best.ckpt`, the checkpoint with the best `monitor`; of equally good ones the latest.

    Every number is better than NaN. A run takes `mode`, min or max, from the metric. `best_metrics` are of validation.
    """

    def __init__(self, dirpath: str, monitor: str, mode: str) -> None:
        options: dict[str, Any] = {"auto_insert_metric_name": False, "enable_version_counter": False}
        super().__init__(dirpath, filename="best", monitor=monitor, mode=mode, **options)
        self.best_metrics: dict[str, float] = {}

    def check_monitor_top_k(self, trainer: Trainer, current: torch.Tensor | None = None) -> bool:
        best = self.best_model_score
        ties = current is not None and best is not None and bool(current == best)
        # Lightning scores NaN as infinity.
        if current is not None and current.isnan():
            ties = ties or math.isnan(self.best_metrics.get(str(self.monitor), 0.0))
        if not ties and not super().check_monitor_top_k(trainer, current):
            return False
        self.best_metrics = {
            name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")
        }
        return True

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"best_metrics": self.best_metrics}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the best score so far if the run folder, which may have moved, has its `best.ckpt`.

        Lightning forgets the score in another folder, and the next validation would count as the best.
        """
        own = Path(str(self.dirpath)) / "best.ckpt"
        if state_dict["best_model_path"] and not own.is_file():
            _log.warning("%s is missing: the best checkpoint is searched from here on", own)
            return
        if state_dict["dirpath"] != self.dirpath and own.is_file():
            best = {str(own): score for score in state_dict["best_k_models"].values()}
            here = {"dirpath": self.dirpath, "best_model_path": str(own), "best_k_models": best}
            state_dict = {**state_dict, **here, "kth_best_model_path": str(own), "last_model_path": ""}
        super().load_state_dict(state_dict)
        self.best_metrics = state_dict["best_metrics"]


class LastCheckpoint(Checkpoint):
    """Writes `last.ckpt` every n updates, every n minutes, after each epoch and when the run is interrupted.

    A checkpoint always has the state after an update, including the statistics of batch norms, so that a resumed run
    repeats the uninterrupted one. After an interruption in a validation, a resumed run begins with this validation.
    After an interruption during the optimizer's step, the previous checkpoint remains.
    """

    def __init__(
        self, dirpath: str, every_n_train_steps: int | None = None, every_n_minutes: float | None = None
    ) -> None:
        self.path = Path(dirpath) / "last.ckpt"
        self.every_n_train_steps = every_n_train_steps
        self.every_n_minutes = every_n_minutes
        self._saved_at = 0.0
        self._saved_step = -1
        self._resume_point: dict[str, Any] | None = None  # state of the loops after the latest update
        self._buffers: list[torch.Tensor] = []  # saved ones, such as statistics of batch norms,
        self._kept: list[torch.Tensor] = []  # and their values after the latest update
        self._interrupted = False
        self._is_due = False  # whether a validation follows the resume point
        self._loaded: dict[str, Any] = {}  # the loops of the checkpoint that is continued
        self._loaded_due = False
        self._saved_due = False

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # Lightning also calls this before the test, for the best checkpoint.
        if trainer.state.fn == TrainerFn.FITTING:
            self._loaded, self._loaded_due = checkpoint["loops"]["fit_loop"], checkpoint.get(_DUE, False)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._saved_at = time.monotonic()
        self._saved_step, self._saved_due = trainer.global_step, self._loaded_due
        saved = pl_module.state_dict().keys()
        self._buffers = [buffer for name, buffer in pl_module.named_buffers() if name in saved]
        self._kept = [buffer.clone() for buffer in self._buffers]
        at_end = trainer.global_step > 0 and trainer.global_step == getattr(pl_module, "last_update", None)
        if self._loaded_due and trainer.enable_validation:
            loop = trainer.fit_loop.epoch_loop.val_loop
            loop.restarting = False
            trainer.validating = True
            loop.run()
            loop.reset()  # otherwise Lightning would leave the epoch without counting its last update
            trainer.training = True
            self._resume_point = self._loaded
        elif at_end:
            trainer.should_stop = True
        self._loaded_due = False

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: torch.optim.Optimizer) -> None:
        self._resume_point = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_last_batch or not updated(trainer, batch_idx):
            return
        # The checkpoint waits for the validation after its update, which is not repeated after a resume.
        if not _validation_follows(trainer):
            self._record(trainer)
            self._save_if_time(trainer)
        elif trainer.should_stop:  # a resumed run takes no further step, in which Lightning would count this one
            self._record(trainer)
            self._is_due = True

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking or self._loaded_due:
            return
        if updated(trainer, trainer.fit_loop.batch_idx) and not self._is_due:
            self._record(trainer)
            self._is_due = True

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # From here on the result is logged and counted, which a resumed run must not repeat.
        if self._is_due:
            self._resume_point, self._is_due = None, False

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        training = trainer.state.fn == TrainerFn.FITTING and not trainer.is_last_batch and not self._loaded_due
        if training and updated(trainer, trainer.fit_loop.batch_idx):
            self._record(trainer)
            if not trainer.should_stop:  # otherwise the end of the epoch saves it
                self._save_if_time(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer)
        self._resume_point = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # All processes must take part in saving, which they do only on SIGTERM.
        together = trainer.world_size == 1 or isinstance(exception, SIGTERMException)
        if self._resume_point is not None and together and not isinstance(exception, NonFiniteError):
            self._interrupted = True
            _copy(self._kept, self._buffers)
            self._save(trainer)
        if trainer.is_global_zero and self._saved_step >= 0:
            line = "stopped; nothing is saved"
            if self.path.exists():
                line = f"stopped; saved as of update {self._saved_step}: {self.path}; resume=true continues there"
            _log.info(line)
            print(line, file=sys.stderr)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._interrupted:
            checkpoint["loops"]["fit_loop"] = self._resume_point
            checkpoint[_DUE] = self._is_due

    def _record(self, trainer: Trainer) -> None:
        self._resume_point = trainer.fit_loop.state_dict()
        _copy(self._buffers, self._kept)

    def _save_if_time(self, trainer: Trainer) -> None:
        due = self.every_n_train_steps is not None and trainer.global_step % self.every_n_train_steps == 0
        if not due and self.every_n_minutes is not None:
            due = time.monotonic() - self._saved_at >= 60 * self.every_n_minutes
            if trainer.world_size > 1:
                # The processes' clocks differ, and agreeing costs a collective.
                agree = trainer.global_step % 50 == 0
                due = agree and trainer.strategy.reduce_boolean_decision(due, all=False)
        if due:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        saved = trainer.global_step == self._saved_step and (self._is_due or not self._saved_due)
        if trainer.fast_dev_run or saved:  # type: ignore[attr-defined]
            return
        trainer.save_checkpoint(self.path)
        self._saved_at = time.monotonic()
        self._saved_step, self._saved_due = trainer.global_step, self._is_due


def _validation_follows(trainer: Trainer) -> bool:
    """True if Lightning validates after this batch; called after the update."""
    loop, every = trainer.fit_loop, trainer.check_val_every_n_epoch
    if not trainer.enable_validation or (every is not None and (trainer.current_epoch + 1) % every):
        return False
    if trainer.should_stop:
        return True
    interval = trainer.val_check_batch
    if interval is None or math.isinf(interval):
        return trainer.is_last_batch
    return ((loop.total_batch_idx if every is None else loop.batch_idx) + 1) % interval == 0


@torch.no_grad()
def _copy(tensors: list[torch.Tensor], places: list[torch.Tensor]) -> None:
    if tensors:
        torch._foreach_copy_(places, tensors)
