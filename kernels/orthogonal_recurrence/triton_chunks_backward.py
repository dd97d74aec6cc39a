"""Chunks of TTT's recurrence backward in Triton. Formulas and names are those of chunk.py, `_chunk_backward`.

`differentiate_outputs` computes over chunks in parallel what the gradients of the outputs contribute to those of q, c,
H, the gates and the state before each chunk. `retreat_chunks` loops from the last chunk to the first with the gradient
of the state in registers; as in the forward pass, a chunk has two dependent products. It stores the gradients of the
states after the chunks and of what the keys decode. From these, `differentiate_inputs` computes the rest over chunks in
parallel.
"""

import triton
import triton.language as tl

from longseq.kernels.orthogonal_recurrence.triton_chunks import (
    UNSPECIALISED,
    decays_until_end,
    decoded,
    load_h,
    load_keys,
    load_outside,
    log_gates,
    numbers_of_chunk,
    place_chunk,
    precise_product,
    product,
    weigh,
)
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
    q, k, gamma, g, cu_seqlens, sequence_of, states, directions, d_output, d_q, d_coefficients, d_h, d_states,
    from_gates, scale, T, H, q_token, k_token, gamma_token, g_token, do_token,
    D: tl.constexpr, M: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: the gradient of q, and the outputs' contribution to those of c, H, log gates and state."""
    GATED: tl.constexpr = g is not None
    head, slot, token, live = find_chunk(tl.program_id(0), T, H, cu_seqlens, sequence_of, CHUNK, REVERSE)
    if live <= 0:
        return
    place = slot * H + head
    live = tl.minimum(live, CHUNK)
    NEXT = direction(REVERSE)
    q += token * q_token + head * M
    k += token * k_token + head * M
    gamma += token * gamma_token + head
    d_output += token * do_token + head * D
    d_q += (token * H + head) * M
    q_token *= NEXT
    k_token *= NEXT
    gamma_token *= NEXT
    do_token *= NEXT
    if GATED:
        g += token * g_token + head
        g_token *= NEXT
    gate = log_gates(g, g_token, live, BLOCK_C)
    since = decay_since(gate)
    strength = load_numbers(gamma, gamma_token, live, BLOCK_C)

    products = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
    d_since = tl.zeros((BLOCK_C,), tl.float32)
    for e in range(0, M, BLOCK):
        # After a barrier, tiles are loaded again, from the cache: there are not enough registers to hold them.
        tl.debug_barrier()
        do = load_tokens(d_output, do_token, live, 0, D, BLOCK_C, BLOCK_D)
        state = load_block(states + place * D * M, e, 0, M, D, BLOCK, BLOCK_D)
        into_state = product(state, tl.trans(do), PRECISION)
        read = load_keys(q, q_token, live, e, M, BLOCK_C, BLOCK) * scale
        if GATED:
            d_since += tl.sum(into_state * read, 0)
        d_read = into_state * since[None, :]
        tl.debug_barrier()
        do = load_tokens(d_output, do_token, live, 0, D, BLOCK_C, BLOCK_D)
        h_t = load_h(directions, place, D, CHUNK, BLOCK_C, BLOCK_D)
        into_t = product(tl.trans(h_t), tl.trans(do), PRECISION)
        into_t = weigh(into_t, gate, True, GATED, BLOCK_C) * strength[:, None]
        key = load_keys(k, k_token, live, e, M, BLOCK_C, BLOCK)
        d_read += product(key, into_t, PRECISION)
        store_tokens(d_q, H * M * NEXT, live, e, tl.trans(d_read) * scale, M, BLOCK_C, BLOCK)

        tl.debug_barrier()
        h_t = load_h(directions, place, D, CHUNK, BLOCK_C, BLOCK_D)
        do = load_tokens(d_output, do_token, live, 0, D, BLOCK_C, BLOCK_D)
        into = weigh(product(do, h_t, PRECISION), gate, False, GATED, BLOCK_C)
        d_c = product(read, into, PRECISION)
        key = load_keys(k, k_token, live, e, M, BLOCK_C, BLOCK)
        products += product(tl.trans(key), read, PRECISION)
        store_block(d_coefficients + place * CHUNK * M, e, 0, d_c, M, CHUNK, BLOCK, BLOCK_C)

        tl.debug_barrier()
        do = load_tokens(d_output, do_token, live, 0, D, BLOCK_C, BLOCK_D)
        d_state = product(read * since[None, :], do, PRECISION)
        store_block(d_states + place * D * M, e, 0, d_state, M, D, BLOCK, BLOCK_D)

    h_t = load_h(directions, place, D, CHUNK, BLOCK_C, BLOCK_D)
    do = load_tokens(d_output, do_token, live, 0, D, BLOCK_C, BLOCK_D)
    products = weigh(products, gate, True, GATED, BLOCK_C) * strength[:, None]
    d_h_c = product(products, do, PRECISION)
    store_block(d_h + place * CHUNK * D, 0, 0, d_h_c, CHUNK, D, BLOCK_C, BLOCK_D)
    if GATED:
        d_decay = products * product(tl.trans(h_t), tl.trans(do), PRECISION)
        i = tl.arange(0, BLOCK_C)
        d_gates = gates_of_decays(d_decay, BLOCK_C) + tl.cumsum(d_since * since, 0, reverse=True)
        tl.store(from_gates + place * CHUNK + i, d_gates, mask=i < CHUNK)


