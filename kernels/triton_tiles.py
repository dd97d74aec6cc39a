"""What the Triton kernels that work in chunks share: their place in the work, tiles, decays, the inverse.

Sequences are cut into chunks of CHUNK tokens, numbered over the whole batch: the slots. Tensors of the user are read
where they lie ([B, T, H, D], any strides but for the last). What one kernel leaves for another is stored by slot and
head, [slots, H, rows, columns], so that a tile is one block of memory. Rows past the end of a sequence are read as
zeros, which leave the state as it is.
"""

import triton
import triton.language as tl

# Arguments of which no kernel gets faster by being compiled for their values: fewer kernels to compile.
SIZES_AND_STRIDES = ["T", "H", "tokens", "beta_row", "beta_token", "beta_head", "g_row", "g_token", "g_head"]
MINUS_LOG2_E = tl.constexpr(-1.4426950408889634)

# REVERSE, how a kernel reads its sequences, is 0 for from their start, 1 for from their end, or this: the first half of
# the batch from the start, the second from the end.
SECOND_HALF = tl.constexpr(2)


@triton.jit
def direction(REVERSE: tl.constexpr):
    """1, or -1 for a program that reads from the end. Programs are in the order of the rows of the batch."""
    if REVERSE == SECOND_HALF:
        return tl.where(tl.program_id(0) < tl.num_programs(0) // 2, 1, -1)
    if REVERSE:
        return -1
    return 1


@triton.jit
def token_after(done, start, end, REVERSE: tl.constexpr):
    """The token of a sequence, from start to end, that is read when `done` of them are."""
    if REVERSE == SECOND_HALF:
        return tl.where(tl.program_id(0) < tl.num_programs(0) // 2, start + done, end - 1 - done)
    if REVERSE:
        return end - 1 - done
    return start + done


@triton.jit
def first_read(n, sequences, start, end, REVERSE: tl.constexpr):
    """The token that is read first of sequence n of so many, from start to end, and 1, or -1 if that is the last one.

    For a program that reads several sequences, whose own number does not tell how it reads one of them.
    """
    if REVERSE == SECOND_HALF:
        forward = n < sequences // 2
        return tl.where(forward, start, end - 1), tl.where(forward, 1, -1)
    return token_after(0, start, end, REVERSE), direction(REVERSE)


@triton.jit
def sequence(n, T, cu_seqlens, PACKED: tl.constexpr, CHUNK: tl.constexpr):
    """The batch row, first token, end and first slot of sequence n."""
    if PACKED:
        # Reading the borders on the host to check them would wait for the device; held inside the tokens they can at
        # least touch no foreign memory.
        start = tl.minimum(tl.maximum(tl.load(cu_seqlens + n).to(tl.int64), 0), T)
        end = tl.minimum(tl.maximum(tl.load(cu_seqlens + n + 1).to(tl.int64), start), T)
        return n * 0, start, end, start // CHUNK + n
    return n, n * 0, n * 0 + T, n * tl.cdiv(T, CHUNK)


@triton.jit
def chunk(
    slot, T, cu_seqlens, sequence_of, PACKED: tl.constexpr, CHUNK: tl.constexpr, REVERSE: tl.constexpr = 0
):  # fmt: skip
    """The batch row, first token and number of tokens of a chunk; a slot of packed sequences may hold no token.

    Read from the end, chunks begin there, and the first token of each is its last.
    """
    n = slot // tl.cdiv(T, CHUNK)
    if PACKED:
        n = tl.load(sequence_of + slot).to(tl.int64)
    row, start, end, first = sequence(n, T, cu_seqlens, PACKED, CHUNK)
    done = (slot - first) * CHUNK
    return row, token_after(done, start, end, REVERSE), end - start - done


@triton.jit
def load_tokens(base, stride, live, column, WIDTH: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows of a chunk, [CHUNK, COLUMNS] from `column` on; `base` points to its first token."""
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
def load_numbers(base, stride, live, CHUNK: tl.constexpr):
    """One number for each token of a chunk, [CHUNK], in float32."""
    i = tl.arange(0, CHUNK)
    return tl.load(base + i * stride, mask=i < live, other=0.0).to(tl.float32)


@triton.jit
def load_block(base, row, column, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS] of a contiguous matrix [HEIGHT, WIDTH], zero outside."""
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
    """Decays from the start of the chunk to each token, for log gates [CHUNK]."""
    return tl.exp(tl.cumsum(gate, 0))


@triton.jit
def decay_until(base, stride, live, CHUNK: tl.constexpr):
    """Decays from each token to the end of the chunk, for log gates at `base`: sums, never differences of sums."""
    later = load_numbers(base + stride, stride, tl.minimum(live, CHUNK) - 1, CHUNK)
    return tl.exp(tl.cumsum(later, 0, reverse=True))


@triton.jit
def decay_between(gate, CHUNK: tl.constexpr):
    """exp(g_{j+1} + ... + g_i) for i >= j, each added up over its own range; 1 above the diagonal."""
    i = tl.arange(0, CHUNK)
    terms = tl.where(i[:, None] > i[None, :], gate[:, None], 0.0)
    return tl.exp(tl.cumsum(terms, 0))


@triton.jit
def _near(i, SIZE: tl.constexpr):
    """Whether two tokens lie in one block of SIZE."""
    return (i // SIZE)[:, None] == (i // SIZE)[None, :]


@triton.jit
def _join(x, minus, i, SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """The inverses of blocks of 4 SIZE from those of SIZE, X: (I + M²) (I + M) X with M = -X L between the blocks."""
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
def unit_lower_inverse(lower, CHUNK: tl.constexpr, HALVES: tl.constexpr):
    """(I + L)^{-1} in float32 for strictly lower triangular L [CHUNK, CHUNK] in float32; CHUNK is 32 or 64.

    Blocks of 4, then of 16, then all: each step is of four blocks and ends with the square of what couples them, which
    is small for repeated keys, where higher powers of L are not. Of HALVES, operands are float16 numbers, and one step
    of Newton's method, X + (I - X (I + L)) X with L in 22 bits, makes good what they lose: an error of some 1e-6 is
    left, while `inverse_size` is at most MILD. Nothing leaves the chip: what one product leaves in registers is the
    next one's left side as it lies there.
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
    x = _join(x, minus, i, 16, CHUNK)
    if HALVES:
        known = x.to(DTYPE)
        x = known.to(tl.float32)
        rest = tl.dot(known, low, tl.dot(known, minus, one - x))
        x = tl.dot(rest.to(DTYPE), known, x)
    return x


# See `inverse_size`.
MILD = tl.constexpr(256.0)


@triton.jit
def inverse_size(steepest, x):
    """No less than any sum of magnitudes along a row of the inverse X; not finite if X is not.

    For `steepest`, the largest magnitudes in the rows of L: above MILD, either L or X is so large that Newton's method
    does not make good what float16 operands have lost.
    """
    rows = tl.maximum(tl.sum(tl.abs(x), 1), 32 * steepest)
    return tl.max(tl.where(rows < float("inf"), rows, float("inf")), 0)


@triton.jit
def eliminate(lower, CHUNK: tl.constexpr):
    """`unit_lower_inverse` column by column, in float32 alone: for numbers that float16 does not hold.

    Slow. What is infinite or NaN does not reach the rows before it.
    """
    i = tl.arange(0, CHUNK)
    x = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for j in range(0, CHUNK - 1):
        column = tl.sum(tl.where(i[None, :] == j, lower, 0.0), 1)
        row = tl.sum(tl.where(i[:, None] == j, x, 0.0), 0)
        x -= tl.where(i[:, None] > j, column[:, None] * row[None, :], 0.0)
    return x
