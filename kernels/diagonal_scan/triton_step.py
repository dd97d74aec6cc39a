"""One token of Longhorn's and Mamba's scans in one Triton kernel, which reads and writes the state once.

A program holds the states of some channels of one sequence.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longseq.kernels.custom_op import custom_op, results_like
from longseq.kernels.devices import channels_adjacent, contiguous
from longseq.kernels.triton_launch import cdiv, find_launch, launch_options
from longseq.kernels.triton_steps import UNSPECIALISED, load_vector, row_tile, store_vector
from longseq.kernels.triton_tiles import load_block, store_block

# Measured on an H200: numbers of a state that a program of one warp holds. 16 registers in each thread leave room for
# many warps, and with them for many loads under way.
NUMBERS = 512


@triton.jit(do_not_specialize=UNSPECIALISED)
def _step(
    x, rate, key, query, A, state, output, after, x_row, rate_row, key_row, query_row,
    D: tl.constexpr, N: tl.constexpr, LONGHORN: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    blocks = (D + BLOCK_D - 1) // BLOCK_D
    row = (tl.program_id(0) // blocks).to(tl.int64)
    first = (tl.program_id(0) % blocks) * BLOCK_D
    memory = load_block(state + row * D * N, first, 0, D, N, BLOCK_D, BLOCK_N)
    value = load_vector(x + row * x_row, first, D, BLOCK_D)
    rates = load_vector(rate + row * rate_row, first, D, BLOCK_D)
    keys = load_vector(key + row * key_row, 0, N, BLOCK_N)
    queries = load_vector(query + row * query_row, 0, N, BLOCK_N)
    if LONGHORN:
        rates = rates / (1.0 + rates * tl.sum(keys * keys, 0))
        decay = 1.0 - rates[:, None] * (keys * keys)[None, :]
    else:
        decay = tl.exp(rates[:, None] * load_block(A, first, 0, D, N, BLOCK_D, BLOCK_N).to(tl.float32))

    memory = decay * memory + (rates * value)[:, None] * keys[None, :]
    store_block(after + row * D * N, first, 0, memory, D, N, BLOCK_D, BLOCK_N)
    store_vector(output + row * D, first, tl.sum(memory * queries[None, :], 1), D, BLOCK_D)


@custom_op("diagonal_scan_step", results_like(0, 5))
def diagonal_scan_step(
    x: Tensor, rate: Tensor, key: Tensor, query: Tensor, A: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Longhorn's step for beta, k and q, Mamba's for delta, B, C and A [D, N].

    Returns o [B, D] in x's dtype and the next state [B, D, N] in float32.
    """
    x, rate, key, query = (channels_adjacent(tensor) for tensor in (x, rate, key, query))
    state, A = state.contiguous(), contiguous(A)
    batch, channels, width = state.shape
    output, after = x.new_empty(x.shape), torch.empty_like(state)
    tile = row_tile(channels, width, NUMBERS)
    find_launch(
        _step, x.device, batch * cdiv(channels, tile.rows),
        (x.stride(0), rate.stride(0), key.stride(0), query.stride(0)),
        D=channels, N=width, LONGHORN=A is None, BLOCK_D=tile.rows, BLOCK_N=tile.columns,
        **launch_options(tile.warps),
    )(x, rate, key, query, A, state, output, after)  # fmt: skip
    return output, after


def longhorn_scan_step_triton(x: Tensor, q: Tensor, k: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """`longhorn_scan_step` in one Triton kernel."""
    return diagonal_scan_step(x, beta, k, q, None, state)


def selective_scan_step_triton(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """`selective_scan_step` in one Triton kernel."""
    return diagonal_scan_step(x, delta, B, C, A, state)
