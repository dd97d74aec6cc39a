"""What the kernels of linear attention share: matrices, products, and sums of gates over ranges of tokens.

A decay is the exponential of the sum of gates over a range of tokens. The sums for all tokens of a chunk are one matrix
product: a matrix of zeros and ones, whose rows mark the ranges, times the gates. `ranges` is such a matrix.
"""

import triton
import triton.language as tl

# exp(STRONGEST) is 0 in float32, so that gates are clamped to it: infinite gates times 0 would be NaN.
STRONGEST = tl.constexpr(-128.0)


@triton.jit
def multiply(x, y, SCALED: tl.constexpr):
    """x y in float32 for tiles, or if not SCALED, for float32 matrices in three TF32 products."""
    return tl.dot(x, y, input_precision="tf32" if SCALED else "tf32x3")


@triton.jit
def decay(tile, part):
    """A tile times `part`, the decay of its numbers, in the tile's type."""
    return (tile.to(tl.float32) * part).to(tile.dtype)


@triton.jit
def load_matrix(
    base, row, column, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A block [ROWS, COLUMNS] of a matrix [HEIGHT, WIDTH], stored TRANSPOSED or not, zero outside."""
    i = row + tl.arange(0, ROWS)
    e = column + tl.arange(0, COLUMNS)
    place = base + i[:, None] * (1 if TRANSPOSED else WIDTH) + e[None, :] * (HEIGHT if TRANSPOSED else 1)
    if HEIGHT % ROWS == 0 and WIDTH % COLUMNS == 0:
        return tl.load(place)
    return tl.load(place, mask=(i < HEIGHT)[:, None] & (e < WIDTH)[None, :], other=0.0)


@triton.jit
def store_matrix(
    base, row, column, x, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    i = row + tl.arange(0, ROWS)
    e = column + tl.arange(0, COLUMNS)
    place = base + i[:, None] * (1 if TRANSPOSED else WIDTH) + e[None, :] * (HEIGHT if TRANSPOSED else 1)
    tl.store(place, x, mask=(i < HEIGHT)[:, None] & (e < WIDTH)[None, :])


@triton.jit
def _halve(x):
    """x as the sum of two parts that TF32 holds: its leading 11 bits, and the rest."""
    high = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def add_ranges(ranges, x):
    """Sums of rows of x [CHUNK, N] over `ranges` [CHUNK, CHUNK]."""
    high, low = _halve(x)
    ranges = ranges.to(tl.float32)
    return tl.dot(ranges, high, tl.dot(ranges, low, input_precision="tf32"), input_precision="tf32")


@triton.jit
def add_gates(ranges, gate, DTYPE: tl.constexpr):
    """`add_ranges` of gates that were loaded as DTYPE. Gates of 16 bits are operands of matrix products as they are."""
    return add_ranges(ranges, gate) if DTYPE.primitive_bitwidth == 32 else tl.dot(ranges.to(DTYPE), gate.to(DTYPE))


@triton.jit
def pair_ranges(i, t, level):
    """Ranges for pairs of blocks of 2^level tokens.

    For i in the second block of a pair: from the start of that block to i. For i in the first block: from after i to
    the end of that block.
    """
    second = (i >> level) % 2 == 1
    return ((i >> level) == (t >> level)) & ((second & (t <= i)) | ((i >> level) % 2 == 0) & (t > i))


@triton.jit
def block_ranges(i, t, level):
    """Ranges from the start of i's block of 2^level tokens to i; empty for blocks of one token."""
    return ((i >> level) == (t >> level)) & (t <= i) & (level > 0)


@triton.jit
def are_paired(i, j, level):
    """True where i lies in the second and j in the first block of a pair of blocks of 2^level tokens."""
    return ((i >> level) % 2 == 1) & ((i >> level) == (j >> level) + 1)


@triton.jit
def mild_level(gate, total, LIMIT: tl.constexpr, LEVELS: tl.constexpr):
    """LEVELS if no decay over the chunk is below e^-LIMIT, else the highest level whose blocks keep decays above e^-8.

    `total` holds the sums of the gates' columns.
    """
    level = tl.full((), LEVELS, tl.int32)
    if tl.min(total, 0) < -LIMIT:
        fitting = tl.floor(tl.log2(8.0 / -tl.min(tl.min(gate, 1), 0)))
        level = tl.minimum(tl.maximum(fitting, 0.0), 1.0 * LEVELS).to(tl.int32)
    return level
