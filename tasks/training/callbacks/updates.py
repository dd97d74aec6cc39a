"""Tells which batches end in an update of the weights, or in a validation."""

from lightning.pytorch import Trainer


def updated(trainer: Trainer, batch_idx: int) -> bool:
    """True if the weights were updated after this batch, and not only its gradients accumulated."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch


def validation_follows(trainer: Trainer) -> bool:
    """True if Lightning validates after this batch; call it after the update."""
    loop = trainer.fit_loop
    return loop.epoch_loop._should_check_val_fx(loop._data_fetcher)  # type: ignore[arg-type]
