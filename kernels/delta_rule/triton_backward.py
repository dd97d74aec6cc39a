"""The delta rule backward in Triton. The formulas are those of chunk.py, `_backward`.

Where the forward pass did not keep e^b Q and e^{b_C - b} P, `retreat` makes them again. It walks from the last chunk to
the first, in the segments of time of the forward pass (see triton_segments.py), and stores the gradients of the states
after each chunk. The other kernels run over chunks in parallel: `differentiate_scores` (gradients of V, A and L, and a
part of that of gates) and `differentiate_inputs` (gradients of queries, keys, beta and gates). Without a gate, up to
128 columns, the second one does the work of both.

A matrix that is needed both as it is and transposed goes through memory in between: a transposed result of one matrix
product as the left operand of another gives wrong numbers on Hopper in Triton 3.4 to 3.7. The kernels exchange tiles
with units, which are in separate rows of memory (see triton_kept.py). Gradients of states, of U and of V are stored
transposed, as states, U and V themselves are (see triton_forward.py).
"""

import triton
import triton.language as tl

from longseq.kernels.delta_rule.triton_kept import (
    D_A,
    D_L,
    D_OUTPUT,
    INVERSE,
    KEY,
    PACKED_UNITS,
    PRECISION,
    QUERY,
    SIZE,
    TILE,
    WRITE_KEY,
    U,
    find_gradient_units,
    find_place,
    find_units,
    load_by_columns,
    load_by_rows,
    store_by_columns,
    store_by_rows,
    unpack_a,
    unpack_queries,
    unpack_w,
    unpack_writes,
)
from longseq.kernels.delta_rule.triton_segments import (
    across,
    end_walk,
    find_exponent,
    find_exponents,
    follow_unit,
    load_betas,
    load_rows,
    multiply_pieces,
    multiply_rows,
    rescale_if_steep,
    turn_to_tiles,
)
from longseq.kernels.triton_tiles import (
    SIZES_AND_STRIDES,
    add_separated,
    chunk,
    decay_by_difference,
    decay_of_logs,
    direction,
    find_decays,
    find_segment,
    load_block,
    load_numbers,
    load_tokens,
    log_decays,
    of_token_before,
    sequence,
    store_block,
    store_tokens,
    token_after,
)
from longseq.kernels.triton_units import (
    LEAD,
    LIMIT,
    as_tile,
    bound_product,
    exponent_of,
    in_units,
    inverse_of,
    load_largest_unit,
    load_share,
    load_unit,
    power_of_two,
    store_column_units,
    store_unit,
    two_to,
)


