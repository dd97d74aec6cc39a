"""What becomes of the channels of queries, keys and values before the delta rule reads them, in torch."""

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
KEY_NORMS = {"l2": 2.0, "l1": 1.0}
EPS = 1e-12  # the least norm that a head is divided by


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
        q, k = (
            functional.normalize(FEATURE_MAPS[feature_map](part), p=KEY_NORMS[key_norm], dim=-1, eps=EPS)
            for part in (q, k)
        )
        features = q.to(x.dtype), k.to(x.dtype), functional.silu(v).to(x.dtype)
        if logits is None:
            return features
        beta = logits.to(dtype).sigmoid()
        return *features, torch.cat((beta, beta)) if are_read_twice(x, logits) else beta


def are_read_twice(x: Tensor, logits: Tensor) -> bool:
    """Whether x are two readings of the batch that the logits belong to."""
    return x.shape[0] != logits.shape[0]
