"""The loss of a language model from its features, with the scores of only a few tokens in memory at a time."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from longseq.blocks.precision import product_dtype
from longseq.kernels.custom_op import once_differentiable
from longseq.kernels.precision import compute_dtype
from longseq.kernels.token_loss import token_loss

IGNORED = -100  # the target of a token without a target

# Elements of a chunk's scores: 128 MiB in float32, or 1,048 tokens with a vocabulary of 32,000. Not tuned.
CHUNK_SCORES = 2**25

# Larger on a GPU, 256 MiB in bfloat16: each chunk also adds to the gradient of the whole weight, which for 1,048 tokens
# takes a third of the time of the matrix products, by the bytes that it moves.
GPU_CHUNKS = 4


class SummedLoss(NamedTuple):
    """Sums over the targets of a batch; divide both by their number.

    objective: what training minimises: the loss and the penalty on normalisers. Only this has a gradient.
    loss: the cross entropy.
    """

    objective: Tensor
    loss: Tensor


def summed_loss(features: Tensor, weight: Tensor, target: Tensor, *, z_loss: float = 0.0) -> SummedLoss:
    """Project features to scores and sum their losses, one chunk of tokens after the other.

        objective = Σ loss_t + z_loss · (log Σ_v exp(score_tv))²

    The gradients of features and weight are computed in the forward pass, while the scores of a chunk exist: scores are
    neither kept nor computed twice. The weight's gradient is summed in float32 at least.

    Shapes: features [..., D]; weight [V, D]; target [...], int64 below V or IGNORED.

    Sources: PaLM (Chowdhery et al., 2022), section 5, for the penalty; Liger Kernel (Hsu et al., 2024), section 3.2,
    for gradients in the forward pass.
    """
    rows, targets = features.flatten(0, -2), target.flatten()
    objective, loss = _SummedLoss.apply(rows, weight, targets, z_loss)  # type: ignore[misc]
    return SummedLoss(objective, loss)


@torch.no_grad()
def token_losses(features: Tensor, project: Callable[[Tensor], Tensor], vocabulary: int, target: Tensor) -> Tensor:
    """The cross entropy of each token `[...]`, 0 where the target is IGNORED, without a gradient.

    `project` maps features `[n, D]` to scores `[n, vocabulary]`. Shapes: features [..., D]; target [...].
    """
    rows, targets = features.flatten(0, -2), target.flatten()
    losses = [features.new_zeros((0,), dtype=compute_dtype(features))]
    for part in _chunks(rows, vocabulary):
        losses.append(token_loss(project(rows[part]), targets[part], ignore_index=IGNORED))
    return torch.cat(losses).view(target.shape)


def sum_scored(scores: Tensor, target: Tensor, *, z_loss: float = 0.0) -> SummedLoss:
    """`summed_loss` from given scores `[..., V]`."""
    losses = token_loss(scores, target, ignore_index=IGNORED)
    objective = loss = losses.sum()
    if z_loss:
        own = scores.gather(-1, target.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        # loss = normaliser - own score, so that the normaliser needs no second pass over the vocabulary.
        normaliser = torch.where(target == IGNORED, 0.0, losses + own)
        objective = loss + z_loss * normaliser.square().sum()
    return SummedLoss(objective, loss.detach())


class _SummedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, targets: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
        wants_rows, wants_weight = ctx.needs_input_grad[:2]
        wide = compute_dtype(rows, weight)
        objective, loss = torch.zeros((2,), device=rows.device, dtype=wide).unbind()
        d_rows = torch.empty_like(rows) if wants_rows else None
        d_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        factor = weight.to(product_dtype(weight))  # autocast would cast a transposed weight again in each chunk
        for part in _chunks(rows, weight.shape[0]):
            x = rows[part]
            scores = linear(x, factor).detach()
            with torch.enable_grad():
                summed = sum_scored(scores.requires_grad_(), targets[part], z_loss=z_loss)
                (d_scores,) = torch.autograd.grad(summed.objective, scores)
            objective = objective + summed.objective.detach()
            loss = loss + summed.loss
            if d_rows is not None:
                d_rows[part] = linear(d_scores, factor.t())
            if d_weight is not None:
                d_weight += linear(d_scores.t(), x.t())
        ctx.d_rows, ctx.d_weight = d_rows, None if d_weight is None else d_weight.to(weight.dtype)
        ctx.is_used = False
        ctx.mark_non_differentiable(loss)
        return objective, loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_objective: Tensor, _: Tensor) -> Any:
        if ctx.is_used:
            raise RuntimeError("summed_loss keeps its gradients for one backward pass")
        ctx.is_used = True  # the gradients are scaled in place
        d_rows, d_weight = ctx.d_rows, ctx.d_weight
        return (
            None if d_rows is None else d_rows.mul_(d_objective),
            None if d_weight is None else d_weight.mul_(d_objective),
            None,
            None,
        )


def _chunks(rows: Tensor, vocabulary: int) -> Iterator[slice]:
    scores = CHUNK_SCORES * GPU_CHUNKS if rows.device.type == "cuda" else CHUNK_SCORES
    size = max(1, scores // vocabulary)
    return (slice(start, start + size) for start in range(0, len(rows), size))
