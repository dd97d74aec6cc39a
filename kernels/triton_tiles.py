"""What the Triton kernels that work in chunks share: sequences, slots, tiles, decays, inverses of triangular matrices.

Each sequence is cut into chunks of CHUNK tokens. A slot is the number of a chunk, counted over the whole batch. The
user's tensors are read in place: [B, T, H, D] with any strides, except that channels are adjacent. What one kernel
stores for another is contiguous by slot and head, [slots, H, rows, columns], so that a tile is one block of memory.
Rows past the end of a sequence are read as zeros, which leave the state unchanged. `live` is the number of tokens from
the start of a chunk to the end of its sequence.
"""

import triton
import triton.language as tl

# Arguments that Triton must not specialise on, because no kernel gets faster by it: fewer kernels to compile.
SIZES_AND_STRIDES = ["T", "H", "tokens", "beta_row", "beta_token", "beta_head", "g_row", "g_token", "g_head"]
MINUS_LOG2_E = tl.constexpr(-1.4426950408889634)

# Values of REVERSE: 0 reads each sequence from its start, 1 from its end. SECOND_HALF reads the first half of the batch
# from the start and the second half from the end.
SECOND_HALF = tl.constexpr(2)
# Borders of packed sequences that are compared at a time.
BORDERS = tl.constexpr(128)


