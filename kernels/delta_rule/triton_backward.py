"""The delta rule backward in Triton. The formulas are those of chunk.py, `_backward`.

`retreat` walks from the last chunk to the first, in the segments of time that forward had (see triton_segments.py), and
leaves the gradients of the states after each chunk. The rest runs over chunks in parallel: `differentiate_scores`
(gradients of V, of tril(Q Wᵀ ⊙ D) and of L; of short sequences, `retreat` does that too) and `differentiate_inputs`
(gradients of queries, keys, strengths and gates).

A matrix that is needed as it is and transposed goes through memory in between: a transposed result of one matrix
product as the left side of another gives wrong numbers on Hopper in Triton 3.4 to 3.7. What the kernels hand on is in
units of the largest gradient, `d_largest`, and what they find from U and the states in units of `largest` as well.
Gradients of states, of U and of V are handed on transposed, as those are themselves (see triton_forward.py).
"""

import triton
import triton.language as tl

from longseq.kernels.delta_rule.triton_segments import find_segment
from longseq.kernels.triton_tiles import (
    PLAIN,
    chunk,
    decay_between,
    decay_since,
    decay_until,
    direction,
    load_block,
    load_numbers,
    load_tokens,
    own_unit,
    sequence,
    store_block,
    store_tokens,
    token_after,
    unit_of_chunk,
    unit_scale,
)


@triton.jit
def _store_scores(
    d_attention, d_lower, d_reading, d_erasing, gate, scale, place, GATED: tl.constexpr, CHUNK: tl.constexpr
):
    """Gradients of scale tril(Q Wᵀ ⊙ D) and of L, as those of Q Wᵀ and R Wᵀ."""
    i = tl.arange(0, CHUNK)
    if GATED:
        between = decay_between(gate, CHUNK)
        d_reading *= between
        d_erasing *= between
    d_reading = tl.where(i[:, None] >= i[None, :], d_reading * scale, 0.0)
    d_erasing = tl.where(i[:, None] > i[None, :], -d_erasing, 0.0)
    store_block(d_attention + place * CHUNK * CHUNK, 0, 0, d_reading, CHUNK, CHUNK, CHUNK, CHUNK)
    store_block(d_lower + place * CHUNK * CHUNK, 0, 0, d_erasing, CHUNK, CHUNK, CHUNK, CHUNK)


