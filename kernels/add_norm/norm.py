"""A residual's sum and its norm, in torch."""

import torch
from torch import Tensor
from torch.nn import functional

from longseq.kernels.precision import without_autocast
from longseq.kernels.reading import halves


def add_norm_torch(
    x: Tensor, weight: Tensor, *, bias: Tensor | None, branch: Tensor | None, eps: float, centred: bool,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`add_norm` by torch's own functions, which accumulate in float32 whatever the type."""
    if weight.dim() == 2:
        forward, backward = halves(x)
        _, forward = add_norm_torch(forward, weight[0], bias=None, branch=None, eps=eps, centred=centred, dtype=None)
        _, backward = add_norm_torch(backward, weight[1], bias=None, branch=None, eps=eps, centred=centred, dtype=None)
        return x, (forward + backward).to(dtype or x.dtype)
    with without_autocast(x):
        total = x if branch is None else x + branch
        own = weight.to(total.dtype)
        if centred:
            y = functional.layer_norm(total, weight.shape, own, None if bias is None else bias.to(total.dtype), eps)
        else:
            y = functional.rms_norm(total, weight.shape, own, eps)
            y = y if bias is None else y + bias.to(total.dtype)
        return total, y.to(dtype or total.dtype)
