"""Float16 tiles with units: matrix products with 11 significant bits for numbers of any size.

A tile is the matrix of one chunk of one head that a matrix product takes. For half precision inputs, tiles are float16
even if the inputs are bfloat16: bfloat16's 8 bits are too few for intermediate results. Because float16 has little
range, each tile is divided by a power of two, its unit, that brings its numbers below 2^15 in magnitude. Division by a
unit is exact. A product of two tiles is summed in float32 and then multiplied by both units. A number that is 2^28
times smaller than the largest of its tile still has all 11 bits, so a token 10^4 times larger than its neighbours costs
them no precision. Where a bound of a product is known, its tile's unit follows from the bound; elsewhere the kernel
finds the largest number of the tile.

Each unit belongs to one chunk of one head, or to one row of such a tile where no other kernel reads it. Therefore
rows of the batch, heads and packed sequences do not affect each other, nor does a chunk affect one that is read
before it. An infinity or NaN in a tile makes the tile's products NaN. Through the state it reaches the chunks that
are read later; in gradients, through the gradient of the state, those that are read earlier. Numbers below 2^-112
have fewer bits, because the unit of a tile of zeros must be a number, too.

Float32 inputs (not SCALED) are multiplied as they are: their unit is 1 and is not stored.
"""

import triton
import triton.language as tl

from longseq.kernels.triton_tiles import load_tokens

# The numbers of a tile are below LIMIT = 2^TOP. Float16 ends just below 2^16, which leaves room for rounding.
TOP = tl.constexpr(15)
LIMIT = tl.constexpr(32768.0)


@triton.jit
def as_tile(x, SCALED: tl.constexpr):
    """x in the type of matrix products: float16 (x is already divided by its unit), or float32."""
    return x.to(tl.float16 if SCALED else tl.float32)


@triton.jit
def find_largest(x):
    """The largest magnitude in a matrix."""
    return tl.max(tl.abs(x.to(tl.float32)))


@triton.jit
def find_largest_of_rows(x):
    """The largest magnitude in each row of a matrix."""
    return tl.max(tl.abs(x.to(tl.float32)), 1)


@triton.jit
def find_largest_of_both(x, y):
    """The largest magnitudes in two tensors of one shape, found in one reduction."""
    both = tl.join(tl.abs(x.to(tl.float32)), tl.abs(y.to(tl.float32)))
    return tl.split(tl.max(tl.reshape(both, (x.numel, 2)), 0))


@triton.jit
def keep_larger(x, y):
    """The larger magnitude at each place of two tensors of one shape and type, in that type."""
    return tl.maximum(tl.abs(x.to(tl.float32)), tl.abs(y.to(tl.float32))).to(x.dtype)


@triton.jit
def power_of_two(largest):
    """The unit for numbers up to `largest`, and its inverse: the least power of two that brings them below LIMIT.

    The unit is finite and positive for every `largest`. For an infinity or NaN it is the unit of the largest float32
    numbers.
    """
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.minimum(tl.maximum(exponent, TOP), 254) - (TOP - 1)
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def inverse_of(unit):
    """The inverse of a unit, exact."""
    return ((254 << 23) - unit.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def exponent_of(unit):
    """The exponent e of a unit 2^e."""
    return (unit.to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def two_to(exponent):
    """2^exponent, or the nearest power of two that is a normal float32 number."""
    exponent = tl.minimum(tl.maximum(exponent, -126), 127)
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def times_two_to(x, exponent):
    """x 2^exponent in two steps: float32 may hold the result, but not a unit that is the product of two units."""
    half = exponent >> 1
    return x * two_to(half) * two_to(exponent - half)


# Before a product of tiles is added to a sum, the sum is rescaled to the product's unit. The factor is at most 2^LEAD,
# so that the sum stays in float32's range. A product with a still smaller unit is added without a factor, and thus too
# large. Even so its numbers are below 2^36, which is 2^24 times below the unit that the sum had.
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
    """x, in float32, divided by its unit, and the unit."""
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
    """Unit i divided by `largest`, the largest of all units."""
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
    """For each column, [COLUMNS], the unit of its tile. Tiles have TILE columns, and their units are STRIDE apart."""
    unit = tl.full((COLUMNS,), 1.0, tl.float32)
    if SCALED:
        e = column + tl.arange(0, COLUMNS)
        unit = tl.load(units + e // TILE * STRIDE, mask=e < WIDTH, other=0.0)
    return unit


@triton.jit
def store_column_units(
    units, column, unit, TILE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, SCALED: tl.constexpr
):
    """Store the same unit for each tile of TILE columns among COLUMNS."""
    if SCALED:
        for e in tl.static_range(0, COLUMNS, TILE):
            tl.store(units + (column + e) // TILE, unit, mask=column + e < WIDTH)


@triton.jit
def add_product(acc, a, b, unit, SCALED: tl.constexpr, PRECISION: tl.constexpr):
    """acc + a b unit, for tiles a and b; `unit` is the product of their units."""
    if SCALED:
        return acc + tl.dot(a, b) * unit
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def mix_rows(weights, rows, SCALED: tl.constexpr, PRECISION: tl.constexpr):
    """The product of a square matrix with rows, both in float32, as a tile, and its unit.

    Each row is first divided by a unit of its own, which its column of weights then takes over: a large row costs the
    other rows no precision.
    """
    unit = 1.0
    if SCALED:
        row_unit, row_inverse = power_of_two(tl.max(tl.abs(rows), 1))
        rows *= row_inverse[:, None]
        weights *= row_unit[None, :]
        # The unit of the sums of magnitudes: no number of the product exceeds LIMIT^2.
        unit, inverse = power_of_two(tl.max(tl.sum(tl.abs(weights), 1), 0))
        weights *= inverse
    product = tl.dot(as_tile(weights, SCALED), as_tile(rows, SCALED), input_precision=PRECISION)
    if SCALED:
        product *= 1.0 / LIMIT
        unit *= LIMIT
    return as_tile(product, SCALED), unit


@triton.jit
def exponent_above(largest):
    """The exponent of a power of two that is above a magnitude, and not far."""
    return exponent_of(power_of_two(largest)[0]) + TOP


@triton.jit
def bound_product(first, second, length):
    """The exponent of a unit for products of tiles with units of exponents `first` and `second`.

    A number of such a product is a sum of 2^length products of their numbers.
    """
    return first + second + TOP + length


@triton.jit
def clamp_exponent(exponent):
    """The exponent, or the nearest one that a unit may have: float32 holds that unit and its inverse."""
    return tl.minimum(tl.maximum(exponent, -126), 112)


@triton.jit
def to_tf32(x, SCALED: tl.constexpr):
    """If SCALED, x rounded to the 11 bits of TF32 (matrix products would truncate it); otherwise x itself."""
    if SCALED:
        rounded = ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
        # The NaN of a GPU has all bits but the sign set, and becomes a zero by the addition.
        x = rounded + x * 0.0
    return x
