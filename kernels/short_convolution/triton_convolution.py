"""The causal depthwise convolution in Triton, its activation fused: one launch forward, one or two backward.

    z_t = bias + Σ_j w_j ⊙ x_{t-j};   y_t = z_t or SiLU(z_t);   j = 0 ... W-1, x before the first token from the state

Channels are adjacent in memory, so every load is a row of BLOCK_D channels and a tap is the same load some rows up,
which the cache answers; read in reverse, some rows down. Packed segments are told apart by the number of the segment of
each token, found without waiting for the device. Backward computes z again instead of storing it. Each program writes
its sum for the weights and the bias, and torch adds them in a fixed order: the result is the same in every run.
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
STATE_BLOCK_T = 16  # with a state, for which larger tiles have not enough registers
BLOCK_D = 64
NUM_WARPS = 4


@triton.jit
def _borders(n, T, cu_seqlens):
    """First token and end of the segments n."""
    # Reading the borders on the host to check them would wait for the device; held inside the tokens they can at least
    # touch no foreign memory.
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens + n).to(tl.int64), 0), T)
    return start, tl.minimum(tl.maximum(tl.load(cu_seqlens + n + 1).to(tl.int64), start), T)


@triton.jit
def _sequence(row, t, T, cu_seqlens, segment_of, PACKED: tl.constexpr):
    """Of the tokens t of one row: the sequence's number, first token and end."""
    if PACKED:
        n = tl.load(segment_of + t, mask=t < T, other=0).to(tl.int64)
        start, end = _borders(n, T, cu_seqlens)
        return n, start, end
    return row + t * 0, t * 0, t * 0 + T


