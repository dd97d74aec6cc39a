"""The causal depthwise convolution in Triton, fused with its activation: one launch forward, one or two backward.

    z_t = bias + Σ_j w_j ⊙ x_{t-j};   y_t = z_t or SiLU(z_t);   j = 0 ... W-1, x before the first token from the state

A program takes a stretch of tokens for BLOCK_D adjacent channels. It loops over the tokens and holds the last W inputs
in registers: each input is read once, in vectors, except for the W - 1 inputs before a stretch. The backward pass loops
in the same order and computes z again instead of storing it. It holds the gradients of the last W inputs, to which each
token contributes, and continues for W - 1 tokens after its stretch. In reverse, the loop begins at the last token.
Borders of packed segments come from a tensor with the segment of each token, which is found without waiting for the
device. Each program writes its own sums for the weights and the bias, and torch adds them in a fixed order, so that the
result is the same in every run.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from longseq.kernels.custom_op import Gradients, custom_op
from longseq.kernels.devices import channels_adjacent, contiguous
from longseq.kernels.packing import find_once, sequence_of_tokens
from longseq.kernels.reading import Reverse, number_of, run_each_way
from longseq.kernels.short_convolution.chunk import convolve_windows
from longseq.kernels.triton_launch import PREPARED, Launch, Prepared, borders_on, cdiv, find_launch, next_power_of_2
from longseq.kernels.triton_tiles import MINUS_LOG2_E, direction, sequence, token_after

# By bytes of an input: channels of a program, tokens whose loads are issued together, warps. Those for two bytes were
# measured on an H200.
WALKS = {
    2: {"forward": Launch(128, 4, 1, 1), "backward": Launch(128, 4, 1, 1)},
    4: {"forward": Launch(128, 8, 1, 1), "backward": Launch(128, 4, 1, 1)},
}
# The approximate number of programs for which rows are cut into stretches; smaller for the backward pass, which writes
# and reads a partial sum for each.
PROGRAMS = {"forward": 16384, "backward": 4096}

# Arguments that Triton must not specialise on, because no kernel gets faster by it: fewer kernels to compile.
UNSPECIALISED = ["B", "T", "stretch"]


@triton.jit
def _place(T, D, stretch, BLOCK_D: tl.constexpr):
    """This program's stretch of tokens (its number over all rows), row, first token, end (exclusive) and channels."""
    over_d = tl.cdiv(D, BLOCK_D)
    tile = tl.program_id(0) // over_d
    over_t = tl.cdiv(T, stretch)
    first = (tile % over_t) * stretch
    d = (tl.program_id(0) % over_d) * BLOCK_D + tl.arange(0, BLOCK_D)
    return tile.to(tl.int64), (tile // over_t).to(tl.int64), first, tl.minimum(first + stretch, T), d


@triton.jit
def _channels(condition, d, D):
    """A mask of the channels d that exist; false everywhere if the condition does not hold."""
    return d < tl.where(condition, D, 0)


@triton.jit
def _token(base, row, t, row_stride, token_stride, T, REVERSE: tl.constexpr):
    """A pointer to the token that is read as number t, and the step from there to the next one."""
    step = tl.cast(token_stride, tl.int64)
    return base + row * row_stride + token_after(t, 0, T, REVERSE) * step, step * direction(REVERSE)


@triton.jit
def _load_rows(at, step, t, T, d, D, UNROLL: tl.constexpr):
    """UNROLL tokens, read as numbers t, t + 1, ...; zero past the last token."""
    rows = ()
    for i in tl.static_range(UNROLL):
        rows = rows + (tl.load(at + i * step + d, mask=_channels(t + i < T, d, D), other=0.0),)
    return rows


@triton.jit
def _load_taps(weight, bias, d, D, WIDTH: tl.constexpr):
    """The taps for the current token, the one before it, ..., and the bias, in float32."""
    taps = ()
    for k in tl.static_range(WIDTH):
        taps = taps + (tl.load(weight + d * WIDTH + (WIDTH - 1 - k), mask=d < D, other=0.0).to(tl.float32),)
    offset = tl.zeros((d.shape[0],), tl.float32)
    if bias is not None:
        offset = tl.load(bias + d, mask=d < D, other=0.0).to(tl.float32)
    return taps, offset


@triton.jit
def _load_state(state, n, place, mask, d, D, WIDTH: tl.constexpr):
    return tl.load(state + (n * D + d) * (WIDTH - 1) + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_window(at, step, state, n, age, d, D, WIDTH: tl.constexpr):
    """The W inputs before token number `age` of a sequence, the latest first.

    Those before the sequence come from the state or are zero. The oldest of them is never used.
    """
    window = ()
    for k in tl.static_range(1, WIDTH):
        seen = tl.load(at - k * step + d, mask=_channels(age >= k, d, D), other=0.0).to(tl.float32)
        if state is not None:
            seen += _load_state(state, n, WIDTH - 1 - k + age, _channels(age < k, d, D), d, D, WIDTH)
        window = window + (seen,)
    return window + (tl.zeros((d.shape[0],), tl.float32),)


@triton.jit
def _segment(reach, segment_of, t, T, REVERSE: tl.constexpr):
    """The packed segment of the token that is read as number t, 0 without states; and its number in the segment."""
    place = token_after(t, 0, T, REVERSE)
    n = tl.cast(0, tl.int64)
    if segment_of is not None:
        n = tl.load(segment_of + place, mask=t < T, other=0).to(tl.int64)
    if REVERSE:
        reach += T
    return n, tl.load(reach + place, mask=t < T, other=0)


@triton.jit
def _segments(reach, segment_of, t, T, REVERSE: tl.constexpr, COUNT: tl.constexpr):
    """`_segment` of COUNT tokens from number t on, loaded together, before a token between them is stored."""
    segments = ()
    if reach is not None:
        for i in tl.static_range(COUNT):
            segments = segments + (_segment(reach, segment_of, t + i, T, REVERSE),)
    return segments


@triton.jit
def _enter_segment(window, state, n, age, d, D, WIDTH: tl.constexpr):
    """At the first token of a packed segment, its state replaces the inputs of the segment before it."""
    entered = ()
    for k in tl.static_range(1, WIDTH + 1):
        seen = tl.where(age == 0, 0.0, window[k - 1])
        if state is not None and k < WIDTH:
            seen += _load_state(state, n, WIDTH - 1 - k, _channels(age == 0, d, D), d, D, WIDTH)
        entered = entered + (seen,)
    return entered


@triton.jit
def push(window, newest, WIDTH: tl.constexpr):
    return (newest,) + window[: WIDTH - 1]


@triton.jit
def convolve(window, taps, bias, WIDTH: tl.constexpr):
    z = bias + taps[0] * window[0]
    for k in tl.static_range(1, WIDTH):
        z += taps[k] * window[k]
    return z


@triton.jit
def _gradient(window, taps, bias, dy, WIDTH: tl.constexpr, SILU: tl.constexpr):
    """The gradient of z from the gradient of y."""
    dz = dy.to(tl.float32)
    if SILU:
        z = convolve(window, taps, bias, WIDTH)
        gate = 1.0 / (1.0 + tl.exp2(z * MINUS_LOG2_E))
        dz *= gate * (1.0 + z * (1.0 - gate))
    return dz


@triton.jit
def _spread(behind, taps, dz, age, WIDTH: tl.constexpr, PACKED: tl.constexpr):
    """Add a token's contribution to the gradients of the W inputs that it saw; the oldest of them is then complete."""
    spread = (taps[0] * dz,)
    for k in tl.static_range(1, WIDTH):
        share = tl.where(age >= k, dz, 0.0) if PACKED else dz
        spread = spread + (behind[k - 1] + taps[k] * share,)
    return spread


@triton.jit
def zeros_of_taps(like, WIDTH: tl.constexpr):
    return (tl.zeros(like.shape, tl.float32),) * WIDTH


@triton.jit
def accumulate(sums, window, dz, WIDTH: tl.constexpr):
    added = ()
    for k in tl.static_range(WIDTH):
        added = added + (sums[k] + dz * window[k],)
    return added


@triton.jit
def _convolve_stretch(
    x, weight, bias, state, reach, segment_of, y, T, D, x_row, x_token, row, n, first, end, d,
    WIDTH: tl.constexpr, REVERSE: tl.constexpr, SILU: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """The outputs from token `first` to `end` - 1, in the order of reading, of row `row` of x and row n of y and the
    state.
    """
    taps, offset = _load_taps(weight, bias, d, D, WIDTH)
    at, step = _token(x, row, first, x_row, x_token, T, REVERSE)
    y_at, y_step = _token(y, n * T, first, D, D, T, REVERSE)
    age = first
    if reach is not None:
        n, age = _segment(reach, segment_of, first, T, REVERSE)
    window = _load_window(at, step, state, n, age, d, D, WIDTH)

    for t in range(first, end, UNROLL):
        rows = _load_rows(at, step, t, T, d, D, UNROLL)
        segments = _segments(reach, segment_of, t, T, REVERSE, UNROLL)
        for i in tl.static_range(UNROLL):
            if reach is not None:
                n, age = segments[i]
                window = _enter_segment(window, state, n, age, d, D, WIDTH)
            window = push(window, rows[i].to(tl.float32), WIDTH)
            z = convolve(window, taps, offset, WIDTH)
            if SILU:
                z = z / (1.0 + tl.exp2(z * MINUS_LOG2_E))
            tl.store(y_at + i * y_step + d, z, mask=_channels(t + i < end, d, D))
        at += UNROLL * step
        y_at += UNROLL * y_step


@triton.jit(do_not_specialize=UNSPECIALISED)
def _forward(
    x, weight, bias, state, reach, segment_of, y, B, T, D, x_row, x_token, stretch,
    WIDTH: tl.constexpr, REVERSE: tl.constexpr, SHARED: tl.constexpr, SILU: tl.constexpr, UNROLL: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One stretch of x; if SHARED, in both directions, with the taps of each of them."""
    _, row, first, end, d = _place(T, D, stretch, BLOCK_D)
    n = row
    for second in tl.static_range(2 if SHARED else 1):
        if second:
            weight += D * WIDTH
            if bias is not None:
                bias += D
            n, first, end = row + B, T - end, T - first
        _convolve_stretch(
            x, weight, bias, state, reach, segment_of, y, T, D, x_row, x_token, row, n, first, end, d,
            WIDTH, second if SHARED else REVERSE, SILU, UNROLL,
        )  # fmt: skip


@triton.jit
def _differentiate_stretch(
    x, weight, bias, state, reach, segment_of, dy, skipped, skip_weight, dx, sums, T, D,
    x_row, x_token, dy_row, dy_token, dx_row, dx_token, row, n, first, end, d,
    WIDTH: tl.constexpr, REVERSE: tl.constexpr, SILU: tl.constexpr, UNROLL: tl.constexpr, WEIGHS: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """The gradients from token `first` to `end` - 1, in the order of reading.

    `row` is the row of x and dx, n that of dy and the state. With ADD, the gradient is added to what dx holds. If
    WEIGHS, sums for weight and bias are written. With `skipped`, which has the rows of x, the gradient of y is
    dy + skip_weight ⊙ skipped.
    """
    taps, offset = _load_taps(weight, bias, d, D, WIDTH)
    at, step = _token(x, row, first, x_row, x_token, T, REVERSE)
    dy_at, dy_step = _token(dy, n, first, dy_row, dy_token, T, REVERSE)
    skipped_at, skipped_step = dy_at, dy_step
    scale = offset
    if skipped is not None:
        skipped_at, skipped_step = _token(skipped, row * T, first, D, D, T, REVERSE)
        scale = tl.load(skip_weight + d, mask=d < D, other=0.0).to(tl.float32)
    dx_at, dx_step = _token(dx, row, first - (WIDTH - 1), dx_row, dx_token, T, REVERSE)
    age = first
    if reach is not None:
        n, age = _segment(reach, segment_of, first, T, REVERSE)
    window = _load_window(at, step, state, n, age, d, D, WIDTH)
    behind = zeros_of_taps(d, WIDTH)
    dweight = zeros_of_taps(d, WIDTH)
    dbias = tl.zeros((d.shape[0],), tl.float32)

    for t in range(first, end + (WIDTH - 1), UNROLL):
        rows = _load_rows(at, step, t, T, d, D, UNROLL)
        segments = _segments(reach, segment_of, t, T, REVERSE, UNROLL)
        dy_rows = _load_rows(dy_at, dy_step, t, T, d, D, UNROLL)
        skipped_rows = dy_rows
        if skipped is not None:
            skipped_rows = _load_rows(skipped_at, skipped_step, t, T, d, D, UNROLL)
        for i in tl.static_range(UNROLL):
            if reach is not None:
                n, age = segments[i]
                window = _enter_segment(window, state, n, age, d, D, WIDTH)
            window = push(window, rows[i].to(tl.float32), WIDTH)
            dy_t = dy_rows[i].to(tl.float32)
            if skipped is not None:
                dy_t += scale * skipped_rows[i].to(tl.float32)
            dz = _gradient(window, taps, offset, dy_t, WIDTH, SILU)
            own = tl.where(t + i < end, dz, 0.0)
            if WEIGHS:
                dweight = accumulate(dweight, window, own, WIDTH)
                dbias += own
            behind = _spread(behind, taps, dz, age, WIDTH, reach is not None)
            done = t + i - (WIDTH - 1)
            mask = _channels((done >= first) & (done < end), d, D)
            complete = behind[WIDTH - 1]
            if ADD:
                complete += tl.load(dx_at + i * dx_step + d, mask=mask, other=0.0).to(tl.float32)
            tl.store(dx_at + i * dx_step + d, complete, mask=mask)
        at += UNROLL * step
        dy_at += UNROLL * dy_step
        skipped_at += UNROLL * skipped_step
        dx_at += UNROLL * dx_step

    if WEIGHS:
        for k in tl.static_range(WIDTH):
            tl.store(sums + (WIDTH - 1 - k) * D + d, dweight[k], mask=d < D)
        if bias is not None:
            tl.store(sums + WIDTH * D + d, dbias, mask=d < D)


@triton.jit(do_not_specialize=UNSPECIALISED)
def _backward(
    x, weight, bias, state, reach, segment_of, dy, skipped, skip_weight, dx, sums, B, T, D,
    x_row, x_token, dy_row, dy_token, dx_row, dx_token, stretch,
    WIDTH: tl.constexpr, REVERSE: tl.constexpr, SHARED: tl.constexpr, SILU: tl.constexpr, WEIGHS: tl.constexpr,
    UNROLL: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The gradients from one stretch; if SHARED, those from both directions, one after the other."""
    tile, row, first, end, d = _place(T, D, stretch, BLOCK_D)
    sums += tile * (WIDTH + (bias is not None)) * D
    n = row
    for second in tl.static_range(2 if SHARED else 1):
        if second:
            tl.debug_barrier()  # this reading loads what other threads have written to dx
            weight += D * WIDTH
            if bias is not None:
                bias += D
            if skipped is not None:
                skip_weight += D
            sums += B * tl.cdiv(T, stretch) * (WIDTH + (bias is not None)) * D
            n, first, end = row + B, T - end, T - first
        _differentiate_stretch(
            x, weight, bias, state, reach, segment_of, dy, skipped, skip_weight, dx, sums, T, D,
            x_row, x_token, dy_row, dy_token, dx_row, dx_token, row, n, first, end, d,
            WIDTH, second if SHARED else REVERSE, SILU, UNROLL, WEIGHS, second,
        )  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALISED)
def _backward_state(
    x, weight, bias, state, cu_seqlens, dy, dstate, B, T, D, x_row, x_token, dy_row, dy_token,
    WIDTH: tl.constexpr, REVERSE: tl.constexpr, SHARED: tl.constexpr, SILU: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The gradient of one sequence's state, from its first W - 1 tokens."""
    over_d = tl.cdiv(D, BLOCK_D)
    n = (tl.program_id(0) // over_d).to(tl.int64)
    d = (tl.program_id(0) % over_d) * BLOCK_D + tl.arange(0, BLOCK_D)
    row, start, end, _ = sequence(n, T, cu_seqlens, cu_seqlens is not None, 1)
    dy_number = row
    if SHARED:
        if n >= B:
            row -= B
            weight += D * WIDTH
            if bias is not None:
                bias += D
    skipped = T - end if REVERSE == 1 else start
    taps, offset = _load_taps(weight, bias, d, D, WIDTH)
    at, step = _token(x, row, skipped, x_row, x_token, T, REVERSE)
    dy_at, dy_step = _token(dy, dy_number, skipped, dy_row, dy_token, T, REVERSE)
    window = _load_window(at, step, state, n, 0, d, D, WIDTH)
    behind = zeros_of_taps(d, WIDTH)
    for i in range(WIDTH - 1):
        seen = _channels(i < end - start, d, D)
        window = push(window, tl.load(at + i * step + d, mask=seen, other=0.0).to(tl.float32), WIDTH)
        dz = _gradient(window, taps, offset, tl.load(dy_at + i * dy_step + d, mask=seen, other=0.0), WIDTH, SILU)
        behind = _spread(behind, taps, dz, i, WIDTH, False)
        tl.store(dstate + (n * D + d) * (WIDTH - 1) + i, behind[WIDTH - 1], mask=d < D)


def _allocate_output(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty((x.shape[0] * (2 if weight.dim() == 3 else 1), *x.shape[1:]))


@custom_op("causal_convolution", _allocate_output)
def causal_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None, silu: bool,
    reverse: int,
) -> Tensor:  # fmt: skip
    """Convolve x [B, T, D] with weight [D, W] (the current token's tap last), bias [D] and state [B or N, D, W-1].

    Weight [2, D, W] and bias [2, D] convolve x once forward and once backward: y and the state then have 2 B rows. y is
    in x's type.
    """
    x, weight, bias, state = channels_adjacent(x), weight.contiguous(), contiguous(bias), contiguous(initial_state)
    y = _allocate_output(x, weight)
    launch = _prepare(
        "forward", x.device, x.shape, x.stride()[:2], WALKS[x.element_size()]["forward"],
        WIDTH=weight.shape[-1], REVERSE=reverse, SHARED=weight.dim() == 3, SILU=silu,
    )[0]  # fmt: skip
    launch(x, weight, bias, *_find_places(x, state, cu_seqlens), y)
    return y


@causal_convolution.gradient("x weight bias initial_state")
def causal_convolution_backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None, dy: Tensor,
    silu: bool, reverse: int, wanted: list[bool],
) -> Gradients:  # fmt: skip
    """The gradients of x, weight, bias and state."""
    dx = x.new_empty(x.shape)
    found = differentiate_convolution(
        x, weight, bias, initial_state, cu_seqlens, dy, silu, reverse, dx, weighs=wanted[1] or wanted[2],
        enters=wanted[3],
    )  # fmt: skip
    return dx, *found


def differentiate_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None, dy: Tensor,
    silu: bool, reverse: int, dx: Tensor, skipped: Tensor | None = None, skip_weight: Tensor | None = None, *,
    weighs: bool = True, enters: bool = True,
) -> Gradients:  # fmt: skip
    """Writes the gradient of x to dx, whose channels are adjacent; returns those of weight, bias and state.

    They are None without these tensors; those of weight and bias also without `weighs`, that of the state without
    `enters`.

    If given, skip_weight ⊙ skipped is added to dy: `skipped` [B, T, D], contiguous and without a state, is shared by
    both readings, and `skip_weight` [2, D] has a row for each of them.
    """
    x, dy, weight = channels_adjacent(x), channels_adjacent(dy), weight.contiguous()
    bias, state = contiguous(bias), contiguous(initial_state)
    channels, width = weight.shape[-2:]
    table = WALKS[x.element_size()]["backward"]
    constants = {"WIDTH": width, "REVERSE": reverse, "SHARED": weight.dim() == 3, "SILU": silu}
    strides = *x.stride()[:2], *dy.stride()[:2]
    launch, block, tiles = _prepare(
        "backward", x.device, x.shape, (*strides, *dx.stride()[:2]), table, WEIGHS=weighs, **constants
    )
    rows = (*weight.shape[:-2], tiles, width + (bias is not None), channels)
    sums = x.new_empty(rows if weighs else 0, dtype=torch.float32)
    dstate = None if state is None or not enters else state.new_empty(state.shape)
    launch(x, weight, bias, *_find_places(x, state, cu_seqlens), dy, skipped, skip_weight, dx, sums)
    if state is not None and dstate is not None and dstate.numel():
        find_launch(
            _backward_state, x.device, state.shape[0] * cdiv(channels, block), (*x.shape, *strides),
            BLOCK_D=block, **constants, **table.options,
        )(x, weight, bias, state, cu_seqlens, dy, dstate)  # fmt: skip
    if not weighs:
        return None, None, dstate
    total = sums.sum(-3)
    dweight = torch.empty_like(weight).copy_(total[..., :width, :].mT)
    dbias = None if bias is None else torch.empty_like(bias).copy_(total[..., width, :])
    return dweight, dbias, dstate


def short_convolution_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str | None, mask: Tensor | None, **call: Any
) -> tuple[Tensor, Tensor | None]:
    """`short_convolution` as one kernel on tokens in place; with a mask, the real tokens are first gathered.

    `call` is for `run_recurrence`, which the masked form takes.
    """
    silu = activation == "silu"
    if mask is None:
        state, cu_seqlens, reverse = call["initial_state"], call["cu_seqlens"], call["reverse"]
        cu_seqlens = borders_on(x.device, cu_seqlens)
        y = causal_convolution(x, weight, bias, state, cu_seqlens, silu, number_of(reverse))
        return y, last_states(x, weight, state, cu_seqlens, reverse) if call["output_final_state"] else None
    if weight.dim() == 3:
        own = {"weight": weight, "bias": bias}
        return run_each_way(short_convolution_triton, own, {}, x=x, activation=activation, mask=mask, **call)

    def convolve_window(window: Tensor) -> Tensor:
        return causal_convolution(window.mT, weight, bias, None, None, silu, 0)[:, weight.shape[1] - 1 :].mT

    return convolve_windows(convolve_window, x, weight.shape, activation=None, mask=mask, **call)


def last_states(x: Tensor, weight: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, reverse: Reverse) -> Tensor:
    """The last W - 1 inputs of each sequence, or of each reading of it, in float32; the first state precedes them."""
    taps = weight.shape[-1] - 1
    if cu_seqlens is not None:
        return _last_packed_inputs(x, state, cu_seqlens, taps, reverse)
    last = x[:, max(0, x.shape[1] - taps) :]
    if reverse:
        rows = x.shape[0] if reverse is True or weight.dim() == 3 else x.shape[0] // 2
        backward = x[x.shape[0] - rows :, :taps].flip(1)
        last = backward if reverse is True else torch.cat((last[:rows], backward))
    last = last.mT.to(torch.float32)
    missing = taps - last.shape[2]
    if state is None:
        return functional.pad(last, (missing, 0))
    return torch.cat((state[..., taps - missing :].to(torch.float32), last), -1)


def _last_packed_inputs(x: Tensor, state: Tensor | None, cu_seqlens: Tensor, taps: int, reverse: Reverse) -> Tensor:
    """The last inputs [N, D, taps] of each segment; short segments are filled up from their first state or zeros."""
    tokens = x.shape[1]

    def find() -> tuple[Tensor, Tensor]:
        """Their numbers in the segment [N, taps], negative for those from the state, and their indices in x."""
        start, end = (border.clamp(0, tokens)[:, None] for border in (cu_seqlens[:-1], cu_seqlens[1:]))
        age = end - start - taps + torch.arange(taps, device=cu_seqlens.device)
        place = end - 1 - age if reverse else start + age
        return age, place.clamp(0, max(tokens - 1, 0))

    age, place = find_once(cu_seqlens, ("places of last inputs", taps, bool(reverse)), find)
    if state is None:
        state = x.new_zeros((age.shape[0], x.shape[2], taps), dtype=torch.float32)
    earlier = (age + taps).clamp_max(taps - 1)[:, None].expand_as(state)
    from_state = state.to(torch.float32).gather(2, earlier)
    if tokens == 0:
        return from_state
    own = x[0][place].mT.to(torch.float32)
    return torch.where((age >= 0)[:, None], own, from_state)


def reach_of_tokens(x: Tensor, cu_seqlens: Tensor | None) -> Tensor | None:
    """How many tokens of its packed segment are read before each token, forward and backward: [2, T] int32.

    None if the batch is not packed. Wrong borders give numbers from 0 to T.
    """
    if cu_seqlens is None:
        return None
    tokens = x.shape[1]

    def find() -> Tensor:
        borders, segment = cu_seqlens.clamp(0, tokens), sequence_of_tokens(cu_seqlens, tokens)
        place = torch.arange(tokens, device=cu_seqlens.device)
        return torch.stack((place - borders[segment], borders[segment + 1] - 1 - place)).clamp_min(0).to(torch.int32)

    return find_once(cu_seqlens, ("reach", tokens), find)


def _find_places(x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor | None, ...]:
    """The state, None if it is empty; the reach of each token, and its packed segment if that has a state."""
    state = None if state is None or not state.numel() else state
    segments = None if cu_seqlens is None or state is None else sequence_of_tokens(cu_seqlens, x.shape[1])
    return state, reach_of_tokens(x, cu_seqlens), segments


@lru_cache(PREPARED)
def _prepare(
    kernel: str, device: torch.device, shape: tuple[int, ...], strides: tuple[int, ...], table: Launch,
    **constants: int,
) -> tuple[Prepared, int, int]:  # fmt: skip
    """The launch of a kernel for inputs of a shape, the channels of a program, and the number of stretches over all
    rows.

    `strides` holds those of batch and time, for all sequences that the kernel reads and for the gradient that it
    writes.
    """
    batch, tokens, channels = shape
    width = constants["WIDTH"]
    # Each thread holds a few numbers for each tap of each of its channels.
    block = min(table.block // next_power_of_2(cdiv(width, 4)), next_power_of_2(channels))
    block = max(block, 32 * table.warps)
    stretches = cdiv(PROGRAMS[kernel], max(batch * cdiv(channels, block), 1))
    stretch = max(cdiv(tokens, stretches), 8 * width)
    stretch = cdiv(stretch, table.step) * table.step
    tiles = batch * cdiv(tokens, stretch)
    launch = Prepared(
        _forward if kernel == "forward" else _backward, device, tiles * cdiv(channels, block),
        (*shape, *strides, stretch), UNROLL=table.step, BLOCK_D=block, **constants, **table.options,
    )  # fmt: skip
    return launch, block, tiles
