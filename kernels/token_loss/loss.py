"""The cross entropy of each token, in torch."""

from torch import Tensor
from torch.nn import functional

from longseq.kernels.precision import compute_dtype, without_autocast


def token_loss_torch(logits: Tensor, target: Tensor, *, ignore_index: int) -> Tensor:
    """`token_loss` by torch's own function, which keeps a copy of the logits in float32."""
    with without_autocast(logits):
        wide = logits.to(compute_dtype(logits)).reshape(-1, logits.shape[-1])
        losses = functional.cross_entropy(wide, target.flatten(), ignore_index=ignore_index, reduction="none")
        return losses.reshape(target.shape)
