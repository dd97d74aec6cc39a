"""The short convolution and the features of queries, keys and values, as two operations in turn."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from longseq.kernels.head_features.features import head_features_torch
from longseq.kernels.precision import compute_dtype


def convolved_features_torch(
    convolve: Callable[..., tuple[Tensor, Tensor | None]], x: Tensor, weight: Tensor, *, num_heads: int, key_dim: int,
    feature_map: str, key_norm: str, initial_state: Tensor | None, **options: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """`convolved_features` by a form of the short convolution."""
    channels = weight.shape[-2]
    mixed, logits = x[..., : channels + num_heads].to(compute_dtype(x, initial_state)).split([channels, num_heads], -1)
    y, final_state = convolve(mixed, weight, None, activation=None, initial_state=initial_state, **options)
    q, k, v, beta = head_features_torch(
        y, logits=logits, num_heads=num_heads, key_dim=key_dim, feature_map=feature_map, key_norm=key_norm
    )
    return q.to(x.dtype), k.to(x.dtype), v.to(x.dtype), beta, final_state
