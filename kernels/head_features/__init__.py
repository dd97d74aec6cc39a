"""Queries and keys with a feature map and norm one in each head, values, and write strengths."""

from torch import Tensor

from longseq.kernels.checks import check_shapes
from longseq.kernels.dispatch import Call, is_exporting
from longseq.kernels.head_features.features import FEATURE_MAPS, KEY_NORMS, has_two_readings, head_features_torch
from longseq.kernels.operation import operation
from longseq.kernels.precision import call_dtype, is_mixed

TRITON_WIDTH = 8192  # channels of a head, which one program reads whole


def check_features(feature_map: str, key_norm: str) -> None:
    """Raise ValueError for a feature map or a norm that `head_features` does not know."""
    if feature_map not in FEATURE_MAPS:
        raise ValueError(f"feature_map {feature_map!r} is not one of {', '.join(FEATURE_MAPS)}")
    if key_norm not in KEY_NORMS:
        raise ValueError(f"key_norm {key_norm!r} is not one of {', '.join(KEY_NORMS)}")


def count_values(op: str, channels: int, num_heads: int, key_dim: int) -> int:
    """The channels of a head's values, where the heads' queries, keys and values are `channels` together."""
    values = channels - 2 * num_heads * key_dim
    if not is_exporting() and (min(num_heads, key_dim) < 1 or values < num_heads or values % num_heads):
        raise ValueError(
            f"{op}: {channels} channels cannot be shared out among num_heads={num_heads} with key_dim={key_dim}: there "
            "must be 2 H K and a multiple of H"
        )
    return values // num_heads


def _judge(
    op: str, x: Tensor, logits: Tensor | None, num_heads: int, key_dim: int, feature_map: str, key_norm: str
) -> Call:
    check_features(feature_map, key_norm)
    sizes = {"H": num_heads, "K": key_dim, "V": count_values(op, x.shape[-1], num_heads, key_dim)}
    if logits is not None:
        rows = 2 * logits.shape[0] if has_two_readings(x, logits) else x.shape[0]
        logits_shape = (*logits.shape[:-1], num_heads)
        check_shapes(op, {"logits": (logits, logits_shape), "x": (x, (rows, *logits.shape[1:-1], x.shape[-1]))})
    kind = "" if logits is None else "logits"
    dtype, mixed = call_dtype(x, logits), is_mixed(x, logits)
    return Call(x.device, dtype, exporting=is_exporting(), sizes=sizes, mixed=mixed, kind=kind)


@operation(_judge, triton="triton_features", limits={"K V": TRITON_WIDTH}, torch=head_features_torch)
def head_features(
    x: Tensor,
    *,
    logits: Tensor | None = None,
    num_heads: int,
    key_dim: int,
    feature_map: str = "silu",
    key_norm: str = "l2",
    backend: str = "auto",
) -> tuple[Tensor, ...]:
    """Queries and keys of norm one for each head, and values, from projected channels; write strengths from logits.

        q, k, v = x;   q = φ(q) / ‖φ(q)‖;   k = φ(k) / ‖φ(k)‖;   v = SiLU(v);   β = sigmoid(logits)

    φ is `feature_map`: silu, relu, elu_plus_one or identity. `key_norm` is l2 or l1, with 1e-6 under the root: ‖f‖ is
    sqrt(Σ f² + 1e-6) or sqrt((Σ |f|)² + 1e-6), so that features of zero are zero and have gradients of at most 1000.

    Shapes: x [..., H K + H K + H V] with H = `num_heads` and K = `key_dim`; q, k [..., H, K]; v [..., H, V]; logits and
    β [..., H]. x may be two readings [2 B, ...] of the batch that logits [B, ...] belong to: β then has 2 B rows.
    Arithmetic is float32, or float64 for float64 inputs; q, k and v have x's dtype, β that of the arithmetic. Returns
    (q, k, v), with logits (q, k, v, β).
    """
