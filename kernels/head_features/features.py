"""What becomes of the channels of queries, keys and values before the delta rule reads them, in torch."""

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
    x: Tensor, *, num_heads: int, key_dim: int, feature_map: str, key_norm: str
) -> tuple[Tensor, Tensor, Tensor]:
    """`head_features` by torch's own functions."""
    keys = num_heads * key_dim
    with without_autocast(x):
        wide = x.to(compute_dtype(x))
        q, k, v = (
            part.unflatten(-1, (num_heads, -1)) for part in wide.split([keys, keys, x.shape[-1] - 2 * keys], dim=-1)
        )
        q, k = (
            functional.normalize(FEATURE_MAPS[feature_map](part), p=KEY_NORMS[key_norm], dim=-1, eps=EPS)
            for part in (q, k)
        )
        return q.to(x.dtype), k.to(x.dtype), functional.silu(v).to(x.dtype)
