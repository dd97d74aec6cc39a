"""Chunks of the orthogonal recurrence backward in Triton. Formulas and names are those of chunk.py, `_chunk_backward`.

Four kernels find over chunks in parallel what the gradients of the outputs leave for H, c, a, the gates and the state
before each chunk: `relate_chunks`, `differentiate_slots` for columns, each a slot's, a few at a time, and for what is a
sum over slots `differentiate_directions` and `differentiate_gates`. `retreat_chunks` walks from the last chunk to the
first, adds what comes from the state after each chunk, which is linear in that state's gradient, and turns the sums
into gradients of the inputs.
"""

import triton
import triton.language as tl

from longseq.kernels.orthogonal_recurrence.triton_chunks import (
    UNSPECIALISED,
    coefficients,
    decays_until_end,
    decoded,
    empty,
    load_square,
    loaded_weights,
    log_gates,
    product,
    slot_lengths,
    squared_directions,
    squared_norms,
)
from longseq.kernels.orthogonal_recurrence.triton_tokens import reciprocal_root
from longseq.kernels.triton_tiles import (
    chunk,
    decay_since,
    load_block,
    load_numbers,
    load_tokens,
    sequence,
    store_block,
    store_tokens,
)


@triton.jit(do_not_specialize=UNSPECIALISED)
def differentiate_slots(
    q, k, gamma, g, cu_seqlens, sequence_of, states, answers, d_output, weights, among, into,
    d_q, d_coefficients, d_answers, d_states, reads, onto_gradients, additions, norm_gradients, gone_gradients, sums,
    scale, T, H, q_row, q_token, q_head, k_row, k_token, k_head, gamma_row, gamma_token, gamma_head,
    g_row, g_token, g_head, do_row, do_token, do_head,
    D: tl.constexpr, M: tl.constexpr, OBJECTIVE: tl.constexpr, UNIT: tl.constexpr, GATED: tl.constexpr,
    PACKED: tl.constexpr, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK slots of one chunk of one head: the gradient of q, what outputs leave for c, a and the state before it.

    And for the next kernels what the queries are after N (`reads`) and the gradient of F, with gates also what N adds
    up and the gradients of N and W x; `sums` are these slots' parts of the gradients of b and of -‖h‖².
    """
    blocks: tl.constexpr = (M + BLOCK - 1) // BLOCK
    block = tl.program_id(0) % blocks
    column = block * BLOCK
    head = (tl.program_id(0) // blocks % H).to(tl.int64)
    slot = (tl.program_id(0) // blocks // H).to(tl.int64)
    place = slot * H + head
    row, start, live = chunk(slot, T, cu_seqlens, sequence_of, PACKED, CHUNK)
    live = tl.minimum(live, CHUNK)
    i = tl.arange(0, BLOCK_C)
    if GATED:
        g += row * g_row + start * g_token + head * g_head
    since = decay_since(log_gates(g, g_token, live, GATED, BLOCK_C))
    gamma += row * gamma_row + start * gamma_token + head * gamma_head
    strength = load_numbers(gamma, gamma_token, live, BLOCK_C)
    q += row * q_row + start * q_token + head * q_head
    k += row * k_row + start * k_token + head * k_head
    d_output += row * do_row + start * do_token + head * do_head
    query = load_tokens(q, q_token, live, column, M, BLOCK_C, BLOCK).to(tl.float32) * scale
    key = load_tokens(k, k_token, live, column, M, BLOCK_C, BLOCK).to(tl.float32)
    do = load_tokens(d_output, do_token, live, 0, D, BLOCK_C, BLOCK_D).to(tl.float32)
    state = load_block(states + place * D * M, 0, column, D, M, BLOCK_D, BLOCK)
    tile = place * CHUNK * M
    a = tl.zeros((BLOCK_C, BLOCK), tl.float32)
    if OBJECTIVE != "ttt":
        a = load_block(answers + tile, 0, column, CHUNK, M, BLOCK_C, BLOCK)
    r = slot_lengths(state, OBJECTIVE, UNIT)
    c = coefficients(key, a, strength, r, OBJECTIVE)
    removed = a * c

    gone = tl.zeros_like(a)
    if OBJECTIVE != "ttt":
        gone = product(loaded_weights(weights, place, GATED, CHUNK, BLOCK_C), removed)
    read = query
    if UNIT:
        w = loaded_weights(weights, place, GATED, CHUNK, BLOCK_C)
        squared, onto, added = squared_norms(state, among, place, w, c, a, removed, gone, since, CHUNK, BLOCK_C)
        shorter = reciprocal_root(squared)
        read *= shorter

    into_state = product(do, state)
    into_slots = into_state * r
    d_read = product(load_square(into, place, CHUNK, BLOCK_C), c) + since[:, None] * into_state - gone * into_slots
    d_gone = -into_slots * read
    d_since = tl.sum(into_state * read, 1)
    d_c = product(tl.trans(load_square(into, place, CHUNK, BLOCK_C)), read)
    do = load_tokens(d_output, do_token, live, 0, D, BLOCK_C, BLOCK_D).to(tl.float32)
    if UNIT or OBJECTIVE == "ttt":
        d_state = product(tl.trans(do), read * (since[:, None] - gone))
    else:
        d_slots = -product(tl.trans(do), read * gone) * r
        d_state = product(tl.trans(do), read * since[:, None]) + d_slots
        slots = state * r
        d_state -= slots * tl.sum(d_slots * slots, 0)[None, :]
    store_block(d_states + place * D * M, 0, column, d_state, D, M, BLOCK_D, BLOCK)
    store_block(reads + tile, 0, column, read, CHUNK, M, BLOCK_C, BLOCK)

    d_a = tl.zeros_like(a)
    d_removed = tl.zeros_like(a)
    d_long = since * 0.0
    if UNIT:
        d_read *= shorter
        d_squared = tl.where(squared <= 1e-24, 0.0, -0.5 * d_read * query * shorter * shorter)
        w = loaded_weights(weights, place, GATED, CHUNK, BLOCK_C)
        d_added = product(tl.trans(w * w), d_squared)
        d_onto = 2.0 * d_added * c
        long = squared_directions(among, place, CHUNK, BLOCK_C)
        d_c += product(tl.trans(load_square(among, place, CHUNK, BLOCK_C)), d_onto) + d_added * (
            2.0 * onto - 2.0 * long * c + a * removed
        )
        d_removed = d_added * c
        d_long = -tl.sum(d_removed * c, 1)
        d_a = d_removed * removed - d_onto * gone
        d_removed *= a
        none = empty(state)
        d_since += 2.0 * tl.sum(d_squared * tl.where(none, gone, since[:, None]), 1)
        d_gone += tl.where(none, 2.0 * since[:, None] * d_squared, 0.0) - d_onto * a
        store_block(onto_gradients + tile, 0, column, d_onto, CHUNK, M, BLOCK_C, BLOCK)
        if GATED:
            store_block(additions + tile, 0, column, added, CHUNK, M, BLOCK_C, BLOCK)
            store_block(norm_gradients + tile, 0, column, d_squared, CHUNK, M, BLOCK_C, BLOCK)
    if OBJECTIVE != "ttt":
        d_removed += product(tl.trans(loaded_weights(weights, place, GATED, CHUNK, BLOCK_C)), d_gone)
        d_c += d_removed * a
        d_a += d_removed * c
        store_block(d_answers + tile, 0, column, d_a, CHUNK, M, BLOCK_C, BLOCK)
        if GATED:
            store_block(gone_gradients + tile, 0, column, d_gone, CHUNK, M, BLOCK_C, BLOCK)
    store_block(d_coefficients + tile, 0, column, d_c, CHUNK, M, BLOCK_C, BLOCK)
    d_q += ((row * T + start) * H + head) * M
    store_tokens(d_q, H * M, live, column, d_read * scale, M, BLOCK_C, BLOCK)
    sums += (place * blocks + block) * 2 * CHUNK + i
    tl.store(sums, d_since, mask=i < CHUNK)
    tl.store(sums + CHUNK, d_long, mask=i < CHUNK)


@triton.jit
def _load_coefficients(
    k, k_token, live, answers, states, place, strength, column, D: tl.constexpr, M: tl.constexpr,
    OBJECTIVE: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """c and a of STEP slots of one chunk and head, from `column` on."""
    key = load_tokens(k, k_token, live, column, M, BLOCK_C, STEP).to(tl.float32)
    a = tl.zeros_like(key)
    if OBJECTIVE != "ttt":
        a = load_block(answers + place * CHUNK * M, 0, column, CHUNK, M, BLOCK_C, STEP)
    r = tl.full((1, STEP), 1.0, tl.float32)
    if not UNIT and OBJECTIVE != "ttt":
        r = slot_lengths(load_block(states + place * D * M, 0, column, D, M, BLOCK_D, STEP), OBJECTIVE, UNIT)
    return coefficients(key, a, strength, r, OBJECTIVE), a


@triton.jit(do_not_specialize=UNSPECIALISED)
def differentiate_directions(
    k, gamma, cu_seqlens, sequence_of, states, directions, answers, d_output, weights, reads, d_onto, sums,
    d_directions, T, H,
    k_row, k_token, k_head, gamma_row, gamma_token, gamma_head, do_row, do_token, do_head,
    D: tl.constexpr, M: tl.constexpr, OBJECTIVE: tl.constexpr, UNIT: tl.constexpr, GATED: tl.constexpr,
    PACKED: tl.constexpr, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: what outputs leave for H. BLOCK is that of `differentiate_slots`."""
    blocks: tl.constexpr = (M + BLOCK - 1) // BLOCK
    head = (tl.program_id(0) % H).to(tl.int64)
    slot = (tl.program_id(0) // H).to(tl.int64)
    place = slot * H + head
    row, start, live = chunk(slot, T, cu_seqlens, sequence_of, PACKED, CHUNK)
    live = tl.minimum(live, CHUNK)
    gamma += row * gamma_row + start * gamma_token + head * gamma_head
    strength = load_numbers(gamma, gamma_token, live, BLOCK_C)
    k += row * k_row + start * k_token + head * k_head
    tile = place * CHUNK * M

    # Each is found transposed too: what a product left would be wrong when the next one takes it transposed.
    products_t = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
    d_pairs = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
    d_pairs_t = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
    for e in range(0, M, STEP):
        c, _ = _load_coefficients(
            k, k_token, live, answers, states, place, strength, e, D, M, OBJECTIVE, UNIT, CHUNK, BLOCK_C, BLOCK_D, STEP
        )
        products_t += product(c, tl.trans(load_block(reads + tile, 0, e, CHUNK, M, BLOCK_C, STEP)))
        if UNIT:
            from_onto = load_block(d_onto + tile, 0, e, CHUNK, M, BLOCK_C, STEP)
            d_pairs += product(from_onto, tl.trans(c))
            d_pairs_t += product(c, tl.trans(from_onto))
    w = loaded_weights(weights, place, GATED, CHUNK, BLOCK_C)
    d_output += row * do_row + start * do_token + head * do_head
    do = load_tokens(d_output, do_token, live, 0, D, BLOCK_C, BLOCK_D).to(tl.float32)
    d_h = product(tl.trans(w) * products_t, do)
    if UNIT:
        i = tl.arange(0, BLOCK_C)
        d_long = tl.zeros((BLOCK_C,), tl.float32)
        for block in range(0, blocks):
            part = (place * blocks + block) * 2 + 1
            d_long += tl.load(sums + part * CHUNK + i, mask=i < CHUNK, other=0.0)
        h = load_block(directions + place * CHUNK * D, 0, 0, CHUNK, D, BLOCK_C, BLOCK_D)
        d_h += product(w * d_pairs + tl.trans(w) * d_pairs_t, h) + 2.0 * h * d_long[:, None]
    store_block(d_directions + place * CHUNK * D, 0, 0, d_h, CHUNK, D, BLOCK_C, BLOCK_D)


@triton.jit(do_not_specialize=UNSPECIALISED)
def differentiate_gates(
    k, gamma, g, cu_seqlens, sequence_of, states, answers, weights, among, into,
    reads, d_onto, added, d_squared, d_gone, sums, from_gates, T, H,
    k_row, k_token, k_head, gamma_row, gamma_token, gamma_head, g_row, g_token, g_head,
    D: tl.constexpr, M: tl.constexpr, OBJECTIVE: tl.constexpr, UNIT: tl.constexpr, GATED: tl.constexpr,
    PACKED: tl.constexpr, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: what outputs leave for its log gates. BLOCK is that of `differentiate_slots`."""
    blocks: tl.constexpr = (M + BLOCK - 1) // BLOCK
    head = (tl.program_id(0) % H).to(tl.int64)
    slot = (tl.program_id(0) // H).to(tl.int64)
    place = slot * H + head
    row, start, live = chunk(slot, T, cu_seqlens, sequence_of, PACKED, CHUNK)
    live = tl.minimum(live, CHUNK)
    gamma += row * gamma_row + start * gamma_token + head * gamma_head
    strength = load_numbers(gamma, gamma_token, live, BLOCK_C)
    k += row * k_row + start * k_token + head * k_head
    tile = place * CHUNK * M

    products = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
    d_pairs = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
    d_squares = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
    d_removed = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
    for e in range(0, M, STEP):
        c, a = _load_coefficients(
            k, k_token, live, answers, states, place, strength, e, D, M, OBJECTIVE, UNIT, CHUNK, BLOCK_C, BLOCK_D, STEP
        )
        products += product(load_block(reads + tile, 0, e, CHUNK, M, BLOCK_C, STEP), tl.trans(c))
        if OBJECTIVE != "ttt":
            d_removed += product(load_block(d_gone + tile, 0, e, CHUNK, M, BLOCK_C, STEP), tl.trans(a * c))
        if UNIT:
            d_pairs += product(load_block(d_onto + tile, 0, e, CHUNK, M, BLOCK_C, STEP), tl.trans(c))
            from_squared = load_block(d_squared + tile, 0, e, CHUNK, M, BLOCK_C, STEP)
            d_squares += product(from_squared, tl.trans(load_block(added + tile, 0, e, CHUNK, M, BLOCK_C, STEP)))
    w = loaded_weights(weights, place, GATED, CHUNK, BLOCK_C)
    d_decay = load_square(into, place, CHUNK, BLOCK_C) * products + w * d_removed
    if UNIT:
        d_decay += load_square(among, place, CHUNK, BLOCK_C) * d_pairs + 2.0 * w * w * d_squares
    i = tl.arange(0, BLOCK_C)
    d_since = tl.zeros((BLOCK_C,), tl.float32)
    for block in range(0, blocks):
        d_since += tl.load(sums + (place * blocks + block) * 2 * CHUNK + i, mask=i < CHUNK, other=0.0)
    g += row * g_row + start * g_token + head * g_head
    d_since *= decay_since(log_gates(g, g_token, live, GATED, BLOCK_C))
    # A gate acts on what is read after it of what was written before it.
    before = tl.where(i[:, None] < i[None, :], 1.0, 0.0)
    d_gates = tl.where(i[:, None] >= i[None, :], product(d_decay, before) + d_since[:, None], 0.0)
    tl.store(from_gates + place * CHUNK + i, tl.sum(d_gates, 0), mask=i < CHUNK)


@triton.jit
def _decoded_backward(z, v, h, d_h):
    """Gradients of TTT's z and v [C, D] from that of H."""
    direction, r, along = decoded(z, v)
    d_v = d_h * r[:, None]
    d_along = -tl.sum(d_v * direction, 1)[:, None]
    d_direction = d_along * v - along[:, None] * d_v
    d_length = -(tl.sum(d_h * h, 1) + tl.sum(d_direction * direction, 1)) * r
    return d_direction * r[:, None] + direction * d_length[:, None], d_v + d_along * direction


@triton.jit
def _before_norms(d_state, state, lengths, live, column, M: tl.constexpr, STEP: tl.constexpr):
    """From the gradient of slots that N left that of the ones before N; as it is of a chunk that is not live."""
    e = column + tl.arange(0, STEP)
    r = tl.load(lengths + e, mask=e < tl.where(live, M, 0), other=0.0)
    along = tl.where(live, tl.sum(state * d_state, 0), 0.0)
    return (d_state - state * along[None, :]) * tl.where(live, r, 1.0)[None, :]


@triton.jit(do_not_specialize=UNSPECIALISED)
def retreat_chunks(
    k, v, gamma, g, initial, cu_seqlens, states, directions, answers, lengths, final, d_final, scratch,
    from_gates, d_coefficients, d_directions, d_states, d_answers, d_k, d_v, d_gamma, d_g, d_initial, T, H,
    k_row, k_token, k_head, v_row, v_token, v_head, gamma_row, gamma_token, gamma_head, g_row, g_token, g_head,
    D: tl.constexpr, M: tl.constexpr, OBJECTIVE: tl.constexpr, UNIT: tl.constexpr, GATED: tl.constexpr,
    PACKED: tl.constexpr, HAS_FINAL: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One head of one sequence: gradients of k, v, gamma, g and the initial state, STEP slots at a time.

    The gradient of the state after a chunk takes the place of the final one in `d_initial`, and at last becomes that of
    the initial state. `d_coefficients` and `d_answers` are overwritten.
    """
    head = (tl.program_id(0) % H).to(tl.int64)
    n = (tl.program_id(0) // H).to(tl.int64)
    row, start, end, slot = sequence(n, T, cu_seqlens, PACKED, CHUNK)
    k += row * k_row + start * k_token + head * k_head
    v += row * v_row + start * v_token + head * v_head
    gamma += row * gamma_row + start * gamma_token + head * gamma_head
    if GATED:
        g += row * g_row + start * g_token + head * g_head
    corner = (n * H + head) * D * M
    scratch += (n * H + head) * D * CHUNK
    d_initial += corner
    i = tl.arange(0, BLOCK_C)

    chunks = tl.cdiv((end - start).to(tl.int32), CHUNK)
    for e in range(0, M, STEP):
        d_after = tl.zeros((BLOCK_D, STEP), tl.float32)
        if HAS_FINAL:
            d_after = load_block(d_final + corner, 0, e, D, M, BLOCK_D, STEP).to(tl.float32)
        if UNIT:
            after = load_block(final + corner, 0, e, D, M, BLOCK_D, STEP)
            norms = lengths + ((slot + chunks - 1) * H + head) * M
            d_after = _before_norms(d_after, after, norms, chunks > 0, e, M, STEP)
        store_block(d_initial, 0, e, d_after, D, M, BLOCK_D, STEP)
    for back in range(0, chunks):
        m = chunks - 1 - back
        first = m.to(tl.int64) * CHUNK
        place = (slot + m) * H + head
        token = (row * T + start + first) * H + head
        live = tl.minimum(end - start - first, CHUNK)
        keys = k + first * k_token
        before = states + place * D * M
        tile = place * CHUNK * M
        d_before = d_states + place * D * M
        strength = load_numbers(gamma + first * gamma_token, gamma_token, live, BLOCK_C)
        whole = 1.0
        until = tl.zeros((BLOCK_C,), tl.float32) + 1.0
        if GATED:
            whole = tl.exp(tl.sum(log_gates(g + first * g_token, g_token, live, GATED, BLOCK_C), 0))
            until = decays_until_end(g + first * g_token, g_token, live, GATED, BLOCK_C)
        tl.debug_barrier()  # what one thread wrote, another one reads

        # H's gradient and, but for TTT, on top of it the values'.
        h = load_block(directions + place * CHUNK * D, 0, 0, CHUNK, D, BLOCK_C, BLOCK_D)
        dv = load_block(d_directions + place * CHUNK * D, 0, 0, CHUNK, D, BLOCK_C, BLOCK_D)
        d_strength = tl.zeros((BLOCK_C,), tl.float32)
        d_until = tl.zeros((BLOCK_C,), tl.float32)
        d_whole = tl.zeros((STEP,), tl.float32)
        z = tl.zeros_like(h)
        for e in range(0, M, STEP):
            state = load_block(before, 0, e, D, M, BLOCK_D, STEP)
            d_after = load_block(d_initial, 0, e, D, M, BLOCK_D, STEP)
            key = load_tokens(keys, k_token, live, e, M, BLOCK_C, STEP).to(tl.float32)
            r = slot_lengths(state, OBJECTIVE, UNIT)
            a = tl.zeros_like(key)
            if OBJECTIVE != "ttt":
                a = load_block(answers + tile, 0, e, CHUNK, M, BLOCK_C, STEP)
            c = coefficients(key, a, strength, r, OBJECTIVE)
            along = tl.sum(d_after * state, 0)
            d_whole += along
            d_gone = -along[None, :] * r
            dv += product(until[:, None] * c, tl.trans(d_after))
            d_c = product(h, d_after)
            d_until += tl.sum(d_c * c + d_gone * a * c, 1)
            d_c = until[:, None] * (d_c + d_gone * a)
            d_c += load_block(d_coefficients + tile, 0, e, CHUNK, M, BLOCK_C, STEP)
            source = key
            if OBJECTIVE == "encode":
                source = key - a
            d_strength += tl.sum(source * d_c * r, 1)
            if OBJECTIVE == "ttt":
                z += product(key, tl.trans(state))
            else:
                d_a = load_block(d_answers + tile, 0, e, CHUNK, M, BLOCK_C, STEP)
                d_a += until[:, None] * d_gone * c
                if OBJECTIVE == "encode":
                    d_a -= strength[:, None] * d_c * r
            tl.debug_barrier()  # more than one thread may read a number, and one of them overwrites it
            store_block(d_coefficients + tile, 0, e, d_c, CHUNK, M, BLOCK_C, STEP)
            if OBJECTIVE != "ttt":
                store_block(d_answers + tile, 0, e, d_a, CHUNK, M, BLOCK_C, STEP)
                dv += product(d_a * r, tl.trans(state))
        tl.store(d_gamma + token + i * H, d_strength, mask=i < live)
        if GATED:
            # W's last row and b's last number alone act on the state after the chunk.
            d_gates = tl.sum(tl.where(i[:, None] < i[None, :], (until * d_until)[:, None], 0.0), 0)
            d_gates += whole * tl.sum(d_whole, 0)
            d_gates += tl.load(from_gates + place * CHUNK + i, mask=i < CHUNK, other=0.0)
            tl.store(d_g + token + i * H, d_gates, mask=i < live)
        erased = dv
        if OBJECTIVE == "ttt":
            value = load_tokens(v + first * v_token, v_token, live, 0, D, BLOCK_C, BLOCK_D).to(tl.float32)
            d_z, dv = _decoded_backward(z, value, h, dv)
            erased = -d_z
        store_tokens(d_v + token * D, H * D, live, 0, dv, D, BLOCK_C, BLOCK_D)
        if OBJECTIVE == "decode" or OBJECTIVE == "ttt":
            store_block(scratch, 0, 0, erased, CHUNK, D, BLOCK_C, BLOCK_D)
        tl.debug_barrier()
        for e in range(0, M, STEP):
            state = load_block(before, 0, e, D, M, BLOCK_D, STEP)
            d_after = load_block(d_initial, 0, e, D, M, BLOCK_D, STEP)
            key = load_tokens(keys, k_token, live, e, M, BLOCK_C, STEP).to(tl.float32)
            d_c = load_block(d_coefficients + tile, 0, e, CHUNK, M, BLOCK_C, STEP)
            r = slot_lengths(state, OBJECTIVE, UNIT)
            slots = state * r
            dk = strength[:, None] * d_c * r
            d_state = load_block(d_before, 0, e, D, M, BLOCK_D, STEP) + d_after * whole
            d_slots = tl.zeros_like(state)
            if OBJECTIVE != "ttt":
                a = load_block(answers + tile, 0, e, CHUNK, M, BLOCK_C, STEP)
                d_a = load_block(d_answers + tile, 0, e, CHUNK, M, BLOCK_C, STEP)
                c = coefficients(key, a, strength, r, OBJECTIVE)
                h_t = tl.trans(load_block(directions + place * CHUNK * D, 0, 0, CHUNK, D, BLOCK_C, BLOCK_D))
                d_slots = product(h_t, d_a) - d_after * tl.sum(until[:, None] * a * c, 0)[None, :]
            if OBJECTIVE == "decode" or OBJECTIVE == "ttt":
                dk -= product(erased, slots)
                erased_t = tl.trans(load_block(scratch, 0, 0, CHUNK, D, BLOCK_C, BLOCK_D))
                d_slots -= product(erased_t, key)
            if not UNIT and OBJECTIVE != "ttt":
                d_lengths = -tl.sum(d_c * c, 0) - tl.sum(d_slots * slots, 0)
                d_slots = (d_slots + slots * d_lengths[None, :]) * r
            d_state += d_slots
            store_tokens(d_k + token * M, H * M, live, e, dk, M, BLOCK_C, STEP)
            if UNIT:
                d_state = _before_norms(d_state, state, lengths + (place - H) * M, m > 0, e, M, STEP)
            tl.debug_barrier()  # as above
            store_block(d_initial, 0, e, d_state, D, M, BLOCK_D, STEP)

    if UNIT:
        tl.debug_barrier()
        for e in range(0, M, STEP):
            d_state = load_block(d_initial, 0, e, D, M, BLOCK_D, STEP)
            state = load_block(initial + corner, 0, e, D, M, BLOCK_D, STEP).to(tl.float32)
            r = reciprocal_root(tl.sum(state * state, 0))[None, :]
            state *= r
            along = tl.sum(state * d_state, 0)[None, :]
            d_state = tl.where(chunks > 0, (d_state - state * along) * r, d_state)
            tl.debug_barrier()
            store_block(d_initial, 0, e, d_state, D, M, BLOCK_D, STEP)
