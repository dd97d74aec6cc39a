"""Log decays of heads or channels, in torch."""

from torch import Tensor
from torch.nn import functional

from longseq.kernels.precision import compute_dtype, without_autocast


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
