"""Recursive least squares forward in Triton. The formulas and names are those of triton_least_squares.py.

`added`, what refreshes add to the diagonal of A, is in the order of reading.
"""

import triton
import triton.language as tl

from longseq.kernels.triton_tiles import (
    SIZES_AND_STRIDES,
    chunk,
    direction,
    load_block,
    load_numbers,
    load_tokens,
    sequence,
    store_block,
    store_tokens,
    token_after,
)

# Arguments that Triton must not specialise on, because no kernel gets faster by it: fewer kernels to compile.
WALK = [*SIZES_AND_STRIDES, "span", "segments"]
MOST_SEGMENTS = tl.constexpr(128)


@triton.jit
def _nearest(x):
    """x rounded to the 11 bits of TF32. Tensor cores would truncate, which loses twice as much."""
    return ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def product(a, b, EXACT_A: tl.constexpr = False, EXACT_B: tl.constexpr = False):
    """a b to about 23 bits, as TF32 products of leading and trailing bits; an EXACT operand has no trailing bits.

    It takes fewer registers than "tf32x3", and one product less if an operand is exact.
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
    """x rounded to the 11 bits of TF32; NaN stays NaN, whatever its bits."""
    return tl.where(x == x, _nearest(x), x)


@triton.jit
def load_rows(u, u_token, live, K: tl.constexpr, EXACT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of a chunk in float32; EXACT rounds them to the bits of TF32, which changes float32 only."""
    rows = load_tokens(u, u_token, live, 0, K, CHUNK, BLOCK)
    if EXACT and rows.dtype == tl.float32:
        return _rounded(rows)
    return rows.to(tl.float32)


@triton.jit
def multiply(a, b, acc=None, PRECISION: tl.constexpr = "tf32"):
    """a b + acc, in one TF32 product of rounded operands, or in three ("tf32x3")."""
    if PRECISION == "tf32":
        a = _rounded(a)
        b = _rounded(b)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _multiply_fully(a, b, PRECISION: tl.constexpr, EXACT_A: tl.constexpr = False, EXACT_B: tl.constexpr = False):
    """a b to about 23 bits, whatever the precision of the call. With "tf32", EXACT operands have no more than 11."""
    if PRECISION == "tf32":
        return product(a, b, EXACT_A, EXACT_B)
    return tl.dot(a, b, input_precision=PRECISION)


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
    """e: what refreshes have added to the diagonal from the start of the chunk to before each token."""
    i = tl.arange(0, CHUNK)
    return tl.cumsum(tl.load(added + i - 1, mask=(i > 0) & (i < live), other=0.0), 0)


@triton.jit
def refreshed_since(added, live, CHUNK: tl.constexpr):
    """ē: what refreshes have added to the diagonal from the start of the chunk to after each token."""
    return tl.cumsum(load_numbers(added, 1, live, CHUNK), 0)


