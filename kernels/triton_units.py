"""Float16 tiles with units: how kernels multiply numbers of any size with 11 bits.

Matrix products of half precision values are products of float16 numbers whatever the values are: bfloat16 has 8 bits,
too few for what lies between two products. Float16 has little range. So a tile, the matrix of one chunk of one head
that a product takes, counts in a power of two of its own, its unit, which brings its numbers below 2^15 in magnitude.
Units are powers of two, and thus exact; a product of tiles is added up in float32 and is then multiplied by the units
of both. What is 2^28 times smaller than the largest number of its tile still has all 11 bits: a token 10^4 times larger
than its neighbours takes nothing from them. Where it is known how large a product can become, its tile's unit follows
from that, else from a look at its numbers.

No unit belongs to more than one chunk of one head. Rows of the batch, heads and packed sequences do not see each other,
and no chunk sees one that is read after it. A number that is infinite or NaN makes NaN of its tile's products: it
reaches its own chunk, and through the state, those that are read after it; of gradients, through the state's, those
before it. Numbers below 2^-112 have fewer bits, as tiles of zeros need a unit, too.

Float32 values (not SCALED) are multiplied as they are: their unit is 1, and no memory holds it.
"""

import triton
import triton.language as tl

from longseq.kernels.triton_tiles import load_tokens

# The numbers of a tile are below LIMIT, 2 to this. Float16 ends just below 2^16: what rounding adds has room.
TOP = tl.constexpr(15)
LIMIT = tl.constexpr(32768.0)


@triton.jit
def as_tile(x, SCALED: tl.constexpr):
    """x in the type of matrix products: float16 in units, or float32."""
    return x.to(tl.float16 if SCALED else tl.float32)


@triton.jit
def find_largest(x):
    """The largest magnitude in a matrix."""
    return tl.max(tl.max(tl.abs(x.to(tl.float32)), 1), 0)


@triton.jit
def power_of_two(largest):
    """The unit of numbers up to `largest`, the power of two that leaves it below LIMIT, and the inverse of the unit.

    Of what is infinite or NaN it is that of the largest numbers: so it is finite.
    """
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.minimum(tl.maximum(exponent, TOP), 254) - (TOP - 1)
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def inverse_of(unit):
    """Of a unit, exactly."""
    return ((254 << 23) - unit.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def exponent_of(unit):
    """Of a unit 2^e: e."""
    return (unit.to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def two_to(exponent):
    """2^exponent, or the nearest number that float32 has."""
    exponent = tl.minimum(tl.maximum(exponent, -126), 127)
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def times_two_to(x, exponent):
    """x 2^exponent, in two steps: of products of units, float32 may hold the result but not the unit."""
    half = exponent >> 1
    return x * two_to(half) * two_to(exponent - half)


# A sum of matrices begins with one whose numbers are below 2^LEAD of the unit that it goes on in. A product that has
# still less to say is added in too large a unit, 2^24 times below that of the tile that the sum becomes.
LEAD = tl.constexpr(60)


@triton.jit
def find_unit(x, SCALED: tl.constexpr):
    """The unit of a matrix and its inverse; not SCALED, both are 1."""
    unit, inverse = 1.0, 1.0
    if SCALED:
        unit, inverse = power_of_two(find_largest(x))
    return unit, inverse


@triton.jit
def scale_down(x, SCALED: tl.constexpr):
    """x, in float32, in units, and its unit."""
    unit, inverse = find_unit(x, SCALED)
    if SCALED:
        x *= inverse
    return x, unit


@triton.jit
def in_units(x, SCALED: tl.constexpr):
    """x, in float32, as a tile, and its unit."""
    x, unit = scale_down(x, SCALED)
    return as_tile(x, SCALED), unit


@triton.jit
def load_scaled(
    base, stride, live, column, WIDTH: tl.constexpr, SCALED: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr
):
    """`load_tokens` as a tile, and its unit."""
    return in_units(load_tokens(base, stride, live, column, WIDTH, CHUNK, COLUMNS).to(tl.float32), SCALED)


@triton.jit
def load_unit(units, place, SCALED: tl.constexpr):
    """The unit of one tile."""
    unit = 1.0
    if SCALED:
        unit = tl.load(units + place)
    return unit


@triton.jit
def load_largest_unit(units, TILES: tl.constexpr):
    """The largest of several units."""
    unit = tl.load(units)
    for i in tl.static_range(1, TILES):
        unit = tl.maximum(unit, tl.load(units + i))
    return unit


@triton.jit
def load_share(units, i, largest):
    """Number i of several units as a part of the largest of them."""
    return tl.load(units + i) * inverse_of(largest)


@triton.jit
def store_unit(units, place, unit, SCALED: tl.constexpr):
    if SCALED:
        tl.store(units + place, unit)


@triton.jit
def load_column_units(
    units, column,
    STRIDE: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Of each column, [COLUMNS], the unit of its tile, for tiles of TILE columns with units STRIDE apart."""
    unit = tl.full((COLUMNS,), 1.0, tl.float32)
    if SCALED:
        e = column + tl.arange(0, COLUMNS)
        unit = tl.load(units + e // TILE * STRIDE, mask=e < WIDTH, other=0.0)
    return unit


@triton.jit
def store_column_units(
    units, column, unit, TILE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, SCALED: tl.constexpr
):
    """One unit for all tiles of TILE columns among COLUMNS."""
    if SCALED:
        for e in tl.static_range(0, COLUMNS, TILE):
            tl.store(units + (column + e) // TILE, unit, mask=column + e < WIDTH)


@triton.jit
def add_product(acc, a, b, unit, SCALED: tl.constexpr, PRECISION: tl.constexpr):
    """acc + a b unit, for tiles a and b whose units are multiplied to `unit`."""
    if SCALED:
        return acc + tl.dot(a, b) * unit
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def mix_rows(weights, rows, SCALED: tl.constexpr, PRECISION: tl.constexpr):
    """The product of a square matrix with rows, both in float32, as a tile, and its unit.

    Each row counts in its own unit first, which its weights then take over: a row of any size leaves the others theirs.
    """
    unit = 1.0
    if SCALED:
        row_unit, row_inverse = power_of_two(tl.max(tl.abs(rows), 1))
        rows *= row_inverse[:, None]
        weights *= row_unit[None, :]
        # The sums of magnitudes, so that no number of the product exceeds LIMIT^2.
        unit, inverse = power_of_two(tl.max(tl.sum(tl.abs(weights), 1), 0))
        weights *= inverse
    product = tl.dot(as_tile(weights, SCALED), as_tile(rows, SCALED), input_precision=PRECISION)
    if SCALED:
        product *= 1.0 / LIMIT
        unit *= LIMIT
    return as_tile(product, SCALED), unit


@triton.jit
def to_tf32(x, SCALED: tl.constexpr):
    """x rounded to the 11 bits of TF32, which matrix products would cut off; not SCALED, x itself."""
    if SCALED:
        x = ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
    return x
