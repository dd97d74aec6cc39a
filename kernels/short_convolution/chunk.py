"""The short convolution as one depthwise convolution over all tokens."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from longseq.kernels.custom_op import is_exactly_tensor
from longseq.kernels.dispatch import is_exporting
from longseq.kernels.packing import Packing
from longseq.kernels.reading import Reverse, turn
from longseq.kernels.recurrence import Core, Sequences, run_recurrence
from longseq.kernels.short_convolution.reference import convolve_each_way


def short_convolution_chunk(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    mask: Tensor | None,
    reverse: Reverse,
) -> tuple[Tensor, Tensor | None]:
    """`short_convolution` by torch's convolution, which keeps its inputs for the gradient of a weight that has one."""
    if weight.dim() == 3:
        return convolve_each_way(
            short_convolution_chunk, x, weight, bias, initial_state,
            activation=activation, output_final_state=output_final_state, cu_seqlens=None, mask=mask,
        )  # fmt: skip

    def convolve(window: Tensor) -> Tensor:
        dtype = window.dtype
        taps, offset = weight.to(dtype).unsqueeze(1), None if bias is None else bias.to(dtype)
        if _keeps_no_inputs(window, taps, offset):
            return _FrozenTaps.apply(window, taps, offset)
        return F.conv1d(window, taps, offset, groups=len(taps))

    return convolve_windows(
        convolve,
        x,
        weight.shape,
        activation=activation,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        mask=mask,
        reverse=reverse,
    )


def _keeps_no_inputs(window: Tensor, taps: Tensor, bias: Tensor | None) -> bool:
    """Whether eager code differentiates by anything but the taps. Transforms and graphs take torch's own form."""
    if torch.compiler.is_compiling() or is_exporting() or not (is_exactly_tensor(window) and is_exactly_tensor(taps)):
        return False
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    wanted = window.requires_grad or (bias is not None and bias.requires_grad)
    return wanted and not taps.requires_grad and torch.is_grad_enabled()


class _FrozenTaps(torch.autograd.Function):
    """A depthwise convolution whose taps get no gradient, so that nothing depends on its inputs.

    torch's own form keeps the inputs nevertheless. The arithmetic is the same, and has second derivatives.
    """

    @staticmethod
    def forward(ctx, window, taps, bias):
        ctx.save_for_backward(taps)
        ctx.layout = window.shape, window.stride()
        return F.conv1d(window, taps, bias, groups=len(taps))

    @staticmethod
    def backward(ctx, d_y):
        (taps,) = ctx.saved_tensors
        channels, wanted = len(taps), ctx.needs_input_grad
        window = d_y.new_empty_strided(*ctx.layout)  # of which only the layout is read
        d_window, _, d_bias = torch.ops.aten.convolution_backward(
            d_y, window, taps, [channels], [1], [0], [1], False, [0], channels, [wanted[0], False, wanted[2]]
        )
        return d_window, None, d_bias


def convolve_windows(
    convolve: Callable[[Tensor], Tensor],
    x: Tensor,
    weight_shape: Sequence[int],
    *,
    activation: str | None = None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    mask: Tensor | None,
    reverse: Reverse,
) -> tuple[Tensor, Tensor | None]:
    """Convolve with the state in front of the real tokens, which are moved next to each other.

    `convolve` maps a window [B, D, W-1 + L] of inputs to L outputs [B, D, L], each of which sees W inputs. The
    activation follows where outputs of no token are left out: they see two sequences, and the slope of an activation
    that is not a number would reach both, although their own gradient is zero.
    """

    def activate(y: Tensor) -> Tensor:
        return F.silu(y) if activation == "silu" else y

    mask = None if mask is None else turn(mask, reverse)

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
        dense if mask is None or mask.numel() == 0 else padded,
        (x,),
        initial_state,
        (weight_shape[0], weight_shape[1] - 1),
        output_dtype=x.dtype,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        unpack=packed,
        reverse=reverse,
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
