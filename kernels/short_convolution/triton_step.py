"""One token of the short convolution in one Triton kernel, which reads and writes the last inputs once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longseq.kernels.custom_op import custom_op, results_like
from longseq.kernels.devices import channels_adjacent, contiguous
from longseq.kernels.triton_launch import cdiv, find_launch, launch_options
from longseq.kernels.triton_steps import UNSPECIALISED, load_vector, row_tile, store_vector

# The last inputs that a program of one warp holds, two loads of 16 bytes in each thread. Twice as many are 6 % faster
# for 128 sequences on an H200, and 14 % slower for one.
NUMBERS = 256


@triton.jit(do_not_specialize=UNSPECIALISED)
def _step(
    x, weight, bias, state, output, after, x_row,
    D: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    blocks = (D + BLOCK_D - 1) // BLOCK_D
    row = (tl.program_id(0) // blocks).to(tl.int64)
    first = (tl.program_id(0) % blocks) * BLOCK_D
    d = first + tl.arange(0, BLOCK_D)
    j = tl.arange(0, BLOCK_W)[None, :]
    own = (d < D)[:, None]
    place = (row * D + d[:, None]) * (WIDTH - 1) + j
    current = load_vector(x + row * x_row, first, D, BLOCK_D)
    taps = tl.load(weight + d[:, None] * WIDTH + j, mask=own & (j < WIDTH), other=0.0).to(tl.float32)
    window = tl.load(state + place, mask=own & (j < WIDTH - 1), other=0.0)
    window = tl.where(j == WIDTH - 1, current[:, None], window)

    y = tl.sum(window * taps, 1)
    if HAS_BIAS:
        y += load_vector(bias, first, D, BLOCK_D)
    if SILU:
        y *= tl.sigmoid(y)
    store_vector(output + row * D, first, y, D, BLOCK_D)
    tl.store(after + place - 1, window, mask=own & (j > 0) & (j < WIDTH))


@custom_op("short_convolution_step", results_like(0, 2))
def short_convolution_step_triton(
    x: Tensor, weight: Tensor, state: Tensor, bias: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor]:
    """Returns y [B, D] in x's dtype and the next state [B, D, W-1] in float32."""
    x, weight, state = channels_adjacent(x), weight.contiguous(), state.contiguous()
    bias = contiguous(bias)
    channels, width = weight.shape
    output, after = x.new_empty(x.shape), torch.empty_like(state)
    tile = row_tile(channels, width, NUMBERS)
    find_launch(
        _step, x.device, x.shape[0] * cdiv(channels, tile.rows), (x.stride(0),),
        D=channels, WIDTH=width, HAS_BIAS=bias is not None, SILU=activation == "silu", BLOCK_D=tile.rows,
        BLOCK_W=tile.columns, **launch_options(tile.warps),
    )(x, weight, bias, state, output, after)  # fmt: skip
    return output, after
