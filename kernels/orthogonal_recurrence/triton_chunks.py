"""Chunks of the orthogonal recurrence forward in Triton. Formulas and names are those of chunk.py: H, c, a, x, W, b, N.

`advance_chunks` walks along time for one head of one sequence: three matrix products a chunk, for
H, for a and for the state after it. It leaves the states before the chunks, H and a. From these the rest is found over
chunks in parallel: `relate_chunks` leaves W and W ⊙ H Hᵀ, `read_slots` finds N, for a few slots at a time, and
`read_out` the outputs.

Matrix products are three TF32 products each, whatever the inputs, because states and lengths are float32. Tiles that
one product leaves and another needs transposed go through memory: as they are, they give wrong numbers on Hopper in
Triton 3.4 to 3.7. Loops that do so run in one stage, because software pipelining would load what is yet to be written.
"""

import triton
import triton.language as tl

from longseq.kernels.orthogonal_recurrence.triton_tokens import reciprocal_root
from longseq.kernels.triton_tiles import (
    PLAIN,
    chunk,
    decay_between,
    decay_since,
    decay_until,
    load_block,
    load_numbers,
    load_tokens,
    sequence,
    store_block,
    store_tokens,
)

UNSPECIALISED = [*PLAIN, "sequences", "gamma_row", "gamma_token", "gamma_head"]


@triton.jit
def product(x, y):
    return tl.dot(x, y, input_precision="tf32x3")


@triton.jit
def slot_lengths(state, OBJECTIVE: tl.constexpr, UNIT: tl.constexpr):
    """Reciprocal lengths [1, M] of the columns that are not kept at unit length; else ones."""
    if UNIT or OBJECTIVE == "ttt":
        return tl.full((1, state.shape[1]), 1.0, tl.float32)
    return reciprocal_root(tl.sum(state * state, 0))[None, :]


@triton.jit
def coefficients(k, a, strength, r, OBJECTIVE: tl.constexpr):
    """c [C, M], divided by the slots' lengths."""
    if OBJECTIVE == "encode":
        return strength[:, None] * (k - a) * r
    return strength[:, None] * k * r


@triton.jit
def decoded(z, v):
    """Of what TTT decodes, z [C, D]: the directions, their reciprocal lengths and the values' parts along them."""
    r = reciprocal_root(tl.sum(z * z, 1))
    direction = z * r[:, None]
    return direction, r, tl.sum(direction * v, 1)


@triton.jit
def decay_weights(gate, GATED: tl.constexpr, BLOCK_C: tl.constexpr):
    """W, the decays from each token s to each later token t."""
    i = tl.arange(0, BLOCK_C)
    lower = i[:, None] >= i[None, :]
    if GATED:
        return tl.where(lower, decay_between(gate, BLOCK_C), 0.0)
    return tl.where(lower, 1.0, 0.0)


@triton.jit
def log_gates(g, g_token, live, GATED: tl.constexpr, BLOCK_C: tl.constexpr):
    """Of a chunk, [C]: zeros without gates."""
    if GATED:
        return load_numbers(g, g_token, live, BLOCK_C)
    return tl.zeros((BLOCK_C,), tl.float32)


@triton.jit
def decays_until_end(g, g_token, live, GATED: tl.constexpr, BLOCK_C: tl.constexpr):
    """From each token of a chunk to its end, [C]."""
    if GATED:
        return decay_until(g, g_token, live, BLOCK_C)
    return tl.zeros((BLOCK_C,), tl.float32) + 1.0


