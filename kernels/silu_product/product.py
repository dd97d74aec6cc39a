"""A product gated by SiLU, in torch."""

import torch
from torch import Tensor
from torch.nn import functional

from longseq.kernels.precision import compute_dtype, without_autocast


def silu_product_torch(x: Tensor, gate: Tensor, *, skip: Tensor | None, skip_weight: Tensor | None) -> Tensor:
    """`silu_product` by torch's own functions."""
    with without_autocast(x):
        if skip_weight is not None and skip_weight.dim() == 2:
            skip_weight = skip_weight.reshape(2, *[1] * (x.dim() - 1), -1)
            x, skip = (
                x.unflatten(0, (2, x.shape[0] // 2)),
                None if skip is None else skip.unflatten(0, (2, x.shape[0] // 2)),
            )
        wide = compute_dtype(x, gate, skip, skip_weight)
        value = x.to(wide)
        if skip is not None and skip_weight is not None:
            value = torch.addcmul(value, skip.to(wide), skip_weight.to(wide))
        if value.dim() > gate.dim():
            value = value.sum(0)
        product = value * functional.silu(gate.to(wide))
        return product.to(torch.promote_types(x.dtype, gate.dtype))
