"""Log decays of heads or channels from a projection."""

from torch import Tensor
from torch.nn import functional

from longseq.kernels.checks import check_shapes
from longseq.kernels.dispatch import Call, is_exporting
from longseq.kernels.operation import operation
from longseq.kernels.precision import call_dtype, compute_dtype, is_mixed, without_autocast


def _judge(op: str, z: Tensor, A_log: Tensor, dt_bias: Tensor, bound: float | None) -> Call:
    width = dt_bias.shape[A_log.dim() - 1 :]  # H, or H and K
    parts, rows = tuple(A_log.shape[:-1]), tuple(z.shape[: z.dim() - len(width)])
    if len(parts):
        parts, rows = (2,), (2 * (rows[0] // 2), *rows[1:])
    heads = A_log.shape[-1:]
    check_shapes(
        op,
        {
            "A_log": (A_log, (*parts, *heads)),
            "dt_bias": (dt_bias, (*parts, *heads, *width[1:2])),
            "z": (z, (*rows, *width)),
        },
    )
    sizes = {"H": A_log.shape[-1], "K": dt_bias.shape[-1] if dt_bias.dim() > A_log.dim() else 1}
    dtype, mixed = call_dtype(z, A_log, dt_bias), is_mixed(z, A_log, dt_bias)
    kind = "" if bound is None else "bound"
    return Call(z.device, dtype, exporting=is_exporting(), sizes=sizes, mixed=mixed, kind=kind)


def log_decay_torch(z: Tensor, A_log: Tensor, dt_bias: Tensor, *, bound: float | None) -> Tensor:
    """`log_decay` by torch's own functions."""
    with without_autocast(z):
        wide = compute_dtype(z, A_log, dt_bias)
        z, slope = z.to(wide), A_log.to(wide).exp()
        if dt_bias.dim() > A_log.dim():
            slope = slope.unsqueeze(-1)
        is_pair = A_log.dim() == 2
        if is_pair:
            z = z.unflatten(0, (2, z.shape[0] // 2))
            slope, dt_bias = (x.reshape(2, *[1] * (z.dim() - x.dim()), *x.shape[1:]) for x in (slope, dt_bias))
        z = z + dt_bias
        g = -slope * functional.softplus(z) if bound is None else bound * (slope * z).sigmoid()
        return g.flatten(0, 1) if is_pair else g


@operation(_judge, triton="triton_decay", torch=log_decay_torch)
def log_decay(
    z: Tensor, A_log: Tensor, dt_bias: Tensor, *, bound: float | None = None, backend: str = "auto"
) -> Tensor:
    """Log decays of heads or channels; only the inputs are saved for the backward pass.

        g = −exp(A_log) softplus(z + dt_bias)     or, with a bound,     g = bound · sigmoid(exp(A_log) (z + dt_bias))

    Shapes: z, g [..., H] with A_log, dt_bias [H]; or z, g [..., H, K] with A_log [H] and dt_bias [H, K]. With a leading
    2 in both parameters, the first half of z's first dimension has the first ones, the second half the second ones.
    Arithmetic and g are float32, or float64 for float64 inputs.

    Source: Mamba-2 (Dao and Gu, 2024) for heads; Kimi Linear (Kimi Team, 2025) for channels; the bound is Kimi K3's.
    """
