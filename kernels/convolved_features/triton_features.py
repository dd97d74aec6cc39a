"""The short convolution of queries, keys and values with their features in Triton: one launch forward, one backward.

    z_t = Σ_j w_j ⊙ x_{t-j};   q, k = φ(z) / ‖φ(z)‖;   v = SiLU(z);   j = 0 ... W-1, zeros before the first token

A program takes a stretch of tokens for a few heads of the queries, of the keys or of the values. It loops over the
tokens and holds the last W inputs in registers, so that x is read once. The window of W inputs also serves the reading
from the last token to the first: with the taps in reverse order, it gives z of the token W - 1 steps ago. So one loop
computes both readings. The backward pass loops in the same order and computes z again instead of storing it. It holds
the gradients of the last W inputs, to which each z contributes. Each program writes its own sum for the weights, and
torch adds the sums in a fixed order, so that the result is the same in every run.
"""

from functools import lru_cache
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longseq.kernels.custom_op import Gradients, custom_op, empty_like
from longseq.kernels.devices import channels_adjacent
from longseq.kernels.head_features.triton_features import (
    EPS,
    KINDS,
    differentiate_map,
    head_features_triton,
    map_channels,
    norm_slope,
    squared_norm,
)
from longseq.kernels.reading import Reverse, number_of
from longseq.kernels.short_convolution.triton_convolution import (
    accumulate,
    convolve,
    last_states,
    push,
    reach_of_tokens,
    short_convolution_triton,
    zeros_of_taps,
)
from longseq.kernels.triton_launch import PREPARED, Prepared, borders_on, cdiv, launch_options, next_power_of_2

# Measured on an H200. WARP: channels of a program's block for each warp. UNROLL: tokens whose loads are issued
# together, for one reading and for two. PROGRAMS: the number of programs for which rows are cut into stretches; smaller
# for the backward pass, which writes and reads a partial sum for each.
WARP = 128
UNROLL = {"forward": (4, 8), "backward": (4, 4)}
PROGRAMS = {"forward": 16384, "backward": 4096}
LARGEST_WARPS = 8  # wider heads are not read by one program
STRENGTHS = tl.constexpr(32)  # tokens whose write strengths are computed together
ALIGNMENT = 16  # rows of a gradient begin at multiples of this many numbers, so that a thread stores several at once

# Arguments that Triton must not specialise on, because no kernel gets faster by it: fewer kernels to compile.
UNSPECIALISED = ["B", "T", "P", "stretch"]


