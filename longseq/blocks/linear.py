"""Projections to widths at which matrix products of half precision are slow, and pairs of projections."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from longseq.blocks.hooks import is_replaceable
from longseq.blocks.pairs import stack_pair
from longseq.blocks.precision import product_dtype
from longseq.kernels.dispatch import is_exporting

# Output widths in half precision are padded to a multiple of this. Matrix products need 8, because a GPU loads 16 bytes
# at once; Triton loads vectors from parts of a row only if the stride of rows is a multiple of 16.
ALIGNMENT = 16


class AlignedLinear(nn.Linear):
    """`nn.Linear` that computes a multiple of 16 outputs on a GPU in half precision; its parameters keep their width.

    Each call pads the weight, a copy that pays off for sequences but not for one token. The result is a view of the
    padded product. With `keep_padding` it is the padded product, whose last channels have no meaning.
    """

    def forward(self, x: Tensor, keep_padding: bool = False) -> Tensor:
        if self.out_features % ALIGNMENT == 0 or x.ndim < 3 or not needs_alignment(self.weight):
            return super().forward(x)
        y = functional.linear(x, *_align(self.weight, self.bias))
        return y if keep_padding else y[..., : self.out_features]


class UpcastLinear(nn.Linear):
    """`nn.Linear` that computes in the type of its input, whatever the type of its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return functional.linear(x, self.weight.to(x.dtype), bias)


def project_padded(layer: nn.Linear, x: Tensor) -> Tensor:
    """Project and keep the padding of an `AlignedLinear`, which saves a copy in the backward pass."""
    return layer(x, keep_padding=True) if is_replaceable(layer, AlignedLinear) else layer(x)


def project_pair(forward: nn.Linear, backward: nn.Linear, x: Tensor) -> Tensor:
    """Project the first half of the rows of `x [2 B, T, I]` by one layer and the second by another, in one product.

    x may also be `[2, B, T, I]`, such as the same rows twice by `expand`.
    """
    halves = x if x.ndim == 4 else x.unflatten(0, (2, -1))
    weight = stack_pair(forward.weight, backward.weight)
    bias: Tensor | None = stack_pair(forward.bias, backward.bias)
    rows = halves.flatten(1, 2)
    gains = needs_alignment(forward.weight)
    if gains and forward.out_features % ALIGNMENT:
        weight, bias = _align(weight, bias)
    if gains and (missing := -forward.in_features % ALIGNMENT):
        # The gradient of a weight is a product with as many rows as there are inputs: it needs the multiple, too.
        rows, weight = functional.pad(rows, (0, missing)), functional.pad(weight, (0, missing))
    y = torch.bmm(rows, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, weight.mT)
    return y[..., : forward.out_features].unflatten(1, halves.shape[1:3]).flatten(0, 1)


def _align(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Pad weights `[..., O, I]` and biases `[..., O]` to a multiple of 16 outputs, by copies of the first output."""
    # Padding with zeros would launch one more kernel in each pass, which would slow small models down.
    missing = -weight.shape[-2] % ALIGNMENT
    spare = weight.detach()[..., :1, :].expand(*weight.shape[:-2], missing, -1)
    wide = torch.cat((weight, spare), -2)
    if bias is None:
        return wide, None
    return wide, torch.cat((bias, bias.detach()[..., :1].expand(*bias.shape[:-1], missing)), -1)


def needs_alignment(weight: Tensor) -> bool:
    """Whether products with a weight have kernels that need aligned rows."""
    return weight.device.type == "cuda" and product_dtype(weight).itemsize == 2 and not is_exporting()
