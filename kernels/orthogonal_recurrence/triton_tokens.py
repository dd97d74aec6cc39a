"""The exact orthogonal recurrence in Triton, one token at a time. The formulas are those of chunk.py, `_token`.

One program holds the state of one head of one sequence in registers and loops over its tokens. The time for a token is
that of its chain of dependent sums. In the forward pass for "decode", these are φ k (along rows), φᵀ h and the squared
norms (along columns); the other objectives have one sum less. The output is not part of the chain. Columns are adjacent
in memory, so Triton gives each thread four of them in every eighth row, and a row lies inside one warp. A sum along a
row takes four shuffles; a sum along a column takes one shuffle and a trip through shared memory. At 64 x 64 with four
warps, the compiled loop has 570 instructions and 8 barriers for each token. With a warp on each scheduler, that is
about 600 cycles of issue and 400 of waiting for sums: 0.6 µs, as long as each head has a multiprocessor to itself. The
backward pass has 350 instructions for the state and 700 for the gradients, with eight warps: 1.7 µs by the same count.
An H200 takes longer: 1.2 µs for a token forward and 6.7 µs backward (8 x 16 heads of 2,048 tokens in bfloat16, see
benchmarks/kernels.json).

Two things keep the chain short. The state is not divided by its norms: it is kept with their reciprocals r (φ = S r),
which multiply vectors only. The inputs of a token are loaded while the token before it is computed.

The backward pass computes the states of EVERY tokens at a time again from the saved state before them. It stores them
in memory that no other program uses, which is read soon after and so mostly stays in the cache, and then takes these
tokens from the last to the first.
"""

import triton
import triton.language as tl

from longseq.kernels.triton_tiles import (
    SIZES_AND_STRIDES,
    direction,
    first_read,
    load_block,
    sequence,
    store_block,
    token_after,
)

UNSPECIALISED = [*SIZES_AND_STRIDES, "sequences", "gamma_token"]


