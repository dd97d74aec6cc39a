"""A branch added to the residual, and the norm of the sum."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from longseq.kernels.checks import check_shapes
from longseq.kernels.dispatch import Call, is_exporting
from longseq.kernels.operation import operation
from longseq.kernels.precision import call_dtype, is_mixed, without_autocast
from longseq.kernels.reading import halves

TRITON_WIDTH = 8192  # of a row, which one program reads whole


def _judge(
    op: str, x: Tensor, weight: Tensor, bias: Tensor | None, branch: Tensor | None, dtype: torch.dtype | None, **_: Any
) -> Call:
    width, rows = tuple(x.shape[-1:]), tuple(x.shape[:-1])
    if weight.dim() == 2:
        if branch is not None or bias is not None:
            raise ValueError(f"{op}: the two norms of a pair take neither a branch nor a bias")
        width, rows = (2, *width), (2 * (x.shape[0] // 2), *x.shape[1:-1])
    shapes = {"x": (x, (*rows, *x.shape[-1:])), "branch": (branch, x.shape), "weight": (weight, width)}
    check_shapes(op, {**shapes, "bias": (bias, width)})
    return Call(
        x.device,
        call_dtype(x, branch, weight),
        exporting=is_exporting(),
        sizes={"D": x.shape[-1]},
        mixed=is_mixed(x, weight),
        kind="narrow" if x.dtype == torch.float32 and dtype is not None and dtype.itemsize == 2 else "",
    )


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


@operation(_judge, triton="triton_norm", limits={"D": TRITON_WIDTH}, torch=add_norm_torch)
def add_norm(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    branch: Tensor | None = None,
    eps: float = 1e-5,
    centred: bool = False,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Add a branch to the residual, and take the norm of the sum over its channels.

        s = x + branch;   y = weight ⊙ s / √(mean(s²) + eps) + bias

    With `centred` y has s minus its mean over the channels in place of s: a layer norm in place of an RMS norm.

    Shapes: x, branch, s, y [..., D]; weight, bias [D]. Without a branch s is x itself. With weight [2, D], and neither
    branch nor bias, x [2 B, ..., D] are two readings of one batch, and y [B, ..., D] is the sum of their norms, each by
    its own weight. Arithmetic is float32, or float64 for float64 inputs; s has the type that torch gives to x + branch,
    y has `dtype`, by default that of s. Returns (s, y).
    """
