"""Exponential moving average of the weights."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from longseq.tasks.training.callbacks.updates import updated


class ExponentialMovingAverage(Callback):
    """Keeps the average of the weights, validates with it, and makes it the checkpoint's `state_dict`.

    After each update `average = d * average + (1 - d) * weights` with `d = decay`, or with `warmup`
    `d = min(decay, (1 + n) / (10 + n))` at the n-th update, so that the initial weights do not dominate short runs.
    The raw weights are the checkpoint's `current_model_state`; both continue exactly after a resume.

    Lightning's EMAWeightAveraging has no warm-up, and copies the weights at the first update.
    """

    def __init__(self, decay: float = 0.9999, warmup: bool = True) -> None:
        self.decay = decay
        self.warmup = warmup
        self._average: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}  # of the module
        self._swapped = False

    def decay_at(self, update: int) -> float:
        """The decay of the n-th update, counted from 1."""
        return min(self.decay, (1 + update) / (10 + update)) if self.warmup else self.decay

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._average = {}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # Lightning also calls this before a test, which uses the average in `state_dict`.
        if trainer.state.fn == TrainerFn.FITTING and "current_model_state" in checkpoint:
            self._average = checkpoint["state_dict"]
            pl_module.load_state_dict(checkpoint["current_model_state"])

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._weights = pl_module.state_dict()
        start = self._average or self._weights
        self._average = {name: start[name].to(weight, copy=True) for name, weight in self._weights.items()}

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not updated(trainer, batch_idx):
            return
        averages, weights = [], []
        for name, weight in self._weights.items():
            if weight.is_floating_point():
                averages.append(self._average[name])
                weights.append(weight)
            else:
                self._average[name].copy_(weight)
        torch._foreach_lerp_(averages, weights, 1.0 - self.decay_at(trainer.global_step))

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._average:
            self._swap()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._swapped:
            self._swap()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # A checkpoint after an interrupted validation must not save the average as the raw weights.
        if self._swapped:
            self._swap()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._average:
            checkpoint["current_model_state"] = checkpoint["state_dict"]
            checkpoint["state_dict"] = self._average

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._swap()
        self._average, self._weights, self._swapped = {}, {}, False

    @torch.no_grad()
    def _swap(self) -> None:
        for name, weight in self._weights.items():
            held = weight.clone()
            weight.copy_(self._average[name])
            self._average[name].copy_(held)
        self._swapped = not self._swapped
