"""Triton kernels of the delta rule with decays per key channel, value keys and reads before the decay: forward.

The formulas are those of chunk.py. `relate` computes the products of tokens within a chunk, L, A, M and N; `invert` puts
X = (I + L)^{-1} in place of L; `walk` passes the state from chunk to chunk and writes the outputs.

A decay between two tokens is the exponential of the sum of the gates between them. It does not split into factors of
both tokens without leaving float32's range. So a chunk has blocks of BLOCK tokens. For tokens of different blocks both
factors begin or end at the start of the later block, and are at most 1. Inside a block they begin and end at its middle,
if the gates of the block add up to no less than -MILD; else tokens are taken one by one. All sums are over their own
range: differences of sums would lose what follows a strong gate.

Matrix products have TF32 operands, 11 bits with the range of float32, if the values are of half precision; else each is
three such products.
"""

import triton
import triton.language as tl

from longseq.kernels.triton_tiles import (
    MILD as LARGEST_INVERSE,
)
from longseq.kernels.triton_tiles import (
    chunk,
    direction,
    eliminate,
    inverse_size,
    load_block,
    load_numbers,
    load_tokens,
    sequence,
    store_block,
    store_tokens,
    token_after,
    unit_lower_inverse,
)

BLOCK = tl.constexpr(16)
MILD = tl.constexpr(60.0)
SIZES = ["T", "H"]


