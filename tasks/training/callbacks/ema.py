"""Exponential moving average of the weights."""

import logging
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn

from longseq.tasks.training.precision import widen_weights

_log = logging.getLogger(__name__)


class ExponentialMovingAverage(WeightAveraging):
    """Keeps the average of the weights, validates with it, and makes it the checkpoint's `state_dict`.

    After each update `average = d * average + (1 - d) * weights` with `d = decay`, or with `warmup`
    `d = min(decay, (1 + n) / (10 + n))` at the n-th update, so that the initial weights do not dominate short runs.
    The raw weights are the checkpoint's `current_model_state`; both continue exactly after a resume.
    """

    def __init__(self, decay: float = 0.9999, warmup: bool = True) -> None:
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"recipe.ema.decay={decay} must lie in [0, 1): 0 keeps no history, 0.9999 is usual")
        super().__init__(use_buffers=True)
        self.decay = decay
        self.warmup = warmup
        self._swapped = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        widen_weights(pl_module, trainer.precision)  # of which the average begins as a copy
        super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        # Lightning counts whole epochs, of which a run may take a part.
        updates = getattr(pl_module, "last_update", None) or trainer.estimated_stepping_batches
        share = 0.0 if self.warmup else self.decay**updates
        if share > 0.1 and not trainer.fast_dev_run and trainer.is_global_zero:  # type: ignore[attr-defined]
            _log.warning(
                "recipe.ema.decay=%g keeps %.0f%% of the initial weights in the average, which is what is validated, "
                "after all %d updates: set recipe.ema.warmup=true or a lower decay",
                self.decay,
                100 * share,
                updates,
            )

    def decay_at(self, update: int) -> float:
        """The decay of the n-th update, counted from 1."""
        return min(self.decay, (1 + update) / (10 + update)) if self.warmup else self.decay

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._latest_update_step:
            return
        self._latest_update_step = trainer.global_step
        self._update(pl_module, self.decay_at(trainer.global_step))

    @torch.no_grad()
    def _update(self, pl_module: LightningModule, decay: float) -> None:
        # AveragedModel.update_parameters reads its counter from the device in every step, which waits for the device.
        assert self._average_model is not None
        averages, weights = [], []
        for average, weight in zip(_tensors(self._average_model.module), _tensors(pl_module), strict=True):
            if average.is_floating_point():
                averages.append(average)
                weights.append(weight)
            else:
                average.copy_(weight)
        torch._foreach_lerp_(averages, weights, 1.0 - decay)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_epoch_start(trainer, pl_module)
        self._swapped = self._average_model is not None

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_epoch_end(trainer, pl_module)
        self._swapped = False

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # Lightning also calls this before a test, which must use the averaged weights and not the raw ones.
        if trainer.state.fn == TrainerFn.FITTING:
            super().on_load_checkpoint(trainer, pl_module, checkpoint)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # A checkpoint after an interrupted validation must not save the average as the raw weights.
        if self._swapped:
            self._swap_models(pl_module)
            self._swapped = False


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    return [tensor.detach() for tensor in (*module.parameters(), *module.buffers())]
