"""The checkpoint from which a run continues, and the best one."""

import logging
import math
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.loops.evaluation_loop import RestartStage
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from longseq.tasks.training.callbacks.nonfinite import NonFiniteError
from longseq.tasks.training.callbacks.updates import updated, validation_follows
from longseq.tasks.training.options import Range
from longseq.tasks.training.runs import is_readable
from longseq.tasks.training.signals import answered

_log = logging.getLogger(__name__)

_DUE = "validation_due"  # the key of a checkpoint that is of the moment before a validation


class BestCheckpoint(ModelCheckpoint):
    """Keeps `best.ckpt`, the checkpoint with the best `monitor`; of equally good ones the latest.

    Each number is better than NaN. While there is none, the latest is kept, and a warning says so.

    `mode` is max if higher values are better, else min; a run takes it from the metric. `best_metrics` are the
    validation metrics when it was written. Other callbacks with the method `on_best_validation()` are told that the
    last validation was the best one so far.
    """

    FILES = ("best.ckpt",)

    def __init__(self, dirpath: str, monitor: str, mode: str) -> None:
        super().__init__(
            dirpath,
            filename="best",
            monitor=monitor,
            mode=mode,
            auto_insert_metric_name=False,
            enable_version_counter=False,
        )
        self.best_metrics: dict[str, float] = {}
        self._told_nan = False

    def check_monitor_top_k(self, trainer: Trainer, current: torch.Tensor | None = None) -> bool:
        # Ties are common on small validation sets; the later checkpoint was trained for longer.
        best = self.best_model_score
        ties = current is not None and best is not None and bool(current == best)
        is_nan = current is not None and bool(current.isnan())
        # Lightning's score of NaN is infinity.
        ties = ties or (is_nan and math.isnan(self.best_metrics.get(str(self.monitor), 0.0)))
        if not ties and not super().check_monitor_top_k(trainer, current):
            return False
        if is_nan and not self._told_nan:
            self._told_nan = True
            _log.warning("%s is nan: until it is a number, %s is the latest checkpoint", self.monitor, self.FILES[0])
        self.best_metrics = {
            name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")
        }
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if (tell := getattr(callback, "on_best_validation", None)) is not None:
                tell()
        return True

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"best_metrics": self.best_metrics}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the best score so far, also in a folder that was moved and has the file of that score.

        Lightning forgets the score in another folder: the next validation would then be the best one. That is so here
        where the file of the score is gone or damaged, with which the run could not be tested at its end.
        """
        own, saved = Path(str(self.dirpath)) / self.FILES[0], state_dict["best_model_path"]
        if saved and not is_readable(own) and not is_readable(Path(saved)):
            _log.warning("%s is gone or damaged: the best checkpoint is sought from here on", own)
            return
        if state_dict["dirpath"] != self.dirpath and own.is_file():
            best = {str(own): score for score in state_dict["best_k_models"].values()}
            here = {"dirpath": self.dirpath, "best_model_path": str(own), "best_k_models": best}
            state_dict = {**state_dict, **here, "kth_best_model_path": str(own), "last_model_path": ""}
        super().load_state_dict(state_dict)
        self.best_metrics = state_dict.get("best_metrics", {})


class LastCheckpoint(Checkpoint):
    """Writes `last.ckpt` every n updates, every n minutes, at the end of each epoch and when the run is interrupted.

    A checkpoint always has the state after an update, so that a resumed run repeats the uninterrupted one. After an
    interruption within a step, or between the accumulated batches of an update, the checkpoint is that of the update
    before, also in the statistics of batch norms. After an interruption in a validation, it is that of the update
    before, and a resumed run begins with this validation. After an interruption during the optimizer's step, the
    previous checkpoint remains.
    """

    FILES = ("last.ckpt",)

    def __init__(
        self,
        dirpath: str,
        every_n_train_steps: Annotated[int | None, Range(1)] = None,
        every_n_minutes: Annotated[float | None, Range(0)] = None,
    ) -> None:
        if every_n_train_steps is not None and every_n_train_steps < 1:
            raise ValueError(
                f"callbacks.checkpoint.every_n_train_steps={every_n_train_steps} must be at least 1, or null for never"
            )
        self.path = Path(dirpath) / self.FILES[0]
        self.every_n_train_steps = every_n_train_steps
        self.every_n_minutes = every_n_minutes
        self._saved_at = time.monotonic()
        self._saved_step = -1
        self._resume_point: dict[str, Any] | None = None  # the state of the loops after the latest update
        # What a checkpoint holds beside parameters, and its values then: a forward pass changes those of batch norms.
        self._buffers: list[torch.Tensor] = []
        self._kept: list[torch.Tensor] = []
        self._interrupted = False
        self._validates = False  # whether the resume point is of the moment before a validation
        self._resumes_validation = False  # whether the run continues a checkpoint of such a moment
        self._is_due_on_disk = False  # whether the file is of such a moment, and is written anew after the validation
        self.has_ended = False  # whether it was told of the error that ended the run, and has saved what it can
        self._has_described = False  # whether it has told where the run is saved

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._saved_at = time.monotonic()
        self._saved_step = trainer.global_step
        self._has_described = False  # of an earlier fit
        saved = pl_module.state_dict().keys()
        self._buffers = [buffer for name, buffer in pl_module.named_buffers() if name in saved]
        self._kept = [buffer.clone() for buffer in self._buffers]
        if self._resumes_validation and trainer.enable_validation:
            _validate_first(trainer)
        elif trainer.global_step and _is_at_end(trainer, pl_module):
            trainer.should_stop = True  # the run was stopped within the epoch in which it had ended

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self._resume_point = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # The checkpoint waits for the validation after its update, which is not repeated after a resume.
        if updated(trainer, batch_idx) and not trainer.is_last_batch and not validation_follows(trainer):
            self._pass(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        if self._resumes_validation:
            self._resumes_validation = False
            # as the last update has done, after which a run may end within an epoch
            trainer.should_stop = _is_at_end(trainer, pl_module)
        if updated(trainer, trainer.fit_loop.batch_idx):
            self._record(trainer)
            self._validates = True

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # From here on the result is logged, and callbacks count it, which a resumed run must not do again.
        if self._validates:
            self._resume_point, self._validates = None, False

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        training = trainer.state.fn == TrainerFn.FITTING and not trainer.is_last_batch
        if training and updated(trainer, trainer.fit_loop.batch_idx):
            if trainer.should_stop:  # the run ends here, and saves at the end of its epoch unless it is stopped before
                self._record(trainer)
            else:
                self._pass(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer)
        self._resume_point = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # With several processes, none can save alone. On SIGTERM they stop together, and all take part in saving.
        alone = trainer.world_size == 1 or isinstance(exception, SIGTERMException)
        told: list[int] = []
        if self._resume_point is not None and alone and not isinstance(exception, NonFiniteError):
            self._interrupted = True
            _copy(self._kept, self._buffers)
            # A data worker's death is told to the main process twice: a read from it fails, which ends the run, and by
            # a signal, which torch answers with an error wherever the program is then. That error, which says what has
            # happened, must not end the save: it comes after it.
            with answered([signal.SIGCHLD], lambda number, frame: told.append(number)):
                self._save(trainer)
        self.has_ended = True
        if not self.path.exists() and isinstance(exception, SIGTERMException) and trainer.is_global_zero:
            update = trainer.global_step
            moment = f"after update {update}" if update else "before the first update"
            print(f"stopped {moment}; nothing is saved", file=sys.stderr)
        remedy = f"init={self.path} starts a new run from these weights"
        line = self.describe_end(remedy) if isinstance(exception, NonFiniteError) else self.describe_end()
        if line is not None and trainer.is_global_zero:
            if isinstance(exception, BrokenPipeError):
                line = f"nobody reads the output any more, whose pipe is closed: {line}"
            _log.info(line)  # before it is printed, which a closed pipe refuses
            with suppress(BrokenPipeError):
                print(line, file=sys.stderr)
        if told:
            signal.raise_signal(signal.SIGCHLD)

    def describe_end(self, remedy: str = "the same command with resume=true continues there") -> str | None:
        """Where an interrupted run is saved, and what to do; None if it is not, or if that was told before.

        The error that ends a run asks, and so does the watch over its processes where the end takes long after it.
        """
        begun = self._saved_step >= 0  # not while a checkpoint is read that does not fit
        if self._has_described or not begun or not self.path.exists():
            return None
        self._has_described = True
        return f"stopped; saved as of update {self._saved_step}: {self.path}; {remedy}"

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._interrupted:
            checkpoint["loops"]["fit_loop"] = self._resume_point
            checkpoint[_DUE] = self._validates

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # Lightning calls this also before the test, for the best checkpoint.
        if trainer.state.fn == TrainerFn.FITTING:
            self._resumes_validation = self._is_due_on_disk = checkpoint.get(_DUE, False)

    def _pass(self, trainer: Trainer) -> None:
        """Record the state from which a run can continue, and save it if that is due."""
        self._record(trainer)
        if self._is_due(trainer):
            self._save(trainer)

    def _record(self, trainer: Trainer) -> None:
        self._resume_point = trainer.fit_loop.state_dict()
        _copy(self._buffers, self._kept)

    def _is_due(self, trainer: Trainer) -> bool:
        if self.every_n_train_steps is not None and trainer.global_step % self.every_n_train_steps == 0:
            return True
        if self.every_n_minutes is None:
            return False
        elapsed = time.monotonic() - self._saved_at >= 60 * self.every_n_minutes
        if trainer.world_size == 1:
            return elapsed
        # The processes' clocks differ, and agreeing costs a collective.
        return trainer.global_step % 50 == 0 and trainer.strategy.reduce_boolean_decision(elapsed, all=False)

    def _save(self, trainer: Trainer) -> None:
        saved = trainer.global_step == self._saved_step and (self._validates or not self._is_due_on_disk)
        if trainer.fast_dev_run or saved:  # type: ignore[attr-defined]
            return
        trainer.save_checkpoint(self.path)
        self._is_due_on_disk = self._validates
        self._saved_at = time.monotonic()
        self._saved_step = trainer.global_step


def _is_at_end(trainer: Trainer, pl_module: LightningModule) -> bool:
    """Whether the run's last update is done."""
    return trainer.global_step == getattr(pl_module, "last_update", None)


def _validate_first(trainer: Trainer) -> None:
    """Let a resumed training begin with the validation that follows its last update.

    Lightning does so where a checkpoint was written within a validation. It asks twice whether one is due: before it
    takes a batch, and before it validates.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    ask, answers = loop._should_check_val_fx, iter((True, True))
    loop._should_check_val_fx = lambda fetcher: next(answers, False) or ask(fetcher)
    loop.val_loop._restart_stage = RestartStage.RESTARTED_MID_EVALUATION


@torch.no_grad()
def _copy(tensors: list[torch.Tensor], places: list[torch.Tensor]) -> None:
    if tensors:
        torch._foreach_copy_(places, tensors)
