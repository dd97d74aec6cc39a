"""Attention over packed rows by `scaled_dot_product_attention`, over padded rows of similar lengths."""

import torch
from torch import Tensor

from longseq.kernels.packed_attention.attend import attend, attend_nearby, attend_window
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
        elif causal:
            o = attend_nearby(query, key, value, window, True)
        else:
            o = _attend_both_ways(query, key, value, group.lengths, window)
        outputs.append(o.flatten(0, 1)[group.slot_of])
    return torch.cat(outputs)[groups.by_token].unsqueeze(0)


def _attend_both_ways(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, window: int) -> Tensor:
    """Attend to `window` - 1 tokens on either side, within padded rows of `lengths` real tokens."""
    reach = window - 1
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, reach, reach)) for x in (k, v))
    block = min(q.shape[1], 2 * reach + 1)
    first = torch.full_like(lengths, reach)
    return attend_window(q, k, v, first, first + lengths, reach, reach, block, -(-q.shape[1] // block))


def _real(lengths: Tensor, longest: int) -> Tensor:
    """A mask `[n, L]`, True at the real tokens of padded rows."""
    return torch.arange(longest, device=lengths.device) < lengths[:, None]
