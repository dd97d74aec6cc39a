"""Recursive least squares forward in Triton. The formulas are those of triton_least_squares.py, with its names."""

import triton
import triton.language as tl

from longseq.kernels.triton_tiles import (
    PLAIN,
    chunk,
    load_block,
    load_numbers,
    load_tokens,
    sequence,
    store_block,
    store_tokens,
)

# Arguments of which no kernel gets faster by being compiled for their values: fewer kernels to compile.
WALK = [*PLAIN, "span", "segments"]


@triton.jit
def _nearest(x):
    """x rounded to the 11 bits that TF32 has; tensor cores cut the others off, by which twice as much is lost."""
    return ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def product(a, b, EXACT_A: tl.constexpr = False, EXACT_B: tl.constexpr = False):
    """a b to about 23 bits, in TF32 products of leading and trailing bits; an EXACT operand has no trailing bits.

    Fewer registers than "tf32x3", and a product less where an operand is exact.
    """
    b_leading = _nearest(b)
    if EXACT_A:
        ab = tl.dot(a, b - b_leading, input_precision="tf32")
        return tl.dot(a, b_leading, ab, input_precision="tf32")
    a_leading = _nearest(a)
    ab = tl.dot(a - a_leading, b_leading, input_precision="tf32")
    if not EXACT_B:
        ab = tl.dot(a_leading, b - b_leading, ab, input_precision="tf32")
    return tl.dot(a_leading, b_leading, ab, input_precision="tf32")


@triton.jit
def _rounded(x):
    """x rounded to the 11 bits that TF32 has; what is not a number stays so, whatever its bits."""
    return tl.where(x == x, _nearest(x), x)


