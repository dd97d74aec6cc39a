"""Chunks of the orthogonal recurrence backward in Triton. Formulas and names are those of chunk.py, `_chunk_backward`.

`differentiate_outputs` computes over chunks in parallel what the gradients of the outputs contribute to those of q, c,
H ("encode", "similarity": v), the gates and the state before each chunk. `retreat_chunks` loops from the last chunk to
the first with the gradient of the state in registers; as in the forward pass, a chunk has two dependent products. It
stores the gradients of the states after the chunks, before N, and of H ("encode": their contribution to that of a).
From these, `differentiate_inputs` computes the rest over chunks in parallel.
"""

import triton
import triton.language as tl

from longseq.kernels.orthogonal_recurrence.triton_chunks import (
    UNSPECIALISED,
    decays_until_end,
    decoded,
    empty,
    load_a,
    load_h,
    load_outside,
    load_side,
    load_slots,
    load_written,
    log_gates,
    numbers_of_chunk,
    of_slots,
    place_chunk,
    precise_product,
    product,
    slot_lengths,
    squared,
    squared_norms,
    weigh,
    weights_of_chunk,
)
from longseq.kernels.orthogonal_recurrence.triton_tokens import reciprocal_root
from longseq.kernels.triton_tiles import (
    decay_since,
    direction,
    find_chunk,
    load_block,
    load_numbers,
    load_tokens,
    sequence,
    store_block,
    store_tokens,
)


@triton.jit
def gates_of_decays(d_decay, BLOCK_C: tl.constexpr):
    """Gradients of the log gates [C] from those of W's logarithms [s, t].

    A gate acts on each pair of an earlier write s and a later read t around it.
    """
    i = tl.arange(0, BLOCK_C)
    later = tl.cumsum(tl.where(i[:, None] < i[None, :], d_decay, 0.0), 1, reverse=True)
    return tl.sum(tl.where(i[:, None] < i[None, :], later, 0.0), 0)


