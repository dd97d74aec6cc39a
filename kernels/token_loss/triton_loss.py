"""The cross entropy of each token in one kernel, which reads the logits once, and its gradient in another."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longseq.kernels.custom_op import custom_op
from longseq.kernels.devices import as_rows
from longseq.kernels.triton_launch import Prepared, cdiv, find_launch, launch_options, next_power_of_2

# Measured on an H200. BLOCK: logits that a program reads at once, 16 for each thread. WARPS: the warps of a program.
BLOCK = 4096
WARPS = 8


@triton.jit
def _has_loss(target, V, ignored):
    return (target != ignored) & (target >= 0) & (target < V)


@triton.jit(do_not_specialize=["ignored"])
def measure_loss(logits, targets, losses, sums, V, row_stride, ignored, BLOCK: tl.constexpr):
    """The loss of one token, and the logarithm of the sum of its logits' exponentials."""
    row = tl.program_id(0).to(tl.int64)
    first = logits + row * row_stride
    largest = tl.full((BLOCK,), -1e38, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(first + column, mask=column < V, other=-float("inf")).to(tl.float32)
        before = largest
        largest = tl.maximum(largest, x)  # finite from the start: the difference of two infinities is NaN
        total = total * tl.exp(before - largest) + tl.exp(x - largest)
    most = tl.max(largest, 0)
    sum_of_exp = tl.sum(total * tl.exp(largest - most), 0)
    log_sum = most + tl.log(sum_of_exp)
    target = tl.load(targets + row)
    counts = _has_loss(target, V, ignored)
    own = tl.load(first + target, mask=counts, other=0.0).to(tl.float32)
    tl.store(sums + row, log_sum)
    tl.store(losses + row, tl.where(counts, log_sum - own, tl.where(target == ignored, 0.0, float("nan"))))


@triton.jit(do_not_specialize=["ignored"])
def differentiate_loss(logits, targets, sums, d_losses, d_logits, V, row_stride, ignored, BLOCK: tl.constexpr):
    """The gradient of a block of one token's logits."""
    blocks = tl.cdiv(V, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    weight = tl.where(_has_loss(target, V, ignored), tl.load(d_losses + row), 0.0)
    x = tl.load(logits + row * row_stride + column, mask=column < V, other=0.0).to(tl.float32)
    share = tl.exp(x - tl.load(sums + row)) - tl.where(column == target, 1.0, 0.0)
    share = tl.where(weight == 0.0, 0.0, share * weight)
    tl.store(d_logits + row * V + column, share, mask=column < V)


def _block(vocabulary: int) -> int:
    return min(BLOCK, next_power_of_2(vocabulary))


def _launch(kernel: Any, rows: Tensor, programs: int, ignore_index: int) -> Prepared:
    """A launch of `programs` programs for each row of logits."""
    numbers, block = (rows.shape[1], rows.stride(0), ignore_index), _block(rows.shape[1])
    return find_launch(kernel, rows.device, rows.shape[0] * programs, numbers, BLOCK=block, **launch_options(WARPS))


def _allocate(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    losses = logits.new_empty(target.shape, dtype=torch.float32)
    return losses, torch.empty_like(losses)


@custom_op("token_loss", _allocate)
def token_loss(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The loss of each token, and the logarithm of the sum of its logits' exponentials, [...] in float32."""
    rows = as_rows(logits)
    losses, sums = _allocate(logits, target, ignore_index)
    _launch(measure_loss, rows, 1, ignore_index)(rows, target.contiguous(), losses, sums)
    return losses, sums


@token_loss.gradient("logits", outputs=1)
def token_loss_backward(logits: Tensor, target: Tensor, sums: Tensor, d_losses: Tensor, ignore_index: int) -> Tensor:
    """The gradient of the logits."""
    rows = as_rows(logits)
    d_logits = logits.new_empty(logits.shape)
    launch = _launch(differentiate_loss, rows, cdiv(rows.shape[1], _block(rows.shape[1])), ignore_index)
    launch(rows, target.contiguous(), sums, d_losses.contiguous(), d_logits)
    return d_logits


def token_loss_triton(logits: Tensor, target: Tensor, *, ignore_index: int) -> Tensor:
    """`token_loss` as one kernel, whose gradient is one kernel, too."""
    return token_loss(logits, target, ignore_index)[0]
