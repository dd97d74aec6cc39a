"""The delta rule forward in Triton. The formulas and letters are those of chunk.py.

`prepare` runs over chunks in parallel and stores tiles that need no further scaling but by their units (see
triton_units.py). Then `advance` walks along time and stores the outputs. In float32 the tiles are too large for that:
`read_out` computes the outputs over chunks in parallel. A long sequence with few heads is cut into segments of time
first (see triton_segments.py). In half precision without gates and segments, and up to 128 columns, `advance` makes the
tiles of queries and write keys itself, from what the call gave (see `load_rows`). Short sequences without a backward
pass, and longer ones that fill a GPU, are read by one launch, `read_through`, which walks along time and keeps
everything on chip.

Units are found from bounds where that is accurate enough, because finding the largest number of a tile takes time. The
units of products follow from those of their factors, and the units of sums from those of their parts. A bound can be
2^10 times too large. A chunk whose inverse is not mild (see `inverse_size`) has tokens that are 10^8 times larger than
those before them: its tiles have units from their largest numbers, so that small tokens stay accurate beside large
ones.

States and U are stored transposed, [V, K] and [V, C]. Then the left operands of `advance`, Sᵀ and Uᵀ, are in registers
and the right ones are tiles of memory, and no chunk waits for shared memory. The units of a chunk of a head are in one
row of memory (see triton_kept.py).
"""

import triton
import triton.language as tl

from longseq.kernels.delta_rule.triton_kept import (
    INVERSE,
    KEY,
    PACKED_UNITS,
    PRECISION,
    QUERY,
    SIZE,
    TILE,
    WRITE_KEY,
    U,
    find_place,
    find_units,
    load_by_rows,
    pack_units,
    store_by_columns,
    store_by_rows,
    unpack_a,
    unpack_queries,
    unpack_writes,
)
from longseq.kernels.delta_rule.triton_segments import (
    BOTH,
    across,
    end_walk,
    load_betas,
    load_xv,
    multiply_rows,
    turn_to_tiles,
    walk_through,
)
from longseq.kernels.triton_tiles import (
    MILD,
    SIZES_AND_STRIDES,
    chunk,
    decay_between,
    decay_of_logs,
    decay_since,
    decays_for_tiles,
    direction,
    eliminate,
    find_decays,
    find_segment,
    inverse_size,
    inverse_sizes,
    load_block,
    load_numbers,
    load_tokens,
    sequence,
    store_block,
    store_tokens,
    token_after,
    unit_lower_inverse,
    unit_lower_inverse_left,
)
from longseq.kernels.triton_units import (
    LEAD,
    LIMIT,
    add_product,
    as_tile,
    bound_product,
    clamp_exponent,
    exponent_above,
    exponent_of,
    find_largest,
    find_largest_of_both,
    find_largest_of_rows,
    find_unit,
    in_units,
    keep_larger,
    mix_rows,
    power_of_two,
    store_column_units,
    two_to,
)


@triton.jit
def _weigh(
    products, weight, gate, logs, REACH: tl.constexpr, GATED: tl.constexpr, EXACT: tl.constexpr, CHUNK: tl.constexpr
):
    """Products with write keys times the write's beta and decay, for tokens REACH or more back; else 0.

    The decays are those of `gate` if EXACT, else those of `logs` (see `decay_of_logs`).
    """
    i = tl.arange(0, CHUNK)
    products *= weight[None, :]
    if GATED:
        products *= decay_between(gate, CHUNK) if EXACT else decay_of_logs(logs)
    return tl.where(i[:, None] >= i[None, :] + REACH, products, 0.0)


@triton.jit
def _tile_of_scores(scores, exponent, LOOK: tl.constexpr, SCALED: tl.constexpr):
    """Scores as a tile, and its unit: 2^exponent, or that of the largest if LOOK.

    Gates may have any sign: there is no bound then.
    """
    unit, inverse = 1.0, 1.0
    if LOOK:
        unit, inverse = find_unit(scores, SCALED)
    elif SCALED:
        unit, inverse = two_to(exponent), two_to(-exponent)
    return as_tile(scores * inverse, SCALED), unit


# A mild inverse X, and the rows that it is multiplied by, use these shares of LIMIT. In units, magnitudes in a row of X
# add up to less than 2^8, and the other numbers are below 2^7. So their product is below LIMIT and is a tile.
INVERSE_SHARE = tl.constexpr(2.0**-7)
ROWS_SHARE = tl.constexpr(2.0**-8)


# Bits that a tile of write keys leaves free, so that the walks' tiles of U have these more (see `find_exponents`).
WRITES_ROOM = tl.constexpr(3)


@triton.jit
def _find_unit_below(largest, share, SCALED: tl.constexpr):
    """The unit of numbers up to `largest` that must stay below a share of LIMIT, and the inverse of the unit."""
    unit, inverse = 1.0, 1.0
    if SCALED:
        unit, inverse = power_of_two(largest)
        unit /= share
        inverse *= share
    return unit, inverse


