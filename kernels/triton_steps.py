"""What the Triton kernels for one token share: tiles of the state, loads of a token's vectors, reciprocal lengths."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from longseq.kernels.triton_launch import next_power_of_2

# Arguments that Triton must not specialise on, because no kernel gets faster by it: a token's strides, and the number
# of heads.
UNSPECIALISED = ["H"] + [
    f"{name}_{axis}"
    for name in ("q", "k", "v", "beta", "write_key", "g", "g_value", "write", "gamma", "u", "x", "rate")
    for axis in ("row", "head")
]
UNSPECIALISED += ["key_row", "query_row"]

# Measured on an H200. WARP: numbers of a state that one warp holds, 32 registers in each thread. COLUMNS: the least
# number of columns of a state that a program holds.
WARP = 1024
COLUMNS = 32


class Tile(NamedTuple):
    """The rows and columns of the state that a program holds, and the number of its warps."""

    rows: int
    columns: int
    warps: int


def column_tile(rows: int, columns: int, numbers: int | None = None) -> Tile:
    """The tile for a matrix whose rows a program must hold together: all rows, and as many columns as `numbers` allows.

    Without `numbers`, the tile fills one warp, but has at least COLUMNS columns.
    """
    rows = next_power_of_2(rows)
    columns = min(next_power_of_2(columns), max(COLUMNS, (numbers or WARP) // rows))
    return Tile(rows, columns, min(max(rows * columns // WARP, 1), 8))


def row_tile(rows: int, columns: int, numbers: int) -> Tile:
    """The tile for a matrix whose columns one warp must hold together: all columns, and rows as `numbers` allows."""
    columns = next_power_of_2(columns)
    return Tile(min(next_power_of_2(rows), max(numbers // columns, 1)), columns, 1)


def strides(tensor: Tensor | None) -> tuple[int, int]:
    """The strides of batch and heads; zeros for None."""
    return (0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1))


@triton.jit
def place(H, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """This program's matrix of the state (its index), batch row, head, and block of the matrix (its index)."""
    blocks = (WIDTH + BLOCK - 1) // BLOCK
    n = (tl.program_id(0) // blocks).to(tl.int64)
    return n, n // H, n % H, tl.program_id(0) % blocks


@triton.jit
def load_vector(base, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK numbers of a token's vector from `first` on, in float32; zeros past its end."""
    i = first + tl.arange(0, BLOCK)
    return tl.load(base + i, mask=i < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def store_vector(base, first, x, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    i = first + tl.arange(0, BLOCK)
    tl.store(base + i, x, mask=i < WIDTH)


@triton.jit
def reciprocal_root(squares):
    """1 / sqrt(squares), for squared lengths; 1 for a zero vector."""
    return 1.0 / tl.sqrt_rn(tl.where(squares <= 1e-24, 1.0, squares))
