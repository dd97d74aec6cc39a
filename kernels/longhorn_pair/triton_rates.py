"""Rates of low rank in Triton, sigmoid(r weightᵀ + bias) for both halves of the rows, and their gradients.

Both kernels move little but the rates themselves: a product of 24 columns costs less than reading what it gives.
"""

import triton
import triton.language as tl

from longseq.kernels.diagonal_scan.triton_forward import INTERPRETED


@triton.jit
def _multiply(x, y):
    if INTERPRETED:  # which takes bfloat16 numbers for integers
        return tl.dot(x.to(tl.float32), y.to(tl.float32))
    return tl.dot(x, y, input_precision="tf32x3")


@triton.jit
def _load_columns(x, row, live, R: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The first R columns of so many rows, of which some are live, [ROWS, COLUMNS] with zeros past them."""
    i = tl.arange(0, ROWS)
    r = tl.arange(0, COLUMNS)
    return tl.load(x + i[:, None] * row + r[None, :], mask=(i < live)[:, None] & (r < R)[None, :], other=0.0)


@triton.jit(do_not_specialize=["rows"])
def find_rates(
    selected, weight, bias, rates, rows, D, S,
    R: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The rates of some rows and channels; each half has so many rows."""
    over_d = tl.cdiv(D, BLOCK_D)
    over_t = tl.cdiv(rows, BLOCK_T)
    block = tl.program_id(0) // over_d
    half = (block // over_t).to(tl.int64)
    t = (block % over_t) * BLOCK_T
    d = (tl.program_id(0) % over_d) * BLOCK_D
    row = half * rows + t
    channel = half * D + d
    ranks = _load_columns(selected + row * S, S, rows - t, R, BLOCK_T, BLOCK_R)
    factors = _load_columns(weight + channel * R, R, D - d, R, BLOCK_D, BLOCK_R).to(ranks.dtype)
    logits = _multiply(ranks, tl.trans(factors))
    i = tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_D)
    logits += tl.load(bias + channel + e, mask=e < D - d, other=0.0).to(tl.float32)[None, :]
    inside = (i < rows - t)[:, None] & (e < D - d)[None, :]
    tl.store(rates + row * D + d + i[:, None] * D + e[None, :], tl.sigmoid(logits), mask=inside)


@triton.jit(do_not_specialize=["rows", "blocks", "programs"])
def differentiate_rates(
    selected, weight, rates, d_rates, d_ranks, d_weights, d_biases, rows, blocks, programs, D, S,
    R: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """From the gradients of rates to those of r, one part for each block of channels [blocks of D, R, 2 rows], and of
    weight and bias, one part for each of so many programs [programs, 2, D, R] and [programs, 2, D].

    A program walks through blocks of rows that are as many apart as there are programs.
    """
    over_d = tl.cdiv(D, BLOCK_D)
    slab = (tl.program_id(0) % over_d).to(tl.int64)
    first = (tl.program_id(0) // over_d) % programs
    half = (tl.program_id(0) // over_d // programs).to(tl.int64)
    d = (tl.program_id(0) % over_d) * BLOCK_D
    i = tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_D)
    r = tl.arange(0, BLOCK_R)
    place = i[:, None] * D + e[None, :]
    factors = _load_columns(weight + (half * D + d) * R, R, D - d, R, BLOCK_D, BLOCK_R)
    factors = factors.to(selected.dtype.element_ty)
    d_weight_t = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for block in range(first, blocks, programs):
        row = half * rows + block * BLOCK_T
        live = rows - block * BLOCK_T
        inside = (i < live)[:, None] & (e < D - d)[None, :]
        share = tl.load(rates + row * D + d + place, mask=inside, other=0.0).to(tl.float32)
        d_logits = tl.load(d_rates + row * D + d + place, mask=inside, other=0.0).to(tl.float32)
        d_logits *= share * (1.0 - share)
        ranks = _load_columns(selected + row * S, S, live, R, BLOCK_T, BLOCK_R)
        ranks = tl.where((r == R)[None, :], 1.0, ranks).to(ranks.dtype)  # in the place of a zero: the bias's column
        d_logits = d_logits.to(ranks.dtype)
        # Both products take the gradients of logits as their right side, which Hopper reads where it lies.
        into = d_ranks + slab * R * 2 * rows + row
        own = (r < R)[:, None] & (i < live)[None, :]
        d_ranks_t = _multiply(tl.trans(factors), tl.trans(d_logits))
        tl.store(into + r.to(tl.int64)[:, None] * 2 * rows + i[None, :], d_ranks_t, mask=own)
        d_weight_t += _multiply(tl.trans(ranks), d_logits)
    channel = (first * 2 + half) * D + d
    into = d_weights + channel * R
    tl.store(into + e[None, :] * R + r[:, None], d_weight_t, mask=(e < D - d)[None, :] & (r < R)[:, None])
    into = d_biases + channel
    tl.store(into + e[None, :] + r[:, None] * 0, d_weight_t, mask=(e < D - d)[None, :] & (r == R)[:, None])


@triton.jit(do_not_specialize=["rows"])
def add_ranks(
    d_ranks, d_selected, rows, slabs, S,
    R: tl.constexpr, CHOSEN: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """The gradient of r in the first R columns of [rows, S], summed over so many parts, and zeros past CHOSEN."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    s = tl.arange(0, BLOCK_S)
    own = (row < rows)[:, None] & (s < R)[None, :]
    place = d_ranks + row[:, None] + s.to(tl.int64)[None, :] * rows
    total = tl.zeros((BLOCK_T, BLOCK_S), tl.float32)
    for _ in range(0, slabs):
        total += tl.load(place, mask=own, other=0.0)
        place += rows.to(tl.int64) * R
    written = (row < rows)[:, None] & ((s < R) | ((s >= CHOSEN) & (s < S)))[None, :]
    tl.store(d_selected + row[:, None] * S + s[None, :], total, mask=written)
