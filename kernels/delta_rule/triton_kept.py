"""The memory in which the delta rule's kernels store units: one row of numbers for each chunk of each head.

Tiles of value columns have a unit for each TILE of them. Forward, a row holds the units of

    INVERSE X
    PACKED_UNITS, in one number: of -X e^b R, e^{b_C - b} W, e^b Q and tril(Q Wᵀ ⊙ D), see `pack_units`
    QUERY, KEY, WRITE_KEY    of q, k and write_key as they came
    SIZE    of X, which is no unit: see `inverse_size`
    WRITTEN, by tiles: X V, then U    after those, by tiles: the state before the chunk

and backward those of

    D_ATTENTION, D_LOWER    D_OUTPUT, by tiles, after those: gradients of U, then V, and of the state after the chunk
"""

import triton
import triton.language as tl

TILE = tl.constexpr(64)
INVERSE = tl.constexpr(0)
PACKED_UNITS = tl.constexpr(1)
QUERY = tl.constexpr(2)
KEY = tl.constexpr(3)
WRITE_KEY = tl.constexpr(4)
SIZE = tl.constexpr(5)
WRITTEN = tl.constexpr(6)

D_ATTENTION = tl.constexpr(0)
D_LOWER = tl.constexpr(1)
D_OUTPUT = tl.constexpr(2)


@triton.jit
def pack_units(erased, writes, queries, among):
    """Four units in the bits of one number: a walk, with few free registers, holds those of two chunks at a time."""
    packed = (erased.to(tl.int32, bitcast=True) >> 23) | ((writes.to(tl.int32, bitcast=True) >> 23) << 8)
    packed |= (queries.to(tl.int32, bitcast=True) >> 23) << 16
    packed |= (among.to(tl.int32, bitcast=True) >> 23) << 24
    return packed.to(tl.float32, bitcast=True)


@triton.jit
def unpack_erased(packed):
    return (packed.to(tl.int32, bitcast=True) & 255) - 127


@triton.jit
def unpack_writes(packed):
    return ((packed.to(tl.int32, bitcast=True) >> 8) & 255) - 127


@triton.jit
def unpack_queries(packed):
    return ((packed.to(tl.int32, bitcast=True) >> 16) & 255) - 127


@triton.jit
def unpack_among(packed):
    return ((packed.to(tl.int32, bitcast=True) >> 24) & 255) - 127


def count_units(value_dim: int) -> int:
    """The number of units in a row of the forward pass."""
    return WRITTEN.value + 2 * -(-value_dim // TILE.value)


def count_gradient_units(value_dim: int) -> int:
    """The number of units in a row of the backward pass."""
    return D_OUTPUT.value + 3 * -(-value_dim // TILE.value)