@triton.jit(do_not_specialize=UNSPECIALISED)
def differentiate_outputs(
    q, k, v, gamma, g, cu_seqlens, sequence_of, states, h_or_a, d_output,
    d_q, d_coefficients, d_h, d_states, d_w_x, d_squared, from_gates, scale, T, H,
    q_token, k_token, v_token, gamma_token, g_token, do_token,
    D: tl.constexpr, M: tl.constexpr, OBJECTIVE: tl.constexpr, UNIT: tl.constexpr, REVERSE: tl.constexpr,
    PRECISION: tl.constexpr, READS: tl.constexpr, WRITES: tl.constexpr, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: the gradient of q, and the outputs' contribution to those of c, H, log gates and state.

    READS computes the contribution through the products that the outputs are made of, and stores `d_w_x` and
    `d_squared`, the gradients of W x and N. WRITES computes the contribution through these two. A launch without READS
    loads both, and adds to the results of the launch before it. One launch with both needs too many registers for
    chunks of 64 tokens: the spilled registers took longer than everything else.
    """
    BOTH: tl.constexpr = READS and WRITES
    GATED: tl.constexpr = g is not None
    head, slot, token, live = find_chunk(tl.program_id(0), T, H, cu_seqlens, sequence_of, CHUNK, REVERSE)
    if live <= 0:
        return
    place = slot * H + head
    live = tl.minimum(live, CHUNK)
    NEXT = direction(REVERSE)
    q += token * q_token + head * M
    k += token * k_token + head * M
    v += token * v_token + head * D
    gamma += token * gamma_token + head
    d_output += token * do_token + head * D
    d_q += (token * H + head) * M
    q_token *= NEXT
    k_token *= NEXT
    v_token *= NEXT
    gamma_token *= NEXT
    do_token *= NEXT
    if GATED:
        g += token * g_token + head
        g_token *= NEXT
    gate = log_gates(g, g_token, live, BLOCK_C)
    since = decay_since(gate)
    strength = load_numbers(gamma, gamma_token, live, BLOCK_C)

    products = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
    d_pairs = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
    d_h_t = tl.zeros((BLOCK_D, BLOCK_C), tl.float32)
    d_since = tl.zeros((BLOCK_C,), tl.float32)
    d_gates = tl.zeros((BLOCK_C,), tl.float32)
    for e in range(0, M, BLOCK):
        h_t = load_h(v, v_token, live, h_or_a, place, D, OBJECTIVE, CHUNK, BLOCK_C, BLOCK_D)
        state = load_block(states + place * D * M, e, 0, M, D, BLOCK, BLOCK_D)
        none = empty(state)
        r = slot_lengths(state, OBJECTIVE, UNIT)
        a = load_a(h_or_a, place, state, r, h_t, e, M, OBJECTIVE, PRECISION, CHUNK, BLOCK_C, BLOCK)
        written = load_written(k, k_token, live, e, a, M, OBJECTIVE, BLOCK_C, BLOCK)
        c = written * strength[None, :] * r
        before = tl.zeros_like(a)
        w_x = before
        if OBJECTIVE != "ttt":
            strict_t = weights_of_chunk(gate, True, True, GATED, BLOCK_C)
            before = product(a * c, strict_t, PRECISION)
            w_x = before + a * c
        if UNIT:
            # After a barrier, tiles are loaded again, from the cache: there are not enough registers to hold them.
            tl.debug_barrier()
            h_t = load_h(v, v_token, live, h_or_a, place, D, OBJECTIVE, CHUNK, BLOCK_C, BLOCK_D)
            written = load_written(k, k_token, live, e, a, M, OBJECTIVE, BLOCK_C, BLOCK)
            c = written * strength[None, :]
            pairs_t = product(tl.trans(h_t), h_t, PRECISION)
            pairs_t = weigh(pairs_t, gate, True, 0.5, GATED, BLOCK_C) * strength[:, None]
            f = product(written, pairs_t, PRECISION) - a * w_x
            if READS or GATED:
                added, norms_before = squared_norms(
                    c, a, a * c, w_x, f, since, none, squared(strict_t, GATED), PRECISION
                )

        if READS:
            stays = tl.zeros_like(a) + since[None, :] - w_x * r
            if UNIT:
                norms = added + norms_before
                shorter = reciprocal_root(norms)
            tl.debug_barrier()
            do = load_tokens(d_output, do_token, live, 0, D, BLOCK_C, BLOCK_D)
            state = load_block(states + place * D * M, e, 0, M, D, BLOCK, BLOCK_D)
            into_state = product(state, tl.trans(do), PRECISION)
            read = tl.trans(load_tokens(q, q_token, live, e, M, BLOCK_C, BLOCK)).to(tl.float32) * scale
            if UNIT:
                read *= shorter
            if GATED:
                d_since += tl.sum(into_state * read, 0)
            d_passed = -into_state * r * read
            d_read = into_state * stays
            if not BOTH:
                if OBJECTIVE != "ttt":
                    store_block(d_w_x + place * CHUNK * M, e, 0, d_passed, M, CHUNK, BLOCK, BLOCK_C)
                tl.debug_barrier()
                do = load_tokens(d_output, do_token, live, 0, D, BLOCK_C, BLOCK_D)
            h_t = load_h(v, v_token, live, h_or_a, place, D, OBJECTIVE, CHUNK, BLOCK_C, BLOCK_D)
            into_t = product(tl.trans(h_t), tl.trans(do), PRECISION)
            into_t = weigh(into_t, gate, True, 1.0, GATED, BLOCK_C) * strength[:, None]
            written = load_written(k, k_token, live, e, a, M, OBJECTIVE, BLOCK_C, BLOCK)
            d_read += product(written, into_t, PRECISION) * r
            if UNIT:
                d_read *= shorter
                d_norms = tl.where(norms <= 1e-24, 0.0, -0.5 * d_read * read * shorter)
                if not BOTH:
                    store_block(d_squared + place * CHUNK * M, e, 0, d_norms, M, CHUNK, BLOCK, BLOCK_C)
            store_tokens(d_q, H * M * NEXT, live, e, tl.trans(d_read) * scale, M, BLOCK_C, BLOCK)

        d_c = tl.zeros_like(a)
        d_a = tl.zeros_like(a)
        if WRITES and OBJECTIVE != "ttt":
            tl.debug_barrier()
            strict = weights_of_chunk(gate, False, True, GATED, BLOCK_C)
            d_x = tl.zeros_like(a)
            if UNIT:
                if not BOTH:
                    d_norms = load_block(d_squared + place * CHUNK * M, e, 0, M, CHUNK, BLOCK, BLOCK_C)
                written = load_written(k, k_token, live, e, a, M, OBJECTIVE, BLOCK_C, BLOCK)
                c = written * strength[None, :]
                d_added = product(d_norms, squared(strict, GATED), PRECISION) + d_norms
                if GATED:
                    d_gates += tl.sum(2.0 * d_added * norms_before, 0)
                d_c = d_added * (2.0 * f + a * a * c)
                d_norm = d_added * c
                d_a = d_norm * (a * c - 2.0 * w_x)
                d_x = d_norm * a
                tl.debug_barrier()
                h_t = load_h(v, v_token, live, h_or_a, place, D, OBJECTIVE, CHUNK, BLOCK_C, BLOCK_D)
                pairs = weigh(product(tl.trans(h_t), h_t, PRECISION), gate, False, 0.5, GATED, BLOCK_C)
                d_c += product(2.0 * d_norm, pairs, PRECISION)
                tl.debug_barrier()
                if not BOTH:
                    d_norms = load_block(d_squared + place * CHUNK * M, e, 0, M, CHUNK, BLOCK, BLOCK_C)
            if not BOTH:
                d_passed = load_block(d_w_x + place * CHUNK * M, e, 0, M, CHUNK, BLOCK, BLOCK_C)
            if UNIT:
                d_passed += tl.where(none, 2.0 * since[None, :] * d_norms, 0.0) - 2.0 * d_x
            d_passed += product(d_passed, strict, PRECISION)
            if GATED:
                d_gates += tl.sum(d_passed * before, 0)
            d_x += d_passed
            tl.debug_barrier()
            written = load_written(k, k_token, live, e, a, M, OBJECTIVE, BLOCK_C, BLOCK)
            c = written * strength[None, :] * r
            d_c += d_x * a
            d_a += d_x * c
            if UNIT:
                d_pairs += product(tl.trans(written), 2.0 * d_norm, PRECISION)

        tl.debug_barrier()
        if READS:
            h_t = load_h(v, v_token, live, h_or_a, place, D, OBJECTIVE, CHUNK, BLOCK_C, BLOCK_D)
            do = load_tokens(d_output, do_token, live, 0, D, BLOCK_C, BLOCK_D)
            into = weigh(product(do, h_t, PRECISION), gate, False, 1.0, GATED, BLOCK_C)
            d_c += product(read, into, PRECISION)
            written = load_written(k, k_token, live, e, a, M, OBJECTIVE, BLOCK_C, BLOCK)
            products += product(tl.trans(written), read * r, PRECISION)
        total = d_c
        if not READS:
            total += load_block(d_coefficients + place * CHUNK * M, e, 0, M, CHUNK, BLOCK, BLOCK_C)
        store_block(d_coefficients + place * CHUNK * M, e, 0, total, M, CHUNK, BLOCK, BLOCK_C)

        tl.debug_barrier()
        d_state = tl.zeros((BLOCK, BLOCK_D), tl.float32)
        d_slots = d_state
        if READS:
            do = load_tokens(d_output, do_token, live, 0, D, BLOCK_C, BLOCK_D)
            if UNIT or OBJECTIVE == "ttt":
                d_state += product(read * stays, do, PRECISION)
            else:
                d_state += product(read * since[None, :], do, PRECISION)
                d_slots -= product(read * w_x, do, PRECISION)
        if WRITES and OBJECTIVE != "ttt":
            if OBJECTIVE == "encode":
                d_a -= strength[None, :] * total * r
            h_t = load_h(v, v_token, live, h_or_a, place, D, OBJECTIVE, CHUNK, BLOCK_C, BLOCK_D)
            from_answers = product(d_a, tl.trans(h_t), PRECISION)
            if UNIT:
                d_state += from_answers
            else:
                d_slots += from_answers
        if not (UNIT or OBJECTIVE == "ttt"):
            slots = load_block(states + place * D * M, e, 0, M, D, BLOCK, BLOCK_D).to(tl.float32) * r
            d_state += (d_slots - slots * (of_slots(slots * d_slots) + of_slots(d_c * c))) * r
        if not READS:
            d_state += load_block(d_states + place * D * M, e, 0, M, D, BLOCK, BLOCK_D)
        store_block(d_states + place * D * M, e, 0, d_state, M, D, BLOCK, BLOCK_D)
        if WRITES and OBJECTIVE != "ttt":
            tl.debug_barrier()
            state = load_block(states + place * D * M, e, 0, M, D, BLOCK, BLOCK_D)
            d_h_t += product(tl.trans(state), d_a * r, PRECISION)

    h_t = load_h(v, v_token, live, h_or_a, place, D, OBJECTIVE, CHUNK, BLOCK_C, BLOCK_D)
    d_decay = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
    d_h_c = tl.zeros((BLOCK_C, BLOCK_D), tl.float32)
    if READS:
        do = load_tokens(d_output, do_token, live, 0, D, BLOCK_C, BLOCK_D)
        products = weigh(products, gate, True, 1.0, GATED, BLOCK_C) * strength[:, None]
        d_h_c += product(products, do, PRECISION)
        if GATED:
            d_decay += products * product(tl.trans(h_t), tl.trans(do), PRECISION)
    else:
        d_h_c += load_block(d_h + place * CHUNK * D, 0, 0, CHUNK, D, BLOCK_C, BLOCK_D)
    if WRITES and UNIT:
        d_pairs = weigh(d_pairs, gate, True, 0.5, GATED, BLOCK_C) * strength[:, None]
        d_h_t += product(h_t, d_pairs, PRECISION)
        d_h_c += product(d_pairs, tl.trans(h_t), PRECISION)
        if GATED:
            d_decay += d_pairs * product(tl.trans(h_t), h_t, PRECISION)
    if WRITES:
        d_h_c += tl.trans(d_h_t)
    store_block(d_h + place * CHUNK * D, 0, 0, d_h_c, CHUNK, D, BLOCK_C, BLOCK_D)
    if GATED:
        i = tl.arange(0, BLOCK_C)
        d_gates += gates_of_decays(d_decay, BLOCK_C) + tl.cumsum(d_since * since, 0, reverse=True)
        if not READS:
            d_gates += tl.load(from_gates + place * CHUNK + i, mask=i < CHUNK, other=0.0)
        tl.store(from_gates + place * CHUNK + i, d_gates, mask=i < CHUNK)


@triton.jit
def decoded_backward(z, v, h, d_h):
    """The gradients of TTT's z and v [C, D] from that of H."""
    direction, r, along = decoded(z, v)
    d_v = d_h * r
    d_along = -tl.sum(d_v * direction, 1)[:, None]
    d_direction = d_along * v - along * d_v
    d_length = -(tl.sum(d_h * h, 1) + tl.sum(d_direction * direction, 1))[:, None] * r
    return d_direction * r + direction * d_length, d_v + d_along * direction


@triton.jit(do_not_specialize=UNSPECIALISED)
def retreat_chunks(
    k, v, gamma, g, initial, cu_seqlens, states, h_or_a, lengths, phi_u, d_final,
    d_h, d_states, d_after, d_h_or_a, d_values, d_initial, T, H, slot_of_finals,
    k_token, v_token, gamma_token, g_token,
    D: tl.constexpr, M: tl.constexpr, OBJECTIVE: tl.constexpr, UNIT: tl.constexpr, REVERSE: tl.constexpr,
    STAGES: tl.constexpr, DTYPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK slots of one head of one sequence: `d_after`, the gradients of the states after its chunks, before N.

    Also `d_h_or_a`: the gradient of H; for TTT, minus that of z, with that of v in `d_values`; for "encode", minus the
    part of the gradient of a that comes from the state after the chunk. Loads run STAGES - 1 steps ahead. Without
    STAGES, only the operands of products are loaded ahead; a step that waited for `d_states` spent half its time so.
    """
    ALONE: tl.constexpr = OBJECTIVE == "encode" or OBJECTIVE == "similarity"
    blocks: tl.constexpr = (M + BLOCK - 1) // BLOCK
    column = tl.program_id(0) % blocks * BLOCK
    head = tl.program_id(0) // blocks % H
    n = (tl.program_id(0) // blocks // H).to(tl.int64)
    row, start, end, slot = sequence(n, T, cu_seqlens, cu_seqlens is not None, CHUNK)
    NEXT = direction(REVERSE)
    start, end = row * T + start, row * T + end
    k += head * M
    v += head * D
    gamma += head
    if g is not None:
        g += head
    corner = (n * H + head) * D * M
    chunks = tl.cdiv((end - start).to(tl.int32), CHUNK)

    d_state = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    if d_final is not None:
        d_state = load_outside(d_final + corner, column, D, M, BLOCK_D, BLOCK)
    # For a sequence without chunks, the loaded numbers are not used.
    first, live = place_chunk(tl.maximum(chunks - 1, 0) * CHUNK, start, end, REVERSE, CHUNK)
    weight, whole = numbers_of_chunk(gamma, g, gamma_token, g_token, first, live, NEXT, BLOCK_C)
    for back in tl.range(0, chunks, num_stages=STAGES):
        m = chunks - 1 - back
        place = (slot + m) * H + head
        first, live = place_chunk(m * CHUNK, start, end, REVERSE, CHUNK)
        source = load_side(k, v, k_token, v_token, first, live, NEXT, column, ALONE, D, M, BLOCK_C, BLOCK_D, BLOCK)
        place_after = tl.where(back == 0, slot_of_finals + n, slot + m + 1) * H + head
        state = load_block(states + place * D * M, column, 0, M, D, BLOCK, BLOCK_D).to(tl.float32)
        after = load_block(states + place_after * D * M, column, 0, M, D, BLOCK, BLOCK_D).to(tl.float32)
        d_before = load_block(d_states + place * D * M, column, 0, M, D, BLOCK, BLOCK_D)
        # Loaded one step early: the compiler does not prefetch strided numbers of 16 bits.
        earlier, count = place_chunk(tl.maximum(m - 1, 0) * CHUNK, start, end, REVERSE, CHUNK)
        next_weight, next_whole = numbers_of_chunk(gamma, g, gamma_token, g_token, earlier, count, NEXT, BLOCK_C)
        if UNIT:
            shorter = load_slots(lengths + place * M, column, M, 1.0, BLOCK)
            # From the gradient of the slots after N to that of the slots before N.
            d_state = (d_state - after * of_slots(after * d_state)) * shorter
        store_block(d_after + place * D * M, column, 0, d_state, M, D, BLOCK, BLOCK_D)
        r = slot_lengths(state, OBJECTIVE, UNIT)
        slots = state * r
        d_u = d_state
        if OBJECTIVE != "ttt":
            along_u = load_slots(phi_u + place * M, column, M, 0.0, BLOCK)
            along = of_slots(slots * d_state)
            d_u -= slots * along
            if UNIT:
                keep = whole - along_u
                d_before += keep * (d_state + along * state) - (along / shorter) * after
            else:
                changed = after - state * whole
                d_before += d_state * whole
                d_slots = -along_u * d_state - along * (changed + slots * along_u)
        else:
            d_before += d_state * whole
        if OBJECTIVE != "similarity":
            if OBJECTIVE == "encode":
                error = precise_product(d_u * r, tl.trans(source), False, DTYPE) * weight[None, :]
                store_block(d_h_or_a + place * CHUNK * M, column, 0, error, M, CHUNK, BLOCK, BLOCK_C)
                into_slots = precise_product(error, source, False, DTYPE)
            else:
                error = precise_product(source, d_u * r, True, DTYPE) * weight[:, None]
                error += load_block(d_h + place * CHUNK * D, 0, 0, CHUNK, D, BLOCK_C, BLOCK_D)
                if OBJECTIVE == "ttt":
                    z = precise_product(source, state, True, DTYPE)
                    value = load_tokens(v + first * v_token, v_token * NEXT, live, 0, D, BLOCK_C, BLOCK_D)
                    value = value.to(tl.float32)
                    h = load_block(h_or_a + place * CHUNK * D, 0, 0, CHUNK, D, BLOCK_C, BLOCK_D)
                    d_z, d_value = decoded_backward(z, value, h, error)
                    store_block(d_values + place * CHUNK * D, 0, 0, d_value, CHUNK, D, BLOCK_C, BLOCK_D)
                    error = -d_z
                store_block(d_h_or_a + place * CHUNK * D, 0, 0, error, CHUNK, D, BLOCK_C, BLOCK_D)
                into_slots = precise_product(tl.trans(source), error, True, DTYPE)
            if OBJECTIVE == "ttt" or UNIT:
                d_before -= into_slots
            else:
                d_slots -= into_slots
        if OBJECTIVE != "ttt":
            if not UNIT:
                u = changed + slots * along_u
                d_slots = (d_slots - slots * (of_slots(slots * d_slots + d_u * u))) * r
                d_before += d_slots
        d_state = d_before
        weight = next_weight
        whole = next_whole
    if UNIT:
        first_state = load_outside(initial + corner, column, D, M, BLOCK_D, BLOCK)
        r = reciprocal_root(of_slots(first_state * first_state))
        first_state *= r
        d_normalised = (d_state - first_state * of_slots(first_state * d_state)) * r
        d_state = tl.where(chunks > 0, d_normalised, d_state)
    store_block(d_initial + corner, 0, column, tl.trans(d_state), D, M, BLOCK_D, BLOCK)


@triton.jit(do_not_specialize=UNSPECIALISED)
def differentiate_inputs(
    k, v, gamma, g, cu_seqlens, sequence_of, states, h_or_a, d_coefficients, d_h, d_after, d_h_or_a, d_values,
    from_gates, d_k, d_v, d_gamma, d_g, T, H, k_token, v_token, gamma_token, g_token,
    D: tl.constexpr, M: tl.constexpr, OBJECTIVE: tl.constexpr, UNIT: tl.constexpr, REVERSE: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of k, v, gamma and g for one chunk of one head."""
    ALONE: tl.constexpr = OBJECTIVE == "encode" or OBJECTIVE == "similarity"
    head, slot, token, live = find_chunk(tl.program_id(0), T, H, cu_seqlens, sequence_of, CHUNK, REVERSE)
    if live <= 0:
        return
    place = slot * H + head
    live = tl.minimum(live, CHUNK)
    NEXT = direction(REVERSE)
    k += token * k_token + head * M
    v += token * v_token + head * D
    gamma += token * gamma_token + head
    k_token *= NEXT
    v_token *= NEXT
    gamma_token *= NEXT
    if g is not None:
        g += token * g_token + head
        g_token *= NEXT
    token = token * H + head
    strength = load_numbers(gamma, gamma_token, live, BLOCK_C)
    until = decays_until_end(g, g_token, live, BLOCK_C)
    h_t = load_h(v, v_token, live, h_or_a, place, D, OBJECTIVE, CHUNK, BLOCK_C, BLOCK_D)
    if ALONE:
        d_value = tl.trans(load_block(d_h + place * CHUNK * D, 0, 0, CHUNK, D, BLOCK_C, BLOCK_D))
    else:
        error = load_block(d_h_or_a + place * CHUNK * D, 0, 0, CHUNK, D, BLOCK_C, BLOCK_D)
    d_strength = tl.zeros((BLOCK_C,), tl.float32)
    d_until = tl.zeros((BLOCK_C,), tl.float32)
    d_whole = tl.full((), 0.0, tl.float32)
    for e in range(0, M, BLOCK):
        kept = load_block(states + place * D * M, e, 0, M, D, BLOCK, BLOCK_D)
        d_u = load_block(d_after + place * D * M, e, 0, M, D, BLOCK, BLOCK_D)
        state = kept.to(tl.float32)
        r = slot_lengths(kept, OBJECTIVE, UNIT)
        along = of_slots(state * d_u)
        d_whole += tl.sum(along)
        if OBJECTIVE != "ttt":
            d_u -= state * (along * r * r)
        written = tl.trans(load_tokens(k, k_token, live, e, M, BLOCK_C, BLOCK)).to(tl.float32)
        if OBJECTIVE == "encode":
            written -= load_block(h_or_a + place * CHUNK * M, e, 0, M, CHUNK, BLOCK, BLOCK_C).to(tl.float32)
        c = written * strength[None, :] * r
        from_after = product(d_u, h_t, PRECISION)
        d_until += tl.sum(from_after * c, 0)
        d_c = load_block(d_coefficients + place * CHUNK * M, e, 0, M, CHUNK, BLOCK, BLOCK_C).to(tl.float32)
        d_c = (d_c + from_after * until[None, :]) * r
        d_strength += tl.sum(written * d_c, 0)
        d_key = strength[None, :] * d_c
        if ALONE:
            d_value += product(tl.trans(d_u), c * until[None, :], PRECISION)
            if OBJECTIVE == "encode":
                d_answers = load_block(d_h_or_a + place * CHUNK * M, e, 0, M, CHUNK, BLOCK, BLOCK_C)
                d_value -= product(tl.trans(kept), d_answers * r, PRECISION)
        else:
            d_key -= product(kept, tl.trans(error), PRECISION) * r
        store_tokens(d_k + token * M, H * M * NEXT, live, e, tl.trans(d_key), M, BLOCK_C, BLOCK)
    if OBJECTIVE == "decode":
        d_value = error
    elif OBJECTIVE == "ttt":
        d_value = load_block(d_values + place * CHUNK * D, 0, 0, CHUNK, D, BLOCK_C, BLOCK_D)
    else:
        d_value = tl.trans(d_value)
    store_tokens(d_v + token * D, H * D * NEXT, live, 0, d_value, D, BLOCK_C, BLOCK_D)
    i = tl.arange(0, BLOCK_C)
    tl.store(d_gamma + token + i * H * NEXT, d_strength, mask=i < live)
    if d_g is not None:
        # Only W's last row and b's last number act on the state after the chunk.
        whole = tl.exp(tl.sum(load_numbers(g, g_token, live, BLOCK_C), 0))
        d_gates = tl.sum(tl.where(i[:, None] < i[None, :], (until * d_until)[:, None], 0.0), 0)
        d_gates += whole * d_whole
        d_gates += tl.load(from_gates + place * CHUNK + i, mask=i < CHUNK, other=0.0)
        tl.store(d_g + token + i * H * NEXT, d_gates, mask=i < live)
