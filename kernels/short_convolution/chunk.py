"""The short convolution as one depthwise convolution over all tokens."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longseq.kernels.packing import Packing
from longseq.kernels.reading import run_each_way, turn
from longseq.kernels.recurrence import Core, Sequences, run_recurrence


def short_convolution_chunk(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str | None, mask: Tensor | None, **call: Any
) -> tuple[Tensor, Tensor | None]:
    """`short_convolution` by torch's convolution; `call` is for `run_recurrence`."""
    if weight.dim() == 3:
        own = {"weight": weight, "bias": bias}
        return run_each_way(short_convolution_chunk, own, {}, x=x, activation=activation, mask=mask, **call)

    def convolve_window(window: Tensor) -> Tensor:
        dtype = window.dtype
        taps, offset = weight.to(dtype).unsqueeze(1), None if bias is None else bias.to(dtype)
        return F.conv1d(window, taps, offset, groups=len(taps))

    return convolve_windows(convolve_window, x, weight.shape, activation=activation, mask=mask, **call)


def convolve_windows(
    convolve: Callable[[Tensor], Tensor], x: Tensor, weight_shape: Sequence[int], *, activation: str | None,
    mask: Tensor | None, **call: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Convolve with the state in front of the real tokens, which are moved next to each other.

    `convolve` maps a window [B, D, W-1 + L] of inputs to L outputs [B, D, L], each of which sees W inputs. The
    activation follows where outputs of no token are left out: they see two sequences, and the slope of an activation
    that is not a number would reach both, although their own gradient is zero.
    """

    def activate(y: Tensor) -> Tensor:
        return F.silu(y) if activation == "silu" else y

    mask = None if mask is None or mask.numel() == 0 else turn(mask, call["reverse"])

    def dense(sequences: Sequences, state: Tensor) -> tuple[Tensor, Tensor]:
        window = torch.cat((state, sequences[0].to(state.dtype).mT), dim=-1)  # [B, D, W-1 + T]
        return activate(convolve(window)).mT, window[..., x.shape[1] :].contiguous()

    def padded(sequences: Sequences, state: Tensor) -> tuple[Tensor, Tensor]:
        assert mask is not None
        count = mask.cumsum(1)
        place = torch.where(mask, count - 1, count[:, -1:] + (~mask).cumsum(1) - 1).unsqueeze(-1).expand(x.shape)
        real = sequences[0].to(state.dtype).masked_fill(~mask.unsqueeze(-1), 0)
        window = torch.cat((state, torch.zeros_like(real).scatter(1, place, real).mT), dim=-1)
        # Places of the W-1 inputs before the padding.
        last = count[:, -1:] + torch.arange(state.shape[2], device=x.device)
        output = activate(convolve(window).mT.gather(1, place)).masked_fill(~mask.unsqueeze(-1), 0)
        return output, window.gather(2, last.unsqueeze(1).expand(state.shape))

    def packed(core: Core, sequences: Sequences, state: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
        tokens, taps = x.shape[1], state.shape[2]
        places = packing.once(("places of a convolution", taps), lambda: find_places(packing, taps))
        token_place, state_place, last_place = places
        rows = state.new_zeros(tokens + taps * packing.count, x.shape[2])
        rows = rows.index_copy(0, token_place, sequences[0][0].to(state.dtype))
        rows = rows.index_copy(0, state_place, state.mT.flatten(0, 1))
        output = activate(convolve(rows.mT.unsqueeze(0))[..., token_place - taps])
        return output.mT, rows[last_place].mT

    return run_recurrence(
        dense if mask is None else padded,
        (x,),
        state_shape=(weight_shape[0], weight_shape[1] - 1),
        output_dtype=x.dtype,
        unpack=packed,
        **call,
    )


def find_places(packing: Packing, taps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Places in a row in which the `taps` inputs of each segment's state come before the segment's tokens.

    Returns the places of the tokens [T] and of the states [N taps], and of the last inputs of each segment [N, taps].
    """
    starts, ends = packing.cu_seqlens[:-1].long(), packing.cu_seqlens[1:].long()
    shift = taps * torch.arange(packing.count, device=starts.device)
    tap = torch.arange(taps, device=starts.device)
    token_place = torch.arange(packing.tokens, device=starts.device) + taps * (packing.sequence + 1)
    return token_place, ((starts + shift).unsqueeze(-1) + tap).flatten(), (ends + shift).unsqueeze(-1) + tap
