"""Where the delta rule's kernels leave units for each other: one row of numbers for each chunk of each head.

Tiles of value columns have a unit for each TILE of them. Forward, a row holds the units of

    INVERSE X    AMONG tril(Q Wᵀ ⊙ D)    QUERIES e^b Q    WRITES e^{b_C - b} W    ERASED -X e^b R
    QUERY, KEY, WRITE_KEY    of q, k and write_key as they came
    SIZE    of X, which is no unit: see `inverse_size`
    WRITTEN, by tiles: X V, then U    after those, by tiles: the state before the chunk

and backward those of

    D_ATTENTION, D_LOWER    D_OUTPUT, by tiles, after those: gradients of U, then V, and of the state after the chunk
"""

import triton.language as tl

TILE = tl.constexpr(64)
INVERSE = tl.constexpr(0)
AMONG = tl.constexpr(1)
QUERIES = tl.constexpr(2)
WRITES = tl.constexpr(3)
ERASED = tl.constexpr(4)
QUERY = tl.constexpr(5)
KEY = tl.constexpr(6)
WRITE_KEY = tl.constexpr(7)
SIZE = tl.constexpr(8)
WRITTEN = tl.constexpr(9)

D_ATTENTION = tl.constexpr(0)
D_LOWER = tl.constexpr(1)
D_OUTPUT = tl.constexpr(2)


def count_units(value_dim: int) -> int:
    """Of a row of the forward pass."""
    return WRITTEN.value + 2 * -(-value_dim // TILE.value)


def count_gradient_units(value_dim: int) -> int:
    """Of a row of the backward pass."""
    return D_OUTPUT.value + 3 * -(-value_dim // TILE.value)