@triton.jit
def _load_gradients(
    d_output, do_token, m, start, end, column,
    V: tl.constexpr, REVERSE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of the gradients of the outputs of a sequence's chunk number m."""
    d_output += token_after(m * CHUNK, start, end, REVERSE) * do_token
    return load_tokens(d_output, do_token * direction(REVERSE), end - start - m * CHUNK, column, V, CHUNK, BLOCK)


@triton.jit(do_not_specialize=[*PLAIN, "sequences", "span"])
def retreat(
    g, d_largest, cu_seqlens, squares, queries, writes, erased, written, decays, d_output, d_final,
    d_offsets, d_states, d_written, d_v, d_attention, d_lower, d_initial,
    scale, sequences, span, T, H, g_row, g_token, g_head, do_row, do_token, do_head,
    K: tl.constexpr, V: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr,
    SCALED: tl.constexpr, HAS_FINAL: tl.constexpr, SHORT: tl.constexpr,
    SEGMENTED: tl.constexpr, SUMMARY: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """BLOCK value columns of one head of one sequence or segment: gradients of the states after each chunk and of U.

    The state's gradient is in pieces of STEP key columns, as the state is in `walk_through`. Of SHORT sequences one
    program holds all columns, and leaves the gradients of V instead of U's, and of the scores. Its unit is that of its
    sequence and head, and is left in `d_largest`, by place. A SUMMARY leaves a segment's offset alone.
    """
    blocks: tl.constexpr = (V + BLOCK - 1) // BLOCK
    column = tl.program_id(0) % blocks * BLOCK
    head = (tl.program_id(0) // blocks % H).to(tl.int64)
    n = (tl.program_id(0) // blocks // H).to(tl.int64)
    segment, number, last, begin = n, 0, 0, 0
    if SEGMENTED:
        n, number, last, begin, stop = find_segment(segment, T, cu_seqlens, sequences, span, PACKED, CHUNK)
        if SUMMARY:  # nothing asks for the first segment's
            begin = tl.where(number == 0, stop, begin)
    row, start, end, slot = sequence(n, T, cu_seqlens, PACKED, CHUNK)
    if not SEGMENTED:
        stop = tl.cdiv((end - start).to(tl.int32), CHUNK)
    NEXT = direction(REVERSE)
    d_output += row * do_row + head * do_head

    if SHORT:
        d_last = d_final
        if HAS_FINAL:
            d_last = load_block(d_final + (n * H + head) * K * V, 0, 0, K, V, STEP, BLOCK)
        unit = own_unit(d_output + start * do_token, do_token, end - start, d_last, V, HAS_FINAL, 128, BLOCK)
    else:
        unit = unit_scale(d_largest, SCALED)
    inverse = 1.0 / unit
    d_state = ()
    for e in tl.static_range(0, K, STEP):
        piece = tl.zeros((BLOCK, STEP), tl.float32)
        if HAS_FINAL:
            piece = load_block(d_final + (n * H + head) * K * V, e, column, K, V, STEP, BLOCK)
            piece = tl.trans(piece.to(tl.float32) * tl.where(number == last, unit, 0.0))
        if SEGMENTED and not SUMMARY:
            if number < last:
                piece = load_block(d_offsets + ((segment + 1) * H + head) * K * V, column, e, V, K, BLOCK, STEP)
        d_state = d_state + (piece,)
    # Shared memory has room for a wide state's tiles of two chunks, but not for these beside them.
    EARLY: tl.constexpr = STEP < K
    if EARLY:
        last_chunk = tl.maximum(stop - 1, 0)
        earlier = _load_gradients(d_output, do_token, last_chunk, start, end, column, V, REVERSE, CHUNK, BLOCK)
    for back in range(0, stop - begin):
        m = stop - 1 - back
        t = token_after(m * CHUNK, start, end, REVERSE)
        live = end - start - m * CHUNK
        place = (slot + m) * H + head
        whole = 1.0
        if GATED:
            whole = tl.load(decays + place)
        among = load_block(squares + (place * 2 + 1) * CHUNK * CHUNK, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
        if EARLY:
            do = earlier
            before = tl.maximum(m - 1, begin)
            earlier = _load_gradients(d_output, do_token, before, start, end, column, V, REVERSE, CHUNK, BLOCK)
        else:
            do = _load_gradients(d_output, do_token, m, start, end, column, V, REVERSE, CHUNK, BLOCK)
        do = (do.to(tl.float32) * unit).to(DTYPE)

        du = tl.dot(tl.trans(do), among, input_precision=PRECISION)
        for e in tl.static_range(0, K, STEP):
            write = load_block(writes + place * CHUNK * K, 0, e, CHUNK, K, CHUNK, STEP)
            after = d_state[e // STEP].to(DTYPE)
            if not SUMMARY:
                store_block(d_states + place * K * V, column, e, after, V, K, BLOCK, STEP)
            du = tl.dot(after, tl.trans(write), du, input_precision=PRECISION)
        du = du.to(DTYPE)
        pieces = ()
        for e in tl.static_range(0, K, STEP):
            query = load_block(queries + place * CHUNK * K, 0, e, CHUNK, K, CHUNK, STEP)
            erase = load_block(erased + place * CHUNK * K, 0, e, CHUNK, K, CHUNK, STEP)
            piece = tl.dot(tl.trans(do), query, d_state[e // STEP] * whole, input_precision=PRECISION)
            pieces = pieces + (tl.dot(du, erase, piece, input_precision=PRECISION),)
        d_state = pieces
        if SHORT:
            tl.store(d_largest + place, unit)
            x = load_block(squares + place * 2 * CHUNK * CHUNK, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
            u = load_block(written + place * CHUNK * V, column, 0, V, CHUNK, BLOCK, CHUNK)
            dv = tl.dot(du, x, input_precision=PRECISION)
            store_block(d_written + place * CHUNK * V, column, 0, dv, V, CHUNK, BLOCK, CHUNK)
            d_v_row = d_v + ((row * T + t) * H + head) * V
            store_tokens(d_v_row, H * V * NEXT, live, column, tl.trans(dv * inverse), V, CHUNK, BLOCK)
            d_reading = tl.dot(do, u, input_precision=PRECISION)
            d_erasing = tl.dot(tl.trans(u), dv.to(DTYPE), input_precision=PRECISION)
            gate = tl.zeros((CHUNK,), tl.float32)
            if GATED:
                gate = load_numbers(g + row * g_row + t * g_token + head * g_head, g_token * NEXT, live, CHUNK)
            _store_scores(d_attention, d_lower, d_reading, tl.trans(d_erasing), gate, scale, place, GATED, CHUNK)
        elif not SUMMARY:
            store_block(d_written + place * CHUNK * V, column, 0, du, V, CHUNK, BLOCK, CHUNK)
    for e in tl.static_range(0, K, STEP):
        left = d_state[e // STEP]
        if SUMMARY:
            if (number > 0) & (number <= last):
                store_block(d_offsets + (segment * H + head) * K * V, column, e, left, V, K, BLOCK, STEP)
        elif number == 0:
            store_block(d_initial + (n * H + head) * K * V, e, column, tl.trans(left * inverse), K, V, STEP, BLOCK)


@triton.jit(do_not_specialize=PLAIN)
def differentiate_scores(
    g, d_largest, cu_seqlens, sequence_of, squares, written, d_output, d_written, d_v, d_attention, d_lower,
    scale, T, H, g_row, g_token, g_head, do_row, do_token, do_head,
    V: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr,
    SCALED: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: gradients of V (in `d_written` also, in place of U's), of Q Wᵀ and of R Wᵀ."""
    head = (tl.program_id(0) % H).to(tl.int64)
    slot = (tl.program_id(0) // H).to(tl.int64)
    row, start, live = chunk(slot, T, cu_seqlens, sequence_of, PACKED, CHUNK, REVERSE)
    NEXT = direction(REVERSE)
    place = slot * H + head
    d_output += row * do_row + start * do_token + head * do_head
    do_token *= NEXT
    d_v += ((row * T + start) * H + head) * V

    unit = unit_scale(d_largest, SCALED)
    inverse = 1.0 / unit
    x = load_block(squares + place * 2 * CHUNK * CHUNK, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
    d_reading = tl.zeros((CHUNK, CHUNK), tl.float32)
    d_erasing = tl.zeros((CHUNK, CHUNK), tl.float32)
    for e in range(0, V, STEP):
        du = load_block(d_written + place * CHUNK * V, e, 0, V, CHUNK, STEP, CHUNK)
        u = load_block(written + place * CHUNK * V, e, 0, V, CHUNK, STEP, CHUNK)
        do = (load_tokens(d_output, do_token, live, e, V, CHUNK, STEP).to(tl.float32) * unit).to(u.dtype)
        dv = tl.dot(du, x, input_precision=PRECISION)
        store_block(d_written + place * CHUNK * V, e, 0, dv, V, CHUNK, STEP, CHUNK)
        dv = tl.dot(tl.trans(x), tl.trans(du), input_precision=PRECISION)
        store_tokens(d_v, H * V * NEXT, live, e, dv * inverse, V, CHUNK, STEP)
        d_reading = tl.dot(do, u, d_reading, input_precision=PRECISION)
        d_erasing = tl.dot(dv.to(u.dtype), u, d_erasing, input_precision=PRECISION)
    gate = tl.zeros((CHUNK,), tl.float32)
    if GATED:
        gate = load_numbers(g + row * g_row + start * g_token + head * g_head, g_token * NEXT, live, CHUNK)
    _store_scores(d_attention, d_lower, d_reading, d_erasing, gate, scale, place, GATED, CHUNK)


@triton.jit(do_not_specialize=PLAIN)
def differentiate_inputs(
    q, k, beta, write_key, g, largest, d_largest, cu_seqlens, sequence_of, written, states,
    d_output, d_written, d_states, d_attention, d_lower, d_q, d_k, d_beta, d_write_key, d_g,
    scale, T, H, tokens,
    q_row, q_token, q_head, k_row, k_token, k_head, beta_row, beta_token, beta_head,
    write_row, write_token, write_head, g_row, g_token, g_head, do_row, do_token, do_head,
    K: tl.constexpr, V: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr,
    SCALED: tl.constexpr, SHORT: tl.constexpr, OWN_WRITE_KEY: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """BLOCK key columns of one chunk of one head: gradients of q, k, write_key; this block's part of beta's and g's."""
    blocks: tl.constexpr = (K + BLOCK - 1) // BLOCK
    block = tl.program_id(0) % blocks
    column = block * BLOCK
    head = (tl.program_id(0) // blocks % H).to(tl.int64)
    slot = (tl.program_id(0) // blocks // H).to(tl.int64)
    row, start, live = chunk(slot, T, cu_seqlens, sequence_of, PACKED, CHUNK, REVERSE)
    NEXT = direction(REVERSE)
    place = slot * H + head
    token = (row * T + start) * H + head
    i = tl.arange(0, CHUNK)
    q += row * q_row + start * q_token + head * q_head
    k += row * k_row + start * k_token + head * k_head
    write_key += row * write_row + start * write_token + head * write_head
    d_output += row * do_row + start * do_token + head * do_head
    q_token *= NEXT
    k_token *= NEXT
    write_token *= NEXT
    do_token *= NEXT
    if GATED:
        g += row * g_row + start * g_token + head * g_head
        g_token *= NEXT

    unit = unit_of_chunk(d_largest, place, SHORT, SCALED)
    # Multiplied by one after the other: their product may lie outside of float32's range where the gradients do not.
    inverse, other = 1.0 / unit, 1.0 / unit_of_chunk(largest, place, SHORT, SCALED)
    dq = tl.zeros((CHUNK, BLOCK), tl.float32)
    dr = tl.zeros((CHUNK, BLOCK), tl.float32)
    dw = tl.zeros((CHUNK, BLOCK), tl.float32)
    d_whole = tl.zeros((BLOCK,), tl.float32)
    for e in range(0, V, STEP):
        state = load_block(states + place * K * V, e, column, V, K, STEP, BLOCK)
        after = load_block(d_states + place * K * V, e, column, V, K, STEP, BLOCK)
        u = load_block(written + place * CHUNK * V, e, 0, V, CHUNK, STEP, CHUNK)
        do = (load_tokens(d_output, do_token, live, e, V, CHUNK, STEP).to(tl.float32) * unit).to(u.dtype)
        dv = load_block(d_written + place * CHUNK * V, e, 0, V, CHUNK, STEP, CHUNK)
        dq = tl.dot(do, state, dq, input_precision=PRECISION)
        dr = tl.dot(tl.trans(dv), state, dr, input_precision=PRECISION)
        dw = tl.dot(tl.trans(u), after, dw, input_precision=PRECISION)
        if GATED:
            d_whole += tl.sum(state.to(tl.float32) * after.to(tl.float32), 0)
    dq *= scale
    dr = -dr
    beta += row * beta_row + start * beta_token + head * beta_head
    strength = load_numbers(beta, beta_token * NEXT, live, CHUNK)
    read = load_tokens(k, k_token, live, column, K, CHUNK, BLOCK).to(written.dtype.element_ty)
    query = load_tokens(q, q_token, live, column, K, CHUNK, BLOCK).to(read.dtype)
    d_reading = load_block(d_attention + place * CHUNK * CHUNK, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
    d_erasing = load_block(d_lower + place * CHUNK * CHUNK, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
    write = read
    if OWN_WRITE_KEY:
        write = load_tokens(write_key, write_token, live, column, K, CHUNK, BLOCK).to(read.dtype)
    d_end = 0.0
    if GATED:
        gate = load_numbers(g, g_token, live, CHUNK)
        since = decay_since(gate)
        dq *= since[:, None]
        dr *= since[:, None]
        dw *= decay_until(g, g_token, live, CHUNK)[:, None]
        d_end = tl.sum(d_whole, 0) * tl.exp(tl.sum(gate, 0))
        d_end += tl.sum(tl.sum(dw * write.to(tl.float32), 1) * strength, 0)

    weighed = (d_reading.to(tl.float32) * strength[None, :]).to(read.dtype)
    dq = tl.dot(weighed, write, dq, input_precision=PRECISION) * inverse * other
    dw = tl.dot(tl.trans(d_reading), query, dw, input_precision=PRECISION)
    store_tokens(d_q + token * K, H * K * NEXT, live, column, dq, K, CHUNK, BLOCK)
    later = strength
    if GATED:
        later = tl.sum(dq * query.to(tl.float32), 1)
    weighed = (d_erasing.to(tl.float32) * strength[None, :]).to(read.dtype)
    dr = tl.dot(weighed, write, dr, input_precision=PRECISION) * inverse * other
    dw = tl.dot(tl.trans(d_erasing), read, dw, input_precision=PRECISION) * inverse * other
    d_strength = tl.sum(dw * write.to(tl.float32), 1)
    part = block.to(tl.int64) * tokens * H + token
    tl.store(d_beta + part + i * H * NEXT, d_strength, mask=i < live)
    if GATED:
        # Every gate acts on what is read after it and on what was written before it. The pairs of tokens that lie on
        # one side of it are in both sums, with opposite signs.
        later += tl.sum(dr * read.to(tl.float32), 1) - d_strength * strength
        dg = tl.cumsum(later, 0, reverse=True) + d_end * inverse * other
        tl.store(d_g + part + i * H * NEXT, dg, mask=i < live)
    dw *= strength[:, None]
    if OWN_WRITE_KEY:
        store_tokens(d_write_key + token * K, H * K * NEXT, live, column, dw, K, CHUNK, BLOCK)
    else:
        dr += dw
    store_tokens(d_k + token * K, H * K * NEXT, live, column, dr, K, CHUNK, BLOCK)
