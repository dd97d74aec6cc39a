"""Projections to widths that matrix products of half precision are slow at, and pairs of projections."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from longseq.blocks.hooks import is_replaceable
from longseq.blocks.pairs import stack_pair
from longseq.blocks.precision import product_dtype
from longseq.kernels.dispatch import is_exporting

# Numbers of half precision. Matrix products want 8, the 16 bytes that a GPU loads at once; Triton's kernels, which read
# parts of the rows where they lie, load single numbers where it does not know the rows to be a multiple of 16 apart.
ALIGNMENT = 16


class AlignedLinear(nn.Linear):
    """`nn.Linear` that a GPU computes at a multiple of 16 outputs in half precision; its parameters keep their width.

    Padding the weight copies it, which pays for a sequence and not for one token. The result is a view of the padded
    product. With `keep_padding` it is the padded product itself: further channels follow those of the layer.
    """

    def forward(self, x: Tensor, keep_padding: bool = False) -> Tensor:
        if self.out_features % ALIGNMENT == 0 or x.ndim < 3 or not needs_alignment(self.weight):
            return super().forward(x)
        y = functional.linear(x, *_align(self.weight, self.bias))
        return y if keep_padding else y[..., : self.out_features]


def project_padded(layer: nn.Linear, x: Tensor) -> Tensor:
    """Project by a layer and keep the padding of an `AlignedLinear`: the caller ignores the channels behind its own.

    It saves a copy: the gradient of a view is written to a new tensor.
    """
    return layer(x, keep_padding=True) if is_replaceable(layer, AlignedLinear) else layer(x)


def project_pair(forward: nn.Linear, backward: nn.Linear, x: Tensor) -> Tensor:
    """Project the first half of the rows of `x [2 B, T, I]` by one layer and the second by another, in one product.

    The halves may also be apart, [2, B, T, I]: so `expand` gives both layers the same rows.
    """
    halves = x if x.ndim == 4 else x.unflatten(0, (2, -1))
    weight = stack_pair(forward.weight, backward.weight)
    bias: Tensor | None = stack_pair(forward.bias, backward.bias)
    rows = halves.flatten(1, 2)
    gains = needs_alignment(forward.weight)
    if gains and forward.out_features % ALIGNMENT:
        weight, bias = _align(weight, bias)
    if gains and (missing := -forward.in_features % ALIGNMENT):
        # The weights' gradient of 12 inputs over 100,000 tokens takes an H200 1.28 ms, that of 16 takes 0.07.
        rows, weight = functional.pad(rows, (0, missing)), functional.pad(weight, (0, missing))
    y = torch.bmm(rows, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, weight.mT)
    return y[..., : forward.out_features].unflatten(1, halves.shape[1:3]).flatten(0, 1)


def _align(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Weights `[..., O, I]` and biases `[..., O]` with the first output again up to a multiple of 16."""
    # Zeros would be one more launch forward and one more backward, for which small models wait.
    missing = -weight.shape[-2] % ALIGNMENT
    spare = weight.detach()[..., :1, :].expand(*weight.shape[:-2], missing, -1)
    wide = torch.cat((weight, spare), -2)
    if bias is None:
        return wide, None
    return wide, torch.cat((bias, bias.detach()[..., :1].expand(*bias.shape[:-1], missing)), -1)


def needs_alignment(weight: Tensor) -> bool:
    """Whether products with a weight have kernels that need aligned rows."""
    return weight.device.type == "cuda" and product_dtype(weight).itemsize == 2 and not is_exporting()