@triton.jit
def _load_vector(base, live, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A vector of one token in float32; zeros if the token is not `live`."""
    i = tl.arange(0, BLOCK)
    return tl.load(base + i, mask=i < tl.where(live, WIDTH, 0), other=0.0).to(tl.float32)


@triton.jit
def _store_vector(base, x, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(base + i, x, mask=i < WIDTH)


@triton.jit
def _load_numbers(gamma, g, live, GATED: tl.constexpr):
    """The strength and the decay of one token."""
    strength = tl.load(gamma, mask=live, other=0.0).to(tl.float32)
    decay = tl.full((), 1.0, tl.float32)
    if GATED:
        decay = tl.exp(tl.load(g, mask=live, other=0.0).to(tl.float32))
    return strength, decay


@triton.jit
def reciprocal_root(x):
    """1 / sqrt(x) by the hardware's approximation, for squared lengths; 1 for a zero vector."""
    return tl.rsqrt(tl.where(x <= 1e-24, 1.0, x))


@triton.jit
def _reciprocal_lengths(state, OBJECTIVE: tl.constexpr):
    """The reciprocal lengths of the columns; ones for TTT, which reads the state itself."""
    if OBJECTIVE == "ttt":
        return tl.full((state.shape[1],), 1.0, tl.float32)
    return reciprocal_root(tl.sum(state * state, 0))


@triton.jit
def _decoded(state, k, v):
    """The direction of what TTT decodes, its reciprocal length, and the component of the value along the direction."""
    z = tl.sum(state * k[None, :], 1)
    r = reciprocal_root(tl.sum(z * z, 0))
    return z * r, r, tl.sum(z * v, 0) * r


@triton.jit
def _written(state, r, k, v, strength, OBJECTIVE: tl.constexpr):
    """h, c and a of one token, for the slots φ = state ⊙ r."""
    c = strength * k
    a = tl.zeros_like(k)
    h = v
    if OBJECTIVE == "ttt":
        direction, shrinkage, along = _decoded(state, k, v)
        h = (v - direction * along) * shrinkage
    else:
        if OBJECTIVE == "decode":
            h = v - tl.sum(state * (k * r)[None, :], 1)
        a = tl.sum(state * h[:, None], 0) * r
        if OBJECTIVE == "encode":
            c = strength * (k - a)
    return h, c, a


@triton.jit
def _updated(state, r, h, c, a, decay, UNIT: tl.constexpr):
    """The state after one token, before N; with N, the state before the token is state ⊙ r."""
    if UNIT:
        state = state * (r * (decay - c * a))[None, :] + h[:, None] * c[None, :]
    else:
        state = state * (decay - c * r * a * r)[None, :] + h[:, None] * (c * r)[None, :]
    return state


@triton.jit(do_not_specialize=UNSPECIALISED)
def advance_tokens(
    q, k, v, gamma, g, initial, cu_seqlens, states, output, final, scale, T, H,
    q_token, k_token, v_token, gamma_token, g_token,
    D: tl.constexpr, M: tl.constexpr, OBJECTIVE: tl.constexpr, UNIT: tl.constexpr, REVERSE: tl.constexpr,
    SAVE: tl.constexpr, EVERY: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Outputs and the final state of one head of one sequence; if SAVE, also the states before every EVERY tokens."""
    GATED: tl.constexpr = g is not None
    head = tl.program_id(0) % H
    n = (tl.program_id(0) // H).to(tl.int64)
    row, start, end, slot = sequence(n, T, cu_seqlens, cu_seqlens is not None, EVERY)
    first = row * T + token_after(0, start, end, REVERSE)
    NEXT = direction(REVERSE)
    q += first * q_token + head * M
    k += first * k_token + head * M
    v += first * v_token + head * D
    gamma += first * gamma_token + head
    if GATED:
        g += first * g_token + head
        g_token *= NEXT
    output += (first * H + head) * D
    q_token *= NEXT
    k_token *= NEXT
    v_token *= NEXT
    gamma_token *= NEXT

    state = load_block(initial + (n * H + head) * D * M, 0, 0, D, M, BLOCK_D, BLOCK_M).to(tl.float32)
    r = _reciprocal_lengths(state, OBJECTIVE)
    length = (end - start).to(tl.int32)
    live = length > 0
    query = _load_vector(q, live, M, BLOCK_M)
    key = _load_vector(k, live, M, BLOCK_M)
    value = _load_vector(v, live, D, BLOCK_D)
    strength, decay = _load_numbers(gamma, g, live, GATED)
    for t in range(0, length):
        live = t + 1 < length
        q += q_token
        k += k_token
        v += v_token
        gamma += gamma_token
        if GATED:
            g += g_token
        next_query = _load_vector(q, live, M, BLOCK_M)
        next_key = _load_vector(k, live, M, BLOCK_M)
        next_value = _load_vector(v, live, D, BLOCK_D)
        next_strength, next_decay = _load_numbers(gamma, g, live, GATED)
        if SAVE:
            if t % EVERY == 0:
                before = state
                if UNIT:
                    before = state * r[None, :]
                place = (slot + t // EVERY) * H + head
                store_block(states + place * D * M, 0, 0, before, D, M, BLOCK_D, BLOCK_M)

        h, c, a = _written(state, r, key, value, strength, OBJECTIVE)
        state = _updated(state, r, h, c, a, decay, UNIT)
        r = _reciprocal_lengths(state, OBJECTIVE)
        read = query * scale
        if UNIT:
            read *= r
        _store_vector(output, tl.sum(state * read[None, :], 1), D, BLOCK_D)
        output += H * D * NEXT
        query = next_query
        key = next_key
        value = next_value
        strength = next_strength
        decay = next_decay
    if UNIT:
        # The state of an empty segment is returned as it is, not normalised.
        state *= tl.where(length > 0, r, 1.0)[None, :]
    store_block(final + (n * H + head) * D * M, 0, 0, state, D, M, BLOCK_D, BLOCK_M)


@triton.jit
def _recompute_segment(
    k, v, gamma, g, states, before, directions, answers, lengths, count,
    k_token, v_token, gamma_token, g_token,
    D: tl.constexpr, M: tl.constexpr, OBJECTIVE: tl.constexpr, UNIT: tl.constexpr, GATED: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Starts from the checkpoint at `states`; stores the state before each token, h, a and r; returns the last state.

    r holds the reciprocal lengths by which the token's update is multiplied: with N those after the update, without N
    those before it.
    """
    state = load_block(states, 0, 0, D, M, BLOCK_D, BLOCK_M)
    r = tl.zeros((BLOCK_M,), tl.float32) + 1.0
    if not UNIT:
        r = _reciprocal_lengths(state, OBJECTIVE)
    key = _load_vector(k, count > 0, M, BLOCK_M)
    value = _load_vector(v, count > 0, D, BLOCK_D)
    strength, decay = _load_numbers(gamma, g, count > 0, GATED)
    for t in range(0, count):
        live = t + 1 < count
        k += k_token
        v += v_token
        gamma += gamma_token
        if GATED:
            g += g_token
        next_key = _load_vector(k, live, M, BLOCK_M)
        next_value = _load_vector(v, live, D, BLOCK_D)
        next_strength, next_decay = _load_numbers(gamma, g, live, GATED)

        slots = state
        if UNIT:
            slots = state * r[None, :]
        store_block(before + t * D * M, 0, 0, slots, D, M, BLOCK_D, BLOCK_M)
        h, c, a = _written(state, r, key, value, strength, OBJECTIVE)
        if not UNIT:
            _store_vector(lengths + t * M, r, M, BLOCK_M)
        state = _updated(state, r, h, c, a, decay, UNIT)
        r = _reciprocal_lengths(state, OBJECTIVE)
        if UNIT:
            _store_vector(lengths + t * M, r, M, BLOCK_M)
        _store_vector(directions + t * D, h, D, BLOCK_D)
        _store_vector(answers + t * M, a, M, BLOCK_M)
        key = next_key
        value = next_value
        strength = next_strength
        decay = next_decay
    if UNIT:
        state *= r[None, :]
    return state


@triton.jit
def _differentiate_token(
    before, after, d_state, r, q, k, v, d_output, h, a, strength, decay,
    OBJECTIVE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """The gradients of the state before a token, of q, k and v, and of the strength and decay."""
    d_q = tl.sum(after * d_output[:, None], 0)
    d_state += d_output[:, None] * q[None, :]
    if UNIT:
        along = tl.sum(after * d_state, 0)
        d_state = (d_state - after * along[None, :]) * r[None, :]

    source = k
    if OBJECTIVE == "encode":
        source = k - a
    written = strength * source
    present = a
    slots = before
    if not UNIT:
        written *= r
        present *= r
        slots = before * r[None, :]
    d_keep = tl.sum(before * d_state, 0)
    d_c = tl.sum(h[:, None] * d_state, 0) - d_keep * present
    d_a = -d_keep * written
    d_decay = tl.sum(d_keep, 0)
    if not UNIT:
        d_c *= r
        d_a *= r
    d_lengths = d_c * written + d_a * present
    d_k = strength * d_c
    d_strength = tl.sum(source * d_c, 0)
    d_before = d_state * (decay - written * present)[None, :]
    if OBJECTIVE == "ttt":
        d_h = tl.sum(d_state * written[None, :], 1)
        direction, shrinkage, along = _decoded(before, k, v)
        d_v = d_h * shrinkage
        d_along = -tl.sum(d_v * direction, 0)
        d_direction = d_along * v - along * d_v
        d_v += d_along * direction
        d_length = -(tl.sum(d_h * h, 0) + tl.sum(d_direction * direction, 0)) * shrinkage
        d_z = d_direction * shrinkage + direction * d_length
        d_k += tl.sum(before * d_z[:, None], 0)
        d_before += d_z[:, None] * k[None, :]
    else:
        if OBJECTIVE == "encode":
            d_a -= d_k
        d_v = tl.sum(d_state * written[None, :] + slots * d_a[None, :], 1)
        across = d_a * a
        into_slots = d_a
        k_r = k
        if not UNIT:
            into_slots *= r
            k_r *= r
        d_before += h[:, None] * into_slots[None, :]
        if OBJECTIVE == "decode":
            d_component = tl.sum(slots * d_v[:, None], 0)
            d_k -= d_component
            across -= d_component * k
            d_before -= d_v[:, None] * k_r[None, :]
        if not UNIT:
            d_before -= slots * (d_lengths + across * r)[None, :]
    return d_before, d_q, d_k, d_v, d_strength, d_decay


@triton.jit(do_not_specialize=UNSPECIALISED)
def retreat_tokens(
    q, k, v, gamma, g, initial, cu_seqlens, states, d_output, d_final, scratch,
    d_q, d_k, d_v, d_gamma, d_g, d_initial, scale, T, H, sequences,
    q_token, k_token, v_token, gamma_token, g_token, do_token,
    D: tl.constexpr, M: tl.constexpr, OBJECTIVE: tl.constexpr, UNIT: tl.constexpr, REVERSE: tl.constexpr,
    EVERY: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The gradients of all inputs, for one head of one sequence after the other.

    `scratch` has room for EVERY tokens for each program.
    """
    GATED: tl.constexpr = g is not None
    before = scratch + tl.program_id(0).to(tl.int64) * EVERY * (D * M + D + 2 * M)
    directions = before + EVERY * D * M
    answers = directions + EVERY * D
    lengths = answers + EVERY * M
    for turn in range(0, tl.cdiv(sequences * H - tl.program_id(0), tl.num_programs(0))):
        work = tl.program_id(0) + turn * tl.num_programs(0)
        head = work % H
        n = (work // H).to(tl.int64)
        row, start, end, slot = sequence(n, T, cu_seqlens, cu_seqlens is not None, EVERY)
        token_0, NEXT = first_read(n, sequences, row * T + start, row * T + end, REVERSE)
        q_0 = q + token_0 * q_token + head * M
        k_0 = k + token_0 * k_token + head * M
        v_0 = v + token_0 * v_token + head * D
        gamma_0 = gamma + token_0 * gamma_token + head
        g_0 = gamma_0
        if GATED:
            g_0 = g + token_0 * g_token + head
        d_output_0 = d_output + token_0 * do_token + head * D
        place_0 = token_0 * H + head

        d_state = tl.zeros((BLOCK_D, BLOCK_M), tl.float32)
        if d_final is not None:
            d_state = load_block(d_final + (n * H + head) * D * M, 0, 0, D, M, BLOCK_D, BLOCK_M).to(tl.float32)
        segments = tl.cdiv((end - start).to(tl.int32), EVERY)
        for back in range(0, segments):
            m = segments - 1 - back
            done = m.to(tl.int64) * EVERY
            count = tl.minimum(end - start - done, EVERY).to(tl.int32)
            first = done * NEXT  # offset from the token that is read first
            after = _recompute_segment(
                k_0 + first * k_token, v_0 + first * v_token, gamma_0 + first * gamma_token, g_0 + first * g_token,
                states + ((slot + m) * H + head) * D * M, before, directions, answers, lengths, count,
                k_token * NEXT, v_token * NEXT, gamma_token * NEXT, g_token * NEXT,
                D, M, OBJECTIVE, UNIT, GATED, BLOCK_D, BLOCK_M,
            )  # fmt: skip
            tl.debug_barrier()  # threads of the program read below what other threads wrote above
            last = first + count * NEXT - NEXT
            live = count > 0
            query = _load_vector(q_0 + last * q_token, live, M, BLOCK_M)
            d_read = _load_vector(d_output_0 + last * do_token, live, D, BLOCK_D)
            for i in range(0, count):
                t = count - 1 - i
                token = first + t * NEXT
                slots = load_block(before + t * D * M, 0, 0, D, M, BLOCK_D, BLOCK_M)
                next_query = _load_vector(q_0 + (token - NEXT) * q_token, t > 0, M, BLOCK_M)
                next_d_read = _load_vector(d_output_0 + (token - NEXT) * do_token, t > 0, D, BLOCK_D)
                key = _load_vector(k_0 + token * k_token, live, M, BLOCK_M)
                value = _load_vector(v_0 + token * v_token, live, D, BLOCK_D)
                h = _load_vector(directions + t * D, live, D, BLOCK_D)
                a = _load_vector(answers + t * M, live, M, BLOCK_M)
                r = _load_vector(lengths + t * M, live, M, BLOCK_M)
                strength, decay = _load_numbers(gamma_0 + token * gamma_token, g_0 + token * g_token, live, GATED)

                d_state, dq, dk, dv, d_strength, d_decay = _differentiate_token(
                    slots, after, d_state, r, query * scale, key, value, d_read, h, a, strength, decay, OBJECTIVE, UNIT
                )
                place = place_0 + token * H
                _store_vector(d_q + place * M, dq * scale, M, BLOCK_M)
                _store_vector(d_k + place * M, dk, M, BLOCK_M)
                _store_vector(d_v + place * D, dv, D, BLOCK_D)
                if GATED:
                    tl.store(d_g + place, d_decay * decay)
                tl.store(d_gamma + place, d_strength)
                after = slots
                query = next_query
                d_read = next_d_read
            tl.debug_barrier()  # the next turn overwrites what was read

        if UNIT:
            state = load_block(initial + (n * H + head) * D * M, 0, 0, D, M, BLOCK_D, BLOCK_M).to(tl.float32)
            r = _reciprocal_lengths(state, OBJECTIVE)
            state *= r[None, :]
            along = tl.sum(state * d_state, 0)
            d_state = tl.where(segments > 0, (d_state - state * along[None, :]) * r[None, :], d_state)
        store_block(d_initial + (n * H + head) * D * M, 0, 0, d_state, D, M, BLOCK_D, BLOCK_M)