@triton.jit
def decoded_backward(z, v, h, d_h):
    """The gradients of z and v [C, D] from that of H."""
    direction, r, along = decoded(z, v)
    d_v = d_h * r
    d_along = -tl.sum(d_v * direction, 1)[:, None]
    d_direction = d_along * v - along * d_v
    d_length = -(tl.sum(d_h * h, 1) + tl.sum(d_direction * direction, 1))[:, None] * r
    return d_direction * r + direction * d_length, d_v + d_along * direction


@triton.jit(do_not_specialize=UNSPECIALISED)
def retreat_chunks(
    k, v, gamma, g, cu_seqlens, states, directions, d_final, d_h, d_states, d_after, d_errors, d_values, d_initial,
    T, H, k_token, v_token, gamma_token, g_token,
    D: tl.constexpr, M: tl.constexpr, REVERSE: tl.constexpr, STAGES: tl.constexpr, DTYPE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of one sequence: `d_after`, the gradients of the states after its chunks; that of v in `d_values`.

    Also `d_errors`, minus the gradients of z, what the keys decode. Loads run STAGES - 1 steps ahead. Without STAGES,
    only the operands of products are loaded ahead; a step that waited for `d_states` spent half its time so.
    """
    head = tl.program_id(0) % H
    n = (tl.program_id(0) // H).to(tl.int64)
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
        d_state = load_outside(d_final + corner, D, M, BLOCK_D, BLOCK)
    # For a sequence without chunks, the loaded numbers are not used.
    first, live = place_chunk(tl.maximum(chunks - 1, 0) * CHUNK, start, end, REVERSE, CHUNK)
    weight, whole = numbers_of_chunk(gamma, g, gamma_token, g_token, first, live, NEXT, BLOCK_C)
    for back in tl.range(0, chunks, num_stages=STAGES):
        m = chunks - 1 - back
        place = (slot + m) * H + head
        first, live = place_chunk(m * CHUNK, start, end, REVERSE, CHUNK)
        key = load_tokens(k + first * k_token, k_token * NEXT, live, 0, M, BLOCK_C, BLOCK)
        state = load_block(states + place * D * M, 0, 0, M, D, BLOCK, BLOCK_D).to(tl.float32)
        d_before = load_block(d_states + place * D * M, 0, 0, M, D, BLOCK, BLOCK_D)
        # Loaded one step early: the compiler does not prefetch strided numbers of 16 bits.
        earlier, count = place_chunk(tl.maximum(m - 1, 0) * CHUNK, start, end, REVERSE, CHUNK)
        next_weight, next_whole = numbers_of_chunk(gamma, g, gamma_token, g_token, earlier, count, NEXT, BLOCK_C)
        store_block(d_after + place * D * M, 0, 0, d_state, M, D, BLOCK, BLOCK_D)
        d_before += d_state * whole
        error = precise_product(key, d_state, True, DTYPE) * weight[:, None]
        error += load_block(d_h + place * CHUNK * D, 0, 0, CHUNK, D, BLOCK_C, BLOCK_D)
        z = precise_product(key, state, True, DTYPE)
        value = load_tokens(v + first * v_token, v_token * NEXT, live, 0, D, BLOCK_C, BLOCK_D)
        value = value.to(tl.float32)
        h = load_block(directions + place * CHUNK * D, 0, 0, CHUNK, D, BLOCK_C, BLOCK_D)
        d_z, d_value = decoded_backward(z, value, h, error)
        store_block(d_values + place * CHUNK * D, 0, 0, d_value, CHUNK, D, BLOCK_C, BLOCK_D)
        error = -d_z
        store_block(d_errors + place * CHUNK * D, 0, 0, error, CHUNK, D, BLOCK_C, BLOCK_D)
        d_before -= precise_product(tl.trans(key), error, True, DTYPE)
        d_state = d_before
        weight = next_weight
        whole = next_whole
    store_block(d_initial + corner, 0, 0, tl.trans(d_state), D, M, BLOCK_D, BLOCK)


@triton.jit(do_not_specialize=UNSPECIALISED)
def differentiate_inputs(
    k, gamma, g, cu_seqlens, sequence_of, states, directions, d_coefficients, d_after, d_errors, d_values, from_gates,
    d_k, d_v, d_gamma, d_g, T, H, k_token, gamma_token, g_token,
    D: tl.constexpr, M: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of k, v, gamma and g for one chunk of one head."""
    head, slot, token, live = find_chunk(tl.program_id(0), T, H, cu_seqlens, sequence_of, CHUNK, REVERSE)
    if live <= 0:
        return
    place = slot * H + head
    live = tl.minimum(live, CHUNK)
    NEXT = direction(REVERSE)
    k += token * k_token + head * M
    gamma += token * gamma_token + head
    k_token *= NEXT
    gamma_token *= NEXT
    if g is not None:
        g += token * g_token + head
        g_token *= NEXT
    token = token * H + head
    strength = load_numbers(gamma, gamma_token, live, BLOCK_C)
    until = decays_until_end(g, g_token, live, BLOCK_C)
    h_t = load_h(directions, place, D, CHUNK, BLOCK_C, BLOCK_D)
    error = load_block(d_errors + place * CHUNK * D, 0, 0, CHUNK, D, BLOCK_C, BLOCK_D)
    d_strength = tl.zeros((BLOCK_C,), tl.float32)
    d_until = tl.zeros((BLOCK_C,), tl.float32)
    d_whole = tl.full((), 0.0, tl.float32)
    for e in range(0, M, BLOCK):
        state = load_block(states + place * D * M, e, 0, M, D, BLOCK, BLOCK_D)
        d_u = load_block(d_after + place * D * M, e, 0, M, D, BLOCK, BLOCK_D)
        d_whole += tl.sum(tl.sum(state.to(tl.float32) * d_u, 1)[:, None])
        key = load_keys(k, k_token, live, e, M, BLOCK_C, BLOCK)
        c = key * strength[None, :]
        from_after = product(d_u, h_t, PRECISION)
        d_until += tl.sum(from_after * c, 0)
        d_c = load_block(d_coefficients + place * CHUNK * M, e, 0, M, CHUNK, BLOCK, BLOCK_C).to(tl.float32)
        d_c += from_after * until[None, :]
        d_strength += tl.sum(key * d_c, 0)
        d_key = strength[None, :] * d_c
        d_key -= product(state, tl.trans(error), PRECISION)
        store_tokens(d_k + token * M, H * M * NEXT, live, e, tl.trans(d_key), M, BLOCK_C, BLOCK)
    d_value = load_block(d_values + place * CHUNK * D, 0, 0, CHUNK, D, BLOCK_C, BLOCK_D)
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