@triton.jit
def _multiply_tiles(x, rows, SCALED: tl.constexpr):
    """The product of two tiles, which is a tile without further scaling."""
    return as_tile(tl.dot(x, rows, input_precision=PRECISION), SCALED)


@triton.jit
def _prepare_chunk(
    place, inputs, steps, results, cu_seqlens, sequence_of, scale, T, H,
    K: tl.constexpr, V: tl.constexpr, REVERSE: tl.constexpr, SAVE: tl.constexpr, ROWS: tl.constexpr,
    RAW: tl.constexpr, AGAIN: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, OWN_WRITE_KEY: tl.constexpr,
):  # fmt: skip
    """`prepare` for one chunk of one head; AGAIN, one that is not mild (see `inverse_size`), with a float32 inverse."""
    q, k, v, beta, write_key, g = inputs
    q_token, k_token, v_token, beta_token, write_token, g_token = steps  # between tokens
    products, queries, writes, w, u, decays, units = results
    GATED: tl.constexpr = g is not None
    SCALED: tl.constexpr = products.dtype.element_ty == tl.float16
    CUT: tl.constexpr = SCALED and (K <= 64 and V <= 64)
    DTYPE: tl.constexpr = q.dtype.element_ty if RAW and SCALED else products.dtype.element_ty
    BITS: tl.constexpr = 6 if K <= 64 else 7 if K <= 128 else 8  # K is at most 2^BITS
    slot = place // H
    head = place % H
    row, start, live = chunk(slot, T, cu_seqlens, sequence_of, cu_seqlens is not None, CHUNK, REVERSE)
    t = row * T + start
    NEXT = direction(REVERSE)
    q += head * K + t * q_token
    k += head * K + t * k_token
    v += head * V + t * v_token
    write_key += head * K + t * write_token
    beta += head + t * beta_token
    units = find_units(units, place, V)
    q_token *= NEXT
    k_token *= NEXT
    v_token *= NEXT
    write_token *= NEXT
    betas = load_numbers(beta, beta_token * NEXT, live, CHUNK)
    gate, logs = betas, betas
    since = tl.full((CHUNK,), 1.0, tl.float32)
    until = since
    EXACT: tl.constexpr = AGAIN or not SCALED
    if GATED:
        g += head + t * g_token
        g_token *= NEXT
        gate = load_numbers(g, g_token, live, CHUNK)

    kk = tl.zeros((CHUNK, CHUNK), tl.float32)
    qk = tl.zeros((CHUNK, CHUNK), tl.float32)
    key_rows = tl.zeros((CHUNK,), tl.float32)
    most_query, most_key, most_write = 0.0, 0.0, 0.0
    for e in tl.static_range(0, K, BLOCK):
        key = load_tokens(k, k_token, live, e, K, CHUNK, BLOCK)
        write = key
        if OWN_WRITE_KEY:
            write = load_tokens(write_key, write_token, live, e, K, CHUNK, BLOCK)
        query = load_tokens(q, q_token, live, e, K, CHUNK, BLOCK)
        if RAW:
            qk = tl.dot(query.to(DTYPE), tl.trans(write.to(DTYPE)), qk, input_precision=PRECISION)
            kk = tl.dot(key.to(DTYPE), tl.trans(write.to(DTYPE)), kk, input_precision=PRECISION)
        if SCALED:
            # Block by block only the largest at each place is kept: one search for all blocks is faster than one each.
            most_query = query if e == 0 else keep_larger(most_query, query)
            most_key = key if e == 0 else keep_larger(most_key, key)
            if OWN_WRITE_KEY:
                most_write = write if e == 0 else keep_larger(most_write, write)
            if AGAIN:
                key_rows = tl.maximum(key_rows, find_largest_of_rows(key))
    if GATED:
        since, until, whole, logs = find_decays(gate, g, g_token, live, EXACT, CHUNK)
        tl.store(decays + place, whole)
    query_unit, query_inverse, key_unit, key_inverse, write_unit, write_inverse = 1.0, 1.0, 1.0, 1.0, 1.0, 1.0
    queries_inverse, writes_inverse, since_exponent = 1.0, 1.0, 0
    if SCALED:
        largest_query, largest_key = find_largest_of_both(most_query, most_key)
        query_unit, query_inverse = power_of_two(largest_query)
        key_unit, key_inverse = power_of_two(largest_key)
        write_unit, write_inverse = key_unit, key_inverse
        if OWN_WRITE_KEY:
            write_unit, write_inverse = find_unit(most_write, SCALED)
        queries_exponent = exponent_of(query_unit) + exponent_above(tl.abs(scale))
        if GATED:
            steepest_since, strongest = find_largest_of_both(since, until * betas)
            since_exponent = exponent_above(steepest_since)
            queries_exponent += since_exponent
        else:
            strongest = find_largest(betas)
        queries_exponent = clamp_exponent(queries_exponent)
        writes_exponent = clamp_exponent(exponent_of(write_unit) + exponent_above(strongest) + WRITES_ROOM)
        queries_inverse = two_to(-queries_exponent)
        writes_inverse = two_to(-writes_exponent)
        tl.store(units + QUERY, query_unit)
        tl.store(units + KEY, key_unit)
        tl.store(units + WRITE_KEY, write_unit)
    if not RAW:
        qk = multiply_rows(
            *(q, q_token, query_inverse, write_key, write_token, write_inverse, live),
            *(K, RAW, DTYPE, CHUNK, BLOCK),
        )
        qk *= query_unit * write_unit
        kk = multiply_rows(
            *(k, k_token, key_inverse, write_key, write_token, write_inverse, live),
            *(K, RAW, DTYPE, CHUNK, BLOCK),
        )
        kk *= key_unit * write_unit
    for e in tl.static_range(0, K, BLOCK):
        if ROWS == 2:
            if K > BLOCK:
                query = load_tokens(q, q_token, live, e, K, CHUNK, BLOCK)
            tile = query.to(tl.float32) * (since * (scale * queries_inverse))[:, None]
            store_by_rows(queries + place * CHUNK * K, live, e, tile, K, CUT, CHUNK, BLOCK)
        if ROWS > 0:
            if K > BLOCK:
                write = load_tokens(write_key, write_token, live, e, K, CHUNK, BLOCK)
            tile = write.to(tl.float32) * (until * betas * writes_inverse)[:, None]
            store_by_rows(writes + place * CHUNK * K, live, e, tile, K, CUT, CHUNK, BLOCK)
    products += place * 2 * CHUNK * CHUNK
    a = _weigh(qk, betas * scale, gate, logs, 0, GATED, EXACT, CHUNK)
    a_exponent = 0
    if SCALED and not (GATED or AGAIN):
        bound = bound_product(exponent_of(query_unit), exponent_of(write_unit), BITS)
        a_exponent = clamp_exponent(bound + exponent_above(strongest * tl.abs(scale)))
    a, a_unit = _tile_of_scores(a, a_exponent, GATED or AGAIN, SCALED)
    store_by_rows(products + CHUNK * CHUNK, live, 0, a, CHUNK, CUT, CHUNK, CHUNK)
    # Where registers suffice, values are loaded before the inverse, and keys once more before the products that
    # they are needed for last: a program that waits for each block of columns takes 4 % more time.
    EARLY: tl.constexpr = BLOCK == 64 and V <= 128
    KEYS_EARLY: tl.constexpr = EARLY and K <= 128
    values, keys = (), ()
    if EARLY:
        for e in tl.static_range(0, V, BLOCK):
            values = values + (load_tokens(v, v_token, live, e, V, CHUNK, BLOCK),)
    lower = _weigh(kk, betas, gate, logs, 1, GATED, EXACT, CHUNK)
    steepest = find_largest_of_rows(lower)
    x = eliminate(lower, CHUNK) if AGAIN else unit_lower_inverse(lower, live if SCALED else CHUNK, CHUNK, SCALED)
    x_unit, x_inverse, unit = 1.0, 1.0, 1.0
    if SCALED:
        size = inverse_size(steepest, x)
        if not AGAIN:
            tl.store(units + SIZE, size)
        x_unit, x_inverse = _find_unit_below(size, INVERSE_SHARE, SCALED)
        tl.store(units + INVERSE, x_unit)
    square = as_tile(x * x_inverse, SCALED)
    if SAVE:
        store_by_rows(products, live, 0, square, CHUNK, CUT, CHUNK, CHUNK)
    for e in tl.static_range(0, V, BLOCK):
        value = values[e // BLOCK] if EARLY else load_tokens(v, v_token, live, e, V, CHUNK, BLOCK)
        if AGAIN:
            tile, unit = mix_rows(x, value.to(tl.float32), SCALED, PRECISION)
        else:
            unit, inverse = _find_unit_below(find_largest(value), ROWS_SHARE, SCALED)
            tile = _multiply_tiles(square, as_tile(value.to(tl.float32) * inverse, SCALED), SCALED)
            unit *= x_unit
        store_by_columns(u + place * CHUNK * V, live, e, tl.trans(tile), V, CUT, BLOCK, CHUNK)
        store_column_units(units + U, e, unit, TILE, V, BLOCK, SCALED)
    if KEYS_EARLY:
        for e in tl.static_range(0, K, BLOCK):
            keys = keys + (load_tokens(k, k_token, live, e, K, CHUNK, BLOCK),)
    if GATED:
        x *= since[None, :]
    if AGAIN:
        # One unit for all blocks of columns; the unit of each row as in `mix_rows`.
        row_unit, row_inverse = power_of_two(key_rows)
        row_inverse = (row_inverse / LIMIT)[:, None]
        x *= row_unit[None, :]
        unit, x_inverse = power_of_two(tl.max(tl.sum(tl.abs(x), 1), 0))
        unit *= LIMIT
    else:
        row_inverse = 1.0
        if SCALED:
            row_inverse = key_inverse * ROWS_SHARE
            x_inverse *= two_to(-since_exponent)
            unit = x_unit * two_to(since_exponent) * (key_unit / ROWS_SHARE)
    square = as_tile(x * -x_inverse, SCALED)
    for e in tl.static_range(0, K, BLOCK):
        key = keys[e // BLOCK] if KEYS_EARLY else load_tokens(k, k_token, live, e, K, CHUNK, BLOCK)
        key = key.to(tl.float32) * row_inverse
        tile = _multiply_tiles(square, as_tile(key, SCALED), SCALED)
        store_by_rows(w + place * CHUNK * K, live, e, tile, K, CUT, CHUNK, BLOCK)
    if SCALED:
        packed = pack_units(unit, two_to(writes_exponent), two_to(queries_exponent), a_unit)
        tl.store(units + PACKED_UNITS, packed)


@triton.jit(do_not_specialize=[*SIZES_AND_STRIDES, "places"])
def prepare(
    q, k, v, beta, write_key, g, cu_seqlens, sequence_of, products, queries, writes, w, u, decays, units,
    scale, places, T, H, q_token, k_token, v_token, beta_token, write_token, g_token,
    K: tl.constexpr, V: tl.constexpr, REVERSE: tl.constexpr, SAVE: tl.constexpr, ROWS: tl.constexpr,
    RAW: tl.constexpr, AGAIN: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, OWN_WRITE_KEY: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: A, W, (X V)ᵀ and e^{b_C}; if SAVE, X.

    ROWS: with 1, e^{b_C - b} P is stored as well, and with 2 also e^b Q; with 0 `advance` makes both from q and write
    keys. RAW: products of queries and keys are of their own type, not of tiles. AGAIN, those of AGAIN chunks, out of
    `places` of all heads, that are not mild (see `inverse_size`), with an inverse in float32.
    """
    inputs = (q, k, v, beta, write_key, g)
    steps = (q_token, k_token, v_token, beta_token, write_token, g_token)
    results = (products, queries, writes, w, u, decays, units)
    if AGAIN:
        first = tl.program_id(0).to(tl.int64) * AGAIN
        place = first + tl.arange(0, AGAIN)
        sizes = tl.load(find_units(units, place, V) + SIZE, mask=place < places, other=0.0)
        if tl.max(sizes, 0) > MILD:
            for i in range(0, AGAIN):
                size = 0.0
                if first + i < places:
                    size = tl.load(find_units(units, first + i, V) + SIZE)
                if size > MILD:
                    _prepare_chunk(
                        first + i, inputs, steps, results, cu_seqlens, sequence_of, scale, T, H,
                        K, V, REVERSE, SAVE, ROWS, RAW, True, CHUNK, BLOCK, OWN_WRITE_KEY,
                    )  # fmt: skip
    else:
        place = tl.program_id(0).to(tl.int64)
        _, _, live = chunk(place // H, T, cu_seqlens, sequence_of, cu_seqlens is not None, CHUNK, REVERSE)
        if live > 0:
            _prepare_chunk(
                place, inputs, steps, results, cu_seqlens, sequence_of, scale, T, H,
                K, V, REVERSE, SAVE, ROWS, RAW, False, CHUNK, BLOCK, OWN_WRITE_KEY,
            )  # fmt: skip
        elif products.dtype.element_ty == tl.float16:
            tl.store(find_units(units, place, V) + SIZE, 0.0)  # a slot without tokens is mild


@triton.jit(do_not_specialize=[*SIZES_AND_STRIDES, "sequences", "span"])
def advance(
    beta, initial, units, cu_seqlens, products, queries, writes, w, u, decays, offsets, states, output, final,
    scale, sequences, span, T, H, q_token, beta_token, write_token,
    K: tl.constexpr, V: tl.constexpr, REVERSE: tl.constexpr, WEIGH: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """BLOCK value columns of one head of one sequence or segment, with the state in pieces of STEP key columns.

    With `states` the state before each chunk is stored, and U in place of X V. WEIGH: `queries` are q as it came, with
    BOTH also `writes` write keys (see `load_rows`).
    """
    GATED: tl.constexpr = decays is not None
    SCALED: tl.constexpr = products.dtype.element_ty == tl.float16
    CUT: tl.constexpr = SCALED and (K <= 64 and V <= 64)
    SEGMENTED: tl.constexpr = offsets is not None
    column, head, n = find_place(H, V, BLOCK)
    segment, number, last, begin = n, 0, 0, 0
    if SEGMENTED:
        n, number, last, begin, stop = find_segment(
            segment, T, cu_seqlens, sequences, span, cu_seqlens is not None, CHUNK
        )
    row, start, end, slot = sequence(n, T, cu_seqlens, cu_seqlens is not None, CHUNK)
    NEXT = direction(REVERSE)
    tokens = (end - start).to(tl.int32)
    if output is not None:
        output += ((row * T + token_after(0, start, end, REVERSE)) * H + head) * V
    if WEIGH > 0:
        queries += head * K + row * T * q_token
    if WEIGH == BOTH:
        writes += head * K + row * T * write_token
        beta += head + row * T * beta_token
    if not SEGMENTED:
        stop = tl.cdiv(tokens, CHUNK)

    state = ()
    for e in tl.static_range(0, K, STEP):
        piece = tl.zeros((BLOCK, STEP), tl.float32)
        if initial is not None:
            piece = load_block(initial + (n * H + head) * K * V, e, column, K, V, STEP, BLOCK)
            piece = tl.trans(piece.to(tl.float32))
        if SEGMENTED:
            if number > 0:
                of_segment = offsets + ((segment - 1) * H + head) * V * K
                piece = load_block(of_segment, column, e, V, K, BLOCK, STEP)
        state = state + (piece,)
    BY_ROW: tl.constexpr = SCALED and states is None  # as in `walk_through`
    state, exponent = turn_to_tiles(state, 0, SCALED, BY_ROW)
    first = (slot + begin) * H + head
    xv, xv_exponents, xv_exponent = load_xv(
        u, units, first, tokens - begin * CHUNK, column, V, False, SCALED, CUT, CHUNK, BLOCK
    )
    if SCALED:
        later_packed = tl.load(find_units(units, first, V) + PACKED_UNITS)
        later_size = tl.load(find_units(units, first, V) + SIZE)
    if GATED:
        later_whole = tl.load(decays + first)
    if WEIGH == BOTH:
        later_betas = load_betas(beta, beta_token, begin, start, end, REVERSE, CHUNK)
    for m in range(begin, stop):
        place = (slot + m) * H + head
        live = tokens - m * CHUNK
        of_chunk = find_units(units, place, V)
        # Loaded one iteration early, because the compiler prefetches only operands of products.
        next_chunk = tl.minimum(m + 1, stop - 1)
        following = (slot + next_chunk) * H + head
        later, later_exponents, later_exponent = load_xv(
            u, units, following, tokens - next_chunk * CHUNK, column, V, False, SCALED, CUT, CHUNK, BLOCK
        )
        packed, size = 1.0, 1.0
        if SCALED:
            packed, size = later_packed, later_size
            later_packed = tl.load(find_units(units, following, V) + PACKED_UNITS)
            later_size = tl.load(find_units(units, following, V) + SIZE)
        whole = 1.0
        if GATED:
            whole = later_whole
            later_whole = tl.load(decays + following)
        query_rows, write_rows = queries + place * CHUNK * K, writes + place * CHUNK * K
        query_weight, write_weight = scale, 1.0
        t = token_after(m * CHUNK, start, end, REVERSE)
        if WEIGH > 0:
            query_rows = queries + t * q_token
            query_weight = scale * two_to(-unpack_queries(packed))
        if WEIGH == BOTH:
            write_rows = writes + t * write_token
            write_weight = (later_betas * two_to(-unpack_writes(packed)))[:, None]
            later_betas = load_betas(beta, beta_token, next_chunk, start, end, REVERSE, CHUNK)

        # Not CUT, 32 bits of `live` in place of 64 here cost registers: with 128 columns the walk took 30 % more time.
        u_tile, u_exponent, state, after_exponent, o, read_exponent = walk_through(
            state, exponent, xv, xv_exponents, xv_exponent, w,
            write_rows, write_token * NEXT, write_weight, query_rows, q_token * NEXT, query_weight,
            live if CUT else end - start - m * CHUNK, packed, size, states, of_chunk, place, column, whole,
            K, V, GATED, output is not None, WEIGH, SCALED, CUT, CHUNK, BLOCK, STEP,
        )  # fmt: skip
        if SCALED:
            exponent = after_exponent
        if states is not None:
            store_by_columns(u + place * CHUNK * V, live, column, u_tile, V, CUT, BLOCK, CHUNK)
            if SCALED:
                store_column_units(of_chunk + U, column, two_to(u_exponent), TILE, V, BLOCK, SCALED)
        if output is not None:
            a = load_by_rows(products + (place * 2 + 1) * CHUNK * CHUNK, live, 0, CHUNK, CUT, CHUNK, CHUNK)
            output_exponent = 0
            if SCALED:
                output_exponent = u_exponent + unpack_a(packed)
                output_exponent = tl.maximum(output_exponent, read_exponent - LEAD)
                o *= across(two_to(read_exponent - output_exponent), BY_ROW)
                output_exponent = across(output_exponent, BY_ROW)
            o = end_walk(tl.dot(u_tile, tl.trans(a), o, input_precision=PRECISION), output_exponent, SCALED)
            chunk_output = output + m * (H.to(tl.int64) * CHUNK * V * NEXT)
            store_tokens(chunk_output, H * V * NEXT, live, column, tl.trans(o), V, CHUNK, BLOCK)
        xv = later
        if SCALED:
            xv_exponents, xv_exponent = later_exponents, later_exponent
    if number == last:
        for e in tl.static_range(0, K, STEP):
            left = tl.trans(end_walk(state[e // STEP], across(exponent, BY_ROW), SCALED))
            store_block(final + (n * H + head) * K * V, e, column, left, K, V, STEP, BLOCK)


@triton.jit(do_not_specialize=SIZES_AND_STRIDES)
def read_out(
    q, g, cu_seqlens, sequence_of, products, u, states, output, scale, T, H, q_token, g_token,
    K: tl.constexpr, V: tl.constexpr, REVERSE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """BLOCK value columns of one chunk of one head: the output, in float32."""
    column, head, slot = find_place(H, V, BLOCK)
    place = slot * H + head
    row, start, live = chunk(slot, T, cu_seqlens, sequence_of, cu_seqlens is not None, CHUNK, REVERSE)
    if live <= 0:
        return
    t = row * T + start
    NEXT = direction(REVERSE)

    q += head * K + t * q_token
    a = load_block(products + (place * 2 + 1) * CHUNK * CHUNK, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
    u_tile = load_block(u + place * CHUNK * V, column, 0, V, CHUNK, BLOCK, CHUNK)
    o = tl.zeros((CHUNK, BLOCK), tl.float32)
    for e in range(0, K, STEP):
        query = load_tokens(q, q_token * NEXT, live, e, K, CHUNK, STEP).to(tl.float32)
        state = load_block(states + place * K * V, column, e, V, K, BLOCK, STEP)
        o = tl.dot(query, tl.trans(state), o, input_precision=PRECISION)
    o *= scale
    if g is not None:
        g += head + t * g_token
        o *= decay_since(load_numbers(g, g_token * NEXT, live, CHUNK))[:, None]
    o = tl.dot(a, tl.trans(u_tile), o, input_precision=PRECISION)
    store_tokens(output + (t * H + head) * V, H * V * NEXT, live, column, o, V, CHUNK, BLOCK)


# Gates may have any sign. Where decays may rise above this, a bound of them is too coarse for a unit.
MOST_RISE = tl.constexpr(16.0)
# Most last tokens that `read_through` takes as a chunk of their own, of this many: images of 197 tokens have 5.
REST = tl.constexpr(16)


@triton.jit
def _read_chunk(
    state, query, key, value, write, betas, gate, logs, since, until, whole, scale,
    GATED: tl.constexpr, OWN_WRITE_KEY: tl.constexpr, RAW: tl.constexpr, STEEP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Of one chunk: the output, the state after it, and the size of its inverse with float16 operands.

    STEEP, the inverse is computed in float32 where the chunk is not mild (see `inverse_size`), and the size is one
    number. Otherwise the chunk is taken for mild, whatever it is, and the sizes of all rows are returned: their maximum
    would be one more number for which all warps wait.
    """
    largest_query, largest_key = find_largest_of_both(query, key)
    key_unit, key_inverse = power_of_two(largest_key)
    query_unit, query_inverse = power_of_two(largest_query)
    key_tile = as_tile(key.to(tl.float32) * key_inverse, True)
    write_unit = key_unit
    if OWN_WRITE_KEY:
        write_unit, write_inverse = find_unit(write, True)
    if RAW:
        kk = tl.dot(key, tl.trans(write))
        qk = tl.dot(query, tl.trans(write))
    else:
        write_tile = key_tile
        if OWN_WRITE_KEY:
            write_tile = as_tile(write.to(tl.float32) * write_inverse, True)
        query_tile = as_tile(query.to(tl.float32) * query_inverse, True)
        kk = tl.dot(key_tile, tl.trans(write_tile), input_precision=PRECISION) * (key_unit * write_unit)
        qk = tl.dot(query_tile, tl.trans(write_tile), input_precision=PRECISION) * (query_unit * write_unit)
    lower = _weigh(kk, betas, gate, logs, 1, GATED, False, CHUNK)
    steepest = find_largest_of_rows(lower)
    x = unit_lower_inverse_left(lower, CHUNK)
    first_size = inverse_sizes(steepest, x)
    if STEEP:
        first_size = tl.max(first_size, 0)
        size = first_size
        if size > MILD:
            x = eliminate(lower, CHUNK)
            size = inverse_size(steepest, x)
    square = as_tile(x, True)  # the largest number of a mild inverse is a tile's in the unit 1
    queries_exponent = exponent_of(query_unit) + exponent_above(tl.abs(scale))
    since_exponent = 0
    if GATED:
        steepest_since, strongest = find_largest_of_both(since, until * betas)
        since_exponent = exponent_above(steepest_since)
        queries_exponent += since_exponent
    else:
        strongest = find_largest(betas)
    queries_exponent = clamp_exponent(queries_exponent)
    writes_exponent = clamp_exponent(exponent_of(write_unit) + exponent_above(strongest))
    a = _weigh(qk, betas * scale, gate, logs, 0, GATED, False, CHUNK)
    rise = 1.0
    if GATED:
        rise = tl.exp(tl.sum(tl.maximum(gate, 0.0), 0))
        strongest = tl.max(tl.abs(betas), 0) * rise
    a_exponent = bound_product(exponent_of(query_unit), exponent_of(write_unit), 6)
    a_exponent = clamp_exponent(a_exponent + exponent_above(strongest * tl.abs(scale)))
    a_unit, a_inverse = two_to(a_exponent), two_to(-a_exponent)
    if STEEP:
        if (size > MILD) | (rise > MOST_RISE):
            a_unit, a_inverse = find_unit(a, True)
    a = as_tile(a * a_inverse, True)
    queries_unit, writes_unit = two_to(queries_exponent), two_to(writes_exponent)
    queries_tile = as_tile(query.to(tl.float32) * (since * scale * two_to(-queries_exponent))[:, None], True)
    writes_tile = as_tile(write.to(tl.float32) * (until * betas * two_to(-writes_exponent))[:, None], True)

    value_exponent = exponent_of(power_of_two(find_largest(value))[0])
    before, state_unit = in_units(state, True)
    read = tl.dot(key_tile, before, input_precision=PRECISION) * (key_unit * state_unit)
    rest = value.to(tl.float32) - read * since[:, None]
    # The unit of a difference from bounds of both of its parts.
    rest_exponent = bound_product(exponent_of(key_unit), exponent_of(state_unit), 6) + since_exponent
    rest_exponent = clamp_exponent(tl.maximum(value_exponent, rest_exponent) + 1)
    rest_tile = as_tile(rest * (two_to(-rest_exponent) * ROWS_SHARE), True)
    u_unit = two_to(rest_exponent) / ROWS_SHARE
    if STEEP:
        if size > MILD:
            u, u_unit = mix_rows(x, rest, True, PRECISION)
        else:
            u = _multiply_tiles(square, rest_tile, True)
    else:
        u = _multiply_tiles(square, rest_tile, True)
    o = tl.dot(queries_tile, before, input_precision=PRECISION) * (queries_unit * state_unit)
    o = add_product(o, a, u, a_unit * u_unit, True, PRECISION)
    state = add_product(state * whole, tl.trans(writes_tile), u, writes_unit * u_unit, True, PRECISION)
    return o, state, first_size


@triton.jit
def _load_first(
    inputs, steps, done, start, end,
    K: tl.constexpr, REVERSE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """What a chunk that begins after `done` tokens needs first: beta, log gates, keys and queries."""
    q, k, _, beta, _, g = inputs
    q_token, k_token, _, beta_token, _, g_token = steps
    NEXT = direction(REVERSE)
    live = end - start - done
    t = token_after(done, start, end, REVERSE)
    betas = load_numbers(beta + t * beta_token, beta_token * NEXT, live, CHUNK)
    gate = betas
    if g is not None:
        gate = load_numbers(g + t * g_token, g_token * NEXT, live, CHUNK)
    key = load_tokens(k + t * k_token, k_token * NEXT, live, 0, K, CHUNK, BLOCK_K)
    query = load_tokens(q + t * q_token, q_token * NEXT, live, 0, K, CHUNK, BLOCK_K)
    return betas, gate, key, query


@triton.jit
def _read_next(
    state, largest, loaded, inputs, steps, output, scale, done, start, end, H,
    K: tl.constexpr, V: tl.constexpr, REVERSE: tl.constexpr, OWN_WRITE_KEY: tl.constexpr, RAW: tl.constexpr,
    STEEP: tl.constexpr, AGAIN: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The state after the chunk that begins after `done` tokens, and the largest size of inverses up to it.

    The arguments are those of `_read_sequence` and what `_load_first` has loaded.
    """
    betas, gate, key, query = loaded
    _, _, v, _, write_key, g = inputs
    _, _, v_token, _, write_token, _ = steps
    NEXT = direction(REVERSE)
    live = end - start - done
    t = token_after(done, start, end, REVERSE)
    since = tl.full((CHUNK,), 1.0, tl.float32)
    until = since
    logs = betas
    whole = 1.0
    if g is not None:
        since, until, whole, logs = decays_for_tiles(gate, CHUNK)
    write = key
    if OWN_WRITE_KEY:
        write = load_tokens(write_key + t * write_token, write_token * NEXT, live, 0, K, CHUNK, BLOCK_K)
    value = load_tokens(v + t * v_token, v_token * NEXT, live, 0, V, CHUNK, BLOCK)
    o, state, size = _read_chunk(
        state, query, key, value, write, betas, gate, logs, since, until, whole, scale,
        g is not None, OWN_WRITE_KEY, RAW, STEEP, CHUNK,
    )  # fmt: skip
    largest = tl.maximum(largest, size)
    if AGAIN:
        live = tl.where(largest > MILD, live, 0)
    store_tokens(output + t * (H * V), H * V * NEXT, live, 0, o, V, CHUNK, BLOCK)
    return state, largest


@triton.jit
def _read_sequence(
    inputs, steps, initial, output, scale, start, end, H,
    K: tl.constexpr, V: tl.constexpr, REVERSE: tl.constexpr, OWN_WRITE_KEY: tl.constexpr, RAW: tl.constexpr,
    STEEP: tl.constexpr, AGAIN: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The state after one head of a sequence, and the largest size of its inverses.

    `inputs` point to the row and the head of q, k, v, beta, write_key and g; `steps` are their distances between
    tokens. AGAIN, outputs are stored from the first chunk on that is not mild:
    those before it are there, and no bit of theirs depends on what comes later. Up to REST last tokens are a chunk of
    that many; AGAIN, which is rare, a whole one.
    """
    state = tl.zeros((BLOCK_K, BLOCK), tl.float32)
    if initial is not None:
        state = load_block(initial, 0, 0, K, V, BLOCK_K, BLOCK).to(tl.float32)
    largest = 0.0 if STEEP else tl.zeros((CHUNK,), tl.float32)
    tokens = (end - start).to(tl.int32)
    chunks = (tokens + ((CHUNK if AGAIN else REST) - 1)) // CHUNK
    loaded = _load_first(inputs, steps, 0, start, end, K, REVERSE, CHUNK, BLOCK_K)
    for m in range(0, chunks):
        # What the next chunk needs first is loaded one iteration early; values are needed late in an iteration.
        following = _load_first(inputs, steps, (m + 1) * CHUNK, start, end, K, REVERSE, CHUNK, BLOCK_K)
        state, largest = _read_next(
            state, largest, loaded, inputs, steps, output, scale, m * CHUNK, start, end, H,
            K, V, REVERSE, OWN_WRITE_KEY, RAW, STEEP, AGAIN, CHUNK, BLOCK_K, BLOCK,
        )  # fmt: skip
        loaded = following
    if not STEEP:
        largest = tl.max(largest, 0)
    if not AGAIN:
        done = chunks * CHUNK
        if done < tokens:
            rest = _load_first(inputs, steps, done, start, end, K, REVERSE, REST, BLOCK_K)
            last_size = largest if STEEP else tl.zeros((REST,), tl.float32)
            state, last_size = _read_next(
                state, last_size, rest, inputs, steps, output, scale, done, start, end, H,
                K, V, REVERSE, OWN_WRITE_KEY, RAW, STEEP, AGAIN, REST, BLOCK_K, BLOCK,
            )  # fmt: skip
            if not STEEP:
                last_size = tl.max(last_size, 0)
            largest = tl.maximum(largest, last_size)
    return state, largest


@triton.jit(do_not_specialize=SIZES_AND_STRIDES)
def read_through(
    q, k, v, beta, write_key, g, initial, cu_seqlens, output, final,
    scale, T, H, q_token, k_token, v_token, beta_token, write_token, g_token,
    K: tl.constexpr, V: tl.constexpr, REVERSE: tl.constexpr, OWN_WRITE_KEY: tl.constexpr, RAW: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of one whole sequence: the output and the final state, and nothing for the backward pass.

    Without gates all chunks are taken for mild first, and a sequence with a chunk that is not is read again: an inverse
    in float32 inside the loop, though it hardly ever runs, makes all chunks slower. Gates take registers of their own,
    and one loop is faster then.
    """
    _, head, n = find_place(H, 1, 1)
    row, start, end, _ = sequence(n, T, cu_seqlens, cu_seqlens is not None, CHUNK)
    first = row * T
    q += first * q_token + head * K
    k += first * k_token + head * K
    v += first * v_token + head * V
    write_key += first * write_token + head * K
    beta += first * beta_token + head
    output += (first * H + head) * V
    if g is not None:
        g += first * g_token + head
    if initial is not None:
        initial += (n * H + head) * K * V
    inputs = (q, k, v, beta, write_key, g)
    steps = (q_token, k_token, v_token, beta_token, write_token, g_token)
    state, largest = _read_sequence(
        inputs, steps, initial, output, scale, start, end, H,
        K, V, REVERSE, OWN_WRITE_KEY, RAW, g is not None, False, CHUNK, BLOCK_K, BLOCK,
    )  # fmt: skip
    if g is None:
        if largest > MILD:
            state, _largest = _read_sequence(
                inputs, steps, initial, output, scale, start, end, H,
                K, V, REVERSE, OWN_WRITE_KEY, RAW, True, True, CHUNK, BLOCK_K, BLOCK,
            )  # fmt: skip
    store_block(final + (n * H + head) * K * V, 0, 0, state, K, V, BLOCK_K, BLOCK)
