"""A branch added to the residual, and the norm of the sum."""

from typing import Any

import torch
from torch import Tensor

from longseq.kernels.add_norm.norm import add_norm_torch
from longseq.kernels.dispatch import Call, is_exporting
from longseq.kernels.operation import operation
from longseq.kernels.precision import call_dtype, is_mixed

__all__ = ["add_norm"]

TRITON_WIDTH = 8192  # of a row, which one program reads whole


def _judge(
    op: str, x: Tensor, weight: Tensor, bias: Tensor | None, branch: Tensor | None, dtype: torch.dtype | None, **_: Any
) -> Call:
    # While a graph is exported, a comparison of symbolic sizes would become a condition of it.
    if not is_exporting():
        _check(x, weight, bias, branch)
    return Call(
        x.device,
        call_dtype(x, branch, weight),
        exporting=is_exporting(),
        sizes={"D": x.shape[-1]},
        mixed=is_mixed(x, weight),
        kind="narrow" if x.dtype == torch.float32 and dtype is not None and dtype.itemsize == 2 else "",
    )


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

    Raises ValueError for tensors that do not fit and for a backend that cannot run them.
    """


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, branch: Tensor | None) -> None:
    if weight.ndim == 2 and (branch is not None or bias is not None or weight.shape[0] != 2 or x.shape[0] % 2):
        raise ValueError(
            f"add_norm: weight has shape {tuple(weight.shape)} and x {tuple(x.shape)}, but of the two norms of a pair, "
            "[2, D], x must have twice the rows and neither a branch nor a bias"
        )
    if (
        weight.ndim not in (1, 2)
        or x.shape[-1:] != weight.shape[-1:]
        or (branch is not None and branch.shape != x.shape)
    ):
        raise ValueError(
            f"add_norm: x has shape {tuple(x.shape)}, its branch {None if branch is None else tuple(branch.shape)} and "
            f"weight {tuple(weight.shape)}, but must have [..., D], the same, and [D]"
        )
