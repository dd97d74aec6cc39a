"""The delta rule forward in Triton. The formulas are those of chunk.py; e^b, D, X, U are named as there.

`prepare` runs over chunks in parallel and leaves tiles that need no further scaling. After it `advance` walks along
time and leaves the outputs on its way, or, in float32, whose tiles are too large for that, `read_out` takes them over
chunks in parallel. Few heads of a long sequence are cut into segments of time before (see triton_segments.py). Of short
sequences there are enough to leave all to `read_through`, one launch that walks along time with everything on chip.
Values, U and states are handed on in units of `largest`, the largest value (see `unit_scale`).

States and what is written are handed on transposed, [V, K] and [V, C]: so `advance` multiplies from the left what it
holds in registers, Sᵀ and then Uᵀ, by tiles of memory, and nothing waits for shared memory from chunk to chunk.
"""

import triton
import triton.language as tl

from longseq.kernels.delta_rule.triton_segments import find_segment, walk_through
from longseq.kernels.triton_tiles import (
    LARGEST_PARTS,
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
    unit_lower_inverse,
    unit_scale,
)


@triton.jit(do_not_specialize=["T", "H", "tokens", "programs", "state_numbers"])
def find_largest(
    values, state, largest, T, H, tokens, programs, state_numbers, row_stride, token_stride, head_stride,
    WIDTH: tl.constexpr, EVEN: tl.constexpr, HAS_STATE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest magnitude of values [B, T, H, WIDTH] and of a contiguous state, in LARGEST_PARTS parts.

    EVEN says that all tokens of the batch lie at equal distances.
    """
    program = tl.program_id(0)
    rows = tokens * H
    e = tl.arange(0, BLOCK)
    found = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(program * ROWS, rows, programs * ROWS):
        i = first + tl.arange(0, ROWS)
        token = i // H
        place = i % H * head_stride
        if EVEN:
            place += token.to(tl.int64) * token_stride
        else:
            place += (token // T).to(tl.int64) * row_stride + (token % T).to(tl.int64) * token_stride
        mask = (i < rows)[:, None] & (e < WIDTH)[None, :]
        numbers = tl.load(values + place[:, None] + e[None, :], mask=mask, other=0.0)
        found = tl.maximum(found, tl.abs(numbers.to(tl.float32)))
    if HAS_STATE:
        step = programs.to(tl.int64) * ROWS * BLOCK
        for first in range(program.to(tl.int64) * ROWS * BLOCK, state_numbers, step):
            i = first + tl.arange(0, ROWS)[:, None] * BLOCK + e[None, :]
            numbers = tl.load(state + i, mask=i < state_numbers, other=0.0)
            found = tl.maximum(found, tl.abs(numbers.to(tl.float32)))
    part = tl.arange(0, LARGEST_PARTS)
    greatest = tl.zeros((LARGEST_PARTS,), tl.float32) + tl.max(tl.max(found, 1), 0)
    tl.store(largest + part, greatest, mask=part % programs == program)


@triton.jit
def _weigh(products, weight, gate, REACH: tl.constexpr, GATED: tl.constexpr, CHUNK: tl.constexpr):
    """Products with write keys weighted by the write's strength and decay, of tokens REACH or more back; else 0."""
    i = tl.arange(0, CHUNK)
    products *= weight[None, :]
    if GATED:
        products *= decay_between(gate, CHUNK)
    return tl.where(i[:, None] >= i[None, :] + REACH, products, 0.0)


@triton.jit(do_not_specialize=PLAIN)
def prepare(
    q, k, v, beta, write_key, g, largest, cu_seqlens, sequence_of,
    squares, queries, writes, erased, offered, decays,
    scale, T, H,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
    beta_row, beta_token, beta_head, write_row, write_token, write_head, g_row, g_token, g_head,
    K: tl.constexpr, V: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr,
    SCALED: tl.constexpr, SAVE: tl.constexpr, SCORES: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, OWN_WRITE_KEY: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: tril(Q Wᵀ ⊙ D), e^{b_C - b} W, -X e^b R, (X V)ᵀ and e^{b_C}; if SAVE, X and e^b Q."""
    slot = (tl.program_id(0) // H).to(tl.int64)
    head = (tl.program_id(0) % H).to(tl.int64)
    place = slot * H + head
    row, start, live = chunk(slot, T, cu_seqlens, sequence_of, PACKED, CHUNK, REVERSE)
    NEXT = direction(REVERSE)
    q += row * q_row + start * q_token + head * q_head
    k += row * k_row + start * k_token + head * k_head
    v += row * v_row + start * v_token + head * v_head
    write_key += row * write_row + start * write_token + head * write_head
    beta += row * beta_row + start * beta_token + head * beta_head
    q_token *= NEXT
    k_token *= NEXT
    v_token *= NEXT
    write_token *= NEXT
    strength = load_numbers(beta, beta_token * NEXT, live, CHUNK)
    gate = strength
    since = tl.full((CHUNK,), 1.0, tl.float32)
    until = since
    if GATED:
        g += row * g_row + start * g_token + head * g_head
        g_token *= NEXT
        gate = load_numbers(g, g_token, live, CHUNK)
        since = decay_since(gate)
        until = decay_until(g, g_token, live, CHUNK)
        tl.store(decays + place, tl.exp(tl.sum(gate, 0)))

    unit = unit_scale(largest, SCALED)
    erasing = tl.zeros((CHUNK, CHUNK), tl.float32)
    reading = tl.zeros((CHUNK, CHUNK), tl.float32)
    for e in tl.static_range(0, K, BLOCK):
        query = load_tokens(q, q_token, live, e, K, CHUNK, BLOCK)
        read = load_tokens(k, k_token, live, e, K, CHUNK, BLOCK)
        write = read
        if OWN_WRITE_KEY:
            write = load_tokens(write_key, write_token, live, e, K, CHUNK, BLOCK)
        reading = tl.dot(query.to(SCORES), tl.trans(write.to(SCORES)), reading, input_precision=PRECISION)
        erasing = tl.dot(read.to(SCORES), tl.trans(write.to(SCORES)), erasing, input_precision=PRECISION)
        if SAVE:
            query = query.to(tl.float32) * (since * scale)[:, None]
            store_block(queries + place * CHUNK * K, 0, e, query, CHUNK, K, CHUNK, BLOCK)
        write = write.to(tl.float32) * (until * strength)[:, None]
        store_block(writes + place * CHUNK * K, 0, e, write, CHUNK, K, CHUNK, BLOCK)
    squares += place * 2 * CHUNK * CHUNK
    among = _weigh(reading, strength * scale, gate, 0, GATED, CHUNK)
    store_block(squares + CHUNK * CHUNK, 0, 0, among, CHUNK, CHUNK, CHUNK, CHUNK)

    # Where measured to be faster, the first values are asked for before the inverse, which leaves registers for so few.
    EARLY: tl.constexpr = BLOCK == 64 and V <= 128
    if EARLY:
        value = load_tokens(v, v_token, live, 0, V, CHUNK, BLOCK)
    x = unit_lower_inverse(_weigh(erasing, strength, gate, 1, GATED, CHUNK), CHUNK, SCALED)
    if SAVE:
        store_block(squares, 0, 0, x.to(DTYPE), CHUNK, CHUNK, CHUNK, CHUNK)
    for e in tl.static_range(0, V, BLOCK):
        if e > 0 or not EARLY:
            value = load_tokens(v, v_token, live, e, V, CHUNK, BLOCK)
        value = (value.to(tl.float32) * unit).to(DTYPE)
        value = tl.dot(x.to(DTYPE), value, input_precision=PRECISION).to(DTYPE)
        store_block(offered + place * CHUNK * V, e, 0, tl.trans(value), V, CHUNK, BLOCK, CHUNK)
    if GATED:
        x *= since[None, :]
    x = -x
    for e in tl.static_range(0, K, BLOCK):
        read = load_tokens(k, k_token, live, e, K, CHUNK, BLOCK).to(DTYPE)
        read = tl.dot(x.to(DTYPE), read, input_precision=PRECISION).to(DTYPE)
        store_block(erased + place * CHUNK * K, 0, e, read, CHUNK, K, CHUNK, BLOCK)


@triton.jit(do_not_specialize=[*PLAIN, "sequences", "span"])
def advance(
    initial, largest, cu_seqlens, squares, queries, writes, erased, written, decays, offsets, states, output, final,
    sequences, span, T, H,
    K: tl.constexpr, V: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr,
    SCALED: tl.constexpr, HAS_INITIAL: tl.constexpr, SEGMENTED: tl.constexpr, READ: tl.constexpr, SAVE: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """BLOCK value columns of one head of one sequence or segment, with the state in pieces of STEP key columns.

    SAVE leaves U in place of X V and the states before each chunk, READ the output.
    """
    blocks: tl.constexpr = (V + BLOCK - 1) // BLOCK
    column = tl.program_id(0) % blocks * BLOCK
    head = (tl.program_id(0) // blocks % H).to(tl.int64)
    n = (tl.program_id(0) // blocks // H).to(tl.int64)
    segment, number, last, begin = n, 0, 0, 0
    if SEGMENTED:
        n, number, last, begin, stop = find_segment(segment, T, cu_seqlens, sequences, span, PACKED, CHUNK)
    row, start, end, slot = sequence(n, T, cu_seqlens, PACKED, CHUNK)
    NEXT = direction(REVERSE)
    tokens = (end - start).to(tl.int32)
    output += ((row * T + token_after(0, start, end, REVERSE)) * H + head) * V
    if not SEGMENTED:
        stop = tl.cdiv(tokens, CHUNK)

    unit = unit_scale(largest, SCALED)
    inverse = 1.0 / unit
    state = ()
    for e in tl.static_range(0, K, STEP):
        piece = tl.zeros((BLOCK, STEP), tl.float32)
        if HAS_INITIAL:
            piece = load_block(initial + (n * H + head) * K * V, e, column, K, V, STEP, BLOCK)
            piece = tl.trans(piece.to(tl.float32) * unit)
        if SEGMENTED:
            if number > 0:
                piece = load_block(offsets + ((segment - 1) * H + head) * K * V, column, e, V, K, BLOCK, STEP)
        state = state + (piece,)
    offered = load_block(written + ((slot + begin) * H + head) * CHUNK * V, column, 0, V, CHUNK, BLOCK, CHUNK)
    for m in range(begin, stop):
        place = (slot + m) * H + head
        whole = 1.0
        if GATED:
            whole = tl.load(decays + place)
        # A turn early: the compiler prefetches the operands of products alone.
        following = (slot + tl.minimum(m + 1, stop - 1)) * H + head
        later = load_block(written + following * CHUNK * V, column, 0, V, CHUNK, BLOCK, CHUNK)

        u, state, o = walk_through(
            state, offered, erased, writes, queries, states, place, column, whole,
            K, V, READ, SAVE, DTYPE, PRECISION, CHUNK, BLOCK, STEP,
        )  # fmt: skip
        if SAVE:
            store_block(written + place * CHUNK * V, column, 0, u, V, CHUNK, BLOCK, CHUNK)
        if READ:
            among = load_block(squares + (place * 2 + 1) * CHUNK * CHUNK, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
            o = tl.dot(u, tl.trans(among), o, input_precision=PRECISION) * inverse
            chunk_output = output + m * (H.to(tl.int64) * CHUNK * V * NEXT)
            store_tokens(chunk_output, H * V * NEXT, tokens - m * CHUNK, column, tl.trans(o), V, CHUNK, BLOCK)
        offered = later
    if number == last:
        for e in tl.static_range(0, K, STEP):
            left = tl.trans(state[e // STEP] * inverse)
            store_block(final + (n * H + head) * K * V, e, column, left, K, V, STEP, BLOCK)


@triton.jit(do_not_specialize=PLAIN)
def read_out(
    q, g, largest, cu_seqlens, sequence_of, squares, written, states, output, scale, T, H,
    q_row, q_token, q_head, g_row, g_token, g_head,
    K: tl.constexpr, V: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr,
    SCALED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """BLOCK value columns of one chunk of one head: the output."""
    blocks: tl.constexpr = (V + BLOCK - 1) // BLOCK
    column = tl.program_id(0) % blocks * BLOCK
    head = (tl.program_id(0) // blocks % H).to(tl.int64)
    slot = (tl.program_id(0) // blocks // H).to(tl.int64)
    place = slot * H + head
    row, start, live = chunk(slot, T, cu_seqlens, sequence_of, PACKED, CHUNK, REVERSE)
    NEXT = direction(REVERSE)

    q += row * q_row + start * q_token + head * q_head
    among = load_block(squares + (place * 2 + 1) * CHUNK * CHUNK, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
    u = load_block(written + place * CHUNK * V, column, 0, V, CHUNK, BLOCK, CHUNK)
    o = tl.zeros((CHUNK, BLOCK), tl.float32)
    for e in range(0, K, STEP):
        query = load_tokens(q, q_token * NEXT, live, e, K, CHUNK, STEP).to(DTYPE)
        state = load_block(states + place * K * V, column, e, V, K, BLOCK, STEP)
        o = tl.dot(query, tl.trans(state), o, input_precision=PRECISION)
    o *= scale
    if GATED:
        g += row * g_row + start * g_token + head * g_head
        o *= decay_since(load_numbers(g, g_token * NEXT, live, CHUNK))[:, None]
    o = tl.dot(among, tl.trans(u), o, input_precision=PRECISION) / unit_scale(largest, SCALED)
    store_tokens(output + ((row * T + start) * H + head) * V, H * V * NEXT, live, column, o, V, CHUNK, BLOCK)


@triton.jit(do_not_specialize=PLAIN)
def read_through(
    q, k, v, beta, write_key, g, initial, largest, cu_seqlens,
    squares, queries, writes, erased, written, decays, states, output, final,
    scale, T, H,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
    beta_row, beta_token, beta_head, write_row, write_token, write_head, g_row, g_token, g_head,
    K: tl.constexpr, V: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr,
    SCALED: tl.constexpr, HAS_INITIAL: tl.constexpr, SAVE: tl.constexpr, OWN_WRITE_KEY: tl.constexpr,
    SCORES: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of one sequence from end to end; SAVE also leaves what the kernels above would have left.

    The unit is that of this sequence and head, and is left in `largest`, by place.
    """
    head = (tl.program_id(0) % H).to(tl.int64)
    n = (tl.program_id(0) // H).to(tl.int64)
    row, start, end, slot = sequence(n, T, cu_seqlens, PACKED, CHUNK)
    NEXT = direction(REVERSE)
    q += row * q_row + head * q_head
    k += row * k_row + head * k_head
    v += row * v_row + head * v_head
    write_key += row * write_row + head * write_head
    beta += row * beta_row + head * beta_head
    if GATED:
        g += row * g_row + head * g_head

    state = tl.zeros((BLOCK_K, BLOCK), tl.float32)
    if HAS_INITIAL:
        state = load_block(initial + (n * H + head) * K * V, 0, 0, K, V, BLOCK_K, BLOCK).to(tl.float32)
    unit = own_unit(v + start * v_token, v_token, end - start, state, V, HAS_INITIAL, 128, BLOCK)
    inverse = 1.0 / unit
    if HAS_INITIAL:
        state *= unit
    for m in range(0, tl.cdiv((end - start).to(tl.int32), CHUNK)):
        place = (slot + m) * H + head
        live = end - start - m * CHUNK
        t = token_after(m * CHUNK, start, end, REVERSE)
        strength = load_numbers(beta + t * beta_token, beta_token * NEXT, live, CHUNK)
        gate = strength
        since = tl.full((CHUNK,), 1.0, tl.float32)
        until = since
        whole = 1.0
        if GATED:
            gate = load_numbers(g + t * g_token, g_token * NEXT, live, CHUNK)
            since = decay_since(gate)
            until = decay_until(g + t * g_token, g_token * NEXT, live, CHUNK)
            whole = tl.exp(tl.sum(gate, 0))
        read = load_tokens(k + t * k_token, k_token * NEXT, live, 0, K, CHUNK, BLOCK_K)
        write = read
        if OWN_WRITE_KEY:
            write = load_tokens(write_key + t * write_token, write_token * NEXT, live, 0, K, CHUNK, BLOCK_K)
        query = load_tokens(q + t * q_token, q_token * NEXT, live, 0, K, CHUNK, BLOCK_K)
        value = load_tokens(v + t * v_token, v_token * NEXT, live, 0, V, CHUNK, BLOCK)
        products = tl.dot(read.to(SCORES), tl.trans(write.to(SCORES)), input_precision=PRECISION)
        x = unit_lower_inverse(_weigh(products, strength, gate, 1, GATED, CHUNK), CHUNK, SCALED).to(DTYPE)
        products = tl.dot(query.to(SCORES), tl.trans(write.to(SCORES)), input_precision=PRECISION)
        among = _weigh(products, strength * scale, gate, 0, GATED, CHUNK).to(DTYPE)
        query = (query.to(tl.float32) * (since * scale)[:, None]).to(DTYPE)
        write = (write.to(tl.float32) * (until * strength)[:, None]).to(DTYPE)

        before = state.to(DTYPE)
        known = tl.dot(read.to(DTYPE), before, input_precision=PRECISION)
        u = (value.to(tl.float32) * unit - known * since[:, None]).to(DTYPE)
        u = tl.dot(x, u, input_precision=PRECISION).to(DTYPE)
        o = tl.dot(query, before, input_precision=PRECISION)
        o = tl.dot(among, u, o, input_precision=PRECISION) * inverse
        store_tokens(output + ((row * T + t) * H + head) * V, H * V * NEXT, live, 0, o, V, CHUNK, BLOCK)
        state = tl.dot(tl.trans(write), u, state * whole, input_precision=PRECISION)
        if SAVE:
            tl.store(largest + place, unit)
            square = squares + place * 2 * CHUNK * CHUNK
            store_block(square, 0, 0, x, CHUNK, CHUNK, CHUNK, CHUNK)
            store_block(square + CHUNK * CHUNK, 0, 0, among, CHUNK, CHUNK, CHUNK, CHUNK)
            store_block(states + place * K * V, 0, 0, tl.trans(before), V, K, BLOCK, BLOCK_K)
            store_block(written + place * CHUNK * V, 0, 0, tl.trans(u), V, CHUNK, BLOCK, CHUNK)
            store_block(queries + place * CHUNK * K, 0, 0, query, CHUNK, K, CHUNK, BLOCK_K)
            store_block(writes + place * CHUNK * K, 0, 0, write, CHUNK, K, CHUNK, BLOCK_K)
            erase = tl.dot((x.to(tl.float32) * since[None, :]).to(DTYPE), read.to(DTYPE), input_precision=PRECISION)
            store_block(erased + place * CHUNK * K, 0, 0, -erase, CHUNK, K, CHUNK, BLOCK_K)
            if GATED:
                tl.store(decays + place, whole)
    store_block(final + (n * H + head) * K * V, 0, 0, state * inverse, K, V, BLOCK_K, BLOCK)
