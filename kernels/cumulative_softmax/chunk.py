"""The cumulative softmax over all tokens at once."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from longseq.kernels.chunks import scan
from longseq.kernels.cumulative_softmax.reference import NOTHING, empty_state
from longseq.kernels.custom_op import once_differentiable
from longseq.kernels.dispatch import is_exporting
from longseq.kernels.precision import without_autocast
from longseq.kernels.recurrence import Sequences, run_padded, run_recurrence


def cumulative_softmax_torch(x: Tensor, **call: Any) -> tuple[Tensor, Tensor | None]:
    """`cumulative_softmax` by torch.logcumsumexp; saves its inputs for the backward. `call` is for `run_recurrence`."""

    def core(sequences: Sequences, state: Tensor) -> tuple[Tensor, Tensor]:
        logits, real = sequences
        logits = logits.to(state.dtype)
        if real is not None:
            logits = logits.masked_fill(real == 0, NOTHING)
        if torch.jit.is_tracing():
            return _forward(logits, state)
        if is_exporting():
            return _exported(logits, state)
        return _CumulativeSoftmax.apply(logits, state)

    # Packed segments are padded with zeros, which are valid logits: the second sequence marks the real tokens.
    real = None if call["cu_seqlens"] is None else torch.ones_like(x[:, :, :1, :1])
    return run_recurrence(
        core, (x, real), state_shape=partial(empty_state, x=x), output_dtype=x.dtype, unpack=run_padded, **call
    )


def _forward(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    before, after = _normalizers(x, state)
    return functional.logsigmoid(before - x), after[:, -1].clone()  # a view would keep the other tokens in memory


def _normalizers(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The normaliser z before and after each token [B, T, H, M]."""
    total = torch.logcumsumexp(torch.cat((state.unsqueeze(1), x), 1), 1)
    return total[:, :-1], total[:, 1:]


def _exported(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The form for torch.export: one Scan over the tokens.

    ONNX's logcumsumexp subtracts one maximum from all tokens, and its logaddexp and logsigmoid none.
    """
    final, before = scan(_next_normalizer, state, [x.transpose(0, 1)])
    return -functional.softplus(x - before.transpose(0, 1)), final


def _next_normalizer(state: Tensor, x: Tensor) -> list[Tensor]:
    """z after the token and before it."""
    return [torch.maximum(state, x) + functional.softplus(-(state - x).abs()), state.clone()]


class _CumulativeSoftmax(torch.autograd.Function):
    """The eager form. Saves its inputs; recomputes the rest."""

    @staticmethod
    def forward(ctx, x, state):
        ctx.save_for_backward(x, state)
        return _forward(x, state)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_g, d_final):
        x, state = ctx.saved_tensors
        wants_x, wants_state = ctx.needs_input_grad
        with without_autocast(state):
            return _backward(wants_x, wants_state, x, state, d_g, d_final)


def _backward(
    wants_x: bool, wants_state: bool, x: Tensor, state: Tensor, d_g: Tensor, d_final: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and of the initial state, where wanted, from those R_t of z_t through all later tokens:

    R_t = w_{t+1} dg_{t+1} + e^{g_{t+1}} R_{t+1};   dx_t = w_t (R_t - dg_t)
    """
    before, _ = _normalizers(x, state)
    share, kept = torch.sigmoid(x - before), torch.sigmoid(before - x)
    direct = share * d_g
    total = _later_total(torch.cat((direct, d_final.unsqueeze(1)), 1), kept)
    return share * total[:, 1:] - direct if wants_x else None, total[:, 0] if wants_state else None


def _later_total(x: Tensor, kept: Tensor) -> Tensor:
    """y_t = x_t + kept_t y_{t+1} for x [B, T + 1, ...] and kept [B, T, ...]; each pass doubles the sums' length."""
    reach = 1
    while reach < x.shape[1]:
        ahead = x.shape[1] - reach
        x = torch.cat((x[:, :ahead] + kept[:, :ahead] * x[:, reach:], x[:, ahead:]), 1)
        kept = kept[:, :-reach] * kept[:, reach:]
        reach *= 2
    return x