@triton.jit
def _load_gradients(
    d_output, do_token, m, start, end, column,
    V: tl.constexpr, REVERSE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of the gradients of the outputs, for chunk m of a sequence."""
    d_output += token_after(m * CHUNK, start, end, REVERSE) * do_token
    return load_tokens(d_output, do_token * direction(REVERSE), end - start - m * CHUNK, column, V, CHUNK, BLOCK)


@triton.jit(do_not_specialize=[*SIZES_AND_STRIDES, "sequences", "span"])
def retreat(
    beta, units, d_units, cu_seqlens, products, queries, writes, w, decays,
    d_output, d_final, d_offsets, d_states, d_u, d_initial,
    scale, sequences, span, T, H, do_token, q_token, beta_token, write_token,
    K: tl.constexpr, V: tl.constexpr, REVERSE: tl.constexpr, WEIGH: tl.constexpr, RAW: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """BLOCK value columns of one head of one sequence or segment: gradients of the states after each chunk and of U.

    The state's gradient is in pieces of STEP key columns, as the state is in `walk_through`. Without `d_states` only a
    segment's offset is stored. WEIGH: `queries` and `writes` are q and write keys as they came, and the program makes
    of them the tiles of the forward pass. RAW, of those two only of write keys: q is multiplied with the gradients of
    the outputs as both came, in half precision.
    """
    GATED: tl.constexpr = decays is not None
    SCALED: tl.constexpr = products.dtype.element_ty == tl.float16
    CUT: tl.constexpr = SCALED and (K <= 64 and V <= 64)
    SEGMENTED: tl.constexpr = d_offsets is not None
    SUMMARY: tl.constexpr = d_states is None
    BITS: tl.constexpr = 6 if K <= 64 else 7 if K <= 128 else 8  # K is at most 2^BITS
    tiles: tl.constexpr = (V + TILE - 1) // TILE
    column, head, n = find_place(H, V, BLOCK)
    segment, number, last, begin = n, 0, 0, 0
    if SEGMENTED:
        n, number, last, begin, stop = find_segment(
            segment, T, cu_seqlens, sequences, span, cu_seqlens is not None, CHUNK
        )
        if SUMMARY:  # the offset of the first segment is not needed
            begin = tl.where(number == 0, stop, begin)
    row, start, end, slot = sequence(n, T, cu_seqlens, cu_seqlens is not None, CHUNK)
    if not SEGMENTED:
        stop = tl.cdiv((end - start).to(tl.int32), CHUNK)
    NEXT = direction(REVERSE)
    d_output += head * V + row * T * do_token
    if WEIGH:
        queries += head * K
        writes += head * K
        beta += head + row * T * beta_token
    d_state = ()
    for e in tl.static_range(0, K, STEP):
        piece = tl.zeros((BLOCK, STEP), tl.float32)
        if d_final is not None:
            if number == last:
                piece = load_block(d_final + (n * H + head) * K * V, e, column, K, V, STEP, BLOCK)
                piece = tl.trans(piece.to(tl.float32))
        if SEGMENTED and not SUMMARY:
            if number < last:
                of_segment = d_offsets + ((segment + 1) * H + head) * V * K
                piece = load_block(of_segment, column, e, V, K, BLOCK, STEP)
        d_state = d_state + (piece,)
    BY_ROW: tl.constexpr = SCALED and SUMMARY
    d_state, exponent = turn_to_tiles(d_state, 0, SCALED, BY_ROW)
    # With 256 columns, shared memory has room for the tiles of queries and keys of two chunks, but not for those of the
    # outputs' gradients as well: these are loaded one chunk early. Their products with the queries are added in the
    # first loop, before the gradient of U is known, and the walk takes a fifth less time. Fewer columns gain nothing.
    EARLY: tl.constexpr = K > 128
    # The state's gradient is then multiplied by one factor for its tile and by another one for that sum: so fewer
    # registers spill. A decay may leave numbers so small that the second factor would be too large for a float32
    # number: then the gradient is brought to its unit first, and with a gate so is one whose rows have a unit each.
    TWO_FACTORS: tl.constexpr = EARLY and SCALED and not (GATED and BY_ROW)
    if EARLY:
        last_chunk = tl.maximum(stop - 1, 0)
        earlier = _load_gradients(d_output, do_token, last_chunk, start, end, column, V, REVERSE, CHUNK, BLOCK)
    if SCALED:
        following_units = find_units(units, (slot + tl.maximum(stop - 1, 0)) * H + head, V)
        later_packed = tl.load(following_units + PACKED_UNITS)
        later_size = tl.load(following_units + SIZE)
    if WEIGH:
        later_betas = load_betas(beta, beta_token, tl.maximum(stop - 1, 0), start, end, REVERSE, CHUNK)
    for back in range(0, stop - begin):
        m = stop - 1 - back
        t = row * T + token_after(m * CHUNK, start, end, REVERSE)
        live = (end - start).to(tl.int32) - m * CHUNK if CUT else end - start - m * CHUNK
        place = (slot + m) * H + head
        left_units = find_gradient_units(d_units, place, V)
        whole = 1.0
        if GATED:
            whole = tl.load(decays + place)
        a = load_by_rows(products + (place * 2 + 1) * CHUNK * CHUNK, live, 0, CHUNK, CUT, CHUNK, CHUNK)
        if EARLY:
            do = earlier
            before = tl.maximum(m - 1, begin)
            earlier = _load_gradients(d_output, do_token, before, start, end, column, V, REVERSE, CHUNK, BLOCK)
        else:
            do = _load_gradients(d_output, do_token, m, start, end, column, V, REVERSE, CHUNK, BLOCK)
        raw_do = do
        do, do_unit = in_units(do.to(tl.float32), SCALED)
        # Values that are not operands of products are loaded one iteration early.
        following = tl.maximum(m - 1, begin)
        packed, size = 1.0, 1.0
        if SCALED:
            packed, size = later_packed, later_size
            following_units = find_units(units, (slot + following) * H + head, V)
            later_packed = tl.load(following_units + PACKED_UNITS)
            later_size = tl.load(following_units + SIZE)
        query_rows, write_rows = queries + place * CHUNK * K, writes + place * CHUNK * K
        query_weight, write_weight = scale, 1.0
        if WEIGH:
            query_rows, write_rows = queries + t * q_token, writes + t * write_token
            query_weight = scale * two_to(-unpack_queries(packed))
            write_weight = (later_betas * two_to(-unpack_writes(packed)))[:, None]
            later_betas = load_betas(beta, beta_token, following, start, end, REVERSE, CHUNK)

        du_exponent, state_exponent, earlier_exponent, read_exponent = 0, 0, 0, 0
        first_weight, second_weight = whole, 1.0
        if SCALED:
            own = find_exponent(d_state, exponent, BY_ROW)
            of_state = bound_product(own, unpack_writes(packed), BITS)
            of_output = bound_product(exponent_of(do_unit), unpack_a(packed), 6)
            bound = tl.maximum(of_state, of_output) + 1
            # The products of queries and outputs' gradients are brought to the state's unit by at most 2^LEAD.
            read_exponent = exponent_of(do_unit) + unpack_queries(packed)
            own = tl.maximum(own, read_exponent - LEAD)
            growth = bound_product(unpack_w(packed), unpack_writes(packed), BITS)
            state_exponent, du_exponent, apart = find_exponents(
                own, bound, unpack_w(packed), growth, size, BY_ROW
            )  # fmt: skip
            if TWO_FACTORS and GATED:
                if exponent - own > LEAD:
                    d_state = multiply_pieces(d_state, two_to(exponent - own))
                    exponent = own
            factor = across(two_to(exponent - state_exponent), BY_ROW)
            if TWO_FACTORS:
                read_exponent = tl.maximum(read_exponent, state_exponent - LEAD)
                first_weight = across(whole * two_to(exponent - read_exponent), BY_ROW)
            else:
                d_state = multiply_pieces(d_state, factor)
                if EARLY:
                    read_exponent = tl.maximum(read_exponent, state_exponent - LEAD)
                    first_weight = across(whole * two_to(state_exponent - read_exponent), BY_ROW)
        read = ()
        du = tl.zeros((BLOCK, CHUNK), tl.float32)
        for e in tl.static_range(0, K, STEP):
            after = as_tile(d_state[e // STEP] * factor if TWO_FACTORS else d_state[e // STEP], SCALED)
            if not SUMMARY:
                store_block(d_states + place * K * V, column, e, after, V, K, BLOCK, STEP)
            write = load_rows(
                write_rows, write_token * NEXT, live, write_weight, e, K, WEIGH, SCALED, CUT, CHUNK, STEP
            )  # fmt: skip
            du = tl.dot(after, tl.trans(write), du, input_precision=PRECISION)
            if EARLY:
                query = load_rows(query_rows, q_token * NEXT, live, query_weight, e, K, WEIGH, SCALED, CUT, CHUNK, STEP)
                piece = d_state[e // STEP] * first_weight
                read = read + (tl.dot(tl.trans(do), query, piece, input_precision=PRECISION),)
        if SCALED:
            from_state = state_exponent + unpack_writes(packed)
            sum_exponent = tl.maximum(exponent_of(do_unit) + unpack_a(packed), from_state - LEAD)
            du *= across(two_to(from_state - sum_exponent), BY_ROW)
        du = tl.dot(tl.trans(do), a, du, input_precision=PRECISION)
        if SCALED:
            du *= across(two_to(sum_exponent - du_exponent), BY_ROW)
            du, du_exponent = rescale_if_steep(du, du_exponent, size, BY_ROW)
        if SCALED:
            product = tl.maximum(du_exponent + unpack_w(packed), tl.maximum(read_exponent - LEAD, -126))
            if EARLY:
                earlier_exponent = tl.where(apart, tl.maximum(product, state_exponent - LEAD), state_exponent)
            else:
                d_state, earlier_exponent = follow_unit(d_state, state_exponent, product, apart, BY_ROW)
            second_weight = two_to(read_exponent - earlier_exponent)
            if RAW:
                second_weight = scale * two_to(-earlier_exponent)  # at most 2^126
            second_weight = across(second_weight, BY_ROW)
        du_unit = two_to(du_exponent) if SCALED else 1.0
        du = as_tile(du, SCALED)
        pieces = ()
        for e in tl.static_range(0, K, STEP):
            w_tile = load_by_rows(w + place * CHUNK * K, live, e, K, CUT, CHUNK, STEP)
            if EARLY:
                piece = read[e // STEP] * second_weight
            else:
                piece = d_state[e // STEP]
                if GATED:
                    piece *= whole
                if RAW:
                    query = load_tokens(query_rows, q_token * NEXT, live, e, K, CHUNK, STEP)
                    piece += tl.dot(tl.trans(raw_do), query) * second_weight
                else:
                    query = load_rows(
                        query_rows, q_token * NEXT, live, query_weight, e, K, WEIGH, SCALED, CUT, CHUNK, STEP
                    )  # fmt: skip
                    if SCALED:
                        piece += tl.dot(tl.trans(do), query) * second_weight
                    else:
                        piece = tl.dot(tl.trans(do), query, piece, input_precision=PRECISION)
            piece = tl.dot(du, w_tile, piece, input_precision=PRECISION)
            pieces = pieces + (piece,)
        d_state = pieces
        if SCALED:
            exponent = earlier_exponent
        if not SUMMARY:
            state_units = left_units + D_OUTPUT + 2 * tiles
            store_column_units(left_units + D_OUTPUT, column, do_unit, TILE, V, BLOCK, SCALED)
            if SCALED:
                store_column_units(state_units, column, two_to(state_exponent), TILE, V, BLOCK, SCALED)
            store_by_columns(d_u + place * CHUNK * V, live, column, du, V, CUT, BLOCK, CHUNK)
            store_column_units(left_units + D_OUTPUT + tiles, column, du_unit, TILE, V, BLOCK, SCALED)
    for e in tl.static_range(0, K, STEP):
        left = end_walk(d_state[e // STEP], across(exponent, BY_ROW), SCALED)
        if SUMMARY:
            if (number > 0) & (number <= last):
                store_block(d_offsets + (segment * H + head) * V * K, column, e, left, V, K, BLOCK, STEP)
        elif number == 0:
            store_block(d_initial + (n * H + head) * K * V, e, column, tl.trans(left), K, V, STEP, BLOCK)


@triton.jit(do_not_specialize=SIZES_AND_STRIDES)
def differentiate_scores(
    q, k, beta, write_key, g, units, d_units, cu_seqlens, sequence_of, products, u, d_output, d_u,
    d_v, d_products, d_gates,
    scale, T, H, q_token, k_token, beta_token, write_token, g_token, do_token,
    K: tl.constexpr, V: tl.constexpr, REVERSE: tl.constexpr, RAW: tl.constexpr, CHUNK: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: gradients of V (also in `d_u`, in place of U's), of Q Pᵀ and of K Pᵀ.

    `d_gates`, None without gates, holds at each token a part of the gradient of the next token's gate: the part from
    reads of what the chunk itself has written. RAW as in `prepare`.
    """
    GATED: tl.constexpr = g is not None
    SCALED: tl.constexpr = products.dtype.element_ty == tl.float16
    CUT: tl.constexpr = SCALED and (K <= 64 and V <= 64)
    DTYPE: tl.constexpr = q.dtype.element_ty if RAW and SCALED else products.dtype.element_ty
    tiles: tl.constexpr = (V + TILE - 1) // TILE
    _, head, slot = find_place(H, 1, 1)
    row, start, live = chunk(slot, T, cu_seqlens, sequence_of, cu_seqlens is not None, CHUNK, REVERSE)
    if live <= 0:
        return
    t = row * T + start
    NEXT = direction(REVERSE)
    place = slot * H + head
    units, d_units = find_units(units, place, V), find_gradient_units(d_units, place, V)
    d_output += head * V + t * do_token
    do_token *= NEXT
    d_v += (t * H + head) * V
    if d_gates is not None:
        q += head * K + t * q_token
        k += head * K + t * k_token
        write_key += head * K + t * write_token
        beta += head + t * beta_token

    x = load_by_rows(products + place * 2 * CHUNK * CHUNK, live, 0, CHUNK, CUT, CHUNK, CHUNK)
    x_unit = load_unit(units, INVERSE, SCALED)
    # The tiles of all value columns are summed in the largest of their units.
    u_units = units + U
    do_units = d_units + D_OUTPUT
    du_units = do_units + tiles
    u_unit, do_unit, dv_unit = 1.0, 1.0, 1.0
    if SCALED:
        u_unit = load_largest_unit(u_units, tiles)
        do_unit = load_largest_unit(do_units, tiles)
    d_qk = tl.zeros((CHUNK, CHUNK), tl.float32)
    d_kk = tl.zeros((CHUNK, CHUNK), tl.float32)
    for e in tl.static_range(0, V, STEP):
        du = load_by_columns(d_u + place * CHUNK * V, live, e, V, CUT, STEP, CHUNK)
        u_tile = load_by_columns(u + place * CHUNK * V, live, e, V, CUT, STEP, CHUNK)
        do = load_tokens(d_output, do_token, live, e, V, CHUNK, STEP).to(tl.float32)
        own_unit = x_unit * load_unit(du_units, e // TILE, SCALED)
        if SCALED:
            do *= inverse_of(do_unit)
            if tiles > 1:
                u_tile = u_tile * load_share(u_units, e // TILE, u_unit).to(u_tile.dtype)
        d_qk = tl.dot(as_tile(do, SCALED), u_tile, d_qk, input_precision=PRECISION)
        dv = tl.dot(tl.trans(x), tl.trans(du), input_precision=PRECISION) * own_unit
        store_tokens(d_v, H * V * NEXT, live, e, dv, V, CHUNK, STEP)
        dv, unit = in_units(dv, SCALED)
        if SCALED:
            if e > 0:
                larger = tl.maximum(unit, dv_unit)
                d_kk *= dv_unit * inverse_of(larger)
                dv = dv * (unit * inverse_of(larger)).to(dv.dtype)
                dv_unit = larger
            else:
                dv_unit = unit
        d_kk = tl.dot(dv, u_tile, d_kk, input_precision=PRECISION)
        turned = tl.dot(du, x, input_precision=PRECISION) * own_unit
        if SCALED:
            turned *= inverse_of(unit)
        store_by_columns(d_u + place * CHUNK * V, live, e, turned, V, CUT, STEP, CHUNK)
        store_unit(du_units, e // TILE, unit, SCALED)
    d_qk = d_qk * do_unit * u_unit
    d_kk = d_kk * dv_unit * u_unit
    i = tl.arange(0, CHUNK)
    if GATED:
        gate = load_numbers(g + head + t * g_token, g_token * NEXT, live, CHUNK)
        between = decay_of_logs(log_decays(gate, CHUNK)[0]) if SCALED else decay_by_difference(gate, CHUNK)
        d_qk *= between
        d_kk *= between
    d_qk = tl.where(i[:, None] >= i[None, :], d_qk * scale, 0.0)
    tile, unit = in_units(d_qk, SCALED)
    d_products += place * 2 * CHUNK * CHUNK
    store_by_rows(d_products, live, 0, tile, CHUNK, CUT, CHUNK, CHUNK)
    store_unit(d_units, D_A, unit, SCALED)
    d_kk = tl.where(i[:, None] > i[None, :], -d_kk, 0.0)
    tile, unit = in_units(d_kk, SCALED)
    store_by_rows(d_products + CHUNK * CHUNK, live, 0, tile, CHUNK, CUT, CHUNK, CHUNK)
    store_unit(d_units, D_L, unit, SCALED)
    if d_gates is not None:
        # A gate acts on reads after it of writes before it. Only pairs of tokens that it separates are added up: a sum
        # from which the pairs on one side of it are subtracted again loses what a strong gate leaves.
        query_unit, key_unit, write_unit = 1.0, 1.0, 1.0
        query_inverse, key_inverse, write_inverse = 1.0, 1.0, 1.0
        if SCALED and not RAW:
            query_unit, key_unit = load_unit(units, QUERY, SCALED), load_unit(units, KEY, SCALED)
            write_unit = load_unit(units, WRITE_KEY, SCALED)
            query_inverse, key_inverse = inverse_of(query_unit), inverse_of(key_unit)
            write_inverse = inverse_of(write_unit)
        pairs = d_qk * query_unit * multiply_rows(
            q, q_token * NEXT, query_inverse, write_key, write_token * NEXT, write_inverse, live,
            K, RAW, DTYPE, CHUNK, STEP,
        )  # fmt: skip
        pairs += d_kk * key_unit * multiply_rows(
            k, k_token * NEXT, key_inverse, write_key, write_token * NEXT, write_inverse, live,
            K, RAW, DTYPE, CHUNK, STEP,
        )  # fmt: skip
        pairs *= (load_numbers(beta, beta_token * NEXT, live, CHUNK) * write_unit)[None, :]
        tl.store(d_gates + place * CHUNK + i, add_separated(pairs, CHUNK))


@triton.jit(do_not_specialize=SIZES_AND_STRIDES)
def differentiate_inputs(
    q, k, beta, write_key, g, units, d_units, cu_seqlens, sequence_of, products, u, states,
    d_output, d_u, d_states, d_products, d_gates, d_q, d_k, d_v, d_beta, d_write_key, d_g,
    scale, T, H, tokens, q_token, k_token, beta_token, write_token, g_token, do_token,
    K: tl.constexpr, V: tl.constexpr, REVERSE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """BLOCK key columns of one chunk of one head: gradients of q, k, write_key; the block's part of beta's and g's.

    `d_write_key` is given if write keys are not k. Without `d_products`, and a gate, the program also does the work of
    `differentiate_scores`, which then is not launched, so `d_u` still holds gradients of U. Each of a chunk's programs
    does all of it, and one stores the gradient of v: products that are computed twice cost less than results that are
    written and read again. STEP value columns share a unit: those of a tile, or with SCORES all columns, if each
    program of the walks takes all of them.
    """
    GATED: tl.constexpr = g is not None
    SCALED: tl.constexpr = products.dtype.element_ty == tl.float16
    CUT: tl.constexpr = SCALED and (K <= 64 and V <= 64)
    SCORES: tl.constexpr = d_products is None
    tl.static_assert(not (SCORES and GATED), "registers do not suffice for scores with gates")
    tiles: tl.constexpr = (V + TILE - 1) // TILE
    steps: tl.constexpr = (V + STEP - 1) // STEP
    column, head, slot = find_place(H, K, BLOCK)
    row, start, live = chunk(slot, T, cu_seqlens, sequence_of, cu_seqlens is not None, CHUNK, REVERSE)
    if live <= 0:
        return
    t = row * T + start
    NEXT = direction(REVERSE)
    place = slot * H + head
    token = t * H + head
    part = (column // BLOCK).to(tl.int64) * tokens * H + token  # in the parts of beta's and g's gradients
    i = tl.arange(0, CHUNK)
    units, d_units = find_units(units, place, V), find_gradient_units(d_units, place, V)
    q += head * K + t * q_token
    k += head * K + t * k_token
    write_key += head * K + t * write_token
    d_output += head * V + t * do_token
    q_token *= NEXT
    k_token *= NEXT
    write_token *= NEXT
    do_token *= NEXT

    # All value columns are summed in the largest of their units.
    u_units = units + U
    state_units = u_units + tiles
    do_units = d_units + D_OUTPUT
    dv_units = do_units + tiles  # with SCORES those of the gradients of U
    after_units = dv_units + tiles
    u_unit, state_unit, do_unit, dv_unit, after_unit = 1.0, 1.0, 1.0, 1.0, 1.0
    if SCALED:
        u_unit = load_largest_unit(u_units, steps)
        state_unit = load_largest_unit(state_units, steps)
        do_unit = load_largest_unit(do_units, steps)
        if not SCORES:
            dv_unit = load_largest_unit(dv_units, steps)
        after_unit = load_largest_unit(after_units, steps)
    dq = tl.zeros((CHUNK, BLOCK), tl.float32)
    dk = tl.zeros((CHUNK, BLOCK), tl.float32)
    # With SCORES transposed, so that no result of a product is transposed as an operand of the next one (see above).
    dw = tl.zeros((BLOCK, CHUNK) if SCORES else (CHUNK, BLOCK), tl.float32)
    d_whole = tl.zeros((BLOCK,), tl.float32)
    if SCORES:
        x = load_by_rows(products + place * 2 * CHUNK * CHUNK, live, 0, CHUNK, CUT, CHUNK, CHUNK)
        x_unit = load_unit(units, INVERSE, SCALED)
        d_qk = tl.zeros((CHUNK, CHUNK), tl.float32)
        d_kk = tl.zeros((CHUNK, CHUNK), tl.float32)
        gradients, gradient_units = (), ()  # of v
        # What the loops need is loaded before them, where registers suffice: a program that waits for each block of
        # columns takes 5 % more time.
        dus, us, dos = (), (), ()
        for e in tl.static_range(0, V, STEP):
            dus = dus + (load_by_columns(d_u + place * CHUNK * V, live, e, V, CUT, STEP, CHUNK),)
            us = us + (load_by_columns(u + place * CHUNK * V, live, e, V, CUT, STEP, CHUNK),)
            dos = dos + (load_tokens(d_output, do_token, live, e, V, CHUNK, STEP),)
        for e in tl.static_range(0, V, STEP):
            du, u_tile, do = dus[e // STEP], us[e // STEP], dos[e // STEP].to(tl.float32)
            dv = tl.dot(tl.trans(x), tl.trans(du), input_precision=PRECISION)
            dv *= x_unit * load_unit(dv_units, e // TILE, SCALED)
            store_tokens(d_v + token * V, H * V * NEXT, tl.where(column == 0, live, 0), e, dv, V, CHUNK, STEP)
            dv, unit = in_units(dv, SCALED)
            gradients, gradient_units = gradients + (dv,), gradient_units + (unit,)
            if SCALED:
                do *= inverse_of(do_unit)
                if e > 0:
                    larger = tl.maximum(unit, dv_unit)
                    d_kk *= dv_unit * inverse_of(larger)
                    dv = dv * (unit * inverse_of(larger)).to(dv.dtype)
                    dv_unit = larger
                else:
                    dv_unit = unit
                if steps > 1:
                    u_tile = u_tile * load_share(u_units, e // TILE, u_unit).to(u_tile.dtype)
            d_qk = tl.dot(as_tile(do, SCALED), u_tile, d_qk, input_precision=PRECISION)
            d_kk = tl.dot(dv, u_tile, d_kk, input_precision=PRECISION)
        for e in tl.static_range(0, V, STEP):
            u_tile, do = us[e // STEP], dos[e // STEP]
            if steps > 1:  # registers do not suffice for these and the sums of both loops: they are loaded again
                u_tile = load_by_columns(u + place * CHUNK * V, live, e, V, CUT, STEP, CHUNK)
                do = load_tokens(d_output, do_token, live, e, V, CHUNK, STEP)
            state = load_block(states + place * K * V, e, column, V, K, STEP, BLOCK)
            after = load_block(d_states + place * K * V, e, column, V, K, STEP, BLOCK)
            if e == 0:  # while the first block of columns is on its way
                d_qk = d_qk * do_unit * u_unit * scale
                d_qk, qk_unit = in_units(tl.where(i[:, None] >= i[None, :], d_qk, 0.0), SCALED)
                d_kk = -(d_kk * dv_unit * u_unit)
                d_kk, kk_unit = in_units(tl.where(i[:, None] > i[None, :], d_kk, 0.0), SCALED)
            do = do.to(tl.float32)
            dv = gradients[e // STEP]
            if SCALED:
                do *= inverse_of(do_unit)
                if steps > 1:
                    state_share = load_share(state_units, e // TILE, state_unit)
                    after_share = load_share(after_units, e // TILE, after_unit)
                    do *= state_share
                    dv = dv * (gradient_units[e // STEP] * inverse_of(dv_unit) * state_share).to(dv.dtype)
                    u_tile = u_tile * (load_share(u_units, e // TILE, u_unit) * after_share).to(u_tile.dtype)
            dq = tl.dot(as_tile(do, SCALED), state, dq, input_precision=PRECISION)
            dk = tl.dot(dv, state, dk, input_precision=PRECISION)
            dw = tl.dot(tl.trans(after), u_tile, dw, input_precision=PRECISION)
    else:
        for e in range(0, V, STEP):
            state = load_block(states + place * K * V, e, column, V, K, STEP, BLOCK)
            after = load_block(d_states + place * K * V, e, column, V, K, STEP, BLOCK)
            u_tile = load_by_columns(u + place * CHUNK * V, live, e, V, CUT, STEP, CHUNK)
            do = load_tokens(d_output, do_token, live, e, V, CHUNK, STEP).to(tl.float32)
            dv = load_by_columns(d_u + place * CHUNK * V, live, e, V, CUT, STEP, CHUNK)
            kept = state.to(tl.float32) * after.to(tl.float32)
            if SCALED:
                do *= inverse_of(do_unit)
                if steps > 1:
                    state_share = load_share(state_units, e // TILE, state_unit)
                    after_share = load_share(after_units, e // TILE, after_unit)
                    do *= state_share
                    dv = dv * (load_share(dv_units, e // TILE, dv_unit) * state_share).to(dv.dtype)
                    u_tile = u_tile * (load_share(u_units, e // TILE, u_unit) * after_share).to(u_tile.dtype)
                    kept *= state_share * after_share
            dq = tl.dot(as_tile(do, SCALED), state, dq, input_precision=PRECISION)
            dk = tl.dot(tl.trans(dv), state, dk, input_precision=PRECISION)
            dw = tl.dot(tl.trans(u_tile), after, dw, input_precision=PRECISION)
            if GATED:
                d_whole += tl.sum(kept, 0)
    dq *= scale
    dk = -dk
    betas = load_numbers(beta + head + t * beta_token, beta_token * NEXT, live, CHUNK)
    query = load_tokens(q, q_token, live, column, K, CHUNK, BLOCK)
    key = load_tokens(k, k_token, live, column, K, CHUNK, BLOCK)
    write = key
    if d_write_key is not None:
        write = load_tokens(write_key, write_token, live, column, K, CHUNK, BLOCK)
    if not SCORES:
        d_products += place * 2 * CHUNK * CHUNK
        d_qk = load_by_rows(d_products, live, 0, CHUNK, CUT, CHUNK, CHUNK)
        d_kk = load_by_rows(d_products + CHUNK * CHUNK, live, 0, CHUNK, CUT, CHUNK, CHUNK)
        qk_unit = load_unit(d_units, D_A, SCALED)
        kk_unit = load_unit(d_units, D_L, SCALED)
    query_unit = load_unit(units, QUERY, SCALED)
    key_unit = load_unit(units, KEY, SCALED)
    write_unit = load_unit(units, WRITE_KEY, SCALED)
    # The products with the states are continued in the larger of their unit and the unit of the products with the
    # scores. beta, and with it the write keys, is in the unit of the largest.
    betas_unit, beta_share = 1.0, betas
    query_weight, q_write_weight, k_write_weight, key_weight = 1.0, 1.0, 1.0, 1.0
    q_exponent, k_exponent, w_exponent, weighed_exponent = 0, 0, 0, 0
    if SCALED:
        betas_unit, betas_inverse = power_of_two(tl.max(tl.abs(betas), 0))
        beta_share *= betas_inverse / LIMIT
        weighed_exponent = exponent_of(betas_unit) + 15 + exponent_of(write_unit)
        to_q = exponent_of(qk_unit) + weighed_exponent
        to_k = exponent_of(kk_unit) + weighed_exponent
        from_query = exponent_of(qk_unit) + exponent_of(query_unit)
        from_key = exponent_of(kk_unit) + exponent_of(key_unit)
        of_q = exponent_of(do_unit) + exponent_of(state_unit)
        of_k = exponent_of(dv_unit) + exponent_of(state_unit)
        of_w = exponent_of(u_unit) + exponent_of(after_unit)
        q_exponent = tl.maximum(of_q, to_q)
        k_exponent = tl.maximum(of_k, to_k)
        w_exponent = tl.maximum(of_w, tl.maximum(from_query, from_key))
        dq *= two_to(of_q - q_exponent)
        dk *= two_to(of_k - k_exponent)
        dw *= two_to(of_w - w_exponent)
        q_write_weight = two_to(to_q - q_exponent)
        k_write_weight = two_to(to_k - k_exponent)
        query_weight = inverse_of(query_unit) * two_to(from_query - w_exponent)
        key_weight = inverse_of(key_unit) * two_to(from_key - w_exponent)
    query_tile = as_tile(query.to(tl.float32) * query_weight, SCALED)
    key_tile = as_tile(key.to(tl.float32) * key_weight, SCALED)
    write_tile = write.to(tl.float32)
    if SCALED:
        write_tile *= inverse_of(write_unit)
    write_tile = as_tile(write_tile, SCALED)
    if GATED:
        g += head + t * g_token
        g_token *= NEXT
        gate = load_numbers(g, g_token, live, CHUNK)
        since, until, whole, _ = find_decays(gate, g, g_token, live, not SCALED, CHUNK)
        # The gate's gradient from reads of the state before the chunk, from writes that the state after it holds,
        # and from what that keeps of the one before. Nothing is subtracted (see `differentiate_scores`).
        dg = tl.sum(d_whole, 0) * state_unit * after_unit * whole
    if GATED:
        dq *= since[:, None]
        d_reads = end_walk(tl.sum(dq * query.to(tl.float32), 1), q_exponent, SCALED)
    weighed = as_tile(d_qk.to(tl.float32) * (beta_share * q_write_weight)[None, :], SCALED)
    dq = tl.dot(weighed, write_tile, dq, input_precision=PRECISION)
    dq = end_walk(dq, q_exponent, SCALED)
    store_tokens(d_q + token * K, H * K * NEXT, live, column, dq, K, CHUNK, BLOCK)
    if GATED:
        dk *= since[:, None]
        d_reads += end_walk(tl.sum(dk * key.to(tl.float32), 1), k_exponent, SCALED)
        dw *= until[:, None]
        d_writes = end_walk(tl.sum(dw * write.to(tl.float32), 1) * betas, w_exponent, SCALED)
        d_writes_before = tl.cumsum(d_writes, 0)
        d_writes_before += tl.load(d_gates + place * CHUNK + i, mask=i < tl.where(column == 0, CHUNK, 0), other=0.0)
        dg += tl.cumsum(d_reads, 0, reverse=True) + of_token_before(d_writes_before, CHUNK)
        tl.store(d_g + part + i * H * NEXT, dg, mask=i < live)
    if SCORES:
        dw = tl.dot(tl.trans(query_tile), d_qk, dw, input_precision=PRECISION)
        dw = tl.trans(tl.dot(tl.trans(key_tile), d_kk, dw, input_precision=PRECISION))
    else:
        dw = tl.dot(tl.trans(d_qk), query_tile, dw, input_precision=PRECISION)
        dw = tl.dot(tl.trans(d_kk), key_tile, dw, input_precision=PRECISION)
    weighed = as_tile(d_kk.to(tl.float32) * (beta_share * k_write_weight)[None, :], SCALED)
    dk = tl.dot(weighed, write_tile, dk, input_precision=PRECISION)
    dk = end_walk(dk, k_exponent, SCALED)
    dw = end_walk(dw, w_exponent, SCALED)
    betas_part = tl.sum(dw * write.to(tl.float32), 1)
    tl.store(d_beta + part + i * H * NEXT, betas_part, mask=i < live)
    dw *= betas[:, None]
    if d_write_key is not None:
        store_tokens(d_write_key + token * K, H * K * NEXT, live, column, dw, K, CHUNK, BLOCK)
    else:
        dk += dw
    store_tokens(d_k + token * K, H * K * NEXT, live, column, dk, K, CHUNK, BLOCK)
