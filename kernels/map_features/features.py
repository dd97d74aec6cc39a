"""A feature map of each head's channels, in torch."""

import torch
from torch import Tensor

from longseq.kernels.head_features.features import FEATURE_MAPS, unit_torch
from longseq.kernels.precision import compute_dtype, without_autocast


def map_features_torch(
    x: Tensor, *, feature_map: str, norm: str | None, scale: float, dtype: torch.dtype | None
) -> Tensor:
    """`map_features` by torch's own functions."""
    with without_autocast(x):
        y = FEATURE_MAPS[feature_map](x.to(compute_dtype(x)))
        if norm is not None:
            y = unit_torch(y, norm)
        return (y if scale == 1.0 else scale * y).to(dtype or x.dtype)
