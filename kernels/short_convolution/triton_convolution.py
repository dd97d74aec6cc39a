"""The causal depthwise convolution in Triton, its activation fused: one launch forward, one backward.

    z_t = bias + Σ_j w_j ⊙ x_{t-j};   y_t = z_t or SiLU(z_t);   j = 0 ... W-1, x = 0 before the first token

Channels are adjacent in memory, so every load is a row of BLOCK_D channels and a tap is the same load some rows up,
which the cache answers. Backward computes z again instead of storing it. Each program writes its sum for the weights
and the bias, and torch adds them in a fixed order: the result is the same in every run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from longseq.kernels.devices import channels_adjacent
from longseq.kernels.short_convolution.chunk import convolve_windows

# A tile of 2,048 numbers for 128 threads. Checked on an H200, but not compared with other tiles.
BLOCK_T = 32
BLOCK_D = 64
NUM_WARPS = 4


@triton.jit
def _convolve(x, weight, bias, row, t, d, x_row, x_token, T, D, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr):
    """z of the tokens t [BLOCK_T] and the channels d [BLOCK_D] of one row."""
    z = tl.zeros((t.shape[0], d.shape[0]), tl.float32)
    if HAS_BIAS:
        z += tl.load(bias + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    for j in tl.static_range(WIDTH):
        tap = tl.load(weight + d * WIDTH + (WIDTH - 1 - j), mask=d < D, other=0.0).to(tl.float32)
        z += tap[None, :] * _tokens(x, row, t - j, d, x_row, x_token, T, D)
    return z


@triton.jit
def _tokens(x, row, t, d, x_row, x_token, T, D):
    """x at the tokens t and the channels d of one row, zero outside the sequence."""
    inside = ((t >= 0) & (t < T))[:, None] & (d < D)[None, :]
    return tl.load(x + row * x_row + t[:, None] * x_token + d[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _place(T, D, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """This program's row, tokens and channels, and the number of its block of tokens over all rows."""
    over_d = tl.cdiv(D, BLOCK_D)
    over_t = tl.cdiv(T, BLOCK_T)
    tile = tl.program_id(0) // over_d
    row = (tile // over_t).to(tl.int64)
    t = (tile % over_t) * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
    d = (tl.program_id(0) % over_d) * BLOCK_D + tl.arange(0, BLOCK_D)
    return row, t, d, tile.to(tl.int64)


@triton.jit
def _forward(
    x, weight, bias, y, T, D, x_row, x_token,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row, t, d, _ = _place(T, D, BLOCK_T, BLOCK_D)
    z = _convolve(x, weight, bias, row, t, d, x_row, x_token, T, D, WIDTH, HAS_BIAS)
    if SILU:
        z = z * tl.sigmoid(z)
    tl.store(y + (row * T + t[:, None]) * D + d[None, :], z, mask=(t < T)[:, None] & (d < D)[None, :])


@triton.jit
def _backward(
    x, weight, bias, dy, dx, dweight, dbias, T, D, x_row, x_token, dy_row, dy_token,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row, t, d, tile = _place(T, D, BLOCK_T, BLOCK_D)
    dx_t = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for j in tl.static_range(WIDTH):
        dz = _tokens(dy, row, t + j, d, dy_row, dy_token, T, D)
        if SILU:
            z = _convolve(x, weight, bias, row, t + j, d, x_row, x_token, T, D, WIDTH, HAS_BIAS)
            gate = tl.sigmoid(z)
            dz = dz * gate * (1.0 + z * (1.0 - gate))
        tap = tl.load(weight + d * WIDTH + (WIDTH - 1 - j), mask=d < D, other=0.0).to(tl.float32)
        dx_t += tap[None, :] * dz
        if j == 0:
            if HAS_BIAS:
                tl.store(dbias + tile * D + d, tl.sum(dz, 0), mask=d < D)
            for i in tl.static_range(WIDTH):
                dtap = tl.sum(dz * _tokens(x, row, t - i, d, x_row, x_token, T, D), 0)
                tl.store(dweight + (tile * D + d) * WIDTH + (WIDTH - 1 - i), dtap, mask=d < D)
    tl.store(dx + (row * T + t[:, None]) * D + d[None, :], dx_t, mask=(t < T)[:, None] & (d < D)[None, :])


@torch.library.custom_op("longseq::causal_convolution", mutates_args=())
def causal_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """Convolve x [B, T, D] with weight [D, W] (the current token's tap last) and bias [D]; y is in x's dtype."""
    x, weight, bias = channels_adjacent(x), weight.contiguous(), None if bias is None else bias.contiguous()
    y = x.new_empty(x.shape)
    if y.numel():
        with torch.cuda.device_of(x):  # Triton launches on the current device
            _forward[(_tiles(x) * triton.cdiv(x.shape[2], BLOCK_D),)](
                x, weight, bias, y, x.shape[1], x.shape[2], x.stride(0), x.stride(1),
                WIDTH=weight.shape[1], HAS_BIAS=bias is not None, SILU=silu, BLOCK_T=BLOCK_T, BLOCK_D=BLOCK_D,
                num_warps=NUM_WARPS,
            )  # fmt: skip
    return y


@causal_convolution.register_fake
def _(x, weight, bias, silu):
    return x.new_empty(x.shape)


@torch.library.custom_op("longseq::causal_convolution_backward", mutates_args=())
def causal_convolution_backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias (empty without bias)."""
    x, dy, weight = channels_adjacent(x), channels_adjacent(dy), weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    channels, width = weight.shape
    tiles = _tiles(x)
    dx = x.new_empty(x.shape)
    dweight = x.new_empty((tiles, channels, width), dtype=torch.float32)
    dbias = x.new_empty((0 if bias is None else tiles, channels), dtype=torch.float32)
    if dx.numel():
        with torch.cuda.device_of(x):
            _backward[(tiles * triton.cdiv(channels, BLOCK_D),)](
                x, weight, bias, dy, dx, dweight, dbias,
                x.shape[1], channels, x.stride(0), x.stride(1), dy.stride(0), dy.stride(1),
                WIDTH=width, HAS_BIAS=bias is not None, SILU=silu, BLOCK_T=BLOCK_T, BLOCK_D=BLOCK_D,
                num_warps=NUM_WARPS,
            )  # fmt: skip
    return dx, dweight.sum(0).to(weight.dtype), dbias if bias is None else dbias.sum(0).to(bias.dtype)


@causal_convolution_backward.register_fake
def _(x, weight, bias, dy, silu):
    dbias = x.new_empty((0, weight.shape[0]), dtype=torch.float32) if bias is None else bias.new_empty(bias.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), dbias


def _setup_context(ctx, inputs, output):
    x, weight, bias, ctx.silu = inputs
    ctx.save_for_backward(x, weight, bias)


def _differentiate(ctx, dy):
    x, weight, bias = ctx.saved_tensors
    dx, dweight, dbias = causal_convolution_backward(x, weight, bias, dy, ctx.silu)
    return dx, dweight, None if bias is None else dbias, None


causal_convolution.register_autograd(_differentiate, setup_context=_setup_context)


def short_convolution_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """`short_convolution` as one kernel over tokens in their own layout."""
    taps = weight.shape[1] - 1
    silu = activation == "silu"
    if initial_state is None and cu_seqlens is None and mask is None:
        final_state = None
        if output_final_state:
            last = x[:, max(0, x.shape[1] - taps) :].mT.to(torch.float32)
            final_state = functional.pad(last, (taps - last.shape[2], 0))
        return causal_convolution(x, weight, bias, silu), final_state

    def convolve(window: Tensor) -> Tensor:
        return causal_convolution(window.mT, weight, bias, silu)[:, taps:].mT

    return convolve_windows(
        convolve,
        x,
        weight.shape,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        mask=mask,
    )


def _tiles(x: Tensor) -> int:
    return x.shape[0] * triton.cdiv(x.shape[1], BLOCK_T)
