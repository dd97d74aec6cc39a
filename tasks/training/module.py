"""What the tasks have in common: optimizer, schedule, learning rate in the log, randomness of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from longseq.mixers import check_revisions, mixer_revisions
from longseq.tasks.data.seeds import derive_seed
from longseq.tasks.training.callbacks.updates import updated

# Where a checkpoint tells which functions of their weights its mixers compute.
REVISIONS = "mixer_revisions"


class TrainedModule(LightningModule):
    """Trains a backbone with an optimizer and a schedule that is stepped after each update.

    `optimizer(model, lr=...)` and `schedule(optimizer, num_epochs=..., updates_per_epoch=...)` are partials, or None in
    a module that only measures.
    `hyperparameters` is a plain container for the checkpoint (see `longseq.tasks.training.checkpoint`). A subclass
    defines the steps, and `val_metrics` and `test_metrics`, logged below `val/` and `test/`; `headline` names those
    that a run ends with. Randomness in a batch is a function of (seed, update, part of the effective batch), so
    that a resumed run repeats the uninterrupted one, also where other processes take the parts: a training step calls
    `seed_batch` first.
    """

    headline: ClassVar[tuple[str, ...]] = ("loss",)

    val_metrics: nn.ModuleDict
    test_metrics: nn.ModuleDict

    # The update after which the run ends, where it is told one.
    last_update: int | None = None

    # Counts [true class, predicted class] of the last test, of tasks that have classes.
    confusion_matrix: Tensor | None = None

    def __init__(
        self,
        backbone: nn.Module,
        *,
        optimizer: Callable[..., torch.optim.Optimizer] | None,
        schedule: Callable[..., tuple[Any, int]] | None,
        learning_rate: float,
        epochs: int,
        seed: int = 0,
        hyperparameters: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(dict(hyperparameters or {}), logger=False)
        self.backbone = backbone
        self.learning_rate = learning_rate
        self.epochs = epochs
        self.seed = seed
        self._learning_rate = learning_rate  # of the latest update
        self._optimizer = optimizer
        self._schedule = schedule

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[REVISIONS] = mixer_revisions(self.backbone)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        try:
            check_revisions(self.backbone, checkpoint.get(REVISIONS))
        except ValueError as error:
            raise ValueError(f"resume: the checkpoint cannot be continued: {error}") from error

    def seed_batch(self, batch_idx: int) -> tuple[int, int]:
        """Seed what a training step draws; returns the number of the update in the run and the part of its batch.

        An effective batch has as many parts as there are processes times accumulated batches (see `UpdateSampler`).
        """
        trainer = self.trainer
        accumulate, updates = trainer.accumulate_grad_batches, self._updates(int(trainer.num_training_batches))
        update = self.current_epoch * updates + batch_idx // accumulate
        part = batch_idx % accumulate * trainer.world_size + self.global_rank
        seed_generators(derive_seed(self.seed, update, part), self.device)
        return update, part

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        # When the batch ends, the schedule has already set the next update's rate.
        self._learning_rate = max(group["lr"] for group in optimizer.param_groups)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        every: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self.logger is not None and updated(self.trainer, batch_idx) and self.global_step % every == 0:
            self.logger.log_metrics({"train/lr": self._learning_rate}, step=self.global_step - 1)

    def configure_optimizers(self) -> Any:
        assert self._optimizer is not None, "this module only measures"
        assert self._schedule is not None, "this module only measures"
        optimizer = self._optimizer(self.backbone, lr=self.learning_rate)
        scheduler, _ = self._schedule(optimizer, num_epochs=self.epochs, updates_per_epoch=self._updates_per_epoch())
        if scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _updates_per_epoch(self) -> int:
        # trainer.estimated_stepping_batches would make the loader here, and Lightning 2.6 gives a loader that exists
        # already no state to resume from.
        batches = self.trainer.datamodule.batches_per_epoch  # type: ignore[attr-defined]
        limit = self.trainer.limit_train_batches
        if limit is not None:
            batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
        return max(1, self._updates(batches))

    def _updates(self, batches: int) -> int:
        """How many updates an epoch of `batches` has."""
        return math.ceil(batches / self.trainer.accumulate_grad_batches)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step_update(self.global_step)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed what is drawn on the CPU and on `device`: `torch.manual_seed` of a training step on this device alone.

    Where there is no GPU, torch.manual_seed notes each of its callers for a GPU to come, at half a millisecond a step.
    """
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    elif device.type == "cuda":
        torch.default_generator.manual_seed(seed)
        torch.cuda.manual_seed(seed)
    else:
        torch.manual_seed(seed)
