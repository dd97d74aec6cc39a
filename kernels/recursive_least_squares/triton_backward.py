"""Recursive least squares backward in Triton. The formulas and names are those of triton_least_squares.py.

`linearize` and `differentiate_directions` run over chunks in parallel; between them, `retreat` loops from the last
chunk to the first.
"""

import triton
import triton.language as tl

from longseq.kernels.recursive_least_squares.triton_forward import (
    WALK,
    finish,
    identity,
    load_rows,
    load_transposed,
    multiply,
    refreshed_before,
    respond,
)
from longseq.kernels.triton_tiles import (
    SIZES_AND_STRIDES,
    chunk,
    direction,
    load_block,
    load_tokens,
    sequence,
    store_block,
    store_tokens,
    token_after,
)
from longseq.kernels.triton_units import scale_down


@triton.jit
def _halve(x):
    """Two float16 numbers whose sum has 22 bits of x."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _store_halves(place, x, K: tl.constexpr, BLOCK: tl.constexpr):
    high, low = _halve(x)
    store_block(place, 0, 0, high, K, K, BLOCK, BLOCK)
    store_block(place + K * K, 0, 0, low, K, K, BLOCK, BLOCK)


@triton.jit
def _load_halves(place, K: tl.constexpr, BLOCK: tl.constexpr):
    return load_block(place, 0, 0, K, K, BLOCK, BLOCK), load_block(place + K * K, 0, 0, K, K, BLOCK, BLOCK)


@triton.jit
def _product_of_halves(a_high, a_low, b_high, b_low):
    return tl.dot(a_high, b_high, tl.dot(a_high, b_low, tl.dot(a_low, b_high)))


@triton.jit(do_not_specialize=SIZES_AND_STRIDES)
def linearize(
    x, u, added, cu_seqlens, sequence_of, states, inverse, written, d_output,
    transitions, read, d_read, weights, d_weights, solved, d_x,
    T, H, x_row, x_token, x_head, u_row, u_token, u_head, do_row, do_token, do_head,
    K: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For one chunk of one head: Φ, x̃, a and Nᵀ (even programs); β̃, b and the gradient of x (odd programs)."""
    program = tl.program_id(0)
    head = (program // 2 % H).to(tl.int64)
    slot = (program // 2 // H).to(tl.int64)
    place = slot * H + head
    row, start, live = chunk(slot, T, cu_seqlens, sequence_of, cu_seqlens is not None, CHUNK, REVERSE)
    if live <= 0:
        return
    NEXT = direction(REVERSE)
    u += row * u_row + start * u_token + head * u_head
    u_token *= NEXT
    matrix = place * CHUNK * CHUNK
    tokens = place * CHUNK * K
    if program % 2 == 0:
        x += row * x_row + start * x_token + head * x_head
        value = load_rows(x, x_token * NEXT, live, K, PRECISION == "tf32", CHUNK, BLOCK)
        among, left = respond(value, u, u_token, inverse, written, place, live, K, PRECISION, CHUNK, BLOCK)
        store_block(weights + matrix, 0, 0, among, CHUNK, CHUNK, CHUNK, CHUNK)
        store_block(read + tokens, 0, 0, left, CHUNK, K, CHUNK, BLOCK)
        tl.debug_barrier()  # written is loaded again, not held in registers
        columns = load_transposed(written + tokens, CHUNK, K, CHUNK, BLOCK)
        factor = load_block(inverse + matrix, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
        columns = multiply(columns, factor, PRECISION=PRECISION)
        store_block(solved + tokens, 0, 0, columns, K, CHUNK, BLOCK, CHUNK)
        rows = load_tokens(u, u_token, live, 0, K, CHUNK, BLOCK).to(tl.float32)
        transition = identity(BLOCK) - multiply(columns, rows, PRECISION=PRECISION)
        _store_halves(transitions + 2 * place * K * K, transition, K, BLOCK)
    else:
        d_output += row * do_row + start * do_token + head * do_head
        value = load_rows(d_output, do_token * NEXT, live, K, PRECISION == "tf32", CHUNK, BLOCK)
        among, left = respond(value, u, u_token, inverse, written, place, live, K, PRECISION, CHUNK, BLOCK)
        store_block(d_weights + matrix, 0, 0, among, CHUNK, CHUNK, CHUNK, CHUNK)
        store_block(d_read + tokens, 0, 0, left, CHUNK, K, CHUNK, BLOCK)
        if added is not None:
            added += row * T + token_after(start, 0, T, REVERSE)
        dx = finish(value, among, left, u, u_token, states, added, place, live, K, PRECISION, CHUNK, BLOCK)
        store_tokens(d_x + ((row * T + start) * H + head) * K, H * K * NEXT, live, 0, dx, K, CHUNK, BLOCK)


@triton.jit
def _pull_back(d_state, transition, K: tl.constexpr, BLOCK: tl.constexpr):
    """Φᵀ D Φ, with Φ at `transition`. D and D Φ are divided by units first, which bring them into float16's range."""
    high, low = _load_halves(transition, K, BLOCK)
    d_state, unit = scale_down(d_state, True)
    d_high, d_low = _halve(d_state)
    d_state, next_unit = scale_down(_product_of_halves(d_high, d_low, high, low), True)
    d_high, d_low = _halve(d_state)
    return _product_of_halves(tl.trans(high), tl.trans(low), d_high, d_low) * unit * next_unit


@triton.jit
def _gain(read, d_read, place, K: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """The contribution of a chunk's outputs to the gradient of A before the chunk: β̃ᵀ x̃."""
    left = load_block(read + place * CHUNK * K, 0, 0, CHUNK, K, CHUNK, BLOCK)
    d_left = load_transposed(d_read + place * CHUNK * K, CHUNK, K, CHUNK, BLOCK)
    return multiply(d_left, left, PRECISION=PRECISION)


@triton.jit(do_not_specialize=WALK)
def accumulate(
    transitions, read, d_read, segment_transitions, segment_gains, segments, span, T, H,
    K: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For one segment (not the first) of one head of one sequence: D before it from none after it, and its product of
    Φ.

    Even programs compute the former, odd programs the latter.
    """
    segment = tl.program_id(0) // 2 % (segments - 1) + 1
    head = (tl.program_id(0) // 2 // (segments - 1) % H).to(tl.int64)
    n = (tl.program_id(0) // 2 // (segments - 1) // H).to(tl.int64)
    _, start, end, slot = sequence(n, T, None, False, CHUNK)
    begin = segment * span
    stop = tl.minimum(begin + span, tl.cdiv((end - start).to(tl.int32), CHUNK))
    square = ((n * H + head) * segments + segment) * K * K
    if tl.program_id(0) % 2 == 0:
        d_state = tl.zeros((BLOCK, BLOCK), tl.float32)
        for m in range(begin, stop):
            place = (slot + begin + stop - 1 - m) * H + head
            d_state = _pull_back(d_state, transitions + 2 * place * K * K, K, BLOCK)
            d_state += _gain(read, d_read, place, K, PRECISION, CHUNK, BLOCK)
        store_block(segment_gains + square, 0, 0, d_state, K, K, BLOCK, BLOCK)
    else:
        passed = identity(BLOCK)
        for m in range(begin, stop):
            place = (slot + begin + stop - 1 - m) * H + head
            high, low = _load_halves(transitions + 2 * place * K * K, K, BLOCK)
            passed_high, passed_low = _halve(passed)
            passed = _product_of_halves(passed_high, passed_low, high, low)
        _store_halves(segment_transitions + 2 * square, passed, K, BLOCK)


@triton.jit(do_not_specialize=WALK)
def retreat(
    cu_seqlens, transitions, read, d_read, segment_transitions, segment_gains, d_final, d_states, d_initial,
    segments, span, T, H,
    K: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For one segment of one head of one sequence: D after each chunk, and D before the sequence.

    The symmetric part of D is the gradient of A. Each program first computes D after its segment from the results of
    `accumulate` for the later segments.
    """
    segment = tl.program_id(0) % segments
    head = (tl.program_id(0) // segments % H).to(tl.int64)
    n = (tl.program_id(0) // segments // H).to(tl.int64)
    _, start, end, slot = sequence(n, T, cu_seqlens, cu_seqlens is not None, CHUNK)
    d_state = tl.zeros((BLOCK, BLOCK), tl.float32)
    if d_final is not None:
        d_state = load_block(d_final + (n * H + head) * K * K, 0, 0, K, K, BLOCK, BLOCK).to(tl.float32)
    if segment_transitions is not None:
        for back in range(0, segments - 1 - segment):
            place = ((n * H + head) * segments + segments - 1 - back) * K * K
            d_state = _pull_back(d_state, segment_transitions + 2 * place, K, BLOCK)
            d_state += load_block(segment_gains + place, 0, 0, K, K, BLOCK, BLOCK)
    begin = segment * span
    stop = tl.minimum(begin + span, tl.cdiv((end - start).to(tl.int32), CHUNK))
    for m in range(begin, stop):
        place = (slot + begin + stop - 1 - m) * H + head
        store_block(d_states + place * K * K, 0, 0, d_state, K, K, BLOCK, BLOCK)
        d_state = _pull_back(d_state, transitions + 2 * place * K * K, K, BLOCK)
        d_state += _gain(read, d_read, place, K, PRECISION, CHUNK, BLOCK)
    if segment == 0:
        store_block(d_initial + (n * H + head) * K * K, 0, 0, d_state, K, K, BLOCK, BLOCK)


@triton.jit(do_not_specialize=SIZES_AND_STRIDES)
def differentiate_directions(
    u, added, cu_seqlens, sequence_of, states, d_states, read, d_read, weights, d_weights, solved, d_u,
    T, H, u_row, u_token, u_head,
    K: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of u for one chunk of one head."""
    head = (tl.program_id(0) % H).to(tl.int64)
    slot = (tl.program_id(0) // H).to(tl.int64)
    place = slot * H + head
    row, start, live = chunk(slot, T, cu_seqlens, sequence_of, cu_seqlens is not None, CHUNK, REVERSE)
    if live <= 0:
        return
    matrix = place * CHUNK * CHUNK
    tokens = place * CHUNK * K
    square = place * K * K

    NEXT = direction(REVERSE)
    u += row * u_row + start * u_token + head * u_head
    u_token *= NEXT

    # 2 N D, for the symmetric part of D
    d_state = load_block(d_states + square, 0, 0, K, K, BLOCK, BLOCK)
    d_state += load_transposed(d_states + square, K, K, BLOCK, BLOCK)
    du = load_transposed(solved + tokens, K, CHUNK, BLOCK, CHUNK)
    du = multiply(du, d_state, PRECISION=PRECISION)
    tl.debug_barrier()  # here and below: tensors are loaded again, not held in registers
    pairs = multiply(du, load_block(solved + tokens, 0, 0, K, CHUNK, BLOCK, CHUNK), PRECISION=PRECISION)
    rows = load_tokens(u, u_token, live, 0, K, CHUNK, BLOCK).to(tl.float32)
    du -= multiply(pairs, rows, PRECISION=PRECISION)
    seen = load_transposed(weights + matrix, CHUNK, CHUNK, CHUNK, CHUNK)
    if added is not None:
        among = load_block(d_weights + matrix, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
        pairs = multiply(seen, among, pairs, PRECISION=PRECISION)
    du = multiply(seen, load_block(d_read + tokens, 0, 0, CHUNK, K, CHUNK, BLOCK), du, PRECISION=PRECISION)
    tl.debug_barrier()
    seen = load_transposed(d_weights + matrix, CHUNK, CHUNK, CHUNK, CHUNK)
    if added is not None:
        among = load_block(weights + matrix, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
        pairs = multiply(seen, among, pairs, PRECISION=PRECISION)
    du = multiply(seen, load_block(read + tokens, 0, 0, CHUNK, K, CHUNK, BLOCK), du, PRECISION=PRECISION)
    # A is symmetric; loaded transposed, it has the layout of an operand.
    state = load_transposed(states + square, K, K, BLOCK, BLOCK)
    total = multiply(du, state, PRECISION=PRECISION)
    if added is not None:
        i = tl.arange(0, CHUNK)
        before = refreshed_before(added + row * T + token_after(start, 0, T, REVERSE), live, CHUNK)
        total += before[:, None] * du
        pairs = tl.where(i[:, None] > i[None, :], pairs * (before[:, None] - before[None, :]), 0.0)
        tl.debug_barrier()
        rows = load_tokens(u, u_token, live, 0, K, CHUNK, BLOCK).to(tl.float32)
        total = multiply(pairs, rows, total, PRECISION=PRECISION)
    store_tokens(d_u + ((row * T + start) * H + head) * K, H * K * NEXT, live, 0, -total, K, CHUNK, BLOCK)
