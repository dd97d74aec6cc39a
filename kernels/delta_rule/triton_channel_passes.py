"""Triton kernels of the delta rule with decays per key channel, value keys or reads before the decay.

The formulas and letters are those of chunk.py: L, A, M and N are products of the tokens of a chunk, X = (I + L)^{-1},
and U is what is written. `sum_gates` computes b, `relate` L, A, M and N, and `prepare` X and what a walk reads:
W = -X (e^c ⊙ R), X V (with value keys -X M V), queries e^b ⊙ Q, writes e^{b_C - b} ⊙ W and value keys decayed likewise.
`walk` passes the state from chunk to chunk, U = X V + W S, and computes the outputs. Backward, it walks again for the
states, `retreat` passes the gradient of the state from the last chunk to the first, `differentiate_products` computes
the gradients of L, A, M and N, and `differentiate` those of the inputs.

The decay between two tokens is e^{b_i - b_j}. As two factors, one for each token, it could leave float32's range. So a
chunk has blocks of 2^n tokens, n = 0 or at least 3, the largest over which no channel decays by more than 2^-LIMIT: b
relative to the mean of its values at the two ends of a block stays in range, and one product has all pairs of a block.
Most chunks are a single block. In the others, pairs of different blocks are sorted by level, in `relate_levels` and
`differentiate_levels`: at level n a chunk is cut into parts of 2^(n + 1) tokens, and a pair belongs to the level where
its tokens lie in the two halves of one part. There one factor is the decay from the first token to the end of the first
half, the other from there to the second token. With strong gates a block is a single token, and all pairs are sorted by
level.

A long sequence with few heads is cut into segments of time. A first walk begins each of them from zero, for what it
adds to the state, and from the identity, for the product of its transitions. From these, `connect` computes the states
before the segments, where the second walk begins.

The gradient of b_i is q_i d_q_i + r_i d_r_i - w_i d_w_i - a_i d_a_i, the gradient of a gate the sum of these from its
token to the end of the chunk. A pair of tokens after the gate has no part in it: its two terms cancel but for float32's
rounding, because both are products of the same rounded numbers. What writes pass to the state after the chunk would not
cancel well behind strong gates. It is summed from the start of the chunk to the token before the gate instead.

Tensors of [slots, H, rows, columns] are contiguous. `place` is the number of a chunk of a head.
"""

import triton
import triton.language as tl