@triton.jit
def _place(T, stretch, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr):
    """This program's stretch of tokens and block of channels.

    Returns the number of the stretch over all rows, its row, its first token and its end (exclusive); the part (0:
    queries, 1: keys, 2: values), its first head, the channels [GROUP, BLOCK_K] in the part, and a mask of those that
    exist. Values are read in blocks as wide as keys: they need no norm, so that a block need not hold whole heads.
    """
    groups: tl.constexpr = (H + GROUP - 1) // GROUP
    blocks: tl.constexpr = 2 * groups + (H * V + GROUP * K - 1) // (GROUP * K)
    tile = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    part = tl.minimum(block // groups, 2)
    head = (block - part * groups) * GROUP
    column = tl.arange(0, BLOCK_K)[None, :]
    channel = (head + tl.arange(0, GROUP)[:, None]) * K + column
    width = tl.where(part == 2, H * V, H * K)
    there = channel < width
    if K != BLOCK_K:
        there = there & (column < K)
    over_t = tl.cdiv(T, stretch)
    first = (tile % over_t) * stretch
    number, row = tile.to(tl.int64), (tile // over_t).to(tl.int64)
    return number, row, first, tl.minimum(first + stretch, T), part, head, channel, there


@triton.jit
def _only_if(condition, there):
    """The mask `there` if the condition holds, else false everywhere."""
    return tl.where(condition, there, False)


@triton.jit
def _load_token(x, t, step, T, channel, there):
    """Channels of token t; zero where the token or the channel does not exist."""
    t = tl.cast(t, tl.int64)
    return tl.load(x + t * step + channel, mask=_only_if((t >= 0) & (t < T), there), other=0.0)


@triton.jit
def _load_tokens(x, t, step, T, channel, there, COUNT: tl.constexpr):
    """COUNT tokens from token t on."""
    rows = ()
    for i in tl.static_range(COUNT):
        rows = rows + (_load_token(x, t + i, step, T, channel, there),)
    return rows


@triton.jit
def _load_window(x, t, step, T, channel, there, WIDTH: tl.constexpr):
    """The W inputs before token t, the latest first. The oldest of them is never used."""
    window = ()
    for k in tl.static_range(WIDTH):
        window = window + (_load_token(x, t - 1 - k, step, T, channel, there).to(tl.float32),)
    return window


@triton.jit
def _load_reaches(reach, t, T, COUNT: tl.constexpr):
    """The reaches of COUNT tokens from token t on, 0 outside; none if the batch is not packed.

    The reach of a token is how many tokens of its packed segment come before it in the direction of reading. They are
    loaded together, before a token between them is stored.
    """
    found = ()
    if reach is not None:
        for i in tl.static_range(COUNT):
            at = tl.cast(t + i, tl.int64)
            found = found + (tl.load(reach + at, mask=(at >= 0) & (at < T), other=0),)
    return found


@triton.jit
def _of_segment(values, reaches, i: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr, DELAY: tl.constexpr):
    """W values, one for each of the last W tokens: zero for those beyond reach i, of the token of DELAY steps ago."""
    own = ()
    for k in tl.static_range(WIDTH):
        distance = k if DELAY == 0 else DELAY - k
        own = own + (tl.where(reaches[i] >= distance, values[k], 0.0) if PACKED and distance > 0 else values[k],)
    return own


@triton.jit
def _tap(k, back, WIDTH: tl.constexpr):
    """The index in the weight of the tap for the input k steps ago; `back` is 1 in a reading from the end."""
    return k * back + (WIDTH - 1 - k) * (1 - back)


@triton.jit
def _load_taps(weight, channel, there, back, WIDTH: tl.constexpr):
    """The taps for the inputs 0 ... W-1 steps ago, in float32."""
    taps = ()
    for k in tl.static_range(WIDTH):
        tap = tl.load(weight + channel * WIDTH + _tap(k, back, WIDTH), mask=there, other=0.0)
        taps = taps + (tap.to(tl.float32),)
    return taps


@triton.jit
def _map(z, unit, K: tl.constexpr, BLOCK_K: tl.constexpr, KIND: tl.constexpr):
    """The feature map of z for queries and keys (`unit`), SiLU for values."""
    feature = map_channels(z, K, BLOCK_K, 0)
    if KIND != 0:
        feature = tl.where(unit, map_channels(z, K, BLOCK_K, KIND), feature)
    return feature


@triton.jit
def _scale(feature, unit, L1: tl.constexpr):
    """The factor for the features of each head, [GROUP, 1]: 1 / norm for queries and keys (`unit`), 1 for values."""
    return tl.where(unit, tl.rsqrt(squared_norm(feature, L1) + EPS)[:, None], 1.0)


@triton.jit
def _gradient(z, dy, unit, K: tl.constexpr, BLOCK_K: tl.constexpr, KIND: tl.constexpr, L1: tl.constexpr):
    """The gradient of z from the gradient of its features."""
    dy = dy.to(tl.float32)
    feature = _map(z, unit, K, BLOCK_K, KIND)
    scale = _scale(feature, unit, L1)
    slope = differentiate_map(z, 0)
    if KIND != 0:
        slope = tl.where(unit, differentiate_map(z, KIND), slope)
    along = tl.where(unit, tl.sum(dy * feature, 1)[:, None] * scale, 0.0)
    return (dy - along * norm_slope(feature * scale, L1)) * slope * scale


@triton.jit
def _place_strengths(t, end, head, H: tl.constexpr, GROUP: tl.constexpr):
    """Tokens [STRENGTHS, 1] from token t on, heads [1, GROUP], and a mask of those that exist."""
    token = t + tl.arange(0, STRENGTHS)[:, None]
    head += tl.arange(0, GROUP)[None, :]
    return token.to(tl.int64), head, (token < end) & (head < H)


@triton.jit(do_not_specialize=UNSPECIALISED)
def convolve_features(
    x, weight, reach, q, k, v, beta, B, T, x_row, x_token, stretch,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, L1: tl.constexpr,
    REVERSE: tl.constexpr, READINGS: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """q, k or v of a few heads in a stretch of tokens; programs for q also write beta."""
    _, row, first, end, part, head, channel, there = _place(T, stretch, H, K, V, GROUP, BLOCK_K)
    x += row * x_row
    if part == 0:
        for t in range(first, end, STRENGTHS):
            token, heads, inside = _place_strengths(t, end, head, H, GROUP)
            logit = tl.load(x + token * x_token + (2 * K + V) * H + heads, mask=inside, other=0.0).to(tl.float32)
            for reading in tl.static_range(READINGS):
                at = ((row + reading * B) * T + token) * H + heads
                tl.store(beta + at, tl.sigmoid(logit), mask=inside)

    unit = part < 2
    y, width = _of_part(part, q, k, v, H, K, V)
    weight += part * H * K * WIDTH
    x += part * H * K
    back = _is_backward(row, B, REVERSE, READINGS)
    delay = back * (WIDTH - 1)
    PACKED: tl.constexpr = reach is not None
    DELAY: tl.constexpr = WIDTH - 1 if REVERSE == 1 and READINGS == 1 else 0  # `delay` of packed segments
    taps = _load_taps(weight, channel, there, back, WIDTH)
    y_at = y + row * T * width
    if READINGS == 2:
        later_taps = _load_taps(weight + (2 * K + V) * H * WIDTH, channel, there, 1, WIDTH)
        later_at = y + (row + B) * T * width
    begin = first + delay
    window = _load_window(x, begin, x_token, T, channel, there, WIDTH)
    for u in range(begin, end + (delay if READINGS == 1 else WIDTH - 1), UNROLL):
        rows = _load_tokens(x, u, x_token, T, channel, there, UNROLL)
        reaches = _load_reaches(reach, u - DELAY, T, UNROLL)
        for i in tl.static_range(UNROLL):
            window = push(window, rows[i].to(tl.float32), WIDTH)
            z = convolve(_of_segment(window, reaches, i, WIDTH, PACKED, DELAY), taps, 0.0, WIDTH)
            feature = _map(z, unit, K, BLOCK_K, KIND)
            feature *= _scale(feature, unit, L1)
            _store_token(y_at, u + i - delay, width, first, end, channel, there, feature)
            if READINGS == 2:
                feature = _map(convolve(window, later_taps, 0.0, WIDTH), unit, K, BLOCK_K, KIND)
                feature *= _scale(feature, unit, L1)
                _store_token(later_at, u + i - (WIDTH - 1), width, first, end, channel, there, feature)


@triton.jit
def _of_part(part, q, k, v, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """The tensor of this part, and its number of channels per token."""
    tensor = v
    width = H * V
    if part == 0:
        tensor = q
        width = H * K
    if part == 1:
        tensor = k
        width = H * K
    return tensor, width


@triton.jit
def _is_backward(row, B, REVERSE: tl.constexpr, READINGS: tl.constexpr):
    """1 if the (first) reading of a row begins at its last token, else 0."""
    back = row * 0
    if READINGS == 1:
        if REVERSE == 1:
            back += 1
        elif REVERSE == 2:
            back = tl.where(row >= B // 2, row * 0 + 1, row * 0)
    return back


@triton.jit
def _store_token(y, t, step, first, end, channel, there, values):
    """Store the channels of token t if it belongs to this program's stretch."""
    t = tl.cast(t, tl.int64)
    tl.store(y + t * step + channel, values, mask=_only_if((t >= first) & (t < end), there))


@triton.jit(do_not_specialize=UNSPECIALISED)
def differentiate_convolved(
    x, weight, reach, dq, dk, dv, d_beta, dx, sums, B, T, x_row, x_token, dx_token, P, stretch,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, L1: tl.constexpr,
    REVERSE: tl.constexpr, READINGS: tl.constexpr, WEIGHS: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """The gradient of x in a stretch of tokens, for the channels of a few heads of q, k or v.

    If WEIGHS, the sums for the weights are written, too. Programs for q also write the gradient of the logits; those of
    the first heads also write zeros to the channels behind the logits.
    """
    C: tl.constexpr = (2 * K + V) * H
    tile, row, first, end, part, head, channel, there = _place(T, stretch, H, K, V, GROUP, BLOCK_K)
    x += row * x_row
    dx += row * T * dx_token
    if part == 0:
        for t in range(first, end, STRENGTHS):
            token, heads, inside = _place_strengths(t, end, head, H, GROUP)
            strength = tl.sigmoid(tl.load(x + token * x_token + C + heads, mask=inside, other=0.0).to(tl.float32))
            d_strength = tl.load(d_beta + (row * T + token) * H + heads, mask=inside, other=0.0)
            if READINGS == 2:
                d_strength += tl.load(d_beta + ((row + B) * T + token) * H + heads, mask=inside, other=0.0)
            tl.store(dx + token * dx_token + C + heads, d_strength * strength * (1.0 - strength), mask=inside)
            if head == 0:
                for c in range(C + H, P, STRENGTHS):
                    spare = c + tl.arange(0, STRENGTHS)[None, :]
                    tl.store(dx + token * dx_token + spare, 0.0, mask=(token < end) & (spare < P))

    unit = part < 2
    dy, width = _of_part(part, dq, dk, dv, H, K, V)
    weight += part * H * K * WIDTH
    x += part * H * K
    dx += part * H * K
    sums += tile * WIDTH * C + part * H * K
    back = _is_backward(row, B, REVERSE, READINGS)
    delay = back * (WIDTH - 1)
    PACKED: tl.constexpr = reach is not None
    DELAY: tl.constexpr = WIDTH - 1 if REVERSE == 1 and READINGS == 1 else 0  # `delay` of packed segments
    taps = _load_taps(weight, channel, there, back, WIDTH)
    dweight = zeros_of_taps(channel, WIDTH)
    dy_at = dy + row * T * width
    if READINGS == 2:
        later_taps = _load_taps(weight + C * WIDTH, channel, there, 1, WIDTH)
        d_later = zeros_of_taps(channel, WIDTH)
        later_at = dy + (row + B) * T * width
    window = _load_window(x, first, x_token, T, channel, there, WIDTH)
    behind = zeros_of_taps(channel, WIDTH)
    for u in range(first, end + (WIDTH - 1), UNROLL):
        rows = _load_tokens(x, u, x_token, T, channel, there, UNROLL)
        reaches = _load_reaches(reach, u - DELAY, T, UNROLL)
        dy_rows = _load_tokens(dy_at, u - delay, width, T, channel, there, UNROLL)
        if READINGS == 2:
            later_rows = _load_tokens(later_at, u - (WIDTH - 1), width, T, channel, there, UNROLL)
        for i in tl.static_range(UNROLL):
            window = push(window, rows[i].to(tl.float32), WIDTH)
            seen = _of_segment(window, reaches, i, WIDTH, PACKED, DELAY)
            dz = _gradient(convolve(seen, taps, 0.0, WIDTH), dy_rows[i], unit, K, BLOCK_K, KIND, L1)
            t = u + i - delay
            if WEIGHS:
                dweight = accumulate(dweight, seen, tl.where((t >= first) & (t < end), dz, 0.0), WIDTH)
            behind = push(behind, tl.zeros_like(dz), WIDTH)
            behind = accumulate(behind, _of_segment(taps, reaches, i, WIDTH, PACKED, DELAY), dz, WIDTH)
            t = u + i - (WIDTH - 1)
            if READINGS == 2:
                dz = _gradient(convolve(window, later_taps, 0.0, WIDTH), later_rows[i], unit, K, BLOCK_K, KIND, L1)
                if WEIGHS:
                    d_later = accumulate(d_later, window, tl.where((t >= first) & (t < end), dz, 0.0), WIDTH)
                behind = accumulate(behind, later_taps, dz, WIDTH)
            _store_token(dx, t, dx_token, first, end, channel, there, behind[WIDTH - 1])
    if WEIGHS:
        for k in tl.static_range(WIDTH):
            tl.store(sums + _tap(k, back, WIDTH) * C + channel, dweight[k], mask=there)
            if READINGS == 2:
                other = sums + tl.cast(B, tl.int64) * tl.cdiv(T, stretch) * WIDTH * C
                tl.store(other + k * C + channel, d_later[k], mask=there)


@lru_cache(PREPARED)
def _prepare(
    kernel: str, device: torch.device, batch: int, tokens: int, numbers: tuple[int, ...], width: int, heads: int,
    key_dim: int, value_dim: int, **constants: int,
) -> tuple[Prepared, int]:  # fmt: skip
    """The launch of a kernel, and the number of stretches of tokens over all rows."""
    block_k = next_power_of_2(key_dim)
    group = gcd(max(WARP // block_k, 1), heads)
    over_c = 2 * cdiv(heads, group) + cdiv(heads * value_dim, group * key_dim)
    stretches = cdiv(PROGRAMS[kernel], max(batch * over_c, 1))
    # A stretch plus the W - 1 tokens after it is a multiple of the unrolled steps.
    unroll, beyond = UNROLL[kernel][constants["READINGS"] - 1], width - 1
    stretch = cdiv(max(cdiv(tokens, stretches), 8 * width) + beyond, unroll) * unroll - beyond
    tiles = batch * cdiv(tokens, stretch)
    launch = Prepared(
        convolve_features if kernel == "forward" else differentiate_convolved, device, tiles * over_c,
        (batch, tokens, *numbers, stretch),
        H=heads, K=key_dim, V=value_dim, WIDTH=width, **constants, GROUP=group, BLOCK_K=block_k, UNROLL=unroll,
        **launch_options(_warps(group * block_k, width)),
    )  # fmt: skip
    return launch, tiles


def _warps(block: int, width: int) -> int:
    """The warps of a program: each thread holds a few numbers for each tap of each of its channels."""
    return max(block * next_power_of_2(cdiv(width, 4)) // WARP, 1)


def _find_reach(x: Tensor, cu_seqlens: Tensor | None, reverse: int) -> Tensor | None:
    """How many tokens of its packed segment are read before each token, [T]; None if the batch is not packed."""
    reach = reach_of_tokens(x, cu_seqlens)
    return None if reach is None else reach[int(reverse > 0)]


def _find_constants(weight: Tensor, feature_map: str, l1: bool, reverse: int) -> dict[str, int]:
    return {"KIND": KINDS[feature_map], "L1": l1, "REVERSE": reverse, "READINGS": 2 if weight.dim() == 3 else 1}


def _allocate(
    x: Tensor, weight: Tensor, cu_seqlens: Tensor | None, heads: int, key_dim: int, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = x.shape[0] * (2 if weight.dim() == 3 else 1)
    keys = rows, x.shape[1], heads, key_dim
    v = x.new_empty((*keys[:-1], weight.shape[-2] // heads - 2 * key_dim))
    return x.new_empty(keys), x.new_empty(keys), v, x.new_empty(keys[:-1], dtype=torch.float32)


@custom_op("convolved_features", _allocate)
def convolved_features(
    x: Tensor, weight: Tensor, cu_seqlens: Tensor | None, num_heads: int, key_dim: int, feature_map: str, l1: bool,
    reverse: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k [B, T, H, K], v [B, T, H, V] in x's type and beta [B, T, H] of x [B, T, 2 H K + H V + H or more].

    The weight is [2 H K + H V, W], the current token's tap last. A weight [2, 2 H K + H V, W] makes two readings,
    forward and reverse, with 2 B rows.
    """
    x, weight = channels_adjacent(x), weight.contiguous()
    q, k, v, beta = _allocate(x, weight, cu_seqlens, num_heads, key_dim)
    batch, tokens, _ = x.shape
    launch, _ = _prepare(
        "forward", x.device, batch, tokens, x.stride()[:2], weight.shape[-1], num_heads, key_dim, v.shape[3],
        **_find_constants(weight, feature_map, l1, reverse),
    )  # fmt: skip
    launch(x, weight, _find_reach(x, cu_seqlens, reverse), q, k, v, beta)
    return q, k, v, beta


def _allocate_gradient(x: Tensor) -> Tensor:
    batch, tokens, channels = x.shape
    return x.new_empty((batch, tokens, cdiv(channels, ALIGNMENT) * ALIGNMENT))[..., :channels]


def _allocate_gradients(x: Tensor, weight: Tensor, *_: Any) -> Gradients:
    return _allocate_gradient(x), empty_like(weight)


@convolved_features.gradient("x weight", fake=_allocate_gradients)
def convolved_features_backward(
    x: Tensor, weight: Tensor, cu_seqlens: Tensor | None, dq: Tensor, dk: Tensor, dv: Tensor, d_beta: Tensor,
    feature_map: str, l1: bool, reverse: int, wanted: list[bool],
) -> Gradients:  # fmt: skip
    """The gradients of x and of the weight."""
    x, weight = channels_adjacent(x), weight.contiguous()
    batch, tokens, channels = x.shape
    heads, key_dim = dq.shape[2:]
    dx, weighs = _allocate_gradient(x), wanted[1]
    launch, tiles = _prepare(
        "backward", x.device, batch, tokens, (*x.stride()[:2], dx.stride(1), channels), weight.shape[-1], heads,
        key_dim, dv.shape[3], WEIGHS=weighs, **_find_constants(weight, feature_map, l1, reverse),
    )  # fmt: skip
    rows = (*weight.shape[:-2], tiles, weight.shape[-1], weight.shape[-2])
    sums = x.new_empty(rows if weighs else 0, dtype=torch.float32)
    gradients = (y.contiguous() for y in (dq, dk, dv, d_beta))
    launch(x, weight, _find_reach(x, cu_seqlens, reverse), *gradients, dx, sums)
    return dx, torch.empty_like(weight).copy_(sums.sum(-3).mT) if weighs else None


def convolved_features_triton(
    x: Tensor, weight: Tensor, *, num_heads: int, key_dim: int, feature_map: str, key_norm: str,
    initial_state: Tensor | None, output_final_state: bool, cu_seqlens: Tensor | None, mask: Tensor | None,
    reverse: Reverse,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """`convolved_features` as one kernel, whose gradient is one kernel, too.

    For padded rows, for initial states, and for heads too wide for one program, the convolution is a kernel of its own.
    """
    cu_seqlens = borders_on(x.device, cu_seqlens)
    channels, width = weight.shape[-2:]
    is_wide = _warps(max(WARP, next_power_of_2(key_dim)), width) > LARGEST_WARPS
    if mask is not None or initial_state is not None or is_wide:
        # One split, so that its gradient is one copy.
        mixed, logits, _ = x.split([channels, num_heads, x.shape[-1] - channels - num_heads], -1)
        y, final = short_convolution_triton(
            mixed, weight, None, activation=None, initial_state=initial_state, output_final_state=output_final_state,
            cu_seqlens=cu_seqlens, mask=mask, reverse=reverse,
        )  # fmt: skip
        q, k, v, beta = head_features_triton(
            y, logits=logits, num_heads=num_heads, key_dim=key_dim, feature_map=feature_map, key_norm=key_norm
        )
        return q, k, v, beta, final
    q, k, v, beta = convolved_features(
        x, weight, cu_seqlens, num_heads, key_dim, feature_map, key_norm == "l1", number_of(reverse)
    )
    final = last_states(x[..., :channels], weight, None, cu_seqlens, reverse) if output_final_state else None
    return q, k, v, beta, final
