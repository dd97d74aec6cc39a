"""Rates of low rank in Triton, sigmoid(r weightᵀ + bias) for both halves of the rows, and their gradients.

The rates dominate the memory traffic of both kernels: it costs less to compute a product of 24 columns again than to
read its result.
"""

import triton
import triton.language as tl

from longseq.kernels.diagonal_scan.triton_forward import INTERPRETED


@triton.jit
def _multiply(x, y):
    if INTERPRETED:  # Triton's interpreter takes bfloat16 for integers
        return tl.dot(x.to(tl.float32), y.to(tl.float32))
    return tl.dot(x, y, input_precision="tf32x3")


@triton.jit
def _load_columns(x, row, live, R: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """R columns of the first `live` of ROWS rows with stride `row`, [ROWS, COLUMNS] padded with zeros."""
    i = tl.arange(0, ROWS)
    r = tl.arange(0, COLUMNS)
    return tl.load(x + i[:, None] * row + r[None, :], mask=(i < live)[:, None] & (r < R)[None, :], other=0.0)


@triton.jit(do_not_specialize=["rows"])
def find_rates(
    selected, weight, bias, rates, rows, D, S,
    R: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The rates of a block of rows and channels. Each half has `rows` rows."""
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
    """The gradients of r, weight and bias from the gradients of the rates, in parts that are summed afterwards.

    The parts of r are one for each block of channels, [blocks of channels, R, 2 rows]. Those of weight and bias are one
    for each of the `programs` programs of a half, [programs, 2, D, R] and [programs, 2, D]. Each program takes every
    `programs`th block of rows. Where `d_weights` and `d_biases` are None, only the parts of r are computed.
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
        ranks = tl.where((r == R)[None, :], 1.0, ranks).to(ranks.dtype)  # a zero of the padding becomes the bias's 1
        d_logits = d_logits.to(ranks.dtype)
        # Both products take the gradient of the logits as the right operand, which Hopper reads from shared memory
        # without a copy to registers.
        into = d_ranks + slab * R * 2 * rows + row
        own = (r < R)[:, None] & (i < live)[None, :]
        d_ranks_t = _multiply(tl.trans(factors), tl.trans(d_logits))
        tl.store(into + r.to(tl.int64)[:, None] * 2 * rows + i[None, :], d_ranks_t, mask=own)
        if d_weights is not None:
            d_weight_t += _multiply(tl.trans(ranks), d_logits)
    if d_weights is not None:
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
    """The sum of r's parts in the first R columns of d_selected [rows, S]; zeros in its columns from CHOSEN on."""
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