@triton.jit
def direction(REVERSE: tl.constexpr):
    """1 if this program reads from the start of its sequence, -1 if from the end.

    Programs are numbered in the order of the rows of the batch.
    """
    if REVERSE == SECOND_HALF:
        return tl.where(tl.program_id(0) < tl.num_programs(0) // 2, 1, -1)
    if REVERSE:
        return -1
    return 1


@triton.jit
def token_after(done, start, end, REVERSE: tl.constexpr):
    """The token that is read after `done` others, in a sequence with the tokens `start` to `end` - 1."""
    if REVERSE == SECOND_HALF:
        return tl.where(tl.program_id(0) < tl.num_programs(0) // 2, start + done, end - 1 - done)
    if REVERSE:
        return end - 1 - done
    return start + done


@triton.jit
def first_read(n, sequences, start, end, REVERSE: tl.constexpr):
    """The first token that is read of sequence n out of `sequences`, and the direction: 1, or -1 from the end.

    The sequence has the tokens `start` to `end` - 1. For programs that read several sequences: there, the direction
    does not follow from the program's number.
    """
    if REVERSE == SECOND_HALF:
        forward = n < sequences // 2
        return tl.where(forward, start, end - 1), tl.where(forward, 1, -1)
    return token_after(0, start, end, REVERSE), direction(REVERSE)


@triton.jit
def sequence(n, T, cu_seqlens, PACKED: tl.constexpr, CHUNK: tl.constexpr):
    """The batch row, first token, end (exclusive) and first slot of sequence n."""
    if PACKED:
        # Checking the borders on the host would wait for the device. Clamped to the tokens, wrong borders at least
        # touch no foreign memory.
        start = tl.minimum(tl.maximum(tl.load(cu_seqlens + n).to(tl.int64), 0), T)
        end = tl.minimum(tl.maximum(tl.load(cu_seqlens + n + 1).to(tl.int64), start), T)
        return n * 0, start, end, start // CHUNK + n
    return n, n * 0, n * 0 + T, n * tl.cdiv(T, CHUNK)


@triton.jit
def find_segment(segment, T, cu_seqlens, sequences, span, PACKED: tl.constexpr, CHUNK: tl.constexpr):
    """A segment's sequence, its number in the sequence and that of the last segment, and its first and end chunk.

    Segments of `span` chunks are numbered over the whole batch as chunks are by slots. A segment of packed sequences
    can be without chunks: then its number is greater than the last one's.
    """
    length = span * CHUNK
    n = segment // tl.cdiv(T, length)
    if PACKED:
        n = segment * 0 - 1
        for first in range(0, sequences, BORDERS):
            i = first + tl.arange(0, BORDERS)
            border = tl.load(cu_seqlens + i, mask=i < sequences, other=0).to(tl.int64)
            begins = tl.minimum(tl.maximum(border, 0), T) // length + i
            n += tl.sum(tl.where((i < sequences) & (begins <= segment), 1, 0), 0)
        n = tl.maximum(n, 0)
    _, start, end, _ = sequence(n, T, cu_seqlens, PACKED, CHUNK)
    number = segment - n * tl.cdiv(T, length)
    if PACKED:
        number = tl.maximum(segment - start // length - n, 0)
    chunks = tl.cdiv((end - start).to(tl.int32), CHUNK)
    number, last = number.to(tl.int32), tl.maximum(tl.cdiv(chunks, span) - 1, 0)
    first = tl.minimum(number * span, chunks)
    return n, number, last, first, tl.minimum(first + span, chunks)


@triton.jit
def chunk(
    slot, T, cu_seqlens, sequence_of, PACKED: tl.constexpr, CHUNK: tl.constexpr, REVERSE: tl.constexpr = 0
):  # fmt: skip
    """The batch row and first token of a chunk, and the number of tokens from there to the end of its sequence.

    The number may exceed CHUNK, and is 0 or negative for a slot without tokens, which packed sequences may have. With
    REVERSE, chunks are counted from the end of the sequence, and the first token of a chunk is the last one in time.
    """
    n = slot // tl.cdiv(T, CHUNK)
    if PACKED:
        n = tl.load(sequence_of + slot).to(tl.int64)
    row, start, end, first = sequence(n, T, cu_seqlens, PACKED, CHUNK)
    done = (slot - first) * CHUNK
    return row, token_after(done, start, end, REVERSE), end - start - done


@triton.jit
def find_chunk(program, T, H, cu_seqlens, sequence_of, CHUNK: tl.constexpr, REVERSE: tl.constexpr):
    """The head, slot, first token (counted over the whole batch) and live tokens of a program's chunk."""
    head = program % H
    slot = (program // H).to(tl.int64)
    row, start, live = chunk(slot, T, cu_seqlens, sequence_of, cu_seqlens is not None, CHUNK, REVERSE)
    return head, slot, row * T + start, live


@triton.jit
def load_tokens(base, stride, live, column, WIDTH: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr):
    """Tokens of a chunk, [CHUNK, COLUMNS] from `column` on; `base` points to its first token."""
    i = tl.arange(0, CHUNK)
    e = column + tl.arange(0, COLUMNS)
    mask = (i < live)[:, None]
    if WIDTH % COLUMNS != 0:
        mask = mask & (e < WIDTH)[None, :]
    return tl.load(base + i[:, None] * stride + e[None, :], mask=mask, other=0.0)


@triton.jit
def store_tokens(base, stride, live, column, x, WIDTH: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr):
    i = tl.arange(0, CHUNK)
    e = column + tl.arange(0, COLUMNS)
    mask = (i < live)[:, None]
    if WIDTH % COLUMNS != 0:
        mask = mask & (e < WIDTH)[None, :]
    tl.store(base + i[:, None] * stride + e[None, :], x, mask=mask)


@triton.jit
def load_rows(x, row, stride, column, inside):
    """Columns of rows with this stride, in float32; zeros where `inside` is false."""
    return tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_numbers(base, stride, live, CHUNK: tl.constexpr):
    """One number for each token of a chunk, [CHUNK], in float32."""
    i = tl.arange(0, CHUNK)
    return tl.load(base + i * stride, mask=i < live, other=0.0).to(tl.float32)


@triton.jit
def load_block(base, row, column, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A block [ROWS, COLUMNS] of a contiguous matrix [HEIGHT, WIDTH], zero outside."""
    i = row + tl.arange(0, ROWS)
    e = column + tl.arange(0, COLUMNS)
    place = base + i[:, None] * WIDTH + e[None, :]
    if HEIGHT % ROWS == 0 and WIDTH % COLUMNS == 0:
        return tl.load(place)
    return tl.load(place, mask=(i < HEIGHT)[:, None] & (e < WIDTH)[None, :], other=0.0)


@triton.jit
def store_block(
    base, row, column, x, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    i = row + tl.arange(0, ROWS)
    e = column + tl.arange(0, COLUMNS)
    place = base + i[:, None] * WIDTH + e[None, :]
    if HEIGHT % ROWS == 0 and WIDTH % COLUMNS == 0:
        tl.store(place, x)
    else:
        tl.store(place, x, mask=(i < HEIGHT)[:, None] & (e < WIDTH)[None, :])


@triton.jit
def decay_since(gate):
    """Decays from the start of the chunk up to and including each token, for log gates [CHUNK]."""
    return tl.exp(tl.cumsum(gate, 0))


@triton.jit
def decay_until(base, stride, live, CHUNK: tl.constexpr):
    """Decays from each token, exclusive, to the end of the chunk, for log gates at `base`.

    The log gates of each range are summed directly: differences of cumulative sums would lose bits.
    """
    later = load_numbers(base + stride, stride, tl.minimum(live, CHUNK) - 1, CHUNK)
    return tl.exp(tl.cumsum(later, 0, reverse=True))


@triton.jit
def decay_between(gate, CHUNK: tl.constexpr):
    """exp(g_{j+1} + ... + g_i) for i >= j, each range summed on its own; 1 above the diagonal."""
    i = tl.arange(0, CHUNK)
    terms = tl.where(i[:, None] > i[None, :], gate[:, None], 0.0)
    return tl.exp(tl.cumsum(terms, 0))


@triton.jit
def decay_by_difference(gate, CHUNK: tl.constexpr):
    """`decay_between` from differences of cumulative sums. Which of both is faster depends on the kernel's registers.

    A difference of large sums would lose bits. So each gate is split into a multiple of 1/64, whose sums are exact, and
    a rest of at most 1/128, whose sums are at most 1/2. Gates are clamped to 2^12 in magnitude: the decay of a larger
    one is 0 or infinite.
    """
    i = tl.arange(0, CHUNK)
    gate = tl.clamp(gate, -4096.0, 4096.0, tl.PropagateNan.ALL)
    coarse = tl.floor(gate * 64 + 0.5) * (1 / 64)
    fine = tl.cumsum(gate - coarse, 0)
    coarse = tl.cumsum(coarse, 0)
    between = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
    return tl.exp(tl.where(i[:, None] > i[None, :], between, 0.0))


# e to the power of this is infinite in float32, and e to the power of minus this is 0.
STEEPEST_GATE = tl.constexpr(104.0)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def log_decays(gate, CHUNK: tl.constexpr):
    """Binary logarithms of `decay_since` for log gates [CHUNK], and that of the decay of the whole chunk.

    Gates are clamped, so that differences of these sums stay exact enough for tiles: see `decay_of_logs`.
    """
    logs = tl.cumsum(tl.clamp(gate, -STEEPEST_GATE, STEEPEST_GATE, tl.PropagateNan.ALL) * LOG2_E, 0)
    return logs, tl.sum(tl.where(tl.arange(0, CHUNK) == CHUNK - 1, logs, 0.0), 0)


@triton.jit
def decay_of_logs(logs):
    """`decay_between` for tiles, from `log_decays`, with any numbers above the diagonal.

    The relative error is 3e-6 where the log gates add up to -50, and at most 4e-4; rounding to a tile's 11 bits has one
    of up to 5e-4. In return it takes a third of the instructions. They count twice: a kernel that has not just run
    loads them from memory, and one program on each multiprocessor waits for them.
    """
    return tl.exp2(logs[:, None] - logs[None, :])


@triton.jit
def decays_for_tiles(gate, CHUNK: tl.constexpr):
    """`decay_since` and `decay_until`, the decay of the whole chunk, and `log_decays`; as exact as `decay_of_logs`."""
    logs, whole = log_decays(gate, CHUNK)
    return tl.exp2(logs), tl.exp2(whole - logs), tl.exp2(whole), logs


@triton.jit
def find_decays(gate, g, g_token, live, EXACT: tl.constexpr, CHUNK: tl.constexpr):
    """`decays_for_tiles` of log gates that were loaded from `g`. EXACT, each is summed on its own; no logarithms."""
    if EXACT:
        decays = decay_since(gate), decay_until(g, g_token, live, CHUNK), tl.exp(tl.sum(gate, 0)), gate
    else:
        decays = decays_for_tiles(gate, CHUNK)
    return decays


@triton.jit
def add_separated(pairs, CHUNK: tl.constexpr):
    """For each token the sum of `pairs` [read, write] whose read is after the token and whose write is not.

    Such pairs are those that the next token's gate acts on, and the sum is a part of that gate's gradient. No other
    pair is in it: a sum from which others are subtracted again would lose what a strong gate leaves.
    """
    i = tl.arange(0, CHUNK)
    return tl.sum(tl.where(i[:, None] > i[None, :], tl.cumsum(pairs, 1), 0.0), 0)


@triton.jit
def of_token_before(x, CHUNK: tl.constexpr):
    """For each token of x [CHUNK] the number of the token before it, and 0 for the first."""
    i = tl.arange(0, CHUNK)
    return tl.where(i > 0, tl.gather(x, tl.maximum(i - 1, 0), 0), 0.0)


@triton.jit
def _near(i, SIZE: tl.constexpr):
    """A mask [CHUNK, CHUNK]: true where both tokens lie in the same block of SIZE."""
    return (i // SIZE)[:, None] == (i // SIZE)[None, :]


@triton.jit
def _join(x, minus, i, SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """The inverses of diagonal blocks of 4 SIZE from the inverses X of those of SIZE.

    It is (I + M²) (I + M) X, where M = -X L between the blocks of SIZE.
    """
    known = x.to(minus.dtype)
    m = tl.dot(known, minus, input_precision="ieee")
    if 4 * SIZE < CHUNK:
        m = tl.where(_near(i, 4 * SIZE), m, 0.0)
    m = tl.where(_near(i, SIZE), 0.0, m).to(minus.dtype)
    x = tl.dot(m, known, x, input_precision="ieee")
    if 2 * SIZE < CHUNK:
        square = tl.dot(m, m, input_precision="ieee").to(minus.dtype)
        x = tl.dot(square, x.to(minus.dtype), x, input_precision="ieee")
    return x


@triton.jit
def unit_lower_inverse(lower, live, CHUNK: tl.constexpr, HALVES: tl.constexpr):
    """(I + L)^{-1} in float32 for strictly lower triangular L [CHUNK, CHUNK] in float32; CHUNK is 32 or 64.

    The diagonal blocks of 4 are inverted first, then those of 16, then the whole. Each step joins four blocks and needs
    only the square of the matrix that couples them. That square is small for repeated keys, whereas higher powers of L
    are not. Rows of L from `live` on are zero; so up to 16 tokens need no second step.

    With HALVES, operands are float16, and one step of Newton's method, X + (I - X (I + L)) X with L in 22 bits,
    corrects their rounding: the error is about 1e-6 while `inverse_size` is at most MILD. All intermediate values stay
    in registers: the result of one product is the left operand of the next without a change of layout.
    """
    DTYPE: tl.constexpr = tl.float16 if HALVES else tl.float32
    i = tl.arange(0, CHUNK)
    one = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    minus = (-lower).to(DTYPE)
    low = (-lower - minus.to(tl.float32)).to(DTYPE)
    m = tl.where(_near(i, 4), -lower, 0.0)
    x = one + m
    m = m.to(DTYPE)
    square = tl.dot(m, m, input_precision="ieee").to(DTYPE)
    x = tl.dot(square, x.to(DTYPE), x, input_precision="ieee")
    x = _join(x, minus, i, 4, CHUNK)
    if live > 16:
        x = _join(x, minus, i, 16, CHUNK)
    if HALVES:
        known = x.to(DTYPE)
        x = known.to(tl.float32)
        rest = tl.dot(known, low, tl.dot(known, minus, one - x))
        x = tl.dot(rest.to(DTYPE), known, x)
    return x


@triton.jit
def _join_left(x, minus, i, SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """`_join` with new numbers on the right: X + X (M + M² + M³), where M = -L X between the blocks of SIZE."""
    known = x.to(minus.dtype)
    m = tl.dot(minus, known)
    if 4 * SIZE < CHUNK:
        m = tl.where(_near(i, 4 * SIZE), m, 0.0)
    m = tl.where(_near(i, SIZE), 0.0, m)
    if 2 * SIZE < CHUNK:
        left = m.to(minus.dtype)
        powers = m + tl.dot(left, left)
        m += tl.dot(left, powers.to(minus.dtype))
    return tl.dot(known, m.to(minus.dtype), x)


@triton.jit
def unit_lower_inverse_left(lower, CHUNK: tl.constexpr):
    """`unit_lower_inverse` of 16 or 32 tokens with float16 operands.

    The warps of a program share products of this size by columns. Then a result is the right operand of the next
    product without a change of layout, whereas a left operand takes a way through shared memory, on which all warps
    wait for each other. So the order of the products is another one here, with half as many new left operands.
    """
    i = tl.arange(0, CHUNK)
    one = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    minus = (-lower).to(tl.float16)
    low = (-lower - minus.to(tl.float32)).to(tl.float16)
    m = tl.where(_near(i, 4), -lower, 0.0)
    x = one + m
    m = m.to(tl.float16)
    x = tl.dot(m, tl.dot(m, x.to(tl.float16)).to(tl.float16), x)
    x = _join_left(x, minus, i, 4, CHUNK)
    if CHUNK > 16:
        x = _join_left(x, minus, i, 16, CHUNK)
    known = x.to(tl.float16)
    x = known.to(tl.float32)
    rest = tl.dot(low, known, tl.dot(minus, known, one - x))
    return tl.dot(known, rest.to(tl.float16), x)


# The largest `inverse_size` for which float16 operands are precise enough.
MILD = tl.constexpr(256.0)


@triton.jit
def inverse_sizes(steepest, x):
    """For each row of the inverse X an upper bound of its sum of magnitudes; infinite if the row is not finite.

    `steepest` holds the largest magnitude in each row of L.
    """
    rows = tl.maximum(tl.sum(tl.abs(x), 1), 32 * steepest)
    return tl.where(rows < float("inf"), rows, float("inf"))


@triton.jit
def inverse_size(steepest, x):
    """The largest of `inverse_sizes`.

    Above MILD, L or X is so large that the step of Newton's method does not correct the rounding of float16 operands.
    """
    return tl.max(inverse_sizes(steepest, x), 0)


@triton.jit
def eliminate(lower, CHUNK: tl.constexpr):
    """`unit_lower_inverse` column by column in float32, for numbers outside float16's range.

    This is slow. An infinity or NaN does not reach the rows before it.
    """
    i = tl.arange(0, CHUNK)
    x = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for j in range(0, CHUNK - 1):
        column = tl.sum(tl.where(i[None, :] == j, lower, 0.0), 1)
        row = tl.sum(tl.where(i[:, None] == j, x, 0.0), 0)
        x -= tl.where(i[:, None] > j, column[:, None] * row[None, :], 0.0)
    return x
