"""The token shift of RWKV: each token sees the one that is read before it."""

from typing import Any

import torch
from torch import Tensor

from longseq.kernels.dispatch import is_exporting
from longseq.kernels.packing import Packing
from longseq.kernels.reading import Reverse, halves
from longseq.kernels.short_convolution import short_convolution


def previous_tokens(
    x: Tensor,
    state: Tensor | None = None,
    *,
    cu_seqlens: Packing | None = None,
    mask: Tensor | None = None,
    reverse: Reverse = False,
    output_final_state: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """The token before each token of `x [B, T, D]`, the first from `state [B, D, 1]` or zeros; and the last."""
    options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "mask": mask, "reverse": reverse, "backend": backend}
    return short_convolution(x, _taps(x), initial_state=state, output_final_state=output_final_state, **options)


def previous_tokens_pair(x: Tensor, *, mask: Tensor | None = None, backend: str = "auto") -> Tensor:
    """The token before each token of `x [B, T, D]`, and then the token after it: `[2 B, T, D]`."""
    taps = _taps(x).expand(2, -1, -1)
    return short_convolution(x, taps, mask=mask, reverse="second_half", backend=backend)[0]


def _taps(x: Tensor) -> Tensor:
    """The taps `[D, 2]` of a convolution that shifts `x [B, T, D]`: 1 for the token before, 0 for the token."""
    return torch.arange(1, -1, -1, device=x.device, dtype=x.dtype).expand(x.shape[-1], 2)


def shift_tokens(x: Tensor, start: Tensor, *, packing: Packing | None = None, reverse: Reverse = False) -> Tensor:
    """Shift `x [B, T, ...]` by one token in the order of reading, with `start [B or N, ...]` first in each sequence.

    Unlike `previous_tokens`, this is for values that padding does not change, such as the states before each token.
    """
    if reverse == "second_half":
        pairs = zip(halves(x), halves(start), (False, True), strict=True)
        return torch.cat([shift_tokens(own, first, reverse=back) for own, first, back in pairs])
    if packing is None:
        first = start.unsqueeze(1)
        # The cut comes last: a slice of T - 1 tokens would bar T = 2 from exported files of any length.
        return torch.cat([x, first], dim=1)[:, 1:] if reverse else torch.cat([first, x], dim=1)[:, :-1]
    edge = torch.zeros_like(x[:, :1])
    shifted = torch.cat([x[:, 1:], edge] if reverse else [edge, x[:, :-1]], dim=1)
    first = packing.positions == (packing.lengths[packing.sequence] - 1 if reverse else 0)
    is_first = first.view(-1, *[1] * (x.dim() - 2))
    return torch.where(is_first, start[packing.sequence].unsqueeze(0), shifted)


def latest_token(x: Tensor, *, packing: Packing | None = None, reverse: Reverse = False) -> Tensor:
    """The token of each sequence of `x [B, T, ...]` that is read last; zeros for an empty sequence."""
    if not is_exporting() and x.shape[1] == 0:
        return x.new_zeros(x.shape[0] if packing is None else packing.count, *x.shape[2:])
    if packing is None:
        return x[:, 0] if reverse else x[:, -1]
    place = packing.cu_seqlens[:-1] if reverse else packing.cu_seqlens[1:] - 1
    latest = x[0, place.clamp(0, x.shape[1] - 1)]
    return latest.masked_fill((packing.lengths == 0).view(-1, *[1] * (latest.dim() - 1)), 0)
