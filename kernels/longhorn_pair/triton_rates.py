"""Rates of low rank in Triton, sigmoid(r weightᵀ + bias) for both halves of the rows, and their gradients.

Both kernels move little but the rates themselves: a product of 24 columns costs less than reading what it gives.
"""

import os

import triton
import triton.language as tl

# Triton's interpreter multiplies bfloat16 numbers as integers.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def _multiply(x, y):
    if INTERPRETED:
        return tl.dot(x.to(tl.float32), y.to(tl.float32))
    return tl.dot(x, y, input_precision="tf32x3")


@triton.jit
def _load_weight(weight, half, i, I, R: tl.constexpr, BLOCK_R: tl.constexpr):
    """The weights of some channels, [channels, BLOCK_R], zero past R."""
    r = tl.arange(0, BLOCK_R)
    mask = (i < I)[:, None] & (r < R)[None, :]
    return tl.load(weight + (half * I + i)[:, None] * R + r[None, :], mask=mask, other=0.0)


@triton.jit
def _load_ranks(selected, row, live, S, R: tl.constexpr, BLOCK_R: tl.constexpr):
    """The first R columns of some rows, [rows, BLOCK_R], zero past them."""
    r = tl.arange(0, BLOCK_R)
    return tl.load(selected + row[:, None] * S + r[None, :], mask=live[:, None] & (r < R)[None, :], other=0.0)


@triton.jit(do_not_specialize=["rows"])
def find_rates(
    selected, weight, bias, rates, rows, I, S,
    R: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """The rates of some rows and channels; each half has so many rows."""
    over_i = tl.cdiv(I, BLOCK_I)
    over_t = tl.cdiv(rows, BLOCK_T)
    block = tl.program_id(0) // over_i
    half = (block // over_t).to(tl.int64)
    t = (block % over_t) * BLOCK_T + tl.arange(0, BLOCK_T)
    i = (tl.program_id(0) % over_i) * BLOCK_I + tl.arange(0, BLOCK_I)
    row = half * rows + t
    ranks = _load_ranks(selected, row, t < rows, S, R, BLOCK_R)
    factors = _load_weight(weight, half, i, I, R, BLOCK_R).to(ranks.dtype)
    logits = _multiply(ranks, tl.trans(factors))
    logits += tl.load(bias + half * I + i, mask=i < I, other=0.0).to(tl.float32)[None, :]
    tl.store(rates + row[:, None] * I + i[None, :], tl.sigmoid(logits), mask=(t < rows)[:, None] & (i < I)[None, :])


@triton.jit(do_not_specialize=["rows", "blocks", "programs"])
def differentiate_rates(
    selected, weight, rates, d_rates, d_ranks, d_weights, d_biases, rows, blocks, programs, I, S,
    R: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """From the gradients of rates to those of r, one part for each block of channels [blocks of I, 2 rows, R], and of
    weight and bias, one part for each of so many programs [programs, 2, I, R] and [programs, 2, I].

    A program walks through blocks of rows that are as many apart as there are programs.
    """
    over_i = tl.cdiv(I, BLOCK_I)
    slab = (tl.program_id(0) % over_i).to(tl.int64)
    first = (tl.program_id(0) // over_i) % programs
    half = (tl.program_id(0) // over_i // programs).to(tl.int64)
    i = slab * BLOCK_I + tl.arange(0, BLOCK_I)
    r = tl.arange(0, BLOCK_R)
    factors = _load_weight(weight, half, i, I, R, BLOCK_R).to(selected.dtype.element_ty)
    d_weight = tl.zeros((BLOCK_I, BLOCK_R), tl.float32)
    d_bias = tl.zeros((BLOCK_I,), tl.float32)
    for block in range(first, blocks, programs):
        t = block * BLOCK_T + tl.arange(0, BLOCK_T)
        row = half * rows + t
        inside = (t < rows)[:, None] & (i < I)[None, :]
        place = row[:, None] * I + i[None, :]
        share = tl.load(rates + place, mask=inside, other=0.0).to(tl.float32)
        d_logits = tl.load(d_rates + place, mask=inside, other=0.0).to(tl.float32) * share * (1.0 - share)
        d_bias += tl.sum(d_logits, 0)
        ranks = _load_ranks(selected, row, t < rows, S, R, BLOCK_R)
        d_logits = d_logits.to(ranks.dtype)
        own = (t < rows)[:, None] & (r < R)[None, :]
        tl.store(d_ranks + (slab * 2 * rows + row)[:, None] * R + r[None, :], _multiply(d_logits, factors), mask=own)
        d_weight += _multiply(tl.trans(d_logits), ranks)
    place = (first * 2 + half) * I + i
    tl.store(d_weights + place[:, None] * R + r[None, :], d_weight, mask=(i < I)[:, None] & (r < R)[None, :])
    tl.store(d_biases + place, d_bias, mask=i < I)


@triton.jit(do_not_specialize=["rows"])
def add_ranks(
    d_ranks, d_selected, rows, slabs, S,
    R: tl.constexpr, CHOSEN: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """The gradient of r in the first R columns of [rows, S], summed over so many parts, and zeros past CHOSEN."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    s = tl.arange(0, BLOCK_S)
    own = (row < rows)[:, None] & (s < R)[None, :]
    place = d_ranks + row[:, None] * R + s[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_S), tl.float32)
    for _ in range(0, slabs):
        total += tl.load(place, mask=own, other=0.0)
        place += rows.to(tl.int64) * R
    written = (row < rows)[:, None] & ((s < R) | ((s >= CHOSEN) & (s < S)))[None, :]
    tl.store(d_selected + row[:, None] * S + s[None, :], total, mask=written)
