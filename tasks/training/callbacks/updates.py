"""Which batches end in an update of the weights, or in a validation."""

import math

from lightning.pytorch import Trainer


def updated(trainer: Trainer, batch_idx: int) -> bool:
    """True if the weights were updated after this batch, and not only its gradients accumulated."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch


def validation_follows(trainer: Trainer) -> bool:
    """True if Lightning validates after this batch; call it after the update."""
    loop, every = trainer.fit_loop, trainer.check_val_every_n_epoch
    if not trainer.enable_validation or (every is not None and (trainer.current_epoch + 1) % every):
        return False
    if trainer.should_stop:
        return True
    interval = trainer.val_check_batch
    if interval is None or math.isinf(interval):
        return trainer.is_last_batch
    return ((loop.total_batch_idx if every is None else loop.batch_idx) + 1) % interval == 0
