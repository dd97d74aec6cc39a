"""The cross entropy of each token of a language model."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from longseq.kernels.checks import check_shapes
from longseq.kernels.dispatch import Call, is_exporting
from longseq.kernels.operation import operation
from longseq.kernels.precision import compute_dtype, without_autocast


def _judge(op: str, logits: Tensor, target: Tensor, **_: Any) -> Call:
    if target.dtype != torch.int64:
        raise ValueError(f"{op}: target is {target.dtype}, but must be int64")
    check_shapes(op, {"target": (target, logits.shape[:-1])})
    return Call(logits.device, logits.dtype, exporting=is_exporting())


def token_loss_torch(logits: Tensor, target: Tensor, *, ignore_index: int) -> Tensor:
    """`token_loss` by torch's own function, which keeps a copy of the logits in float32."""
    with without_autocast(logits):
        wide = logits.to(compute_dtype(logits)).reshape(-1, logits.shape[-1])
        losses = functional.cross_entropy(wide, target.flatten(), ignore_index=ignore_index, reduction="none")
        return losses.reshape(target.shape)


@operation(_judge, triton="triton_loss", torch=token_loss_torch)
def token_loss(logits: Tensor, target: Tensor, *, ignore_index: int = -100, backend: str = "auto") -> Tensor:
    """Cross entropy of each token, from logits of any type without a copy of them in float32.

        loss = log Σ_v exp(logits_v) − logits_target;   0 where the target is `ignore_index`

    The mean over the tokens that count, as torch's `cross_entropy` returns it, is
    `loss.sum() / (target != ignore_index).sum()`.

    Shapes: logits [..., V]; target [...], int64 below V or `ignore_index`; loss [...]. Arithmetic and loss are float32,
    or float64 for float64 logits; the gradient has the logits' type.

    Only the torch backend checks the values of `target`; with the triton backend the loss of one that is out of range
    is NaN.
    """
