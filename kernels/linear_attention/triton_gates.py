"""What the kernels of linear attention share: matrices with strides, sums of gates over ranges of tokens.

A decay is the exponential of a sum of gates over its own range of tokens. The sums of all tokens of a chunk are one
product of matrices: that of a matrix of zeros and ones, which says the ranges, with the gates.
"""

import triton
import triton.language as tl

# exp of this is 0 in float32, so that stronger gates need not be told apart. Infinity times 0 would be NaN.
STRONGEST = tl.constexpr(-128.0)


@triton.jit
def decay(tile, part):
    """A tile of which `part` is left."""
    return (tile.to(tl.float32) * part).to(tile.dtype)


@triton.jit
def load_matrix(
    base, row, column, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """[ROWS, COLUMNS] of a matrix [HEIGHT, WIDTH] with strides ROW and COLUMN, zero outside."""
    i = row + tl.arange(0, ROWS)
    e = column + tl.arange(0, COLUMNS)
    place = base + i[:, None] * ROW + e[None, :] * COLUMN
    if HEIGHT % ROWS == 0 and WIDTH % COLUMNS == 0:
        return tl.load(place)
    return tl.load(place, mask=(i < HEIGHT)[:, None] & (e < WIDTH)[None, :], other=0.0)


@triton.jit
def store_matrix(
    base, row, column, x, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    i = row + tl.arange(0, ROWS)
    e = column + tl.arange(0, COLUMNS)
    place = base + i[:, None] * ROW + e[None, :] * COLUMN
    tl.store(place, x, mask=(i < HEIGHT)[:, None] & (e < WIDTH)[None, :])


@triton.jit
def load_channels(base, stride, live, column, WIDTH: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows of a chunk as columns, [COLUMNS, CHUNK]."""
    i = tl.arange(0, CHUNK)
    e = column + tl.arange(0, COLUMNS)
    mask = (e < WIDTH)[:, None] & (i < live)[None, :]
    return tl.load(base + e[:, None] + i[None, :] * stride, mask=mask, other=0.0)


@triton.jit
def _halve(x):
    """x as a sum of its leading bits, those that TF32 has room for, and the rest, of which TF32 keeps as many."""
    high = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def add_ranges(ranges, x):
    """Sums of rows of x, [CHUNK, N], over ranges [CHUNK, CHUNK]."""
    high, low = _halve(x)
    ranges = ranges.to(tl.float32)
    return tl.dot(ranges, high, tl.dot(ranges, low, input_precision="tf32"), input_precision="tf32")


@triton.jit
def add_gates(ranges, gate, DTYPE: tl.constexpr):
    """`add_ranges` of gates that came in DTYPE: those of 16 bits are operands of matrix products as they are."""
    return add_ranges(ranges, gate) if DTYPE.primitive_bitwidth == 32 else tl.dot(ranges.to(DTYPE), gate.to(DTYPE))


@triton.jit
def add_ranges_across(x, ranges):
    """`add_ranges` of columns of x, [N, CHUNK], over ranges that stand in columns."""
    high, low = _halve(x)
    ranges = ranges.to(tl.float32)
    return tl.dot(high, ranges, tl.dot(low, ranges, input_precision="tf32"), input_precision="tf32")


@triton.jit
def pair_ranges(i, t, level):
    """In pairs of blocks of 2^level tokens: from the second block's start to i, or after i to the first block's end."""
    second = (i >> level) % 2 == 1
    return ((i >> level) == (t >> level)) & ((second & (t <= i)) | ((i >> level) % 2 == 0) & (t > i))


@triton.jit
def block_ranges(i, t, level):
    """From the start of i's block of 2^level tokens to i; none for blocks of one token."""
    return ((i >> level) == (t >> level)) & (t <= i) & (level > 0)


@triton.jit
def are_paired(i, j, level):
    """Whether i lies in the second and j in the first block of a pair of blocks of 2^level tokens."""
    return ((i >> level) % 2 == 1) & ((i >> level) == (j >> level) + 1)


@triton.jit
def mild_level(gate, total, LIMIT: tl.constexpr, LEVELS: tl.constexpr):
    """LEVELS for a chunk over which decays are e^-LIMIT at most, else the largest level with blocks of at most e^-8.

    `total` are the sums of the gates' columns.
    """
    level = tl.full((), LEVELS, tl.int32)
    if tl.min(total, 0) < -LIMIT:
        fitting = tl.floor(tl.log2(8.0 / -tl.min(tl.min(gate, 1), 0)))
        level = tl.minimum(tl.maximum(fitting, 0.0), 1.0 * LEVELS).to(tl.int32)
    return level
