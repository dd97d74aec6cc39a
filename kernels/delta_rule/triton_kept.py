"""What the delta rule's kernels keep for each other, by chunk and head: tiles, and the units of those.

A tile has a row for each token of a chunk, or a column; CUT says that it ends with the last token of a sequence. SCALED
kernels have float16 tiles with units, others float32 tiles without (see triton_units.py).

Units are numbers in one row of memory. Tiles of value columns have one for each TILE columns. Forward, a row holds the
units of

    INVERSE X
    PACKED_UNITS, in one number: of W, e^{b_C - b} P, e^b Q and A, see `pack_units`
    QUERY, KEY, WRITE_KEY    of q, k and write_key as they came
    SIZE    of X, which is no unit: see `inverse_size`
    U, by tiles: X V, then U    after those, by tiles: the state before the chunk

and backward those of

    D_A, D_L    D_OUTPUT, by tiles, after those: gradients of U, then V, and of the state after the chunk
"""

import triton
import triton.language as tl

from longseq.kernels.triton_tiles import load_block, store_block, store_tokens

TILE = tl.constexpr(64)
INVERSE = tl.constexpr(0)
PACKED_UNITS = tl.constexpr(1)
QUERY = tl.constexpr(2)
KEY = tl.constexpr(3)
WRITE_KEY = tl.constexpr(4)
SIZE = tl.constexpr(5)
U = tl.constexpr(6)

D_A = tl.constexpr(0)
D_L = tl.constexpr(1)
D_OUTPUT = tl.constexpr(2)

# Of products of float32 tiles: three TF32 products each. Products of half precision are exact.
PRECISION = tl.constexpr("tf32x3")


@triton.jit
def find_place(H, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """This program's first column of WIDTH, in blocks of BLOCK, its head, and its sequence, segment or slot."""
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    column = tl.program_id(0) % blocks * BLOCK
    return column, (tl.program_id(0) // blocks % H).to(tl.int64), (tl.program_id(0) // blocks // H).to(tl.int64)


@triton.jit
def find_units(units, place, V: tl.constexpr):
    """The row of units that the forward pass keeps of a chunk of a head."""
    return units + place * (U + 2 * ((V + TILE - 1) // TILE))


@triton.jit
def find_gradient_units(d_units, place, V: tl.constexpr):
    """The row of units that the backward pass keeps of a chunk of a head."""
    return d_units + place * (D_OUTPUT + 3 * ((V + TILE - 1) // TILE))


@triton.jit
def pack_units(w, writes, queries, a):
    """Four units in the bits of one number: a walk, with few free registers, holds those of two chunks at a time."""
    packed = (w.to(tl.int32, bitcast=True) >> 23) | ((writes.to(tl.int32, bitcast=True) >> 23) << 8)
    packed |= (queries.to(tl.int32, bitcast=True) >> 23) << 16
    packed |= (a.to(tl.int32, bitcast=True) >> 23) << 24
    return packed.to(tl.float32, bitcast=True)


@triton.jit
def unpack_w(packed):
    return (packed.to(tl.int32, bitcast=True) & 255) - 127


@triton.jit
def unpack_writes(packed):
    return ((packed.to(tl.int32, bitcast=True) >> 8) & 255) - 127


@triton.jit
def unpack_queries(packed):
    return ((packed.to(tl.int32, bitcast=True) >> 16) & 255) - 127


@triton.jit
def unpack_a(packed):
    return ((packed.to(tl.int32, bitcast=True) >> 24) & 255) - 127


@triton.jit
def load_by_rows(
    base, live, column, WIDTH: tl.constexpr, CUT: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """COLUMNS columns of what is kept of a chunk with a row for each token, [CHUNK, WIDTH].

    CUT: only the rows of the chunk's `live` tokens are stored and loaded; the others are zero. No other function is
    called: with 256 columns the assembler spills a fifth more registers of `retreat` if the lines of its loads, which
    it is told for debuggers, come from two functions.
    """
    i = tl.arange(0, CHUNK)
    e = column + tl.arange(0, COLUMNS)
    place = base + i[:, None] * WIDTH + e[None, :]
    if CUT:
        mask = (i < live)[:, None]
        if WIDTH % COLUMNS != 0:
            mask = mask & (e < WIDTH)[None, :]
        return tl.load(place, mask=mask, other=0.0)
    if WIDTH % COLUMNS != 0:
        return tl.load(place, mask=(e < WIDTH)[None, :], other=0.0)
    return tl.load(place)


@triton.jit
def store_by_rows(
    base, live, column, x, WIDTH: tl.constexpr, CUT: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    if CUT:
        store_tokens(base, WIDTH, live, column, x, WIDTH, CHUNK, COLUMNS)
    else:
        store_block(base, 0, column, x, CHUNK, WIDTH, CHUNK, COLUMNS)


@triton.jit
def _kept_columns(
    live, row, PAST: tl.constexpr, HEIGHT: tl.constexpr, CUT: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Which numbers of ROWS rows of [HEIGHT, CHUNK] are kept; those of `live` tokens if CUT, rounded up to vectors."""
    mask = (row + tl.arange(0, ROWS) < HEIGHT)[:, None]
    if CUT:
        tokens = (tl.arange(0, CHUNK) < (live + 15) // 16 * 16)[None, :]
        mask = mask & tokens if PAST or HEIGHT % ROWS != 0 else tokens
    return mask


@triton.jit
def load_by_columns(
    base, live, row, HEIGHT: tl.constexpr, CUT: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    PAST: tl.constexpr = False,
):  # fmt: skip
    """ROWS rows of what is kept of a chunk with a column for each token, [HEIGHT, CHUNK]; see `load_by_rows`.

    PAST: the rows may lie past HEIGHT, where all is zero.
    """
    if CUT or PAST:
        at = base + (row + tl.arange(0, ROWS))[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        return tl.load(at, mask=_kept_columns(live, row, PAST, HEIGHT, CUT, ROWS, CHUNK), other=0.0)
    return load_block(base, row, 0, HEIGHT, CHUNK, ROWS, CHUNK)


@triton.jit
def store_by_columns(
    base, live, row, x, HEIGHT: tl.constexpr, CUT: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    if CUT:
        at = base + (row + tl.arange(0, ROWS))[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        tl.store(at, x, mask=_kept_columns(live, row, False, HEIGHT, CUT, ROWS, CHUNK))
    else:
        store_block(base, row, 0, x, HEIGHT, CHUNK, ROWS, CHUNK)


def count_units(value_dim: int) -> int:
    """The number of units in a row of the forward pass."""
    return U.value + 2 * -(-value_dim // TILE.value)


def count_gradient_units(value_dim: int) -> int:
    """The number of units in a row of the backward pass."""
    return D_OUTPUT.value + 3 * -(-value_dim // TILE.value)