@triton.jit
def inverse_factor(products, live, room, CHUNK: tl.constexpr, ROWS: tl.constexpr = 4):
    """L^{-1} for I + products = L Lᵀ, computed by elimination of ROWS rows at a time.

    Only the upper triangle of `products` is read; its rows from `live` on must be zero. The rows of a step reach all
    threads through `room`, CHUNK * CHUNK numbers of memory that no other program uses, where they are replaced by rows
    of the result. In registers, the part of the matrix after these rows is still to be factored, and the part before
    them holds the inverse of the unit factor. Without rounding, every pivot is at least 1.
    """
    i = tl.arange(0, CHUNK)
    tile = room + i[:, None] * CHUNK + i[None, :]
    matrix = products + identity(CHUNK)
    tl.store(tile, identity(CHUNK), mask=(i >= live)[:, None])
    for j in tl.range(0, tl.minimum(live, CHUNK).to(tl.int32), ROWS, num_stages=1):  # no load may move before a store
        among = (i >= j) & (i < j + ROWS)
        tl.store(tile, matrix, mask=among[:, None])
        matrix = tl.where(among[None, :], 0.0, matrix)
        tl.debug_barrier()
        # Values of the earlier rows of this step: the numbers above their diagonal (`above`), these divided by the
        # pivots (`factors`), 1 / pivot, 1 / sqrt(pivot), and the rows as columns and as rows (with the identity where
        # the inverse begins).
        above, factors, reciprocals, roots, columns, rows = (), (), (), (), (), ()
        for a in tl.static_range(ROWS):
            place = room + (j + a) * CHUNK
            pivot = tl.load(place + j + a)
            column = tl.load(place + i)
            row = tl.where(among, tl.where(i == j + a, 1.0, 0.0), tl.load(place + i))
            for b in tl.static_range(a):
                number = tl.load(room + (j + b) * CHUNK + j + a)
                for c in tl.static_range(b):
                    number -= factors[b * (b - 1) // 2 + c] * above[a * (a - 1) // 2 + c]
                factor = number * reciprocals[b]
                above = above + (number,)
                factors = factors + (factor,)
                pivot -= factor * number
                column -= factor * columns[b]
                row -= factor * rows[b]
            reciprocals = reciprocals + (1.0 / pivot,)
            roots = roots + (tl.rsqrt(tl.maximum(pivot, 1.0)),)
            columns = columns + (column,)
            rows = rows + (row,)
        tl.debug_barrier()  # all threads have read what the next lines overwrite
        for a in tl.static_range(ROWS):
            column = tl.where(i >= j + ROWS, columns[a] * reciprocals[a], 0.0)
            matrix -= column[:, None] * rows[a][None, :]
            tl.store(room + (j + a) * CHUNK + i, tl.where(i <= j + a, rows[a] * roots[a], 0.0))
    tl.debug_barrier()
    return load_block(room, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)


@triton.jit
def first_state(initial, first, place, some, K: tl.constexpr, BLOCK: tl.constexpr):
    """A before the first token: the symmetric part of `initial`, or `initial` itself for a sequence without tokens.

    Without `initial` it is `first` times the identity. `some` is true if the sequence has a token.
    """
    i = tl.arange(0, BLOCK)
    state = tl.where((i[:, None] == i[None, :]) & (i < K)[None, :], first, 0.0)
    if initial is not None:
        state = load_block(initial + place * K * K, 0, 0, K, K, BLOCK, BLOCK).to(tl.float32)
        if some:
            state = 0.5 * (state + load_transposed(initial + place * K * K, K, K, BLOCK, BLOCK).to(tl.float32))
    return state


@triton.jit
def transpose(
    x, scratch, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """xᵀ, through `scratch`, memory that no other program uses."""
    tl.debug_barrier()  # all threads have read what `scratch` held
    store_block(scratch, 0, 0, x, HEIGHT, WIDTH, ROWS, COLUMNS)
    tl.debug_barrier()
    return load_transposed(scratch, HEIGHT, WIDTH, ROWS, COLUMNS)


@triton.jit(do_not_specialize=WALK)
def advance(
    u, added, initial, cu_seqlens, segment_starts, refused, states, inverse, written, final,
    first, segments, span, T, H, u_row, u_token, u_head,
    K: tl.constexpr, REVERSE: tl.constexpr, EXACT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For one segment of one head of one sequence: A before each chunk, L^{-1} and Y of each chunk, and the final A."""
    segment = tl.program_id(0) % segments
    head = (tl.program_id(0) // segments % H).to(tl.int64)
    n = (tl.program_id(0) // segments // H).to(tl.int64)
    row, start, end, slot = sequence(n, T, cu_seqlens, cu_seqlens is not None, CHUNK)
    first_token = token_after(0, start, end, REVERSE)
    u += row * u_row + first_token * u_token + head * u_head
    u_token *= direction(REVERSE)
    if added is not None:
        added += row * T + token_after(first_token, 0, T, REVERSE)
    chunks = tl.cdiv((end - start).to(tl.int32), CHUNK)
    begin = segment * span
    stop = tl.minimum(begin + span, chunks)
    state = first_state(initial, first, n * H + head, end > start, K, BLOCK)
    if segment_starts is not None:
        others = tl.arange(0, MOST_SEGMENTS)
        mask = (others > 0) & (others < segments)
        if tl.max(tl.load(refused + (n * H + head) * segments + others, mask=mask, other=0), 0) > 0:
            # `solve` refused a segment: the first program takes all chunks.
            begin = tl.where(segment == 0, 0, chunks)
            stop = tl.where(segment == 0, chunks, 0)
        elif segment > 0:
            place = (n * H + head) * segments + segment
            state = load_block(segment_starts + place * K * K, 0, 0, K, K, BLOCK, BLOCK)
    k = tl.arange(0, BLOCK)
    done = n * 0 + begin * CHUNK  # 64 bits wide, like n
    later = load_rows(u + done * u_token, u_token, end - start - done, K, EXACT, CHUNK, BLOCK)
    for m in tl.range(begin, stop, num_stages=1):  # no load may move before the store that it reads
        done = n * 0 + m * CHUNK
        live = (end - start - done).to(tl.int32)
        place = (slot + m) * H + head
        rows = later
        later = load_rows(u + (done + CHUNK) * u_token, u_token, live - CHUNK, K, EXACT, CHUNK, BLOCK)
        store_block(states + place * K * K, 0, 0, state, K, K, BLOCK, BLOCK)
        offered = product(rows, state, EXACT_A=EXACT)
        if added is not None:
            offered += refreshed_before(added + done, live, CHUNK)[:, None] * rows
        products = product(offered, tl.trans(rows), EXACT_B=EXACT)
        y = product(inverse_factor(products, live, inverse + place * CHUNK * CHUNK, CHUNK), offered)
        state -= product(transpose(y, written + place * CHUNK * K, CHUNK, K, CHUNK, BLOCK), y)
        if added is not None:
            total = tl.sum(load_numbers(added + done, 1, live, CHUNK), 0)
            state += tl.where((k[:, None] == k[None, :]) & (k < K)[None, :], total, 0.0)
    if stop == chunks:
        store_block(final + (n * H + head) * K * K, 0, 0, state, K, K, BLOCK, BLOCK)


@triton.jit
def respond(
    x, u, u_token, inverse, written, place, live,
    K: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """a and x̃ of a chunk, for x [CHUNK, K] in float32.

    With "tf32", x and U must have no more bits than TF32. Nothing else is rounded to them here. Where directions are
    long or alike, x̃ is a small rest of x, and so is what the gradient of u keeps of a, x̃ and their counterparts: the
    rounding of a, of L^{-1} or of Y would be a multiple of its own size there.
    """
    i = tl.arange(0, CHUNK)
    columns = load_transposed(written + place * CHUNK * K, CHUNK, K, CHUNK, BLOCK)
    weights = _multiply_fully(x, columns, PRECISION, True)
    weights = tl.where(i[:, None] >= i[None, :], weights, 0.0)
    factor = load_block(inverse + place * CHUNK * CHUNK, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
    weights = _multiply_fully(weights, factor, PRECISION)
    rows = load_rows(u, u_token, live, K, PRECISION == "tf32", CHUNK, BLOCK)
    return weights, x - _multiply_fully(weights, rows, PRECISION, False, True)


@triton.jit
def finish(
    x, weights, left, u, u_token, states, added, place, live,
    K: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = A_t x_t of a chunk, from the results of `respond`."""
    # A is symmetric; loaded transposed, it has the layout of an operand.
    state = load_transposed(states + place * K * K, K, K, BLOCK, BLOCK)
    y = multiply(left, state, PRECISION=PRECISION)
    if added is not None:
        tl.debug_barrier()  # u is loaded again, not held in registers
        rows = load_tokens(u, u_token, live, 0, K, CHUNK, BLOCK).to(tl.float32)
        rows *= refreshed_before(added, live, CHUNK)[:, None]
        y += refreshed_since(added, live, CHUNK)[:, None] * x - multiply(weights, rows, PRECISION=PRECISION)
    return y


@triton.jit(do_not_specialize=SIZES_AND_STRIDES)
def read_out(
    x, u, added, cu_seqlens, sequence_of, states, inverse, written, output,
    T, H, x_row, x_token, x_head, u_row, u_token, u_head,
    K: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The output for one chunk of one head."""
    head = (tl.program_id(0) % H).to(tl.int64)
    slot = (tl.program_id(0) // H).to(tl.int64)
    place = slot * H + head
    row, start, live = chunk(slot, T, cu_seqlens, sequence_of, cu_seqlens is not None, CHUNK, REVERSE)
    if live <= 0:
        return
    NEXT = direction(REVERSE)
    u += row * u_row + start * u_token + head * u_head
    x += row * x_row + start * x_token + head * x_head
    u_token *= NEXT
    if added is not None:
        added += row * T + token_after(start, 0, T, REVERSE)
    read = load_rows(x, x_token * NEXT, live, K, PRECISION == "tf32", CHUNK, BLOCK)
    weights, left = respond(read, u, u_token, inverse, written, place, live, K, PRECISION, CHUNK, BLOCK)
    y = finish(read, weights, left, u, u_token, states, added, place, live, K, PRECISION, CHUNK, BLOCK)
    store_tokens(output + ((row * T + start) * H + head) * K, H * K * NEXT, live, 0, y, K, CHUNK, BLOCK)
