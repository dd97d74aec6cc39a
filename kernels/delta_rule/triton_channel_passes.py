"""Triton kernels of the delta rule with decays per key channel, value keys and reads before the decay.

The formulas are those of chunk.py. `relate` computes the products of the tokens of a chunk, L, A, M and N, and `invert`
puts X = (I + L)^{-1} in place of L. `walk` passes the state from chunk to chunk and writes the outputs. Backward,
`retreat` passes the gradient of the state from the last chunk to the first, `differentiate_products` computes the
gradients of L, A, M and N, and `differentiate` those of the inputs.

A decay between two tokens is the exponential of the sum of the gates between them. As a factor for each token it would
leave float32's range. So a chunk has blocks of BLOCK tokens. For tokens of different blocks one factor ends and the
other begins at the start of the later block, and both are at most 1. Inside a block there are four levels: tokens in
the halves of 2, 4, 8 and 16 tokens are separated at the middle. All sums are over their own range: differences of sums
would lose what follows a strong gate.
"""

import triton
import triton.language as tl

from longseq.kernels.triton_tiles import (
    MILD,
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
LEVELS = tl.constexpr(4)  # BLOCK is 2 to the power of it
STEEPEST = tl.constexpr(-104.0)  # e to the power of it is 0 in float32, as of every smaller number
SIZES = ["T", "H"]


@triton.jit
def load_gates(g, stride, live, column, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Log gates [ROWS, COLUMNS] in float32, clamped so that their sums are finite and exact enough."""
    gates = load_tokens(g, stride, live, column, K, ROWS, COLUMNS).to(tl.float32)
    return tl.maximum(gates, STEEPEST, tl.PropagateNan.ALL)


@triton.jit
def sums_before(g, stride, live, column, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums of the gates before each token, from the first token on, to which `g` points, [ROWS, COLUMNS]."""
    i = tl.arange(0, ROWS)
    e = column + tl.arange(0, COLUMNS)
    mask = ((i > 0) & (i - 1 < live))[:, None] & (e < K)[None, :]
    gates = tl.load(g + (i - 1)[:, None] * stride + e[None, :], mask=mask, other=0.0).to(tl.float32)
    return tl.cumsum(tl.maximum(gates, STEEPEST, tl.PropagateNan.ALL), 0)


@triton.jit
def sums_after(g, stride, live, column, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums of the gates after each token, up to `live` tokens in all, [ROWS, COLUMNS]."""
    gates = load_gates(g + stride, stride, tl.minimum(live, ROWS) - 1, column, K, ROWS, COLUMNS)
    return tl.cumsum(gates, 0, reverse=True)


@triton.jit
def add_where(mask, x):
    """For each row of a mask the sum of the rows of x where it is true; what it excludes is never added."""
    return tl.dot(tl.where(mask, 1.0, 0.0), x, input_precision="tf32x3")


@triton.jit
def strictly_before(SIZE: tl.constexpr):
    """A mask [SIZE, SIZE]: the column's token is before that of the row."""
    i = tl.arange(0, SIZE)
    return i[:, None] > i[None, :]


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
def _level(gates, level, BEFORE: tl.constexpr, SIZE: tl.constexpr):
    """The pairs of tokens and the decays of a level, at which a block is cut into parts of 2^(level + 1) tokens.

    Returns two masks, of the pairs (row after the middle of a part, column before it) and of tokens in the same half,
    and the decays of queries and reads since the middle and of writes until it.
    """
    i = tl.arange(0, SIZE)
    half = i >> level
    same = half[:, None] == half[None, :]
    since = add_where(same & (i[:, None] >= i[None, :]), gates)
    since_read = add_where(same & (i[:, None] > i[None, :]), gates) if BEFORE else since
    until = add_where(same & (i[:, None] < i[None, :]), gates)
    pairs = (half[:, None] == half[None, :] + 1) & (half % 2 == 1)[:, None]
    return pairs, same, tl.exp(since), tl.exp(since_read), tl.exp(until)


@triton.jit
def _products_in_block(q, r, w, gates, SIZE: tl.constexpr, BEFORE: tl.constexpr, PRECISION: tl.constexpr):
    """Products of the tokens of one block, [SIZE, SIZE] of q and of r with w: lower and strictly lower triangular."""
    i = tl.arange(0, SIZE)
    of_q = tl.where(i[:, None] == i[None, :], tl.sum(q * w, 1)[:, None], 0.0)
    of_r = tl.zeros((SIZE, SIZE), tl.float32)
    for level in range(0, LEVELS):
        pairs, _, since, since_read, until = _level(gates, level, BEFORE, SIZE)
        right = tl.trans(w * until)
        of_q += tl.where(pairs, tl.dot(q * since, right, input_precision=PRECISION), 0.0)
        of_r += tl.where(pairs, tl.dot(r * since_read, right, input_precision=PRECISION), 0.0)
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
    """L and A, and with value keys M and N, [CHUNK, CHUNK] for each chunk and head; a program has BLOCK rows."""
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
    for column in range(0, K, COLUMNS):
        gates = load_gates(g + before * g_step, g_step, rest, column, K, BLOCK, COLUMNS)
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
        more_q, more_r = _products_in_block(queries, reads, writes, gates, BLOCK, BEFORE, PRECISION)
        own_q += more_q
        own_r += more_r
        if HAS_VALUE_KEY:
            added = load_tokens(value_key + before * value_step, value_step, rest, column, K, BLOCK, COLUMNS)
            more_q, more_r = _products_in_block(queries, reads, added.to(tl.float32), gates, BLOCK, BEFORE, PRECISION)
            own_values_q += more_q
            own_values_r += more_r

    place *= CHUNK * CHUNK
    _store_products(lower + place, before, of_r, own_r, BLOCK, CHUNK)
    _store_products(attention + place, before, of_q * scale, own_q * scale, BLOCK, CHUNK)
    if HAS_VALUE_KEY:
        _store_products(lower_values + place, before, values_r, own_values_r, BLOCK, CHUNK)
        _store_products(attention_values + place, before, values_q * scale, own_values_q * scale, BLOCK, CHUNK)


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
        if inverse_size(tl.max(tl.abs(matrix), 1), x) > MILD:
            x = eliminate(matrix, CHUNK)
    store_block(own, 0, 0, x, CHUNK, CHUNK, CHUNK, CHUNK)


@triton.jit(do_not_specialize=SIZES)
def walk(
    q, k, v, write, beta, value_key, g, cu_seqlens, inverse, attention, lower_values, attention_values,
    first, states, written_out, last, output,
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
        gates = load_gates(g + t * g_token, g_token * NEXT, live, 0, K, CHUNK, BLOCK_K)
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
        if SAVE:
            store_block(written_out + place * CHUNK * V, 0, column, written, CHUNK, V, CHUNK, BLOCK_V)
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


@triton.jit(do_not_specialize=SIZES)
def retreat(
    q, k, v, write, beta, value_key, g, cu_seqlens, inverse, attention, lower_values, attention_values,
    d_output, d_last, d_states, d_errors, d_first, d_v,
    scale, T, H, q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
    write_row, write_token, write_head, beta_row, beta_token, beta_head, value_row, value_token, value_head,
    g_row, g_token, g_head,
    K: tl.constexpr, V: tl.constexpr, BEFORE: tl.constexpr, HAS_BETA: tl.constexpr, HAS_VALUE_KEY: tl.constexpr,
    HAS_LAST: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """From the last chunk to the first: the gradients of the states after each chunk, of the errors and of v."""
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
    d_output += (row * T * H + head) * V
    d_v += (row * T * H + head) * V
    d_state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    if HAS_LAST:
        d_state = load_block(d_last + (n * H + head) * K * V, 0, column, K, V, BLOCK_K, BLOCK_V).to(tl.float32)
    chunks = tl.cdiv((end - start).to(tl.int32), CHUNK)
    for back in range(0, chunks):
        m = chunks - 1 - back
        t = token_after(m * CHUNK, start, end, REVERSE)
        live = end - start - m * CHUNK
        place = (slot + m) * H + head
        store_block(d_states + place * K * V, 0, column, d_state, K, V, BLOCK_K, BLOCK_V)
        d_o = load_tokens(d_output + t * H * V, H * V * NEXT, live, column, V, CHUNK, BLOCK_V).to(tl.float32)
        later = tl.exp(sums_after(g + t * g_token, g_token * NEXT, live, 0, K, CHUNK, BLOCK_K))
        writes = load_writes(
            write + t * write_token, beta + t * beta_token, write_token * NEXT, beta_token * NEXT, live, 0, K,
            HAS_BETA, CHUNK, BLOCK_K,
        )  # fmt: skip
        among = load_block(attention + place * CHUNK * CHUNK, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
        d_written = tl.dot(writes * later, d_state, input_precision=PRECISION)
        d_written = tl.dot(tl.trans(among), d_o, d_written, input_precision=PRECISION)
        x = load_block(inverse + place * CHUNK * CHUNK, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
        d_error = tl.dot(tl.trans(x), d_written, input_precision=PRECISION)
        store_block(d_errors + place * CHUNK * V, 0, column, d_error, CHUNK, V, CHUNK, BLOCK_V)
        if HAS_VALUE_KEY:
            added = load_tokens(value_key + t * value_token, value_token * NEXT, live, 0, K, CHUNK, BLOCK_K)
            d_value = tl.dot(added.to(tl.float32) * later, d_state, input_precision=PRECISION)
            among = load_block(attention_values + place * CHUNK * CHUNK, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
            d_value = tl.dot(tl.trans(among), d_o, d_value, input_precision=PRECISION)
            among = load_block(lower_values + place * CHUNK * CHUNK, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
            d_value -= tl.dot(tl.trans(among), d_error, input_precision=PRECISION)
        else:
            d_value = d_error
        store_tokens(d_v + t * H * V, H * V * NEXT, live, column, d_value, V, CHUNK, BLOCK_V)
        gates = load_gates(g + t * g_token, g_token * NEXT, live, 0, K, CHUNK, BLOCK_K)
        until = tl.cumsum(gates, 0)
        queries = load_tokens(q + t * q_token, q_token * NEXT, live, 0, K, CHUNK, BLOCK_K).to(tl.float32)
        d_state *= tl.exp(tl.sum(gates, 0))[:, None]
        d_state = tl.dot(tl.trans(queries * tl.exp(until) * scale), d_o, d_state, input_precision=PRECISION)
        if BEFORE:
            until = sums_before(g + t * g_token, g_token * NEXT, live, 0, K, CHUNK, BLOCK_K)
        reads = load_tokens(k + t * k_token, k_token * NEXT, live, 0, K, CHUNK, BLOCK_K).to(tl.float32)
        d_state -= tl.dot(tl.trans(reads * tl.exp(until)), d_error, input_precision=PRECISION)
    store_block(d_first + (n * H + head) * K * V, 0, column, d_state, K, V, BLOCK_K, BLOCK_V)


@triton.jit(do_not_specialize=SIZES)
def differentiate_products(
    v, cu_seqlens, sequence_of, d_output, written, d_errors, d_lower, d_attention, d_lower_values, d_attention_values,
    scale, T, H, v_row, v_token, v_head,
    V: tl.constexpr, HAS_VALUE_KEY: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The gradients of L, A, M and N, [CHUNK, CHUNK] for each chunk and head."""
    place = tl.program_id(0).to(tl.int64)
    slot, head = place // H, place % H
    row, t, live = chunk(slot, T, cu_seqlens, sequence_of, PACKED, CHUNK, REVERSE)
    NEXT = direction(REVERSE)
    v += row * v_row + head * v_head + t * v_token
    d_output += ((row * T + t) * H + head) * V
    d_a, d_l = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
    d_n, d_m = d_a, d_l
    for column in tl.static_range(0, V, BLOCK_V):
        d_o = load_tokens(d_output, H * V * NEXT, live, column, V, CHUNK, BLOCK_V).to(tl.float32)
        d_error = load_block(d_errors + place * CHUNK * V, 0, column, CHUNK, V, CHUNK, BLOCK_V)
        right = tl.trans(load_block(written + place * CHUNK * V, 0, column, CHUNK, V, CHUNK, BLOCK_V))
        d_a = tl.dot(d_o, right, d_a, input_precision=PRECISION)
        d_l = tl.dot(d_error, right, d_l, input_precision=PRECISION)
        if HAS_VALUE_KEY:
            right = tl.trans(load_tokens(v, v_token * NEXT, live, column, V, CHUNK, BLOCK_V).to(tl.float32))
            d_n = tl.dot(d_o, right, d_n, input_precision=PRECISION)
            d_m = tl.dot(d_error, right, d_m, input_precision=PRECISION)
    i = tl.arange(0, CHUNK)
    not_after, earlier = i[:, None] >= i[None, :], strictly_before(CHUNK)
    place *= CHUNK * CHUNK
    store_block(d_attention + place, 0, 0, tl.where(not_after, d_a * scale, 0.0), CHUNK, CHUNK, CHUNK, CHUNK)
    store_block(d_lower + place, 0, 0, tl.where(earlier, -d_l, 0.0), CHUNK, CHUNK, CHUNK, CHUNK)
    if HAS_VALUE_KEY:
        store_block(d_attention_values + place, 0, 0, tl.where(not_after, d_n * scale, 0.0), CHUNK, CHUNK, CHUNK, CHUNK)
        store_block(d_lower_values + place, 0, 0, tl.where(earlier, -d_m, 0.0), CHUNK, CHUNK, CHUNK, CHUNK)


@triton.jit
def _through_block(q, r, w, gates, d_q, d_r, SIZE: tl.constexpr, BEFORE: tl.constexpr, PRECISION: tl.constexpr):
    """Gradients of q, r, w and the gates through `_products_in_block`, for gradients d_q, d_r [SIZE, SIZE] of these."""
    i = tl.arange(0, SIZE)
    own = tl.sum(tl.where(i[:, None] == i[None, :], d_q, 0.0), 1)[:, None]
    of_q, of_r, of_w = own * w, w * 0.0, own * q
    of_g = of_r
    for level in range(0, LEVELS):
        pairs, same, since, since_read, until = _level(gates, level, BEFORE, SIZE)
        left, left_read = tl.where(pairs, d_q, 0.0), tl.where(pairs, d_r, 0.0)
        more_q = tl.dot(left, w * until, input_precision=PRECISION) * since
        more_r = tl.dot(left_read, w * until, input_precision=PRECISION) * since_read
        more_w = tl.dot(tl.trans(left), q * since, input_precision=PRECISION)
        more_w = tl.dot(tl.trans(left_read), r * since_read, more_w, input_precision=PRECISION) * until
        of_q += more_q
        of_r += more_r
        of_w += more_w
        of_g += sum_of_reads(q * more_q, r * more_r, same, BEFORE, SIZE)
        of_g += add_where(same & strictly_before(SIZE), w * more_w)
    return of_q, of_r, of_w, of_g


@triton.jit
def sum_of_reads(queries, reads, among, BEFORE: tl.constexpr, SIZE: tl.constexpr):
    """For each gate the sum over the queries and reads, among those of a mask, that it decays."""
    i = tl.arange(0, SIZE)
    not_before = among & (i[:, None] <= i[None, :])
    if BEFORE:  # a read before the decay lacks its own gate
        return add_where(not_before, queries) + add_where(among & (i[:, None] < i[None, :]), reads)
    return add_where(not_before, queries + reads)


@triton.jit
def load_products(base, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    """Rows from `row` and columns from `column` on of a matrix [CHUNK, CHUNK]; zero outside of it."""
    i = row + tl.arange(0, ROWS)
    j = column + tl.arange(0, COLUMNS)
    mask = (i < CHUNK)[:, None] & (j < CHUNK)[None, :]
    return tl.load(base + i[:, None] * CHUNK + j[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=SIZES)
def differentiate(
    q, k, v, write, beta, value_key, g, cu_seqlens, sequence_of, d_output, states, d_states, written, d_errors,
    d_lower, d_attention, d_lower_values, d_attention_values, d_q, d_k, d_write, d_value_key, d_g,
    scale, T, H, q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
    write_row, write_token, write_head, beta_row, beta_token, beta_head, value_row, value_token, value_head,
    g_row, g_token, g_head,
    K: tl.constexpr, V: tl.constexpr, BEFORE: tl.constexpr, HAS_BETA: tl.constexpr, HAS_VALUE_KEY: tl.constexpr,
    PACKED: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The gradients of q, k, the writes, value keys and gates of a chunk and head, in COLUMNS key channels.

    d_q, d_k, d_write, d_value_key and d_g are contiguous, [B, T, H, K] in float32.
    """
    tiles: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    blocks: tl.constexpr = CHUNK // BLOCK
    column = (tl.program_id(0) % tiles) * COLUMNS
    place = (tl.program_id(0) // tiles).to(tl.int64)
    slot, head = place // H, place % H
    row, t, live = chunk(slot, T, cu_seqlens, sequence_of, PACKED, CHUNK, REVERSE)
    NEXT = direction(REVERSE)
    q += row * q_row + head * q_head + t * q_token
    k += row * k_row + head * k_head + t * k_token
    v += row * v_row + head * v_head + t * v_token
    write += row * write_row + head * write_head + t * write_token
    beta += row * beta_row + head * beta_head + t * beta_token
    value_key += row * value_row + head * value_head + t * value_token
    g += row * g_row + head * g_head + t * g_token
    q_step, k_step, v_step, write_step = q_token * NEXT, k_token * NEXT, v_token * NEXT, write_token * NEXT
    beta_step, value_step, g_step = beta_token * NEXT, value_token * NEXT, g_token * NEXT
    own = ((row * T + t) * H + head) * K
    d_q += own
    d_k += own
    d_write += own
    d_value_key += own
    d_g += own
    step = H * K * NEXT
    d_output += ((row * T + t) * H + head) * V
    d_attention += place * CHUNK * CHUNK
    d_lower += place * CHUNK * CHUNK
    d_attention_values += place * CHUNK * CHUNK
    d_lower_values += place * CHUNK * CHUNK

    # What the gates decay in the whole chunk: queries and reads since its start, writes until its end, the state.
    of_q, of_r = tl.zeros((CHUNK, COLUMNS), tl.float32), tl.zeros((CHUNK, COLUMNS), tl.float32)
    of_w, of_state = of_q, tl.zeros((COLUMNS,), tl.float32)
    of_a = of_q
    for start in tl.static_range(0, V, BLOCK_V):
        state = load_block(states + place * K * V, column, start, K, V, COLUMNS, BLOCK_V)
        d_state = load_block(d_states + place * K * V, column, start, K, V, COLUMNS, BLOCK_V)
        of_state += tl.sum(state * d_state, 1)
        d_o = load_tokens(d_output, H * V * NEXT, live, start, V, CHUNK, BLOCK_V).to(tl.float32)
        d_error = load_block(d_errors + place * CHUNK * V, 0, start, CHUNK, V, CHUNK, BLOCK_V)
        u = load_block(written + place * CHUNK * V, 0, start, CHUNK, V, CHUNK, BLOCK_V)
        of_q = tl.dot(d_o, tl.trans(state), of_q, input_precision=PRECISION)
        of_r = tl.dot(d_error, tl.trans(state), of_r, input_precision=PRECISION)
        of_w = tl.dot(u, tl.trans(d_state), of_w, input_precision=PRECISION)
        if HAS_VALUE_KEY:
            values = load_tokens(v, v_step, live, start, V, CHUNK, BLOCK_V).to(tl.float32)
            of_a = tl.dot(values, tl.trans(d_state), of_a, input_precision=PRECISION)
    gates = load_gates(g, g_step, live, column, K, CHUNK, COLUMNS)
    until = tl.cumsum(gates, 0)
    until_read = sums_before(g, g_step, live, column, K, CHUNK, COLUMNS) if BEFORE else until
    later = tl.exp(sums_after(g, g_step, live, column, K, CHUNK, COLUMNS))
    of_q *= tl.exp(until) * scale
    of_r *= -tl.exp(until_read)
    of_w *= later
    store_tokens(d_q, step, live, column, of_q, K, CHUNK, COLUMNS)
    store_tokens(d_k, step, live, column, of_r, K, CHUNK, COLUMNS)
    store_tokens(d_write, step, live, column, of_w, K, CHUNK, COLUMNS)
    of_g = load_tokens(q, q_step, live, column, K, CHUNK, COLUMNS).to(tl.float32) * of_q
    reads = load_tokens(k, k_step, live, column, K, CHUNK, COLUMNS).to(tl.float32) * of_r
    i = tl.arange(0, CHUNK)
    of_g = sum_of_reads(of_g, reads, i[:, None] >= 0, BEFORE, CHUNK)
    writes = load_writes(write, beta, write_step, beta_step, live, column, K, HAS_BETA, CHUNK, COLUMNS) * of_w
    if HAS_VALUE_KEY:
        of_a *= later
        store_tokens(d_value_key, step, live, column, of_a, K, CHUNK, COLUMNS)
        writes += load_tokens(value_key, value_step, live, column, K, CHUNK, COLUMNS).to(tl.float32) * of_a
    of_g += add_where(strictly_before(CHUNK), writes) + (of_state * tl.exp(tl.sum(gates, 0)))[None, :]
    store_tokens(d_g, step, live, column, of_g, K, CHUNK, COLUMNS)
    tl.debug_barrier()

    # Pairs of tokens of the chunk, by blocks of BLOCK tokens: those in the block `b`, those before it and after it.
    for b in range(0, blocks):
        before = b * BLOCK
        after = before + BLOCK
        rest = live - before
        gate = load_gates(g + before * g_step, g_step, rest, column, K, BLOCK, COLUMNS)
        sums = tl.cumsum(gate, 0)
        sums_read = sums_before(g + before * g_step, g_step, rest, column, K, BLOCK, COLUMNS) if BEFORE else sums
        query = load_tokens(q + before * q_step, q_step, rest, column, K, BLOCK, COLUMNS).to(tl.float32)
        own_read = load_tokens(k + before * k_step, k_step, rest, column, K, BLOCK, COLUMNS).to(tl.float32)
        own_write = load_writes(
            write + before * write_step, beta + before * beta_step, write_step, beta_step, rest, column, K, HAS_BETA,
            BLOCK, COLUMNS,
        )  # fmt: skip
        own_q, own_r, own_w, own_g = _through_block(
            query, own_read, own_write, gate,
            load_products(d_attention, before, before, BLOCK, BLOCK, CHUNK),
            load_products(d_lower, before, before, BLOCK, BLOCK, CHUNK), BLOCK, BEFORE, PRECISION,
        )  # fmt: skip
        # Of earlier tokens, until the start of the block; of later ones, since its end.
        earlier = tl.minimum(live, before)
        since = tl.exp(sums_after(g, g_step, earlier, column, K, CHUNK, COLUMNS))
        old = since * load_writes(write, beta, write_step, beta_step, earlier, column, K, HAS_BETA, CHUNK, COLUMNS)
        left = live - after
        next_gates = load_gates(g + after * g_step, g_step, left, column, K, CHUNK, COLUMNS)
        upto = tl.cumsum(next_gates, 0)
        new = load_tokens(q + after * q_step, q_step, left, column, K, CHUNK, COLUMNS).to(tl.float32) * tl.exp(upto)
        if BEFORE:
            upto = sums_before(g + after * g_step, g_step, left, column, K, CHUNK, COLUMNS)
        read = load_tokens(k + after * k_step, k_step, left, column, K, CHUNK, COLUMNS).to(tl.float32) * tl.exp(upto)
        from_old = tl.dot(load_products(d_attention, before, 0, BLOCK, CHUNK, CHUNK), old, input_precision=PRECISION)
        from_old_read = tl.dot(load_products(d_lower, before, 0, BLOCK, CHUNK, CHUNK), old, input_precision=PRECISION)
        to_new = tl.dot(
            tl.trans(load_products(d_attention, after, before, CHUNK, BLOCK, CHUNK)), new, input_precision=PRECISION
        )
        to_new = tl.dot(
            tl.trans(load_products(d_lower, after, before, CHUNK, BLOCK, CHUNK)), read, to_new,
            input_precision=PRECISION,
        )  # fmt: skip
        # Pairs whose tokens lie on both sides of the block.
        across = tl.dot(load_products(d_attention, after, 0, CHUNK, CHUNK, CHUNK), old, input_precision=PRECISION) * new
        across += tl.dot(load_products(d_lower, after, 0, CHUNK, CHUNK, CHUNK), old, input_precision=PRECISION) * read
        around = tl.sum(across, 0)
        place_of = before * step
        if HAS_VALUE_KEY:
            added = load_tokens(value_key + before * value_step, value_step, rest, column, K, BLOCK, COLUMNS)
            added = added.to(tl.float32)
            more_q, more_r, own_a, more_g = _through_block(
                query, own_read, added, gate,
                load_products(d_attention_values, before, before, BLOCK, BLOCK, CHUNK),
                load_products(d_lower_values, before, before, BLOCK, BLOCK, CHUNK), BLOCK, BEFORE, PRECISION,
            )  # fmt: skip
            own_q += more_q
            own_r += more_r
            own_g += more_g
            old = since * load_tokens(value_key, value_step, earlier, column, K, CHUNK, COLUMNS).to(tl.float32)
            from_old = tl.dot(
                load_products(d_attention_values, before, 0, BLOCK, CHUNK, CHUNK), old, from_old,
                input_precision=PRECISION,
            )  # fmt: skip
            from_old_read = tl.dot(
                load_products(d_lower_values, before, 0, BLOCK, CHUNK, CHUNK), old, from_old_read,
                input_precision=PRECISION,
            )  # fmt: skip
            new_values = tl.dot(
                tl.trans(load_products(d_attention_values, after, before, CHUNK, BLOCK, CHUNK)), new,
                input_precision=PRECISION,
            )  # fmt: skip
            new_values = tl.dot(
                tl.trans(load_products(d_lower_values, after, before, CHUNK, BLOCK, CHUNK)), read, new_values,
                input_precision=PRECISION,
            )  # fmt: skip
            across = new * tl.dot(
                load_products(d_attention_values, after, 0, CHUNK, CHUNK, CHUNK), old, input_precision=PRECISION
            )
            across += read * tl.dot(
                load_products(d_lower_values, after, 0, CHUNK, CHUNK, CHUNK), old, input_precision=PRECISION
            )
            around += tl.sum(across, 0)
        until_end = tl.exp(sums_after(g + before * g_step, g_step, rest, column, K, BLOCK, COLUMNS))
        from_old *= tl.exp(sums)
        from_old_read *= tl.exp(sums_read)
        to_new *= until_end
        j = tl.arange(0, BLOCK)
        own_g += sum_of_reads(query * from_old, own_read * from_old_read, j[:, None] >= 0, BEFORE, BLOCK)
        passed = own_write * to_new
        if HAS_VALUE_KEY:
            new_values *= until_end
            passed += added * new_values
            own_a += new_values + load_tokens(d_value_key + place_of, step, rest, column, K, BLOCK, COLUMNS)
            store_tokens(d_value_key + place_of, step, rest, column, own_a, K, BLOCK, COLUMNS)
        own_g += add_where(strictly_before(BLOCK), passed) + (around * tl.exp(tl.sum(gate, 0)))[None, :]
        own_q += from_old + load_tokens(d_q + place_of, step, rest, column, K, BLOCK, COLUMNS)
        own_r += from_old_read + load_tokens(d_k + place_of, step, rest, column, K, BLOCK, COLUMNS)
        own_w += to_new + load_tokens(d_write + place_of, step, rest, column, K, BLOCK, COLUMNS)
        own_g += load_tokens(d_g + place_of, step, rest, column, K, BLOCK, COLUMNS)
        store_tokens(d_q + place_of, step, rest, column, own_q, K, BLOCK, COLUMNS)
        store_tokens(d_k + place_of, step, rest, column, own_r, K, BLOCK, COLUMNS)
        store_tokens(d_write + place_of, step, rest, column, own_w, K, BLOCK, COLUMNS)
        store_tokens(d_g + place_of, step, rest, column, own_g, K, BLOCK, COLUMNS)