@triton.jit(do_not_specialize=UNSPECIALISED)
def advance_chunks(
    k, v, gamma, g, initial, cu_seqlens, states, directions, answers, lengths, final, T, H,
    k_row, k_token, k_head, v_row, v_token, v_head, gamma_row, gamma_token, gamma_head, g_row, g_token, g_head,
    D: tl.constexpr, M: tl.constexpr, OBJECTIVE: tl.constexpr, UNIT: tl.constexpr, GATED: tl.constexpr,
    PACKED: tl.constexpr, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One head of one sequence: of each chunk the state before it, H, a and, with N, 1 / norms after it.

    The state lies in memory, where it is wanted transposed too, and passes through STEP slots at a time.
    """
    head = (tl.program_id(0) % H).to(tl.int64)
    n = (tl.program_id(0) // H).to(tl.int64)
    row, start, end, slot = sequence(n, T, cu_seqlens, PACKED, CHUNK)
    k += row * k_row + start * k_token + head * k_head
    v += row * v_row + start * v_token + head * v_head
    gamma += row * gamma_row + start * gamma_token + head * gamma_head
    if GATED:
        g += row * g_row + start * g_token + head * g_head
    initial += (n * H + head) * D * M
    final += (n * H + head) * D * M

    chunks = tl.cdiv((end - start).to(tl.int32), CHUNK)
    after = states + (slot * H + head) * D * M
    if chunks == 0:
        after = final
    for e in range(0, M, STEP):
        state = load_block(initial, 0, e, D, M, BLOCK_D, STEP).to(tl.float32)
        if UNIT:
            # The state of an empty segment is not looked at, so not normalised either.
            state *= tl.where(chunks > 0, reciprocal_root(tl.sum(state * state, 0)), 1.0)[None, :]
        store_block(after, 0, e, state, D, M, BLOCK_D, STEP)
    for m in range(0, chunks):
        place = (slot + m) * H + head
        live = tl.minimum(end - start - m * CHUNK, CHUNK)
        before = states + place * D * M
        after = before + H * D * M
        if m == chunks - 1:
            after = final
        h = load_tokens(v, v_token, live, 0, D, BLOCK_C, BLOCK_D).to(tl.float32)
        strength = load_numbers(gamma, gamma_token, live, BLOCK_C)
        whole = tl.exp(tl.sum(log_gates(g, g_token, live, GATED, BLOCK_C), 0))
        until = decays_until_end(g, g_token, live, GATED, BLOCK_C)
        tl.debug_barrier()  # what one thread wrote, another one reads
        if OBJECTIVE == "decode" or OBJECTIVE == "ttt":
            read = tl.zeros_like(h)
            for e in range(0, M, STEP):
                key = load_tokens(k, k_token, live, e, M, BLOCK_C, STEP).to(tl.float32)
                state = load_block(before, 0, e, D, M, BLOCK_D, STEP)
                read += product(key * slot_lengths(state, OBJECTIVE, UNIT), tl.trans(state))
            if OBJECTIVE == "decode":
                h -= read
            else:
                direction, shrinkage, along = decoded(read, h)
                h = (h - direction * along[:, None]) * shrinkage[:, None]
        store_block(directions + place * CHUNK * D, 0, 0, h, CHUNK, D, BLOCK_C, BLOCK_D)
        tl.debug_barrier()
        for e in range(0, M, STEP):
            key = load_tokens(k, k_token, live, e, M, BLOCK_C, STEP).to(tl.float32)
            state = load_block(before, 0, e, D, M, BLOCK_D, STEP)
            r = slot_lengths(state, OBJECTIVE, UNIT)
            a = tl.zeros_like(key)
            if OBJECTIVE != "ttt":
                a = product(h, state * r)
                store_block(answers + place * CHUNK * M, 0, e, a, CHUNK, M, BLOCK_C, STEP)
            c = coefficients(key, a, strength, r, OBJECTIVE) * until[:, None]
            h_t = tl.trans(load_block(directions + place * CHUNK * D, 0, 0, CHUNK, D, BLOCK_C, BLOCK_D))
            state = state * (whole - r * tl.sum(a * c, 0)[None, :]) + product(h_t, c)
            if UNIT:
                shrinkage = reciprocal_root(tl.sum(state * state, 0))
                state *= shrinkage[None, :]
                i = e + tl.arange(0, STEP)
                tl.store(lengths + place * M + i, shrinkage, mask=i < M)
            store_block(after, 0, e, state, D, M, BLOCK_D, STEP)
        k += CHUNK * k_token
        v += CHUNK * v_token
        gamma += CHUNK * gamma_token
        if GATED:
            g += CHUNK * g_token


@triton.jit
def load_square(base, place, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr):
    """The matrix [C, C] of one chunk and head."""
    return load_block(base + place * CHUNK * CHUNK, 0, 0, CHUNK, CHUNK, BLOCK_C, BLOCK_C)


@triton.jit
def loaded_weights(weights, place, GATED: tl.constexpr, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr):
    """W, which `relate_chunks` leaves if there are gates."""
    if GATED:
        return load_square(weights, place, CHUNK, BLOCK_C)
    i = tl.arange(0, BLOCK_C)
    return tl.where(i[:, None] >= i[None, :], 1.0, 0.0)


@triton.jit(do_not_specialize=UNSPECIALISED)
def relate_chunks(
    g, cu_seqlens, sequence_of, directions, d_output, weights, among, into, T, H,
    g_row, g_token, g_head, do_row, do_token, do_head,
    D: tl.constexpr, UNIT: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, BACKWARD: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One chunk of one head, tokens against tokens: with gates W, with N W ⊙ H Hᵀ (`among`), BACKWARD W ⊙ dO Hᵀ."""
    head = (tl.program_id(0) % H).to(tl.int64)
    slot = (tl.program_id(0) // H).to(tl.int64)
    place = slot * H + head
    row, start, live = chunk(slot, T, cu_seqlens, sequence_of, PACKED, CHUNK)
    live = tl.minimum(live, CHUNK)
    if GATED:
        g += row * g_row + start * g_token + head * g_head
    w = decay_weights(log_gates(g, g_token, live, GATED, BLOCK_C), GATED, BLOCK_C)
    h = load_block(directions + place * CHUNK * D, 0, 0, CHUNK, D, BLOCK_C, BLOCK_D)
    square = place * CHUNK * CHUNK
    if GATED:
        store_block(weights + square, 0, 0, w, CHUNK, CHUNK, BLOCK_C, BLOCK_C)
    if BACKWARD:
        d_output += row * do_row + start * do_token + head * do_head
        do = load_tokens(d_output, do_token, live, 0, D, BLOCK_C, BLOCK_D).to(tl.float32)
        store_block(into + square, 0, 0, w * product(do, tl.trans(h)), CHUNK, CHUNK, BLOCK_C, BLOCK_C)
    if UNIT:
        store_block(among + square, 0, 0, w * product(h, tl.trans(h)), CHUNK, CHUNK, BLOCK_C, BLOCK_C)


@triton.jit
def squared_directions(among, place, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr):
    """‖h‖² of each token [C, 1]: the diagonal of W ⊙ H Hᵀ."""
    i = tl.arange(0, BLOCK_C)
    return tl.load(among + place * CHUNK * CHUNK + i * (CHUNK + 1), mask=i < CHUNK, other=0.0)[:, None]


@triton.jit
def squared_norms(
    slots, among, place, w, c, a, removed, gone, since, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """N [C, M] after each token, F, and what each token adds to N."""
    long = squared_directions(among, place, CHUNK, BLOCK_C)
    onto = product(load_square(among, place, CHUNK, BLOCK_C), c) - a * gone
    added = c * (2.0 * onto - long * c + a * removed)
    own = since[:, None] * tl.where(empty(slots), 2.0 * gone, since[:, None])
    return product(w * w, added) + own, onto, added


@triton.jit
def empty(slots):
    """Which slots [1, M] have no direction and so no unit length."""
    return (tl.sum(slots * slots, 0) < 0.5)[None, :]


@triton.jit(do_not_specialize=UNSPECIALISED)
def read_slots(
    q, k, gamma, g, cu_seqlens, sequence_of, states, answers, weights, among, reads, kept_reads, scale, T, H,
    q_row, q_token, q_head, k_row, k_token, k_head, gamma_row, gamma_token, gamma_head, g_row, g_token, g_head,
    D: tl.constexpr, M: tl.constexpr, OBJECTIVE: tl.constexpr, UNIT: tl.constexpr, GATED: tl.constexpr,
    PACKED: tl.constexpr, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK slots of one chunk of one head: queries of slots not yet normalised, and of the state before the chunk."""
    blocks: tl.constexpr = (M + BLOCK - 1) // BLOCK
    column = tl.program_id(0) % blocks * BLOCK
    head = (tl.program_id(0) // blocks % H).to(tl.int64)
    slot = (tl.program_id(0) // blocks // H).to(tl.int64)
    place = slot * H + head
    row, start, live = chunk(slot, T, cu_seqlens, sequence_of, PACKED, CHUNK)
    live = tl.minimum(live, CHUNK)
    if GATED:
        g += row * g_row + start * g_token + head * g_head
    since = decay_since(log_gates(g, g_token, live, GATED, BLOCK_C))
    q += row * q_row + start * q_token + head * q_head
    read = load_tokens(q, q_token, live, column, M, BLOCK_C, BLOCK).to(tl.float32) * scale
    stays = tl.zeros_like(read) + since[:, None]
    if OBJECTIVE != "ttt":
        gamma += row * gamma_row + start * gamma_token + head * gamma_head
        strength = load_numbers(gamma, gamma_token, live, BLOCK_C)
        k += row * k_row + start * k_token + head * k_head
        key = load_tokens(k, k_token, live, column, M, BLOCK_C, BLOCK).to(tl.float32)
        state = load_block(states + place * D * M, 0, column, D, M, BLOCK_D, BLOCK)
        a = load_block(answers + place * CHUNK * M, 0, column, CHUNK, M, BLOCK_C, BLOCK)
        r = slot_lengths(state, OBJECTIVE, UNIT)
        c = coefficients(key, a, strength, r, OBJECTIVE)
        w = loaded_weights(weights, place, GATED, CHUNK, BLOCK_C)
        removed = a * c
        gone = product(w, removed)
        stays -= gone * r
        if UNIT:
            squared, _, _ = squared_norms(state, among, place, w, c, a, removed, gone, since, CHUNK, BLOCK_C)
            read *= reciprocal_root(squared)
    store_block(reads + place * CHUNK * M, 0, column, read, CHUNK, M, BLOCK_C, BLOCK)
    store_block(kept_reads + place * CHUNK * M, 0, column, read * stays, CHUNK, M, BLOCK_C, BLOCK)


@triton.jit(do_not_specialize=UNSPECIALISED)
def read_out(
    k, gamma, cu_seqlens, sequence_of, states, directions, answers, weights, reads, kept_reads, output, T, H,
    k_row, k_token, k_head, gamma_row, gamma_token, gamma_head,
    D: tl.constexpr, M: tl.constexpr, OBJECTIVE: tl.constexpr, UNIT: tl.constexpr, GATED: tl.constexpr,
    PACKED: tl.constexpr, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: its outputs."""
    head = (tl.program_id(0) % H).to(tl.int64)
    slot = (tl.program_id(0) // H).to(tl.int64)
    place = slot * H + head
    row, start, live = chunk(slot, T, cu_seqlens, sequence_of, PACKED, CHUNK)
    live = tl.minimum(live, CHUNK)
    k += row * k_row + start * k_token + head * k_head
    gamma += row * gamma_row + start * gamma_token + head * gamma_head
    strength = load_numbers(gamma, gamma_token, live, BLOCK_C)
    tile = place * CHUNK * M
    o = tl.zeros((BLOCK_C, BLOCK_D), tl.float32)
    products = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
    for e in range(0, M, STEP):
        key = load_tokens(k, k_token, live, e, M, BLOCK_C, STEP).to(tl.float32)
        state = load_block(states + place * D * M, 0, e, D, M, BLOCK_D, STEP)
        a = tl.zeros_like(key)
        if OBJECTIVE == "encode":
            a = load_block(answers + tile, 0, e, CHUNK, M, BLOCK_C, STEP)
        c = coefficients(key, a, strength, slot_lengths(state, OBJECTIVE, UNIT), OBJECTIVE)
        products += product(load_block(reads + tile, 0, e, CHUNK, M, BLOCK_C, STEP), tl.trans(c))
        o += product(load_block(kept_reads + tile, 0, e, CHUNK, M, BLOCK_C, STEP), tl.trans(state))
    h = load_block(directions + place * CHUNK * D, 0, 0, CHUNK, D, BLOCK_C, BLOCK_D)
    o += product(loaded_weights(weights, place, GATED, CHUNK, BLOCK_C) * products, h)
    output += ((row * T + start) * H + head) * D
    store_tokens(output, H * D, live, 0, o, D, BLOCK_C, BLOCK_D)