@triton.jit
def sums_before(g, stride, live, column, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums of the gates of a block's tokens before each token, [ROWS, COLUMNS]; `g` points to the first token."""
    i = tl.arange(0, ROWS)
    e = column + tl.arange(0, COLUMNS)
    mask = ((i > 0) & (i - 1 < live))[:, None] & (e < K)[None, :]
    gates = tl.load(g + (i - 1)[:, None] * stride + e[None, :], mask=mask, other=0.0).to(tl.float32)
    return tl.cumsum(gates, 0)


@triton.jit
def sums_after(g, stride, live, column, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums of the gates of the tokens after each token, up to `live` tokens in all, [ROWS, COLUMNS]."""
    gates = load_tokens(g + stride, stride, tl.minimum(live, ROWS) - 1, column, K, ROWS, COLUMNS).to(tl.float32)
    return tl.cumsum(gates, 0, reverse=True)


@triton.jit
def load_writes(
    write, beta, step, beta_step, live, column, K: tl.constexpr, HAS_BETA: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write keys times beta, [ROWS, COLUMNS] in float32."""
    w = load_tokens(write, step, live, column, K, ROWS, COLUMNS).to(tl.float32)
    if HAS_BETA:
        w *= load_numbers(beta, beta_step, live, ROWS)[:, None]
    return w


@triton.jit
def _products_one_by_one(q, r, w, gates, SIZE: tl.constexpr, BEFORE: tl.constexpr):
    """Products of the tokens of one block with those before them, which a decay of any strength separates.

    Returns [SIZE, SIZE] of q and of r. Column j is made after column j + 1: the sums of gates grow by one gate.
    """
    i = tl.arange(0, SIZE)
    of_q = tl.zeros((SIZE, SIZE), tl.float32)
    of_r = tl.zeros((SIZE, SIZE), tl.float32)
    between = gates * 0.0
    between_read = gates * 0.0
    for m in range(0, SIZE):
        j = SIZE - 1 - m
        here = (i == j)[:, None]
        writes = tl.sum(tl.where(here, w, 0.0), 0)[None, :]
        gate = tl.sum(tl.where(here, gates, 0.0), 0)[None, :]
        column = (i == j)[None, :]
        of_q = tl.where(column, tl.sum(q * writes * tl.exp(between), 1)[:, None], of_q)
        of_r = tl.where(column, tl.sum(r * writes * tl.exp(between_read), 1)[:, None], of_r)
        between = tl.where((i >= j)[:, None], between + gate, 0.0)
        if BEFORE:
            between_read = tl.where((i > j)[:, None], between_read + gate, 0.0)
        else:
            between_read = between
    return of_q, of_r


@triton.jit
def _products_in_block(
    q, r, w, gates, until, until_read, SIZE: tl.constexpr, BEFORE: tl.constexpr, PRECISION: tl.constexpr
):
    """Products of the tokens of one block, [SIZE, SIZE] of q and of r with w; what is above the diagonal is not zero."""
    i = tl.arange(0, SIZE)
    if tl.min(until) >= -MILD:
        middle = tl.sum(tl.where((i == SIZE // 2)[:, None], until, 0.0), 0)[None, :]
        right = tl.trans(w * tl.exp(middle - until))
        of_q = tl.dot(q * tl.exp(until - middle), right, input_precision=PRECISION)
        of_r = tl.dot(r * tl.exp(until_read - middle), right, input_precision=PRECISION)
    else:
        of_q, of_r = _products_one_by_one(q, r, w, gates, SIZE, BEFORE)
    return of_q, of_r


@triton.jit
def _store_products(base, before, earlier, own, SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """Store rows of a matrix [CHUNK, CHUNK]: products with earlier blocks, and those of the block itself."""
    i = tl.arange(0, SIZE)
    j = tl.arange(0, CHUNK)
    place = base + (before + i)[:, None] * CHUNK
    tl.store(place + j[None, :], earlier, mask=((j < before) | (j >= before + SIZE))[None, :] & (i >= 0)[:, None])
    tl.store(place + (before + i)[None, :], own)


@triton.jit(do_not_specialize=SIZES)
def relate(
    q, k, write, beta, value_key, g, cu_seqlens, sequence_of, lower, attention, lower_values, attention_values,
    scale, T, H, q_row, q_token, q_head, k_row, k_token, k_head, write_row, write_token, write_head,
    beta_row, beta_token, beta_head, value_row, value_token, value_head, g_row, g_token, g_head,
    K: tl.constexpr, BEFORE: tl.constexpr, HAS_BETA: tl.constexpr, HAS_VALUE_KEY: tl.constexpr, PACKED: tl.constexpr,
    REVERSE: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """L and A, and with value keys M and N, [CHUNK, CHUNK] for each chunk and head; a program has BLOCK rows of them."""
    blocks: tl.constexpr = CHUNK // BLOCK
    before = (tl.program_id(0) % blocks) * BLOCK
    place = (tl.program_id(0) // blocks).to(tl.int64)
    slot, head = place // H, place % H
    row, t, live = chunk(slot, T, cu_seqlens, sequence_of, PACKED, CHUNK, REVERSE)
    NEXT = direction(REVERSE)
    q += row * q_row + head * q_head + t * q_token
    k += row * k_row + head * k_head + t * k_token
    write += row * write_row + head * write_head + t * write_token
    beta += row * beta_row + head * beta_head + t * beta_token
    value_key += row * value_row + head * value_head + t * value_token
    g += row * g_row + head * g_head + t * g_token
    q_step, k_step, write_step = q_token * NEXT, k_token * NEXT, write_token * NEXT
    beta_step, value_step, g_step = beta_token * NEXT, value_token * NEXT, g_token * NEXT
    rest = live - before

    of_q, of_r = tl.zeros((BLOCK, CHUNK), tl.float32), tl.zeros((BLOCK, CHUNK), tl.float32)
    own_q, own_r = tl.zeros((BLOCK, BLOCK), tl.float32), tl.zeros((BLOCK, BLOCK), tl.float32)
    values_q, values_r, own_values_q, own_values_r = of_q, of_r, own_q, own_r
    for column in tl.static_range(0, K, COLUMNS):
        gates = load_tokens(g + before * g_step, g_step, rest, column, K, BLOCK, COLUMNS).to(tl.float32)
        until = tl.cumsum(gates, 0)
        until_read = sums_before(g + before * g_step, g_step, rest, column, K, BLOCK, COLUMNS) if BEFORE else until
        queries = load_tokens(q + before * q_step, q_step, rest, column, K, BLOCK, COLUMNS).to(tl.float32)
        reads = load_tokens(k + before * k_step, k_step, rest, column, K, BLOCK, COLUMNS).to(tl.float32)
        if before > 0:
            earlier = tl.minimum(live, before)
            since = tl.exp(sums_after(g, g_step, earlier, column, K, CHUNK, COLUMNS))
            others = load_writes(write, beta, write_step, beta_step, earlier, column, K, HAS_BETA, CHUNK, COLUMNS)
            right = tl.trans(others * since)
            left, left_read = queries * tl.exp(until), reads * tl.exp(until_read)
            of_q += tl.dot(left, right, input_precision=PRECISION)
            of_r += tl.dot(left_read, right, input_precision=PRECISION)
            if HAS_VALUE_KEY:
                others = load_tokens(value_key, value_step, earlier, column, K, CHUNK, COLUMNS).to(tl.float32)
                right = tl.trans(others * since)
                values_q += tl.dot(left, right, input_precision=PRECISION)
                values_r += tl.dot(left_read, right, input_precision=PRECISION)
        writes = load_writes(
            write + before * write_step, beta + before * beta_step, write_step, beta_step, rest, column, K, HAS_BETA,
            BLOCK, COLUMNS,
        )  # fmt: skip
        more_q, more_r = _products_in_block(queries, reads, writes, gates, until, until_read, BLOCK, BEFORE, PRECISION)
        own_q += more_q
        own_r += more_r
        if HAS_VALUE_KEY:
            added = load_tokens(value_key + before * value_step, value_step, rest, column, K, BLOCK, COLUMNS)
            more_q, more_r = _products_in_block(
                queries, reads, added.to(tl.float32), gates, until, until_read, BLOCK, BEFORE, PRECISION
            )
            own_values_q += more_q
            own_values_r += more_r

    i = tl.arange(0, BLOCK)
    not_after, strictly_before = i[:, None] >= i[None, :], i[:, None] > i[None, :]
    place *= CHUNK * CHUNK
    _store_products(lower + place, before, of_r, tl.where(strictly_before, own_r, 0.0), BLOCK, CHUNK)
    _store_products(attention + place, before, of_q * scale, tl.where(not_after, own_q, 0.0) * scale, BLOCK, CHUNK)
    if HAS_VALUE_KEY:
        _store_products(
            lower_values + place, before, values_r, tl.where(strictly_before, own_values_r, 0.0), BLOCK, CHUNK
        )
        _store_products(
            attention_values + place, before, values_q * scale, tl.where(not_after, own_values_q, 0.0) * scale, BLOCK,
            CHUNK,
        )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def invert(
    lower, cu_seqlens, sequence_of, T, H,
    PACKED: tl.constexpr, REVERSE: tl.constexpr, HALVES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """(I + L)^{-1} of each chunk and head, in place of L."""
    place = tl.program_id(0).to(tl.int64)
    _, _, live = chunk(place // H, T, cu_seqlens, sequence_of, PACKED, CHUNK, REVERSE)
    own = lower + place * CHUNK * CHUNK
    matrix = load_block(own, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
    x = unit_lower_inverse(matrix, live, CHUNK, HALVES)
    if HALVES:
        # Larger numbers leave float16's range, or its precision.
        if inverse_size(tl.max(tl.abs(matrix), 1), x) > LARGEST_INVERSE:
            x = eliminate(matrix, CHUNK)
    store_block(own, 0, 0, x, CHUNK, CHUNK, CHUNK, CHUNK)


@triton.jit(do_not_specialize=SIZES)
def walk(
    q, k, v, write, beta, value_key, g, cu_seqlens, inverse, attention, lower_values, attention_values,
    first, states, last, output,
    scale, T, H, q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
    write_row, write_token, write_head, beta_row, beta_token, beta_head, value_row, value_token, value_head,
    g_row, g_token, g_head,
    K: tl.constexpr, V: tl.constexpr, BEFORE: tl.constexpr, HAS_BETA: tl.constexpr, HAS_VALUE_KEY: tl.constexpr,
    HAS_FIRST: tl.constexpr, SAVE: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The states of one head of one sequence in BLOCK_V value columns, and the outputs; SAVE stores the states before
    each chunk.
    """
    tiles: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    column = (tl.program_id(0) % tiles) * BLOCK_V
    head = (tl.program_id(0) // tiles % H).to(tl.int64)
    n = (tl.program_id(0) // tiles // H).to(tl.int64)
    row, start, end, slot = sequence(n, T, cu_seqlens, PACKED, CHUNK)
    NEXT = direction(REVERSE)
    q += row * q_row + head * q_head
    k += row * k_row + head * k_head
    v += row * v_row + head * v_head
    write += row * write_row + head * write_head
    beta += row * beta_row + head * beta_head
    value_key += row * value_row + head * value_head
    g += row * g_row + head * g_head
    output += (row * T * H + head) * V
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    if HAS_FIRST:
        state = load_block(first + (n * H + head) * K * V, 0, column, K, V, BLOCK_K, BLOCK_V).to(tl.float32)
    for m in range(0, tl.cdiv((end - start).to(tl.int32), CHUNK)):
        t = token_after(m * CHUNK, start, end, REVERSE)
        live = end - start - m * CHUNK
        place = (slot + m) * H + head
        if SAVE:
            store_block(states + place * K * V, 0, column, state, K, V, BLOCK_K, BLOCK_V)
        gates = load_tokens(g + t * g_token, g_token * NEXT, live, 0, K, CHUNK, BLOCK_K).to(tl.float32)
        until = tl.cumsum(gates, 0)
        until_read = until
        if BEFORE:
            until_read = sums_before(g + t * g_token, g_token * NEXT, live, 0, K, CHUNK, BLOCK_K)
        reads = load_tokens(k + t * k_token, k_token * NEXT, live, 0, K, CHUNK, BLOCK_K).to(tl.float32)
        values = load_tokens(v + t * v_token, v_token * NEXT, live, column, V, CHUNK, BLOCK_V).to(tl.float32)
        known = tl.dot(reads * tl.exp(until_read), state, input_precision=PRECISION)
        if HAS_VALUE_KEY:
            among = load_block(lower_values + place * CHUNK * CHUNK, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
            errors = -tl.dot(among, values, known, input_precision=PRECISION)
        else:
            errors = values - known
        x = load_block(inverse + place * CHUNK * CHUNK, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
        written = tl.dot(x, errors, input_precision=PRECISION)
        queries = load_tokens(q + t * q_token, q_token * NEXT, live, 0, K, CHUNK, BLOCK_K).to(tl.float32)
        o = tl.dot(queries * tl.exp(until) * scale, state, input_precision=PRECISION)
        among = load_block(attention + place * CHUNK * CHUNK, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
        o = tl.dot(among, written, o, input_precision=PRECISION)
        if HAS_VALUE_KEY:
            among = load_block(attention_values + place * CHUNK * CHUNK, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
            o = tl.dot(among, values, o, input_precision=PRECISION)
        store_tokens(output + t * H * V, H * V * NEXT, live, column, o, V, CHUNK, BLOCK_V)
        later = tl.exp(sums_after(g + t * g_token, g_token * NEXT, live, 0, K, CHUNK, BLOCK_K))
        writes = load_writes(
            write + t * write_token, beta + t * beta_token, write_token * NEXT, beta_token * NEXT, live, 0, K,
            HAS_BETA, CHUNK, BLOCK_K,
        )  # fmt: skip
        state *= tl.exp(tl.sum(gates, 0))[:, None]
        state = tl.dot(tl.trans(writes * later), written, state, input_precision=PRECISION)
        if HAS_VALUE_KEY:
            added = load_tokens(value_key + t * value_token, value_token * NEXT, live, 0, K, CHUNK, BLOCK_K)
            state = tl.dot(tl.trans(added.to(tl.float32) * later), values, state, input_precision=PRECISION)
    store_block(last + (n * H + head) * K * V, 0, column, state, K, V, BLOCK_K, BLOCK_V)