from longseq.kernels.triton_tiles import (
    LOG2_E,
    MILD,
    SECOND_HALF,
    STEEPEST_GATE,
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

LIMIT = tl.constexpr(160.0)  # of a chunk of 64 tokens; with 32, half
SIZES = ["T", "H"]


@triton.jit
def share(count, REVERSE: tl.constexpr):
    """The first, the end and the step of the pieces of work, of `count`, that this program does.

    It stays in its half of the rows: the direction follows from the program's number.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    if REVERSE != SECOND_HALF:
        return program, count, programs
    later = program // (programs // 2)
    return program + later * (count // 2 - programs // 2), (1 + later) * (count // 2), programs // 2


@triton.jit
def load_writes(
    write, beta, step, beta_step, live, column, K: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr
):
    """Write keys times beta, [CHUNK, COLUMNS] in float32."""
    w = load_tokens(write, step, live, column, K, CHUNK, COLUMNS).to(tl.float32)
    if beta is not None:
        w *= load_numbers(beta, beta_step, live, CHUNK)[:, None]
    return w


@triton.jit
def load_sums(sums, row, column, K: tl.constexpr, COLUMNS: tl.constexpr):
    """b of the rows `row` of a chunk, [rows, COLUMNS]; 0 for row -1."""
    e = column + tl.arange(0, COLUMNS)
    return tl.load(sums + row[:, None] * K + e[None, :], mask=(row >= 0)[:, None] & (e < K)[None, :], other=0.0)


@triton.jit
def decay(logs):
    """2^{-|logs|} in float32."""
    return tl.exp2(-tl.abs(logs).to(tl.float32))


@triton.jit
def load_rows(base, step, row, live, column, K: tl.constexpr, COLUMNS: tl.constexpr):
    """The tokens `row` of a chunk, [rows, COLUMNS] in float32."""
    e = column + tl.arange(0, COLUMNS)
    mask = (row < live)[:, None] & (e < K)[None, :]
    return tl.load(base + row[:, None] * step + e[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def decay_either(logs):
    """2^{logs} in float32, for logs of either sign.

    In a block they are at most LIMIT / 2, but for reads before the gate of a block of one token: it has no pairs.
    """
    return tl.exp2(tl.minimum(logs.to(tl.float32), LIMIT / 2, tl.PropagateNan.ALL))


@triton.jit
def load_center(sums, n, column, K: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr):
    """The mean of b before and at the end of the block of each token, [CHUNK, COLUMNS]; b of a token alone."""
    i = tl.arange(0, CHUNK)
    start = (i >> n) << n
    before = tl.where(n == 0, i, start - 1)
    return (load_sums(sums, before, column, K, COLUMNS) + load_sums(sums, start + (1 << n) - 1, column, K, COLUMNS)) / 2


@triton.jit(do_not_specialize=SIZES)
def sum_gates(
    g, cu_seqlens, sequence_of, sums, mild, T, H, g_token,
    K: tl.constexpr, REVERSE: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """b in binary logs: the sum of the log gates from the start of its chunk to each token, [slots, H, CHUNK, K]; n.

    Gates are clamped, so that their sums are finite and exact enough.
    """
    place = tl.program_id(0).to(tl.int64)
    row, t, live = chunk(place // H, T, cu_seqlens, sequence_of, cu_seqlens is not None, CHUNK, REVERSE)
    g += (row * T + t) * g_token + (place % H) * K
    gates = load_tokens(g, g_token * direction(REVERSE), live, 0, K, CHUNK, BLOCK_K)
    gates = tl.maximum(gates.to(sums.dtype.element_ty), -STEEPEST_GATE, tl.PropagateNan.ALL)
    sums += place * CHUNK * K
    store_block(sums, 0, 0, tl.cumsum(gates, 0) * LOG2_E, CHUNK, K, CHUNK, BLOCK_K)
    tl.debug_barrier()
    end = tl.arange(0, CHUNK // 8) * 8 + 7
    lost = load_sums(sums, end - 8, 0, K, BLOCK_K) - load_sums(sums, end, 0, K, BLOCK_K)
    n = place.to(tl.int32) * 0
    for level in tl.static_range(3, LEVELS + 1):
        n = tl.where(tl.max(lost) <= LIMIT * CHUNK / 64, level, n)  # not for NaN
        if level < LEVELS:
            lost = tl.sum(tl.reshape(lost, (CHUNK >> (level + 1), 2, BLOCK_K)), 1)
    tl.store(mild + place, n)


@triton.jit
def relate_chunk(
    place, q, k, write, beta, sums, mild, cu_seqlens, sequence_of, lower, attention, scale, T, H,
    q_token, k_token, write_token, beta_token,
    K: tl.constexpr, BEFORE: tl.constexpr, WHOLE: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """`relate` for one chunk: pairs of a block, and 0 for the others."""
    n = tl.load(mild + place)
    if (n == LEVELS) == WHOLE:
        slot, head = place // H, place % H
        row, t, live = chunk(slot, T, cu_seqlens, sequence_of, cu_seqlens is not None, CHUNK, REVERSE)
        NEXT = direction(REVERSE)
        t += row * T
        q += t * q_token + head * K
        k += t * k_token + head * K
        write += t * write_token + head * K
        if beta is not None:
            beta += t * beta_token + head
        sums += place * CHUNK * K
        TILE: tl.constexpr = attention.dtype.element_ty
        i = tl.arange(0, CHUNK)
        of_q, of_k = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
        for column in range(0, K, COLUMNS):
            if WHOLE:
                center = load_sums(sums, i * 0 + CHUNK - 1, column, K, COLUMNS) / 2
            else:
                center = load_center(sums, n, column, K, CHUNK, COLUMNS)
            since = load_sums(sums, i, column, K, COLUMNS) - center
            factor = decay_either(since)
            queries = load_tokens(q, q_token * NEXT, live, column, K, CHUNK, COLUMNS).to(tl.float32) * factor
            if BEFORE:
                factor = decay_either(load_sums(sums, i - 1, column, K, COLUMNS) - center)
            reads = load_tokens(k, k_token * NEXT, live, column, K, CHUNK, COLUMNS).to(tl.float32) * factor
            writes = load_writes(write, beta, write_token * NEXT, beta_token * NEXT, live, column, K, CHUNK, COLUMNS)
            writes = tl.trans((writes * decay_either(-since)).to(TILE))
            of_q = tl.dot(queries.to(TILE), writes, of_q, input_precision=PRECISION)
            of_k = tl.dot(reads.to(TILE), writes, of_k, input_precision=PRECISION)
        same = (i >> n)[:, None] == (i >> n)[None, :]
        of_k = tl.where(same & (i[:, None] > i[None, :]), of_k, 0.0)
        of_q = tl.where(same & (i[:, None] >= i[None, :]), of_q * scale, 0.0)
        store_block(lower + place * CHUNK * CHUNK, 0, 0, of_k, CHUNK, CHUNK, CHUNK, CHUNK)
        store_block(attention + place * CHUNK * CHUNK, 0, 0, of_q, CHUNK, CHUNK, CHUNK, CHUNK)


@triton.jit
def relate_levels(
    place, q, k, write, beta, sums, mild, cu_seqlens, sequence_of, lower, attention, scale, T, H,
    q_token, k_token, write_token, beta_token,
    K: tl.constexpr, BEFORE: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """`relate` for one chunk: pairs of different blocks."""
    first = tl.load(mild + place)
    if first < LEVELS:
        slot, head = place // H, place % H
        row, t, live = chunk(slot, T, cu_seqlens, sequence_of, cu_seqlens is not None, CHUNK, REVERSE)
        NEXT = direction(REVERSE)
        t += row * T
        q += t * q_token + head * K
        k += t * k_token + head * K
        write += t * write_token + head * K
        if beta is not None:
            beta += t * beta_token + head
        sums += place * CHUNK * K
        TILE: tl.constexpr = attention.dtype.element_ty
        HALF: tl.constexpr = CHUNK // 2
        n = tl.arange(0, HALF)
        for level in range(first, LEVELS):
            part = n >> level
            late, early = n + ((part + 1) << level), n + (part << level)
            split = ((2 * part + 1) << level) - 1
            of_q, of_k = tl.zeros((HALF, HALF), tl.float32), tl.zeros((HALF, HALF), tl.float32)
            for column in tl.static_range(0, K, COLUMNS):
                border = load_sums(sums, split, column, K, COLUMNS)
                factor = decay(load_sums(sums, late, column, K, COLUMNS) - border)
                queries = (load_rows(q, q_token * NEXT, late, live, column, K, COLUMNS) * factor).to(TILE)
                if BEFORE:
                    factor = decay(load_sums(sums, late - 1, column, K, COLUMNS) - border)
                reads = (load_rows(k, k_token * NEXT, late, live, column, K, COLUMNS) * factor).to(TILE)
                writes = load_rows(write, write_token * NEXT, early, live, column, K, COLUMNS)
                writes *= decay(load_sums(sums, early, column, K, COLUMNS) - border)
                if beta is not None:
                    strength = tl.load(beta + early * beta_token * NEXT, mask=early < live, other=0.0).to(tl.float32)
                    writes *= strength[:, None]
                writes = tl.trans(writes.to(TILE))
                of_q = tl.dot(queries, writes, of_q, input_precision=PRECISION)
                of_k = tl.dot(reads, writes, of_k, input_precision=PRECISION)
            pairs = part[:, None] == part[None, :]
            spot = place * CHUNK * CHUNK + late[:, None] * CHUNK + early[None, :]
            tl.store(lower + spot, of_k, mask=pairs)
            tl.store(attention + spot, of_q * scale, mask=pairs)


@triton.jit(do_not_specialize=SIZES)
def relate(
    q, k, write, beta, sums, mild, cu_seqlens, sequence_of, lower, attention, scale, T, H, places,
    q_token, k_token, write_token, beta_token,
    K: tl.constexpr, BEFORE: tl.constexpr, WHOLE: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """L and A, or M and N if the writes are value keys, [CHUNK, CHUNK] for each chunk and head.

    Chunks are those of a single block if WHOLE, else the others.
    """
    if WHOLE:
        relate_chunk(
            tl.program_id(0).to(tl.int64), q, k, write, beta, sums, mild, cu_seqlens, sequence_of, lower, attention,
            scale, T, H, q_token, k_token, write_token, beta_token, K, BEFORE, WHOLE, REVERSE, PRECISION, CHUNK,
            COLUMNS, LEVELS,
        )  # fmt: skip
    else:
        first, end, step = share(places, REVERSE)
        for program in range(first, end, step):
            place = tl.cast(program, tl.int64)
            relate_chunk(
                place, q, k, write, beta, sums, mild, cu_seqlens, sequence_of, lower, attention, scale, T, H,
                q_token, k_token, write_token, beta_token, K, BEFORE, WHOLE, REVERSE, PRECISION, CHUNK, COLUMNS, LEVELS,
            )  # fmt: skip
            tl.debug_barrier()
            relate_levels(
                place, q, k, write, beta, sums, mild, cu_seqlens, sequence_of, lower, attention, scale, T, H,
                q_token, k_token, write_token, beta_token, K, BEFORE, REVERSE, PRECISION, CHUNK, COLUMNS, LEVELS,
            )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def prepare(
    q, k, v, write, beta, value_key, sums, cu_seqlens, sequence_of, lower, inverse, lower_values, queries, w, offered,
    writes, added, whole, scale, T, H, q_token, k_token, v_token, write_token, beta_token, value_token,
    K: tl.constexpr, V: tl.constexpr, BEFORE: tl.constexpr,
    REVERSE: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What a walk reads of each chunk and head: W, X V, and queries, writes and value keys with their decays.

    X is computed from L, if L is given, and stored.
    """
    place = tl.program_id(0).to(tl.int64)
    slot, head = place // H, place % H
    row, t, live = chunk(slot, T, cu_seqlens, sequence_of, cu_seqlens is not None, CHUNK, REVERSE)
    NEXT = direction(REVERSE)
    t += row * T
    q += t * q_token + head * K
    k += t * k_token + head * K
    v += t * v_token + head * V
    write += t * write_token + head * K
    if beta is not None:
        beta += t * beta_token + head
    if value_key is not None:
        value_key += t * value_token + head * K
    sums += place * CHUNK * K
    own = place * CHUNK * K
    TILE: tl.constexpr = inverse.dtype.element_ty
    HALVES: tl.constexpr = inverse.dtype.element_ty == tl.bfloat16
    i = tl.arange(0, CHUNK)
    if lower is not None:
        matrix = load_block(lower + place * CHUNK * CHUNK, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
        x = unit_lower_inverse(matrix, live, CHUNK, HALVES)
        if HALVES:
            if inverse_size(tl.max(tl.abs(matrix), 1), x) > MILD:
                x = eliminate(matrix, CHUNK)
        x = x.to(TILE)
        store_block(inverse + place * CHUNK * CHUNK, 0, 0, x, CHUNK, CHUNK, CHUNK, CHUNK)
    else:
        x = load_block(inverse + place * CHUNK * CHUNK, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
    for column in tl.static_range(0, K, COLUMNS):
        until = load_sums(sums, i, column, K, COLUMNS)
        e = column + tl.arange(0, COLUMNS)
        end = tl.load(sums + (CHUNK - 1) * K + e, mask=e < K, other=0.0)
        tl.store(whole + place * K + e, decay(end), mask=e < K)
        since, later = decay(until), decay(end[None, :] - until)
        query = load_tokens(q, q_token * NEXT, live, column, K, CHUNK, COLUMNS).to(tl.float32)
        store_block(queries + own, 0, column, query * since * scale, CHUNK, K, CHUNK, COLUMNS)
        if BEFORE:
            since = decay(load_sums(sums, i - 1, column, K, COLUMNS))
        reads = load_tokens(k, k_token * NEXT, live, column, K, CHUNK, COLUMNS).to(tl.float32)
        erased = tl.dot(x, (-reads * since).to(TILE), input_precision=PRECISION)
        store_block(w + own, 0, column, erased, CHUNK, K, CHUNK, COLUMNS)
        write_keys = load_writes(write, beta, write_token * NEXT, beta_token * NEXT, live, column, K, CHUNK, COLUMNS)
        store_block(writes + own, 0, column, write_keys * later, CHUNK, K, CHUNK, COLUMNS)
        if value_key is not None:
            keys = load_tokens(value_key, value_token * NEXT, live, column, K, CHUNK, COLUMNS).to(tl.float32)
            store_block(added + own, 0, column, keys * later, CHUNK, K, CHUNK, COLUMNS)
    for column in tl.static_range(0, V, COLUMNS):
        values = load_tokens(v, v_token * NEXT, live, column, V, CHUNK, COLUMNS).to(TILE)
        if value_key is not None:
            m = load_block(lower_values + place * CHUNK * CHUNK, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
            values = (-tl.dot(m, values, input_precision=PRECISION)).to(TILE)
        given = tl.dot(x, values, input_precision=PRECISION)
        store_block(offered + place * CHUNK * V, 0, column, given, CHUNK, V, CHUNK, COLUMNS)


@triton.jit
def segment(n, T, cu_seqlens, segment_of, SPAN: tl.constexpr, CHUNK: tl.constexpr):
    """Of the segment n of SPAN chunks: the row, first token, end and first slot of its sequence, and the numbers of the
    segment's first chunk and of the first chunk after it. Without SPAN, n is a whole sequence.
    """
    PACKED: tl.constexpr = cu_seqlens is not None
    number = n
    if SPAN > 0:
        number = n // tl.cdiv(T, SPAN * CHUNK)
        if PACKED:
            number = tl.load(segment_of + n).to(tl.int64)
    row, start, end, slot = sequence(number, T, cu_seqlens, PACKED, CHUNK)
    low, high = 0, tl.cdiv((end - start).to(tl.int32), CHUNK)
    if SPAN > 0:
        _, _, _, place = sequence(number, T, cu_seqlens, PACKED, SPAN * CHUNK)
        low = (n - place).to(tl.int32) * SPAN
        high = tl.minimum(high, low + SPAN)
    return row, start, end, slot, low, high


@triton.jit(do_not_specialize=SIZES)
def walk(
    v, cu_seqlens, segment_of, attention, attention_values, queries, w, offered, writes, added, whole, first, states, u,
    last, output, T, H, v_token,
    K: tl.constexpr, V: tl.constexpr, SPAN: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One head of one segment in BLOCK_V value columns: its outputs, its last state, or the states before its chunks
    and U. Without X V, its last state is the product of the transitions of its chunks [K, V = K].
    """
    tiles: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    column = (tl.program_id(0) % tiles) * BLOCK_V
    head = (tl.program_id(0) // tiles % H).to(tl.int64)
    n = (tl.program_id(0) // tiles // H).to(tl.int64)
    row, start, end, slot, low, high = segment(n, T, cu_seqlens, segment_of, SPAN, CHUNK)
    NEXT = direction(REVERSE)
    TILE: tl.constexpr = w.dtype.element_ty
    v += row * T * v_token + head * V
    e = tl.arange(0, BLOCK_K)
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    if first is not None:
        state = load_block(first + (n * H + head) * K * V, 0, column, K, V, BLOCK_K, BLOCK_V).to(tl.float32)
    if offered is None:
        state += tl.where(e[:, None] == column + tl.arange(0, BLOCK_V)[None, :], 1.0, 0.0)
    for m in range(low, high):
        place = (slot + m) * H + head
        t = token_after(m * CHUNK, start, end, REVERSE)
        live = end - start - m * CHUNK
        tile = state.to(TILE)
        erased = load_block(w + place * CHUNK * K, 0, 0, CHUNK, K, CHUNK, BLOCK_K)
        written = tl.zeros((CHUNK, BLOCK_V), tl.float32)
        if offered is not None:
            written = load_block(offered + place * CHUNK * V, 0, column, CHUNK, V, CHUNK, BLOCK_V).to(tl.float32)
        written = tl.dot(erased, tile, written, input_precision=PRECISION).to(TILE)
        if states is not None:
            store_block(states + place * K * V, 0, column, tile, K, V, BLOCK_K, BLOCK_V)
            store_block(u + place * CHUNK * V, 0, column, written, CHUNK, V, CHUNK, BLOCK_V)
        if output is not None:
            query = load_block(queries + place * CHUNK * K, 0, 0, CHUNK, K, CHUNK, BLOCK_K)
            among = load_block(attention + place * CHUNK * CHUNK, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
            o = tl.dot(query, tile, input_precision=PRECISION)
            o = tl.dot(among, written, o, input_precision=PRECISION)
            if added is not None:
                among = load_block(attention_values + place * CHUNK * CHUNK, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
                values = load_tokens(v + t * v_token, v_token * NEXT, live, column, V, CHUNK, BLOCK_V).to(TILE)
                o = tl.dot(among, values, o, input_precision=PRECISION)
            outputs = output + ((row * T + t) * H + head) * V
            store_tokens(outputs, H * V * NEXT, live, column, o, V, CHUNK, BLOCK_V)
        state *= tl.load(whole + place * K + e, mask=e < K, other=0.0)[:, None]
        keys = load_block(writes + place * CHUNK * K, 0, 0, CHUNK, K, CHUNK, BLOCK_K)
        state = tl.dot(tl.trans(keys), written, state, input_precision=PRECISION)
        if added is not None:
            keys = load_block(added + place * CHUNK * K, 0, 0, CHUNK, K, CHUNK, BLOCK_K)
            values = load_tokens(v + t * v_token, v_token * NEXT, live, column, V, CHUNK, BLOCK_V).to(TILE)
            state = tl.dot(tl.trans(keys), values, state, input_precision=PRECISION)
    if last is not None:
        store_block(last + (n * H + head) * K * V, 0, column, state, K, V, BLOCK_K, BLOCK_V)


@triton.jit(do_not_specialize=SIZES)
def connect(
    cu_seqlens, transitions, ends, first, starts, last, T, H,
    K: tl.constexpr, V: tl.constexpr, SPAN: tl.constexpr, BACKWARD: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The states before the segments of one head of one sequence in BLOCK_V value columns, and the last state.

    `ends` are the states after segments that begin from zero. BACKWARD, they are gradients, from the last segment on.
    """
    tiles: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    column = (tl.program_id(0) % tiles) * BLOCK_V
    head = (tl.program_id(0) // tiles % H).to(tl.int64)
    n = (tl.program_id(0) // tiles // H).to(tl.int64)
    _, start, end, slot = sequence(n, T, cu_seqlens, cu_seqlens is not None, SPAN * CHUNK)
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    if first is not None:
        state = load_block(first + (n * H + head) * K * V, 0, column, K, V, BLOCK_K, BLOCK_V).to(tl.float32)
    segments = tl.cdiv((end - start).to(tl.int32), SPAN * CHUNK)
    for number in range(0, segments):
        m = segments - 1 - number if BACKWARD else number
        place = (slot + m) * H + head
        store_block(starts + place * K * V, 0, column, state, K, V, BLOCK_K, BLOCK_V)
        transition = load_block(transitions + place * K * K, 0, 0, K, K, BLOCK_K, BLOCK_K)
        if BACKWARD:
            transition = tl.trans(transition)
        added = load_block(ends + place * K * V, 0, column, K, V, BLOCK_K, BLOCK_V)
        state = tl.dot(transition, state, added, input_precision="tf32x3")
    store_block(last + (n * H + head) * K * V, 0, column, state, K, V, BLOCK_K, BLOCK_V)


@triton.jit(do_not_specialize=SIZES)
def retreat(
    d_output, cu_seqlens, segment_of, attention, queries, w, writes, whole, d_last, d_states, d_u, d_first, T, H,
    K: tl.constexpr, V: tl.constexpr, SPAN: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """From the last chunk of a segment to the first: the gradients of the states after each chunk and of U, or only
    that of the state before the segment.
    """
    tiles: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    column = (tl.program_id(0) % tiles) * BLOCK_V
    head = (tl.program_id(0) // tiles % H).to(tl.int64)
    n = (tl.program_id(0) // tiles // H).to(tl.int64)
    row, start, end, slot, low, high = segment(n, T, cu_seqlens, segment_of, SPAN, CHUNK)
    NEXT = direction(REVERSE)
    TILE: tl.constexpr = w.dtype.element_ty
    d_output += (row * T * H + head) * V
    e = tl.arange(0, BLOCK_K)
    d_state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    if d_last is not None:
        d_state = load_block(d_last + (n * H + head) * K * V, 0, column, K, V, BLOCK_K, BLOCK_V).to(tl.float32)
    for back in range(low, high):
        m = high - 1 - (back - low)
        t = token_after(m * CHUNK, start, end, REVERSE)
        place = (slot + m) * H + head
        tile = d_state.to(TILE)
        d_o = load_tokens(d_output + t * H * V, H * V * NEXT, end - start - m * CHUNK, column, V, CHUNK, BLOCK_V)
        d_o = d_o.to(TILE)
        among = load_block(attention + place * CHUNK * CHUNK, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
        keys = load_block(writes + place * CHUNK * K, 0, 0, CHUNK, K, CHUNK, BLOCK_K)
        d_written = tl.dot(tl.trans(among), d_o, input_precision=PRECISION)
        d_written = tl.dot(keys, tile, d_written, input_precision=PRECISION).to(TILE)
        if d_states is not None:
            store_block(d_states + place * K * V, 0, column, tile, K, V, BLOCK_K, BLOCK_V)
            store_block(d_u + place * CHUNK * V, 0, column, d_written, CHUNK, V, CHUNK, BLOCK_V)
        d_state *= tl.load(whole + place * K + e, mask=e < K, other=0.0)[:, None]
        query = load_block(queries + place * CHUNK * K, 0, 0, CHUNK, K, CHUNK, BLOCK_K)
        d_state = tl.dot(tl.trans(query), d_o, d_state, input_precision=PRECISION)
        erased = load_block(w + place * CHUNK * K, 0, 0, CHUNK, K, CHUNK, BLOCK_K)
        d_state = tl.dot(tl.trans(erased), d_written, d_state, input_precision=PRECISION)
    if d_first is not None:
        store_block(d_first + (n * H + head) * K * V, 0, column, d_state, K, V, BLOCK_K, BLOCK_V)


@triton.jit(do_not_specialize=SIZES)
def differentiate_products(
    v, cu_seqlens, sequence_of, inverse, lower_values, attention_values, added, d_output, u, d_u, d_states, d_lower,
    d_attention, d_lower_values, d_attention_values, d_v, scale, T, H, v_token,
    K: tl.constexpr, V: tl.constexpr, REVERSE: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The gradients of L, A, M, N and v of a chunk and head, and of the errors V - (e^c ⊙ R) S for d_u."""
    place = tl.program_id(0).to(tl.int64)
    slot, head = place // H, place % H
    row, t, live = chunk(slot, T, cu_seqlens, sequence_of, cu_seqlens is not None, CHUNK, REVERSE)
    NEXT = direction(REVERSE)
    t += row * T
    v += t * v_token + head * V
    d_output += (t * H + head) * V
    d_v += (t * H + head) * V
    pairs = place * CHUNK * CHUNK
    TILE: tl.constexpr = inverse.dtype.element_ty
    x = tl.trans(load_block(inverse + pairs, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK))
    d_a, d_l = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
    d_n, d_m = d_a, d_l
    for column in tl.static_range(0, V, BLOCK_V):
        d_o = load_tokens(d_output, H * V * NEXT, live, column, V, CHUNK, BLOCK_V).to(TILE)
        d_written = load_block(d_u + place * CHUNK * V, 0, column, CHUNK, V, CHUNK, BLOCK_V)
        d_error = tl.dot(x, d_written, input_precision=PRECISION)
        d_e = d_error.to(TILE)
        store_block(d_u + place * CHUNK * V, 0, column, d_e, CHUNK, V, CHUNK, BLOCK_V)
        written = tl.trans(load_block(u + place * CHUNK * V, 0, column, CHUNK, V, CHUNK, BLOCK_V))
        d_a = tl.dot(d_o, written, d_a, input_precision=PRECISION)
        d_l = tl.dot(d_e, written, d_l, input_precision=PRECISION)
        if added is not None:
            values = tl.trans(load_tokens(v, v_token * NEXT, live, column, V, CHUNK, BLOCK_V).to(TILE))
            d_n = tl.dot(d_o, values, d_n, input_precision=PRECISION)
            d_m = tl.dot(d_e, values, d_m, input_precision=PRECISION)
            keys = load_block(added + place * CHUNK * K, 0, 0, CHUNK, K, CHUNK, BLOCK_K)
            d_state = load_block(d_states + place * K * V, 0, column, K, V, BLOCK_K, BLOCK_V)
            n = tl.trans(load_block(attention_values + pairs, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK))
            m = tl.trans(load_block(lower_values + pairs, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK))
            d_value = tl.dot(keys, d_state, input_precision=PRECISION)
            d_value = tl.dot(n, d_o, d_value, input_precision=PRECISION)
            d_error = d_value - tl.dot(m, d_e, input_precision=PRECISION)
        store_tokens(d_v, H * V * NEXT, live, column, d_error, V, CHUNK, BLOCK_V)
    i = tl.arange(0, CHUNK)
    not_after, earlier = i[:, None] >= i[None, :], i[:, None] > i[None, :]
    store_block(d_lower + pairs, 0, 0, tl.where(earlier, -d_l, 0.0), CHUNK, CHUNK, CHUNK, CHUNK)
    store_block(d_attention + pairs, 0, 0, tl.where(not_after, d_a * scale, 0.0), CHUNK, CHUNK, CHUNK, CHUNK)
    if added is not None:
        store_block(d_lower_values + pairs, 0, 0, tl.where(earlier, -d_m, 0.0), CHUNK, CHUNK, CHUNK, CHUNK)
        store_block(d_attention_values + pairs, 0, 0, tl.where(not_after, d_n * scale, 0.0), CHUNK, CHUNK, CHUNK, CHUNK)


@triton.jit
def load_pairs(base, mask, CHUNK: tl.constexpr):
    """A matrix [CHUNK, CHUNK], with 0 where there is a mask and it is false."""
    i = tl.arange(0, CHUNK)
    place = base + i[:, None] * CHUNK + i[None, :]
    return tl.load(place) if mask is None else tl.load(place, mask=mask, other=0.0)


@triton.jit
def store_sum(
    base, step, live, column, x, K: tl.constexpr, ADD: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr
):
    """Store x, or with ADD its sum with what is there."""
    if ADD:
        x += load_tokens(base, step, live, column, K, CHUNK, COLUMNS).to(tl.float32)
    store_tokens(base, step, live, column, x, K, CHUNK, COLUMNS)


@triton.jit
def store_writes(
    of_k, of_w, write, beta, d_k, d_write, d_beta, token, live, column, write_step, beta_step, step, K: tl.constexpr,
    ADD: tl.constexpr, ADD_WRITES: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store the gradients of k, write keys and beta from those of k and writes."""
    if beta is not None:
        tiles: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
        i = tl.arange(0, CHUNK)
        keys = load_tokens(write, write_step, live, column, K, CHUNK, COLUMNS).to(tl.float32)
        part = tl.sum(of_w * keys, 1)
        place = d_beta + (token + i * step) * tiles + column // COLUMNS
        if ADD_WRITES:
            part += tl.load(place, mask=i < live, other=0.0)
        tl.store(place, part, mask=i < live)
        of_w *= load_numbers(beta, beta_step, live, CHUNK)[:, None]
    if d_write is not None:
        store_sum(d_write + token * K, step * K, live, column, of_w, K, ADD_WRITES, CHUNK, COLUMNS)
    else:
        of_k += of_w
    store_sum(d_k + token * K, step * K, live, column, of_k, K, ADD, CHUNK, COLUMNS)


@triton.jit
def sum_from(x, start, CHUNK: tl.constexpr, TILE: tl.constexpr):
    """start + the sums of x [CHUNK, columns] from each row to the last.

    A product with a matrix of ones needs fewer registers and barriers than a scan. float32 is the sum of three numbers
    of bfloat16, so that the products are exact.
    """
    if tl.bfloat16 == TILE:
        i = tl.arange(0, CHUNK)
        ones = tl.where(i[:, None] <= i[None, :], 1.0, 0.0).to(TILE)
        for _ in tl.static_range(3):
            part = x.to(TILE)
            start = tl.dot(ones, part, start)
            x -= part.to(tl.float32)
        return start
    return start + tl.cumsum(x, 0, reverse=True)


@triton.jit
def differentiate_chunk(
    program, q, k, write, beta, sums, mild, cu_seqlens, sequence_of, d_output, states, d_states, u, d_errors, d_lower,
    d_attention, d_q, d_k, d_write, d_g, d_beta, scale, T, H, q_token, k_token, write_token, beta_token, u_token,
    K: tl.constexpr, V: tl.constexpr, BEFORE: tl.constexpr, VALUES: tl.constexpr, WHOLE: tl.constexpr,
    REVERSE: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_V: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """What `differentiate` stores for one program, but for pairs of different blocks."""
    tiles: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    NEXT = direction(REVERSE)
    TILE: tl.constexpr = states.dtype.element_ty
    i = tl.arange(0, CHUNK)
    column = (program % tiles) * COLUMNS
    place = tl.cast(program // tiles, tl.int64)
    n = tl.load(mild + place)
    if (n == LEVELS) == WHOLE:
        slot, head = place // H, place % H
        row, t, live = chunk(slot, T, cu_seqlens, sequence_of, cu_seqlens is not None, CHUNK, REVERSE)
        token = (row * T + t) * H + head
        t += row * T
        log = sums + place * CHUNK * K
        e = column + tl.arange(0, COLUMNS)
        end = tl.load(log + (CHUNK - 1) * K + e, mask=e < K, other=0.0)[None, :]
        if WHOLE:
            others = None
            center = end / 2
        else:
            block = i >> n
            others = (block[:, None] == block[None, :]) & (i[:, None] != i[None, :])
            center = load_center(log, n, column, K, CHUNK, COLUMNS)
        until = load_sums(log, i, column, K, COLUMNS) - center
        pairs = place * CHUNK * CHUNK
        own_write = write + t * write_token + head * K
        own_beta = None if beta is None else beta + t * beta_token + head
        write_key = load_writes(
            own_write, own_beta, write_token * NEXT, beta_token * NEXT, live, column, K, CHUNK, COLUMNS
        )
        writes = (write_key * decay_either(-until)).to(TILE)

        # Queries. `by` is the gradient of b. Behind strong gates, token pairs (i, i) would not cancel well in its sums:
        # `others` leaves them out.
        query = load_tokens(q + t * q_token + head * K, q_token * NEXT, live, column, K, CHUNK, COLUMNS)
        query = query.to(tl.float32)
        queries = (query * decay_either(until)).to(TILE)
        more = tl.dot(load_pairs(d_attention + pairs, others, CHUNK), writes, input_precision=PRECISION)
        by = queries.to(tl.float32) * more
        if not VALUES:
            of_state = tl.zeros((CHUNK, COLUMNS), tl.float32)
            for start in range(0, V, BLOCK_V):
                state = load_block(states + place * K * V, column, start, K, V, COLUMNS, BLOCK_V)
                d_o = load_tokens(d_output + token * V, H * V * NEXT, live, start, V, CHUNK, BLOCK_V).to(TILE)
                of_state = tl.dot(d_o, tl.trans(state), of_state, input_precision=PRECISION)
            of_state *= decay(center) * scale
            by += queries.to(tl.float32) * of_state
            more += of_state
        of_q = more * decay_either(until)
        if not WHOLE:
            own = tl.load(d_attention + pairs + i * (CHUNK + 1))[:, None].to(tl.float32)
            of_q += own * write_key
        store_sum(d_q + token * K, H * K * NEXT, live, column, of_q, K, VALUES, CHUNK, COLUMNS)
        tl.debug_barrier()  # without it, the compiler loads early what follows, and registers spill

        # Reads.
        read_key = load_tokens(k + t * k_token + head * K, k_token * NEXT, live, column, K, CHUNK, COLUMNS)
        before = load_sums(log, i - 1 if BEFORE else i, column, K, COLUMNS)
        factor = decay_either(before - center)
        read_key = read_key.to(tl.float32)
        reads = (read_key * factor).to(TILE)
        more = tl.dot(load_pairs(d_lower + pairs, others, CHUNK), writes, input_precision=PRECISION)
        by_reads = reads.to(tl.float32) * more
        of_k = more * factor
        if not VALUES:
            of_state = tl.zeros((CHUNK, COLUMNS), tl.float32)
            for start in range(0, V, BLOCK_V):
                state = load_block(states + place * K * V, column, start, K, V, COLUMNS, BLOCK_V)
                d_error = load_block(d_errors + place * CHUNK * V, 0, start, CHUNK, V, CHUNK, BLOCK_V)
                of_state = tl.dot(d_error, tl.trans(state), of_state, input_precision=PRECISION)
            if not WHOLE:  # the factor may be limited: see `decay_either`
                of_state *= -decay(before)
                by_reads += read_key * of_state
                of_k += of_state
            else:
                of_state *= -decay(center)
                by_reads += reads.to(tl.float32) * of_state
                of_k += of_state * factor
        by += by_reads
        tl.debug_barrier()

        # Writes, and the state itself.
        d_a = load_pairs(d_attention + pairs, others, CHUNK)
        more = tl.dot(tl.trans(d_a), queries, input_precision=PRECISION)
        d_l = load_pairs(d_lower + pairs, others, CHUNK)
        more = tl.dot(tl.trans(d_l), reads, more, input_precision=PRECISION)
        until = load_sums(log, i, column, K, COLUMNS) - center
        write_key = load_writes(
            own_write, own_beta, write_token * NEXT, beta_token * NEXT, live, column, K, CHUNK, COLUMNS
        )
        factor = decay_either(-until)
        writes_again = (write_key * factor).to(TILE).to(tl.float32)
        by -= writes_again * more
        of_state, kept = tl.zeros((CHUNK, COLUMNS), tl.float32), tl.zeros((COLUMNS,), tl.float32)
        for start in range(0, V, BLOCK_V):
            d_state = load_block(d_states + place * K * V, column, start, K, V, COLUMNS, BLOCK_V)
            if VALUES:
                values = u + t * u_token + head * V
                written = load_tokens(values, u_token * NEXT, live, start, V, CHUNK, BLOCK_V).to(TILE)
            else:
                written = load_block(u + place * CHUNK * V, 0, start, CHUNK, V, CHUNK, BLOCK_V)
                state = load_block(states + place * K * V, column, start, K, V, COLUMNS, BLOCK_V)
                kept += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 1)
            of_state = tl.dot(written, tl.trans(d_state), of_state, input_precision=PRECISION)
        of_state *= decay(end - center)
        of_w = (more + of_state) * factor
        if not WHOLE:
            of_w += own * query
        earlier = tl.where(i[:, None] > i[None, :], 1.0, 0.0).to(TILE)
        passed = tl.dot(earlier, (writes_again * of_state).to(TILE), input_precision=PRECISION)
        of_g = sum_from(by, passed, CHUNK, TILE) + kept[None, :] * decay(end)
        if BEFORE:
            of_g -= by_reads
        store_sum(d_g + token * K, H * K * NEXT, live, column, of_g, K, VALUES, CHUNK, COLUMNS)
        store_writes(
            of_k, of_w, own_write, own_beta, d_k, d_write, d_beta, token, live, column, write_token * NEXT,
            beta_token * NEXT, H * NEXT, K, VALUES, False, CHUNK, COLUMNS,
        )  # fmt: skip


@triton.jit
def through_level(pairs, late, d_product, read, write, factor, TILE: tl.constexpr, PRECISION: tl.constexpr):
    """Gradients through the products of the reads of `late` rows with the writes of the others, and those of b.

    Row by row, the first is the gradient of what the row reads or writes.
    """
    rows = (tl.where(late, read, write) * factor).to(TILE)
    below = tl.where(pairs, d_product, 0.0)
    more = tl.dot((below + tl.trans(below)).to(TILE), rows, input_precision=PRECISION)
    by = rows.to(tl.float32) * more
    return more * factor, tl.where(late, by, -by)


@triton.jit
def differentiate_levels(
    program, q, k, write, beta, sums, mild, cu_seqlens, sequence_of, d_lower, d_attention, d_q, d_k, d_write, d_g,
    d_beta, T, H, q_token, k_token, write_token, beta_token,
    K: tl.constexpr, BEFORE: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Add to what `differentiate` stored what comes through pairs of different blocks."""
    tiles: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    column = (program % tiles) * COLUMNS
    place = tl.cast(program // tiles, tl.int64)
    first = tl.load(mild + place)
    if first < LEVELS:
        slot, head = place // H, place % H
        row, t, live = chunk(slot, T, cu_seqlens, sequence_of, cu_seqlens is not None, CHUNK, REVERSE)
        NEXT = direction(REVERSE)
        t += row * T
        q += t * q_token + head * K
        k += t * k_token + head * K
        write += t * write_token + head * K
        if beta is not None:
            beta += t * beta_token + head
        sums += place * CHUNK * K
        TILE: tl.constexpr = d_attention.dtype.element_ty
        i = tl.arange(0, CHUNK)
        query = load_tokens(q, q_token * NEXT, live, column, K, CHUNK, COLUMNS).to(tl.float32)
        read_key = load_tokens(k, k_token * NEXT, live, column, K, CHUNK, COLUMNS).to(tl.float32)
        write_key = load_writes(write, beta, write_token * NEXT, beta_token * NEXT, live, column, K, CHUNK, COLUMNS)
        until = load_sums(sums, i, column, K, COLUMNS)
        d_l = load_block(d_lower + place * CHUNK * CHUNK, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
        d_a = load_block(d_attention + place * CHUNK * CHUNK, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
        of_q, of_k = tl.zeros((CHUNK, COLUMNS), tl.float32), tl.zeros((CHUNK, COLUMNS), tl.float32)
        of_w, by, by_reads = of_q, of_q, of_q
        for level in range(first, LEVELS):
            half = i >> level
            late = (half % 2 == 1)[:, None]
            pairs = (half[:, None] == half[None, :] + 1) & late
            border = load_sums(sums, ((i >> (level + 1)) << (level + 1)) + (1 << level) - 1, column, K, COLUMNS)
            factor = decay(until - border)
            more_q, of_sums = through_level(pairs, late, d_a, query, write_key, factor, TILE, PRECISION)
            if BEFORE:
                factor = tl.where(late, decay(load_sums(sums, i - 1, column, K, COLUMNS) - border), factor)
            more_k, of_reads = through_level(pairs, late, d_l, read_key, write_key, factor, TILE, PRECISION)
            of_q += tl.where(late, more_q, 0.0)
            of_k += tl.where(late, more_k, 0.0)
            of_w += tl.where(late, 0.0, more_q + more_k)
            by += of_sums + tl.where(late, 0.0, of_reads)
            by_reads += tl.where(late, of_reads, 0.0)
        of_g = tl.cumsum(by + by_reads, 0, reverse=True)
        if BEFORE:
            of_g -= by_reads
        token = t * H + head
        store_sum(d_q + token * K, H * K * NEXT, live, column, of_q, K, True, CHUNK, COLUMNS)
        store_sum(d_g + token * K, H * K * NEXT, live, column, of_g, K, True, CHUNK, COLUMNS)
        store_writes(
            of_k, of_w, write, beta, d_k, d_write, d_beta, token, live, column, write_token * NEXT, beta_token * NEXT,
            H * NEXT, K, True, True, CHUNK, COLUMNS,
        )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def differentiate(
    q, k, write, beta, sums, mild, cu_seqlens, sequence_of, d_output, states, d_states, u, d_errors, d_lower,
    d_attention, d_q, d_k, d_write, d_g, d_beta, scale, T, H, places, q_token, k_token, write_token, beta_token,
    u_token, K: tl.constexpr, V: tl.constexpr, BEFORE: tl.constexpr, VALUES: tl.constexpr, WHOLE: tl.constexpr,
    REVERSE: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_V: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """The gradients of q, k, gates, write keys and beta of a chunk and head, in COLUMNS key channels.

    Chunks are those of a single block if WHOLE, else the others. With VALUES, writes are value keys and u the values:
    what they add. The gradient of beta is a part, which lacks the other channels: [B, T, H, tiles].
    """
    if WHOLE:
        differentiate_chunk(
            tl.program_id(0), q, k, write, beta, sums, mild, cu_seqlens, sequence_of, d_output, states, d_states, u,
            d_errors, d_lower, d_attention, d_q, d_k, d_write, d_g, d_beta, scale, T, H, q_token, k_token, write_token,
            beta_token, u_token, K, V, BEFORE, VALUES, WHOLE, REVERSE, PRECISION, CHUNK, COLUMNS, BLOCK_V, LEVELS,
        )  # fmt: skip
    else:
        tiles: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
        first, end, step = share(places * tiles, REVERSE)
        for program in range(first, end, step):
            differentiate_chunk(
                program, q, k, write, beta, sums, mild, cu_seqlens, sequence_of, d_output, states, d_states, u,
                d_errors, d_lower, d_attention, d_q, d_k, d_write, d_g, d_beta, scale, T, H, q_token, k_token,
                write_token, beta_token, u_token, K, V, BEFORE, VALUES, WHOLE, REVERSE, PRECISION, CHUNK, COLUMNS,
                BLOCK_V, LEVELS,
            )  # fmt: skip
            tl.debug_barrier()
            differentiate_levels(
                program, q, k, write, beta, sums, mild, cu_seqlens, sequence_of, d_lower, d_attention, d_q, d_k,
                d_write, d_g, d_beta, T, H, q_token, k_token, write_token, beta_token, K, BEFORE, REVERSE, PRECISION,
                CHUNK, COLUMNS, LEVELS,
            )  # fmt: skip
