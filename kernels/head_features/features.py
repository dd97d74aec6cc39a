"""Features of queries, keys and values for the delta rule, in torch."""

import torch
from torch import Tensor
from torch.nn import functional

from longseq.kernels.precision import compute_dtype, without_autocast

FEATURE_MAPS = {
    "silu": functional.silu,
    "relu": functional.relu,
    "elu_plus_one": lambda x: functional.elu(x) + 1,
    "identity": lambda x: x,
}
EPS = 1e-6  # under the root of a norm: gradients of features near zero are at most a thousand times the incoming ones


# Squared norms of the features of heads.
KEY_NORMS = {
    "l2": lambda feature: feature.square().sum(-1, keepdim=True),
    "l1": lambda feature: feature.abs().sum(-1, keepdim=True).square(),
}


def unit_torch(feature: Tensor, norm: str) -> Tensor:
    """Features of heads `[..., K]` divided by sqrt(‖φ‖² + EPS)."""
    return feature * (KEY_NORMS[norm](feature) + EPS).rsqrt()


def head_features_torch(
    x: Tensor, *, logits: Tensor | None, num_heads: int, key_dim: int, feature_map: str, key_norm: str
) -> tuple[Tensor, ...]:
    """`head_features` by torch's own functions."""
    keys = num_heads * key_dim
    with without_autocast(x):
        dtype = compute_dtype(x, logits)
        q, k, v = (
            part.unflatten(-1, (num_heads, part.shape[-1] // num_heads))
            for part in x.to(dtype).split([keys, keys, x.shape[-1] - 2 * keys], dim=-1)
        )
        q, k = (unit_torch(FEATURE_MAPS[feature_map](part), key_norm) for part in (q, k))
        features = q.to(x.dtype), k.to(x.dtype), functional.silu(v).to(x.dtype)
        if logits is None:
            return features
        beta = logits.to(dtype).sigmoid()
        return *features, torch.cat((beta, beta)) if has_two_readings(x, logits) else beta


def has_two_readings(x: Tensor, logits: Tensor) -> bool:
    """Whether x holds a forward and a backward reading of the batch that the logits belong to."""
    return x.shape[0] != logits.shape[0]