@triton.jit
def load_rows(u, u_token, live, K: tl.constexpr, EXACT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """U of a chunk in float32; EXACT: rounded to the bits that TF32 has, which is nothing to float16 and bfloat16."""
    rows = load_tokens(u, u_token, live, 0, K, CHUNK, BLOCK)
    if EXACT and rows.dtype == tl.float32:
        return _rounded(rows)
    return rows.to(tl.float32)


@triton.jit
def multiply(a, b, acc=None, PRECISION: tl.constexpr = "tf32"):
    """a b, added to acc, in one TF32 product of rounded operands or in three ("tf32x3")."""
    if PRECISION == "tf32":
        a = _rounded(a)
        b = _rounded(b)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def identity(SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    return tl.where(i[:, None] == i[None, :], 1.0, 0.0)


@triton.jit
def load_transposed(base, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The transpose [COLUMNS, ROWS] of a contiguous matrix [HEIGHT, WIDTH], zero outside."""
    return tl.trans(load_block(base, 0, 0, HEIGHT, WIDTH, ROWS, COLUMNS))


@triton.jit
def refreshed_before(added, live, CHUNK: tl.constexpr):
    """What refreshes have added to the diagonal from the start of the chunk to before each token: e."""
    i = tl.arange(0, CHUNK)
    return tl.cumsum(tl.load(added + i - 1, mask=(i > 0) & (i < live), other=0.0), 0)


@triton.jit
def refreshed_since(added, live, CHUNK: tl.constexpr):
    """The same, with what is added after each token: ē."""
    return tl.cumsum(load_numbers(added, 1, live, CHUNK), 0)


@triton.jit
def inverse_factor(products, live, CHUNK: tl.constexpr):
    """L^{-1} for I + products = L Lᵀ, of which the upper triangle is read and rows from `live` on must be zero.

    Elimination in place: the columns done hold the inverse of the unit factor below the diagonal, the others what is
    left to factor. No pivot is below 1 but by rounding.
    """
    i = tl.arange(0, CHUNK)
    matrix = products + identity(CHUNK)
    for j in range(0, tl.minimum(live, CHUNK)):
        row = tl.sum(tl.where(i[:, None] == j, matrix, 0.0), 0)
        column = row[:, None]
        pivot = tl.max(tl.where(i[:, None] == j, column, 1.0), 0)
        factor = tl.where(i[:, None] > j, column / pivot[None, :], 0.0)
        row = tl.where(i == j, 1.0, row)
        matrix = tl.where((i[:, None] > j) & (i[None, :] == j), 0.0, matrix) - factor * row[None, :]
    pivots = tl.maximum(tl.sum(tl.where(i[:, None] == i[None, :], matrix, 0.0), 1), 1.0)
    unit = tl.where(i[:, None] > i[None, :], matrix, identity(CHUNK))
    return unit * tl.rsqrt(pivots)[:, None]


@triton.jit
def _first_state(initial, first, place, some, K: tl.constexpr, HAS_INITIAL: tl.constexpr, BLOCK: tl.constexpr):
    """A before the first token: the symmetric part of the given one, but as it is if there is not `some` token."""
    i = tl.arange(0, BLOCK)
    # zero past K, where `connect` would take its size for that of A
    state = tl.where((i[:, None] == i[None, :]) & (i < K)[None, :], first, 0.0)
    if HAS_INITIAL:
        state = load_block(initial + place * K * K, 0, 0, K, K, BLOCK, BLOCK).to(tl.float32)
        if some:
            state = 0.5 * (state + load_transposed(initial + place * K * K, K, K, BLOCK, BLOCK).to(tl.float32))
    return state


@triton.jit
def _absorb(
    state, rows, added, t, written, live,
    REFRESHED: tl.constexpr, EXACT: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """L^{-1}, Y and Yᵀ of a chunk, whose rows of `written` are this program's own."""
    offered = product(rows, state, EXACT_A=EXACT)
    if REFRESHED:
        offered += refreshed_before(added + t, live, CHUNK)[:, None] * rows
    x = inverse_factor(product(offered, tl.trans(rows), EXACT_B=EXACT), live, CHUNK)
    y = product(x, offered)
    return x, y, _transpose(y, written, CHUNK, K, CHUNK, BLOCK)


@triton.jit
def _transpose(
    x, scratch, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """xᵀ, through memory that is this program's own."""
    tl.debug_barrier()  # until nothing that was there is still to be read
    store_block(scratch, 0, 0, x, HEIGHT, WIDTH, ROWS, COLUMNS)
    tl.debug_barrier()
    return load_transposed(scratch, HEIGHT, WIDTH, ROWS, COLUMNS)


@triton.jit
def _total(added, live, CHUNK: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """What the refreshes of a chunk add to A."""
    k = tl.arange(0, BLOCK)
    total = tl.sum(load_numbers(added, 1, live, CHUNK), 0)
    return tl.where((k[:, None] == k[None, :]) & (k < K)[None, :], total, 0.0)


@triton.jit(do_not_specialize=WALK)
def advance(
    u, added, initial, cu_seqlens, segment_starts, whole, states, inverse, written, final,
    first, segments, span, T, H, u_row, u_token, u_head,
    K: tl.constexpr, PACKED: tl.constexpr, REFRESHED: tl.constexpr, HAS_INITIAL: tl.constexpr,
    SEGMENTED: tl.constexpr, EXACT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One segment of one head of one sequence: A before each chunk, L^{-1} and Y of each, and the final A."""
    segment = tl.program_id(0) % segments
    head = (tl.program_id(0) // segments % H).to(tl.int64)
    n = (tl.program_id(0) // segments // H).to(tl.int64)
    row, start, end, slot = sequence(n, T, cu_seqlens, PACKED, CHUNK)
    u += row * u_row + head * u_head
    if REFRESHED:
        added += row * T
    chunks = tl.cdiv((end - start).to(tl.int32), CHUNK)
    begin = segment * span
    stop = tl.minimum(begin + span, chunks)
    state = _first_state(initial, first, n * H + head, end > start, K, HAS_INITIAL, BLOCK)
    if SEGMENTED:
        if tl.load(whole + n * H + head) > 0:
            # `connect` refused: the first program walks alone
            begin = tl.where(segment == 0, 0, chunks)
            stop = tl.where(segment == 0, chunks, 0)
        elif segment > 0:
            place = (n * H + head) * segments + segment
            state = load_block(segment_starts + place * K * K, 0, 0, K, K, BLOCK, BLOCK)
    t = start + begin * CHUNK
    later = load_rows(u + t * u_token, u_token, end - t, K, EXACT, CHUNK, BLOCK)
    for m in tl.range(begin, stop, num_stages=1):  # no load may overtake the writing of what it reads back
        t = start + m * CHUNK
        live = (end - t).to(tl.int32)
        place = (slot + m) * H + head
        rows = later
        later = load_rows(u + (t + CHUNK) * u_token, u_token, live - CHUNK, K, EXACT, CHUNK, BLOCK)
        store_block(states + place * K * K, 0, 0, state, K, K, BLOCK, BLOCK)
        own = written + place * CHUNK * K
        x, y, columns = _absorb(state, rows, added, t, own, live, REFRESHED, EXACT, K, CHUNK, BLOCK)
        store_block(inverse + place * CHUNK * CHUNK, 0, 0, x, CHUNK, CHUNK, CHUNK, CHUNK)
        state -= product(columns, y)
        if REFRESHED:
            state += _total(added + t, live, CHUNK, K, BLOCK)
    if stop == chunks:
        store_block(final + (n * H + head) * K * K, 0, 0, state, K, K, BLOCK, BLOCK)


@triton.jit
def _upper_factor(matrix, least, K: tl.constexpr, SIZE: tl.constexpr):
    """R with Rᵀ R = the symmetric matrix [SIZE, SIZE], not below 0, with `least` added to its diagonal."""
    i = tl.arange(0, SIZE)
    matrix += identity(SIZE) * least
    for j in range(0, K):
        row = tl.sum(tl.where(i[:, None] == j, matrix, 0.0), 0)
        column = row[:, None]
        pivot = tl.max(tl.where(i[:, None] == j, column, 0.5 * least), 0)
        matrix -= tl.where(i[:, None] > j, column / pivot[None, :], 0.0) * row[None, :]
    pivots = tl.sum(tl.where(i[:, None] == i[None, :], matrix, 0.0), 1)
    return tl.where(i[:, None] <= i[None, :], matrix, 0.0) * tl.rsqrt(tl.maximum(pivots, 0.5 * least))[:, None]


@triton.jit(do_not_specialize=WALK)
def summarize(
    u, added, scratch, transports, offsets, roots, gains, segments, span, T, H, u_row, u_token, u_head,
    K: tl.constexpr, PACKED: tl.constexpr, REFRESHED: tl.constexpr,
    EXACT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One segment, but the last, of one head of one sequence: F, E and R of the map from A before it to A after it."""
    segment = tl.program_id(0) % (segments - 1)
    head = (tl.program_id(0) // (segments - 1) % H).to(tl.int64)
    n = (tl.program_id(0) // (segments - 1) // H).to(tl.int64)
    row, start, end, _ = sequence(n, T, None, PACKED, CHUNK)
    u += row * u_row + head * u_head
    scratch += tl.program_id(0).to(tl.int64) * CHUNK * K
    if REFRESHED:
        added += row * T
    state = tl.zeros((BLOCK, BLOCK), tl.float32)
    transport = identity(BLOCK)
    gained = tl.zeros((BLOCK, BLOCK), tl.float32)
    stop = tl.minimum((segment + 1) * span, tl.cdiv((end - start).to(tl.int32), CHUNK))
    for m in tl.range(segment * span, stop, num_stages=1):  # as in `advance`
        t = start + m * CHUNK
        live = (end - t).to(tl.int32)
        rows = load_rows(u + t * u_token, u_token, live, K, EXACT, CHUNK, BLOCK)
        x, y, columns = _absorb(state, rows, added, t, scratch, live, REFRESHED, EXACT, K, CHUNK, BLOCK)
        state -= product(columns, y)
        if REFRESHED:
            state += _total(added + t, live, CHUNK, K, BLOCK)
        rows = load_rows(u + t * u_token, u_token, live, K, EXACT, CHUNK, BLOCK)  # again: fewer registers
        seen = product(product(x, rows, EXACT_B=EXACT), transport)
        transport -= product(columns, seen)
        gained += product(_transpose(seen, scratch, CHUNK, K, CHUNK, BLOCK), seen)
    largest = tl.max(tl.max(gained, 1), 0)  # which stands on the diagonal
    place = (n * H + head) * segments + segment
    tl.store(gains + place, largest)
    place *= K * K
    store_block(transports + place, 0, 0, transport, K, K, BLOCK, BLOCK)
    store_block(offsets + place, 0, 0, state, K, K, BLOCK, BLOCK)
    root = _upper_factor(gained, tl.maximum(5e-7 * largest, 1e-30), K, BLOCK)
    store_block(roots + place, 0, 0, root, K, K, BLOCK, BLOCK)


@triton.jit(do_not_specialize=WALK)
def connect(
    initial, transports, offsets, roots, gains, scratch, segment_starts, whole, first, segments,
    K: tl.constexpr, HAS_INITIAL: tl.constexpr, LIMIT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of one sequence: A before each segment but the first, and whether one of them could be off."""
    place = tl.program_id(0).to(tl.int64)
    scratch += place * CHUNK * K
    place *= segments
    state = _first_state(initial, first, tl.program_id(0).to(tl.int64), True, K, HAS_INITIAL, BLOCK)
    refused = 0
    for segment in tl.range(0, segments - 1, num_stages=1):  # as in `advance`
        for begin in tl.range(0, K, CHUNK, num_stages=1):
            root = load_block(roots + (place + segment) * K * K, begin, 0, K, K, CHUNK, BLOCK)
            _, y, columns = _absorb(state, root, None, 0, scratch, K - begin, False, False, K, CHUNK, BLOCK)
            state -= product(columns, y)
        largest = tl.max(tl.max(state, 1), 0)  # which stands on the diagonal
        refused = tl.where(largest * tl.load(gains + place + segment) <= LIMIT, refused, 1)
        transport = transports + (place + segment) * K * K
        state = product(load_block(transport, 0, 0, K, K, BLOCK, BLOCK), state)
        tl.debug_barrier()  # read twice, not held in registers
        state = product(state, load_transposed(transport, K, K, BLOCK, BLOCK))
        state += load_block(offsets + (place + segment) * K * K, 0, 0, K, K, BLOCK, BLOCK)
        store_block(segment_starts + (place + segment + 1) * K * K, 0, 0, state, K, K, BLOCK, BLOCK)
    tl.store(whole + tl.program_id(0), refused)


@triton.jit
def respond(
    x, columns, inverse, rows, state, before, since,
    REFRESHED: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """a, x̃ and y = A_t x_t of a chunk, for x [CHUNK, K] in float32 and columns Yᵀ."""
    i = tl.arange(0, CHUNK)
    weights = multiply(x, columns, PRECISION=PRECISION)
    weights = tl.where(i[:, None] >= i[None, :], weights, 0.0)
    weights = multiply(weights, inverse, PRECISION=PRECISION)
    left = x - multiply(weights, rows, PRECISION=PRECISION)
    y = multiply(left, state, PRECISION=PRECISION)
    if REFRESHED:
        y += since[:, None] * x - multiply(weights, before[:, None] * rows, PRECISION=PRECISION)
    return weights, left, y


@triton.jit(do_not_specialize=PLAIN)
def read_out(
    x, u, added, cu_seqlens, sequence_of, states, inverse, written, output,
    T, H, x_row, x_token, x_head, u_row, u_token, u_head,
    K: tl.constexpr, PACKED: tl.constexpr, REFRESHED: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: the output."""
    head = (tl.program_id(0) % H).to(tl.int64)
    slot = (tl.program_id(0) // H).to(tl.int64)
    place = slot * H + head
    row, start, live = chunk(slot, T, cu_seqlens, sequence_of, PACKED, CHUNK)
    u += row * u_row + start * u_token + head * u_head
    x += row * x_row + start * x_token + head * x_head

    before = tl.zeros((CHUNK,), tl.float32)
    since = before
    if REFRESHED:
        before = refreshed_before(added + row * T + start, live, CHUNK)
        since = refreshed_since(added + row * T + start, live, CHUNK)
    rows = load_tokens(u, u_token, live, 0, K, CHUNK, BLOCK).to(tl.float32)
    state = load_block(states + place * K * K, 0, 0, K, K, BLOCK, BLOCK)
    factor = load_block(inverse + place * CHUNK * CHUNK, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
    columns = load_transposed(written + place * CHUNK * K, CHUNK, K, CHUNK, BLOCK)
    read = load_tokens(x, x_token, live, 0, K, CHUNK, BLOCK).to(tl.float32)
    _, _, y = respond(read, columns, factor, rows, state, before, since, REFRESHED, PRECISION, CHUNK)
    store_tokens(output + ((row * T + start) * H + head) * K, H * K, live, 0, y, K, CHUNK, BLOCK)
