"""Attention over packed rows by `scaled_dot_product_attention`, over padded rows of similar lengths."""

import torch
from torch import Tensor

from longseq.kernels.packed_attention.attend import attend, attend_nearby
from longseq.kernels.packing import Packing
from longseq.kernels.recurrence import groups_of, pad_group


def packed_attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing, *, causal: bool, window: int | None) -> Tensor:
    """See `longseq.kernels.packed_attention`.

    Padding follows the real tokens, so that the mask of causal attention already hides it.
    """
    groups = groups_of(packing)
    if not groups.members:
        return q + (k.sum() + v.sum())  # no tokens: all inputs still get a gradient
    outputs = []
    for group in groups.members:
        query, key, value = (pad_group(x, group) for x in (q, k, v))
        if window is None or window >= group.longest:
            o = attend(query, key, value, None if causal else _real(group.lengths, group.longest)[:, None], causal)
        else:
            o = attend_nearby(query, key, value, window, causal, group.lengths)
        outputs.append(o.flatten(0, 1)[group.slot_of])
    return torch.cat(outputs)[groups.by_token].unsqueeze(0)


def _real(lengths: Tensor, longest: int) -> Tensor:
    """A mask `[n, L]`, True at the real tokens of padded rows."""
    return torch.arange(longest, device=lengths.device) < lengths[:, None]
