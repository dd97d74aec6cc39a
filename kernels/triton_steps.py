"""What the one-token Triton kernels share: the part of a state that a program holds, a token's vectors, roots."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from longseq.kernels.triton_launch import next_power_of_2

# A token's strides, and the heads: no kernel gets faster by being compiled for their values.
UNSPECIALISED = ["H"] + [
    f"{name}_{axis}"
    for name in ("q", "k", "v", "beta", "write_key", "g", "g_value", "write", "gamma", "threshold", "u", "x", "rate")
    for axis in ("row", "head")
]
UNSPECIALISED += ["key_row", "query_row"]

# By count, not by time. Numbers of a state that a warp holds: 32 registers of a thread. Columns of it that a program
# holds at least: few, so that one sequence fills the GPU, but 64 bytes, which its memory hands out at once.
WARP = 1024
COLUMNS = 16


class Tile(NamedTuple):
    """The block of a state that a program holds, and the warps of it."""

    rows: int
    columns: int
    warps: int


def column_tile(rows: int, columns: int, numbers: int | None = None) -> Tile:
    """Of a matrix whose rows a program must hold together: all of them, and columns up to so many numbers in all.

    Without `numbers`, of one warp.
    """
    rows = next_power_of_2(rows)
    columns = min(next_power_of_2(columns), max(COLUMNS, (numbers or WARP) // rows))
    return Tile(rows, columns, min(max(rows * columns // WARP, 1), 8))


def row_tile(rows: int, columns: int, numbers: int) -> Tile:
    """Of a matrix whose columns one warp must hold together: all of them, and rows up to so many numbers in all."""
    columns = next_power_of_2(columns)
    return Tile(min(next_power_of_2(rows), max(numbers // columns, 1)), columns, 1)


def strides(tensor: Tensor | None) -> tuple[int, int]:
    """Of batch and heads; none of a tensor that is absent."""
    return (0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1))


@triton.jit
def place(H, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """This program's matrix of the state, its batch row and head, and its block of that matrix."""
    blocks = (WIDTH + BLOCK - 1) // BLOCK
    n = (tl.program_id(0) // blocks).to(tl.int64)
    return n, n // H, n % H, tl.program_id(0) % blocks


@triton.jit
def load_vector(base, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Numbers from `first` on of a vector of one token, in float32; zeros past its end."""
    i = first + tl.arange(0, BLOCK)
    return tl.load(base + i, mask=i < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def store_vector(base, first, x, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    i = first + tl.arange(0, BLOCK)
    tl.store(base + i, x, mask=i < WIDTH)


@triton.jit
def reciprocal_root(squares):
    """The reciprocal length for a squared one; 1 for that of a zero vector, which has no direction."""
    return 1.0 / tl.sqrt_rn(tl.where(squares <= 1e-24, 1.0, squares))
