"""Which batches end in an update of the weights."""

from lightning.pytorch import Trainer


def updated(trainer: Trainer, batch_idx: int) -> bool:
    """Whether the weights were updated after this batch, and not only its gradients accumulated."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch
