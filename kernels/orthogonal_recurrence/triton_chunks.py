"""Chunks of the orthogonal recurrence forward in Triton. Letters are those of chunk.py: H, c, a, x, W, b, N and F.

`advance_chunks` loops over the chunks of one head of one sequence with the state in registers. It needs no a, because
the part that is removed from a slot is that of the update along the slot itself, φᵀ U with U = Σ_s W_Cs h_s c_sᵀ. So a
chunk has two dependent products, one for H ("encode": a) and one for U. The kernel stores the states before the chunks,
and H or a. From these, `read_out` computes the outputs over chunks in parallel. States are stored as [slots of time, H,
M, D]: a sum over the D numbers of one of the M memory slots, of which a chunk has two, stays inside a warp.

In the loop over time, products of half precision inputs are in that precision with float32 sums. One factor is an
input, and the other is split into two halves, so that the error is little more than that of rounding to float32. In
kernels over chunks, products are TF32, which has float16's digits and float32's range: gates and N need both. Products
of float32 inputs are three TF32 products each. The result of a product is never the transposed operand of another: that
gives wrong numbers on Hopper in Triton 3.4 to 3.7. Therefore tiles over chunks have slots as rows and tokens as
columns, [M, C], and a matrix of tokens against tokens that is needed transposed is computed twice.
"""

import triton
import triton.language as tl

from longseq.kernels.orthogonal_recurrence.triton_tokens import reciprocal_root
from longseq.kernels.triton_tiles import (
    SIZES_AND_STRIDES,
    decay_since,
    decay_until,
    direction,
    find_chunk,
    load_block,
    load_numbers,
    load_tokens,
    sequence,
    store_block,
    store_tokens,
    token_after,
)

UNSPECIALISED = [*SIZES_AND_STRIDES, "sequences", "slot_of_finals", "gamma_token"]


@triton.jit
def product(x, y, PRECISION: tl.constexpr):
    return tl.dot(x.to(tl.float32), y.to(tl.float32), input_precision=PRECISION)


@triton.jit
def precise_product(x, y, RIGHT: tl.constexpr, DTYPE: tl.constexpr):
    """x y for one float32 factor (y if RIGHT, else x) and one factor that DTYPE holds exactly."""
    if DTYPE.primitive_bitwidth == 32:
        result = tl.dot(x.to(tl.float32), y.to(tl.float32), input_precision="tf32x3")
    elif RIGHT:
        high = y.to(DTYPE)
        low = (y - high.to(tl.float32)).to(DTYPE)
        result = tl.dot(x, high, tl.dot(x, low))
    else:
        high = x.to(DTYPE)
        low = (x - high.to(tl.float32)).to(DTYPE)
        result = tl.dot(high, y, tl.dot(low, y))
    return result


@triton.jit
def of_slots(x):
    """The sum over D for each slot, [BLOCK, 1]."""
    return tl.sum(x, 1)[:, None]


@triton.jit
def store_numbers(base, x, first, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Store one number for each slot, [BLOCK, 1]."""
    i = first + tl.arange(0, BLOCK)
    tl.store(base + i[:, None], x, mask=(i < COUNT)[:, None])


@triton.jit
def load_slots(base, first, count, absent, BLOCK: tl.constexpr):
    i = first + tl.arange(0, BLOCK)
    return tl.load(base + i, mask=i < count, other=absent)[:, None]


@triton.jit
def slot_lengths(state, OBJECTIVE: tl.constexpr, UNIT: tl.constexpr):
    """Reciprocal lengths [BLOCK, 1] of the slots [BLOCK, D]; 1 for slots of unit length and for TTT."""
    if UNIT or OBJECTIVE == "ttt":
        r = 1.0
    else:
        state = state.to(tl.float32)
        r = reciprocal_root(of_slots(state * state))
    return r


@triton.jit
def decoded(z, v):
    """For what TTT decodes, z [C, D]: directions, reciprocal lengths, and the components of the values along the
    directions.
    """
    r = reciprocal_root(tl.sum(z * z, 1))[:, None]
    direction = z * r
    return direction, r, tl.sum(direction * v, 1)[:, None]


@triton.jit
def log_gates(g, g_token, live, BLOCK_C: tl.constexpr):
    """The log gates of a chunk, [C]; zeros without gates."""
    if g is not None:
        return load_numbers(g, g_token, live, BLOCK_C)
    return tl.zeros((BLOCK_C,), tl.float32)


@triton.jit
def decays_until_end(g, g_token, live, BLOCK_C: tl.constexpr):
    """Decays from each token, exclusive, to the end of the chunk, [C]."""
    if g is not None:
        return decay_until(g, g_token, live, BLOCK_C)
    return tl.zeros((BLOCK_C,), tl.float32) + 1.0


@triton.jit
def place_chunk(done, start, end, REVERSE: tl.constexpr, CHUNK: tl.constexpr):
    """The first token of a chunk that follows `done` tokens of its sequence, and its number of tokens."""
    return token_after(done, start, end, REVERSE), tl.minimum(end - (start + done), CHUNK)


@triton.jit
def numbers_of_chunk(gamma, g, gamma_token, g_token, first, live, NEXT, BLOCK_C: tl.constexpr):
    """For each token its strength times its decay to the end of the chunk, [C]; and the decay over the whole chunk."""
    weight = load_numbers(gamma + first * gamma_token, gamma_token * NEXT, live, BLOCK_C)
    whole = tl.full((), 1.0, tl.float32)
    if g is not None:
        weight *= decay_until(g + first * g_token, g_token * NEXT, live, BLOCK_C)
        whole = tl.exp(tl.sum(load_numbers(g + first * g_token, g_token * NEXT, live, BLOCK_C), 0))
    return weight, whole


@triton.jit
def load_side(
    k, v, k_token, v_token, first, live, NEXT, column, OF_VALUES: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Values [C, D] or keys [C, BLOCK] of the tokens of a chunk from `first` on."""
    if OF_VALUES:
        side = load_tokens(v + first * v_token, v_token * NEXT, live, 0, D, BLOCK_C, BLOCK_D)
    else:
        side = load_tokens(k + first * k_token, k_token * NEXT, live, column, M, BLOCK_C, BLOCK)
    return side


@triton.jit
def load_outside(base, first, D: tl.constexpr, M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK slots of the user's state [D, M] as [BLOCK, D] in float32. The kernels store states as [M, D]."""
    return tl.trans(load_block(base, 0, first, D, M, BLOCK_D, BLOCK)).to(tl.float32)


@triton.jit(do_not_specialize=UNSPECIALISED)
def advance_chunks(
    k, v, gamma, g, initial, cu_seqlens, states, h_or_a, lengths, phi_u, final, T, H, slot_of_finals,
    k_token, v_token, gamma_token, g_token,
    D: tl.constexpr, M: tl.constexpr, OBJECTIVE: tl.constexpr, UNIT: tl.constexpr, REVERSE: tl.constexpr,
    SAVE: tl.constexpr, STAGES: tl.constexpr, DTYPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK slots of one head of one sequence: for each chunk, the state before it and H ("encode": a).

    If SAVE, also φᵀ U of each slot, with N the reciprocal norms after the chunk, and behind the states of all chunks
    the final one. Loads run STAGES - 1 steps ahead. For "decode" and "ttt", all slots belong to one program; for the
    other objectives, slots are independent.
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
    chunks = tl.cdiv((end - start).to(tl.int32), CHUNK)

    corner = (n * H + head) * D * M
    state = load_outside(initial + corner, column, D, M, BLOCK_D, BLOCK)
    if UNIT:
        # The state of an empty segment is returned as it is, not normalised.
        state *= tl.where(chunks > 0, reciprocal_root(of_slots(state * state)), 1.0)
    first, live = place_chunk(0, start, end, REVERSE, CHUNK)
    weight, whole = numbers_of_chunk(gamma, g, gamma_token, g_token, first, live, NEXT, BLOCK_C)
    for m in tl.range(0, chunks, num_stages=STAGES):
        place = (slot + m) * H + head
        first, live = place_chunk(m * CHUNK, start, end, REVERSE, CHUNK)
        source = load_side(k, v, k_token, v_token, first, live, NEXT, column, ALONE, D, M, BLOCK_C, BLOCK_D, BLOCK)
        goal = load_side(k, v, k_token, v_token, first, live, NEXT, column, not ALONE, D, M, BLOCK_C, BLOCK_D, BLOCK)
        # Loaded one step early: the compiler does not prefetch strided numbers of 16 bits.
        following, live = place_chunk(tl.minimum(m + 1, chunks - 1) * CHUNK, start, end, REVERSE, CHUNK)
        next_weight, next_whole = numbers_of_chunk(gamma, g, gamma_token, g_token, following, live, NEXT, BLOCK_C)

        store_block(states + place * D * M, column, 0, state, M, D, BLOCK, BLOCK_D)
        r = slot_lengths(state, OBJECTIVE, UNIT)
        slots = state * r
        if ALONE:
            error = tl.trans(goal).to(tl.float32)
            if OBJECTIVE == "encode":
                answer = precise_product(slots, tl.trans(source), False, DTYPE)
                error -= answer
                store_block(h_or_a + place * CHUNK * M, column, 0, answer, M, CHUNK, BLOCK, BLOCK_C)
            u = precise_product(error * weight[None, :], source, False, DTYPE) * r
        else:
            answer = precise_product(source, slots, True, DTYPE)
            error = goal.to(tl.float32)
            if OBJECTIVE == "ttt":
                unit, shrinkage, component = decoded(answer, error)
                error = (error - unit * component) * shrinkage
            else:
                error -= answer
            store_block(h_or_a + place * CHUNK * D, 0, 0, error, CHUNK, D, BLOCK_C, BLOCK_D)
            u = precise_product(tl.trans(source), error * weight[:, None], True, DTYPE) * r
        if OBJECTIVE == "ttt":
            state = state * whole + u
        else:
            along = of_slots(slots * u)
            state = state * whole + (u - slots * along)
            if SAVE:
                store_numbers(phi_u + place * M, along, column, M, BLOCK)
        if UNIT:
            shorter = reciprocal_root(of_slots(state * state))
            state *= shorter
            if SAVE:
                store_numbers(lengths + place * M, shorter, column, M, BLOCK)
        weight = next_weight
        whole = next_whole
    store_block(final + corner, 0, column, tl.trans(state), D, M, BLOCK_D, BLOCK)
    if SAVE:
        place = (slot_of_finals + n) * H + head
        store_block(states + place * D * M, column, 0, state, M, D, BLOCK, BLOCK_D)


@triton.jit
def weights_of_chunk(
    gate, TRANSPOSED: tl.constexpr, STRICT: tl.constexpr, GATED: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """W [t, s], the decays from each token s to each later token t, or TRANSPOSED; STRICT without the diagonal."""
    i = tl.arange(0, BLOCK_C)
    t, s = i[:, None], i[None, :]
    if TRANSPOSED:
        t, s = i[None, :], i[:, None]
    REACH: tl.constexpr = 1 if STRICT else 0
    later = t >= s + REACH
    if GATED:
        terms = tl.where(t > s, gate[None, :] if TRANSPOSED else gate[:, None], 0.0)
        return tl.where(later, tl.exp(tl.cumsum(terms, 1 if TRANSPOSED else 0)), 0.0)
    return tl.where(later, 1.0, 0.0)


@triton.jit
def weigh(
    x, gate, TRANSPOSED: tl.constexpr, DIAGONAL: tl.constexpr, GATED: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """x ⊙ W for x [t, s] or TRANSPOSED [s, t], with its diagonal multiplied by DIAGONAL."""
    i = tl.arange(0, BLOCK_C)
    if GATED:
        x *= weights_of_chunk(gate, TRANSPOSED, False, GATED, BLOCK_C)
    else:
        x = tl.where(i[None, :] >= i[:, None] if TRANSPOSED else i[:, None] >= i[None, :], x, 0.0)
    if DIAGONAL != 1.0:
        x = tl.where(i[:, None] == i[None, :], x * DIAGONAL, x)
    return x


@triton.jit
def squared(weights, GATED: tl.constexpr):
    """W ⊙ W; without gates they are zeros and ones."""
    if GATED:
        return weights * weights
    return weights


@triton.jit
def load_h(
    v, v_token, live, h_or_a, place, D: tl.constexpr, OBJECTIVE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Hᵀ [D, C] in float32."""
    if OBJECTIVE == "encode" or OBJECTIVE == "similarity":
        h = load_tokens(v, v_token, live, 0, D, BLOCK_C, BLOCK_D)
    else:
        h = load_block(h_or_a + place * CHUNK * D, 0, 0, CHUNK, D, BLOCK_C, BLOCK_D)
    return tl.trans(h).to(tl.float32)


@triton.jit
def load_a(
    h_or_a, place, state, r, h_t, column, M: tl.constexpr, OBJECTIVE: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """aᵀ [BLOCK, C] for a state [BLOCK, D] with reciprocal lengths r."""
    if OBJECTIVE == "ttt":
        a = tl.zeros((BLOCK, BLOCK_C), tl.float32)
    elif OBJECTIVE == "encode":
        a = load_block(h_or_a + place * CHUNK * M, column, 0, M, CHUNK, BLOCK, BLOCK_C)
    else:
        a = product(state, h_t, PRECISION) * r
    return a


@triton.jit
def load_written(
    k, k_token, live, column, a, M: tl.constexpr, OBJECTIVE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Kᵀ or, for "encode", Kᵀ - aᵀ [BLOCK, C] in float32."""
    written = tl.trans(load_tokens(k, k_token, live, column, M, BLOCK_C, BLOCK)).to(tl.float32)
    if OBJECTIVE == "encode":
        written -= a
    return written


@triton.jit
def empty(state):
    """A mask [BLOCK, 1] of the slots of a normalised state [BLOCK, D] that are zero, and so not of unit length."""
    state = state.to(tl.float32)
    return of_slots(state * state) < 0.5


@triton.jit
def squared_norms(c, a, x, w_x, f, since, none, w_squared, PRECISION: tl.constexpr):
    """For N [M, C]: what each token adds to the squared norms, and the squared norms before that.

    `w_squared` are W ⊙ W [s, t] without the diagonal. In `f`, F, a token's own write counts half.
    """
    added = c * (2.0 * f + a * x)
    own = since[None, :] * tl.where(none, 2.0 * w_x, since[None, :])
    return added, product(added, w_squared, PRECISION) + own


@triton.jit(do_not_specialize=UNSPECIALISED)
def read_out(
    q, k, v, gamma, g, cu_seqlens, sequence_of, states, h_or_a, output, scale, T, H,
    q_token, k_token, v_token, gamma_token, g_token,
    D: tl.constexpr, M: tl.constexpr, OBJECTIVE: tl.constexpr, UNIT: tl.constexpr, REVERSE: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The outputs of one chunk of one head, summed over BLOCK slots at a time."""
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
    q_token *= NEXT
    k_token *= NEXT
    v_token *= NEXT
    gamma_token *= NEXT
    GATED: tl.constexpr = g is not None
    if GATED:
        g += token * g_token + head
        g_token *= NEXT
    gate = log_gates(g, g_token, live, BLOCK_C)
    since = decay_since(gate)
    strength = load_numbers(gamma, gamma_token, live, BLOCK_C)
    h_t = load_h(v, v_token, live, h_or_a, place, D, OBJECTIVE, CHUNK, BLOCK_C, BLOCK_D)
    strict = weights_of_chunk(gate, True, True, GATED, BLOCK_C)
    if UNIT:
        pairs = product(tl.trans(h_t), h_t, PRECISION)
        pairs = weigh(pairs, gate, True, 0.5, GATED, BLOCK_C) * strength[:, None]
    o = tl.zeros((BLOCK_D, BLOCK_C), tl.float32)
    products = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
    for e in range(0, M, BLOCK):
        state = load_block(states + place * D * M, e, 0, M, D, BLOCK, BLOCK_D)
        r = slot_lengths(state, OBJECTIVE, UNIT)
        a = load_a(h_or_a, place, state, r, h_t, e, M, OBJECTIVE, PRECISION, CHUNK, BLOCK_C, BLOCK)
        read = tl.trans(load_tokens(q, q_token, live, e, M, BLOCK_C, BLOCK)).to(tl.float32) * scale
        written = load_written(k, k_token, live, e, a, M, OBJECTIVE, BLOCK_C, BLOCK)
        stays = tl.zeros_like(read) + since[None, :]
        if OBJECTIVE != "ttt":
            c = written * strength[None, :] * r
            x = a * c
            w_x = product(x, strict, PRECISION) + x
            stays -= w_x * r
            if UNIT:
                f = product(written, pairs, PRECISION) - a * w_x
                added, before = squared_norms(c, a, x, w_x, f, since, empty(state), squared(strict, GATED), PRECISION)
                read *= reciprocal_root(added + before)
        products += product(tl.trans(written), read * r, PRECISION)
        o += product(tl.trans(state), read * stays, PRECISION)
    products = weigh(products, gate, True, 1.0, GATED, BLOCK_C) * strength[:, None]
    o += product(h_t, products, PRECISION)
    output += (token * H + head) * D
    store_tokens(output, H * D * NEXT, live, 0, tl.trans(o), D, BLOCK_C, BLOCK_D)
