"""A product gated by SiLU."""

import torch
from torch import Tensor
from torch.nn import functional

from longseq.kernels.checks import check_shapes
from longseq.kernels.dispatch import Call, is_exporting
from longseq.kernels.operation import operation
from longseq.kernels.precision import call_dtype, compute_dtype, without_autocast


def _judge(op: str, x: Tensor, gate: Tensor, skip: Tensor | None, skip_weight: Tensor | None) -> Call:
    if (skip is None) != (skip_weight is None):
        raise ValueError(f"{op}: skip and skip_weight go together, but one is missing; give both or neither")
    shape, weights = tuple(gate.shape), tuple(x.shape[-1:])
    if skip_weight is not None and skip_weight.dim() == 2:
        shape, weights = (2 * gate.shape[0], *gate.shape[1:]), (2, *weights)
    check_shapes(op, {"x": (x, shape), "skip": (skip, x.shape), "skip_weight": (skip_weight, weights)})
    return Call(x.device, call_dtype(x, gate, skip, skip_weight), exporting=is_exporting())


def silu_product_torch(x: Tensor, gate: Tensor, *, skip: Tensor | None, skip_weight: Tensor | None) -> Tensor:
    """`silu_product` by torch's own functions."""
    with without_autocast(x):
        wide = compute_dtype(x, gate, skip, skip_weight)
        value = x.to(wide)
        if skip is not None and skip_weight is not None:
            if skip_weight.dim() == 2:
                skip_weight = skip_weight.reshape(2, *[1] * (x.dim() - 1), -1)
                value, skip = (reading.unflatten(0, (2, x.shape[0] // 2)) for reading in (value, skip))
            value = torch.addcmul(value, skip.to(wide), skip_weight.to(wide))
        if value.dim() > gate.dim():
            value = value.sum(0)
        product = value * functional.silu(gate.to(wide))
        return product.to(torch.promote_types(x.dtype, gate.dtype))


@operation(_judge, triton="triton_product", torch=silu_product_torch)
def silu_product(
    x: Tensor, gate: Tensor, *, skip: Tensor | None = None, skip_weight: Tensor | None = None, backend: str = "auto"
) -> Tensor:
    """A product gated by SiLU, which saves only its inputs for the backward pass.

        y = (x + skip_weight ⊙ skip) ⊙ SiLU(gate)

    `skip` and `skip_weight` go together, or are left out.

    Shapes: x, gate, skip, y [..., D]; skip_weight [D]. With skip_weight [2, D], x and skip [2 B, ..., D] are two
    readings of one batch, and the gate [B, ..., D] multiplies the sum of both, each with its own weight for the skip.
    Arithmetic is float32, or float64 for float64 inputs; y has the type that torch gives to x times gate.
    """