@triton.jit
def _inputs(
    x, state, row, n, t, start, end, d, x_row, x_token, D,
    WIDTH: tl.constexpr, HAS_STATE: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """x at the tokens t and the channels d, those before a sequence from its state; zero after it."""
    own = ((t >= start) & (t < end))[:, None] & (d < D)[None, :]
    taken = tl.load(x + row * x_row + t[:, None] * x_token + d[None, :], mask=own, other=0.0).to(tl.float32)
    if HAS_STATE:
        age = end - 1 - t if REVERSE else t - start
        place = age + (WIDTH - 1)
        before = ((age < 0) & (place >= 0))[:, None] & (d < D)[None, :]
        place = (n[:, None] * D + d[None, :]) * (WIDTH - 1) + place[:, None]
        taken += tl.load(state + place, mask=before, other=0.0).to(tl.float32)
    return taken


@triton.jit
def _convolve(
    x, weight, bias, state, row, n, t, start, end, d, x_row, x_token, D,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """z of the tokens t [BLOCK_T] and the channels d [BLOCK_D] of one row."""
    STEP: tl.constexpr = -1 if REVERSE else 1
    z = tl.zeros((t.shape[0], d.shape[0]), tl.float32)
    if HAS_BIAS:
        z += tl.load(bias + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    for j in tl.static_range(WIDTH):
        tap = tl.load(weight + d * WIDTH + (WIDTH - 1 - j), mask=d < D, other=0.0).to(tl.float32)
        seen = _inputs(
            x, state, row, n, t - STEP * j, start, end, d, x_row, x_token, D, WIDTH, HAS_STATE, REVERSE
        )  # fmt: skip
        z += tap[None, :] * seen
    return z


@triton.jit
def _gradient(
    x, weight, bias, state, dy, row, n, t, start, end, d, x_row, x_token, dy_row, dy_token, D,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr, REVERSE: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """The gradient of z at the tokens t and the channels d, zero outside the sequence."""
    own = ((t >= start) & (t < end))[:, None] & (d < D)[None, :]
    dz = tl.load(dy + row * dy_row + t[:, None] * dy_token + d[None, :], mask=own, other=0.0).to(tl.float32)
    if SILU:
        z = _convolve(
            x, weight, bias, state, row, n, t, start, end, d, x_row, x_token, D, WIDTH, HAS_BIAS, HAS_STATE, REVERSE
        )  # fmt: skip
        gate = tl.sigmoid(z)
        dz = dz * gate * (1.0 + z * (1.0 - gate))
    return dz


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
    x, weight, bias, state, cu_seqlens, segment_of, y, T, D, x_row, x_token,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr, PACKED: tl.constexpr,
    REVERSE: tl.constexpr, SILU: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row, t, d, _ = _place(T, D, BLOCK_T, BLOCK_D)
    n, start, end = _sequence(row, t, T, cu_seqlens, segment_of, PACKED)
    z = _convolve(
        x, weight, bias, state, row, n, t, start, end, d, x_row, x_token, D, WIDTH, HAS_BIAS, HAS_STATE, REVERSE
    )  # fmt: skip
    if SILU:
        z = z * tl.sigmoid(z)
    tl.store(y + (row * T + t[:, None]) * D + d[None, :], z, mask=(t < T)[:, None] & (d < D)[None, :])


@triton.jit
def _backward(
    x, weight, bias, state, cu_seqlens, segment_of, dy, dx, dweight, dbias, T, D, x_row, x_token, dy_row, dy_token,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr, PACKED: tl.constexpr,
    REVERSE: tl.constexpr, SILU: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row, t, d, tile = _place(T, D, BLOCK_T, BLOCK_D)
    STEP: tl.constexpr = -1 if REVERSE else 1
    n, start, end = _sequence(row, t, T, cu_seqlens, segment_of, PACKED)
    dx_t = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for j in tl.static_range(WIDTH):
        dz = _gradient(
            x, weight, bias, state, dy, row, n, t + STEP * j, start, end, d, x_row, x_token, dy_row, dy_token, D,
            WIDTH, HAS_BIAS, HAS_STATE, REVERSE, SILU,
        )  # fmt: skip
        tap = tl.load(weight + d * WIDTH + (WIDTH - 1 - j), mask=d < D, other=0.0).to(tl.float32)
        dx_t += tap[None, :] * dz
        if j == 0:
            if HAS_BIAS:
                tl.store(dbias + tile * D + d, tl.sum(dz, 0), mask=d < D)
            for i in tl.static_range(WIDTH):
                seen = _inputs(
                    x, state, row, n, t - STEP * i, start, end, d, x_row, x_token, D, WIDTH, HAS_STATE, REVERSE
                )  # fmt: skip
                tl.store(dweight + (tile * D + d) * WIDTH + (WIDTH - 1 - i), tl.sum(dz * seen, 0), mask=d < D)
    tl.store(dx + (row * T + t[:, None]) * D + d[None, :], dx_t, mask=(t < T)[:, None] & (d < D)[None, :])


@triton.jit
def _backward_state(
    x, weight, bias, state, cu_seqlens, dy, dstate, T, D, x_row, x_token, dy_row, dy_token,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr, SILU: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The gradient of one sequence's state, from its first BLOCK_T >= W - 1 tokens."""
    over_d = tl.cdiv(D, BLOCK_D)
    n = (tl.program_id(0) // over_d).to(tl.int64)
    d = (tl.program_id(0) % over_d) * BLOCK_D + tl.arange(0, BLOCK_D)
    row, start, end = n, n * 0, n * 0 + T
    if PACKED:
        row = n * 0
        start, end = _borders(n, T, cu_seqlens)
    i = tl.arange(0, BLOCK_T)
    t = end - 1 - i if REVERSE else start + i
    dz = _gradient(
        x, weight, bias, state, dy, row, n + t * 0, t, start + t * 0, end + t * 0, d, x_row, x_token, dy_row, dy_token,
        D, WIDTH, HAS_BIAS, True, REVERSE, SILU,
    )  # fmt: skip
    for place in tl.static_range(WIDTH - 1):
        # The token i sees this input through the tap i + 1 to the right of the input's own place.
        seen = (i <= place)[:, None] & (d < D)[None, :]
        tap = tl.load(weight + d[None, :] * WIDTH + (place - i)[:, None], mask=seen, other=0.0).to(tl.float32)
        tl.store(dstate + (n * D + d) * (WIDTH - 1) + place, tl.sum(tap * dz, 0), mask=d < D)


@torch.library.custom_op("longseq::causal_convolution", mutates_args=())
def causal_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    reverse: bool,
) -> Tensor:
    """Convolve x [B, T, D] with weight [D, W] (the current token's tap last), bias [D] and state [B or N, D, W-1].

    y is in x's dtype.
    """
    x, weight, bias = channels_adjacent(x), weight.contiguous(), None if bias is None else bias.contiguous()
    y = x.new_empty(x.shape)
    block = _tile_tokens(initial_state)
    if y.numel():
        with torch.cuda.device_of(x):  # Triton launches on the current device
            _forward[(x.shape[0] * triton.cdiv(x.shape[1], block) * triton.cdiv(x.shape[2], BLOCK_D),)](
                x, weight, bias, None if initial_state is None else initial_state.contiguous(),
                cu_seqlens, _segment_of(x, cu_seqlens), y, x.shape[1], x.shape[2], x.stride(0), x.stride(1),
                WIDTH=weight.shape[1], HAS_BIAS=bias is not None, HAS_STATE=_has(initial_state),
                PACKED=cu_seqlens is not None, REVERSE=reverse, SILU=silu, BLOCK_T=block, BLOCK_D=BLOCK_D,
                num_warps=NUM_WARPS,
            )  # fmt: skip
    return y


@causal_convolution.register_fake
def _(x, weight, bias, initial_state, cu_seqlens, silu, reverse):
    return x.new_empty(x.shape)


@torch.library.custom_op("longseq::causal_convolution_backward", mutates_args=())
def causal_convolution_backward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    dy: Tensor,
    silu: bool,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, bias and state (empty without them)."""
    x, dy, weight = channels_adjacent(x), channels_adjacent(dy), weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    state = None if initial_state is None else initial_state.contiguous()
    channels, width = weight.shape
    block = _tile_tokens(state)
    tiles, blocks = x.shape[0] * triton.cdiv(x.shape[1], block), triton.cdiv(channels, BLOCK_D)
    dx = x.new_empty(x.shape)
    dweight = x.new_empty((tiles, channels, width), dtype=torch.float32)
    dbias = x.new_empty((0 if bias is None else tiles, channels), dtype=torch.float32)
    dstate = x.new_empty((0,)) if state is None else state.new_empty(state.shape)
    shape = (x.shape[1], channels, x.stride(0), x.stride(1), dy.stride(0), dy.stride(1))
    constants = {
        "WIDTH": width, "HAS_BIAS": bias is not None, "PACKED": cu_seqlens is not None, "REVERSE": reverse,
        "SILU": silu,
        "BLOCK_D": BLOCK_D, "num_warps": NUM_WARPS,
    }  # fmt: skip
    with torch.cuda.device_of(x):
        if dx.numel():
            _backward[(tiles * blocks,)](
                x, weight, bias, state, cu_seqlens, _segment_of(x, cu_seqlens), dy, dx, dweight, dbias, *shape,
                HAS_STATE=_has(state), BLOCK_T=block, **constants,
            )  # fmt: skip
        if state is not None and state.numel():
            _backward_state[(state.shape[0] * blocks,)](
                x, weight, bias, state, cu_seqlens, dy, dstate, *shape,
                BLOCK_T=triton.next_power_of_2(width - 1), **constants,
            )  # fmt: skip
    return dx, dweight.sum(0).to(weight.dtype), dbias if bias is None else dbias.sum(0).to(bias.dtype), dstate


@causal_convolution_backward.register_fake
def _(x, weight, bias, initial_state, cu_seqlens, dy, silu, reverse):
    dbias = x.new_empty((0, weight.shape[0]), dtype=torch.float32) if bias is None else bias.new_empty(bias.shape)
    dstate = x.new_empty((0,)) if initial_state is None else initial_state.new_empty(initial_state.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), dbias, dstate


def _setup_context(ctx, inputs, output):
    *tensors, ctx.silu, ctx.reverse = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, dy):
    x, weight, bias, state, cu_seqlens = ctx.saved_tensors
    dx, dweight, dbias, dstate = causal_convolution_backward(
        x, weight, bias, state, cu_seqlens, dy, ctx.silu, ctx.reverse
    )
    return dx, dweight, None if bias is None else dbias, None if state is None else dstate, None, None, None


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
    reverse: bool,
) -> tuple[Tensor, Tensor | None]:
    """`short_convolution` as one kernel over tokens in their own layout; a mask first moves real tokens together."""
    taps = weight.shape[1] - 1
    silu = activation == "silu"
    if mask is None:
        cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(x.device).contiguous()
        y = causal_convolution(x, weight, bias, initial_state, cu_seqlens, silu, reverse)
        return y, _last_inputs(x, initial_state, cu_seqlens, taps, reverse) if output_final_state else None

    def convolve(window: Tensor) -> Tensor:
        return causal_convolution(window.mT, weight, bias, None, None, silu, False)[:, taps:].mT

    return convolve_windows(
        convolve,
        x,
        weight.shape,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=None,
        mask=mask,
        reverse=reverse,
    )


def _last_inputs(x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, taps: int, reverse: bool) -> Tensor:
    """The last inputs [B or N, D, taps] of each sequence, reaching into its first state or into zeros."""
    if cu_seqlens is None:
        last = x[:, :taps].flip(1) if reverse else x[:, max(0, x.shape[1] - taps) :]
        last = last.mT.to(torch.float32)
        missing = taps - last.shape[2]
        if state is None:
            return functional.pad(last, (missing, 0))
        return torch.cat((state[..., taps - missing :].to(torch.float32), last), -1)
    tokens = x.shape[1]
    start, end = (border.clamp(0, tokens)[:, None] for border in (cu_seqlens[:-1], cu_seqlens[1:]))
    if state is None:
        state = x.new_zeros((len(start), x.shape[2], taps), dtype=torch.float32)
    age = end - start - taps + torch.arange(taps, device=x.device)  # [N, taps]
    earlier = (age + taps).clamp_max(taps - 1)[:, None].expand_as(state)
    from_state = state.to(torch.float32).gather(2, earlier)
    if tokens == 0:
        return from_state
    place = end - 1 - age if reverse else start + age
    own = x[0][place.clamp(0, tokens - 1)].mT.to(torch.float32)
    return torch.where((age >= 0)[:, None], own, from_state)


def _segment_of(x: Tensor, cu_seqlens: Tensor | None) -> Tensor | None:
    """The packed segment that each token belongs to."""
    if cu_seqlens is None:
        return None
    numbers = torch.arange(x.shape[1], device=x.device)
    return torch.searchsorted(cu_seqlens[1:].to(torch.int64), numbers, right=True).clamp_max(cu_seqlens.shape[0] - 2)


def _has(state: Tensor | None) -> bool:
    return state is not None and state.numel() > 0


def _tile_tokens(state: Tensor | None) -> int:
    return STATE_BLOCK_T if _has(state) else BLOCK_T
