"""The kernels of linear attention. The formulas are those of chunk.py, with its A, e^b and S.

    decay_channels  e^b Q, e^{b_C - b} K and e^{b_C} for a gate per channel, and A if its decays are mild
    score           A = tril(Q Kᵀ) or its gradient, decayed by a gate per head; also copies of Q and K as tiles
    score_by_level  A for a gate per channel whose decays are not mild
    walk            a loop over chunks: the states before each, or in reverse order, their gradients; in segments of
                    time first only what each segment adds to the state, and its decay
    read            (e^b Q) S + A V: the outputs, and gradients of tensors whose columns have no gate
    walk_and_read   both in one kernel, for a gate per key channel where one program holds all key channels
    differentiate   the gradients of queries, keys and gates
    differentiate_group  the same where heads share queries and keys

Where SHARE heads have the same queries and keys, the scores are those of the group, and A without the gates' decays:
kernels that read them for one head decay them.

The names are those for a gate per key channel. With a gate per value channel, d_o, v, q and k take the places of q, k,
d_o and v, because one case is the transpose of the other: kernels that are forward in one case are backward in the
other, and `differentiate` computes o and d_v.

Where the decay over a chunk is mild, both tokens of a pair are decayed relative to the middle of the chunk's exponents,
which gives the earlier one an exponent above zero. The products need float32's range; TF32 has it, with as many bits as
float16. Where the decay is not mild, pairs of tokens are computed by levels (`score_by_level`, BY_LEVEL). At each
level, blocks of 2^level tokens are paired. Two tokens of a pair of blocks are decayed from the first token to the
border between the blocks, and from there to the second token. The lowest level is that of blocks within which decays
are mild. Blocks of NEAR tokens whose decays are not mild have no lower levels: their pairs are computed one by one, all
pairs of a distance at once. The kernels of each form skip the chunks of the other form.
"""

import triton
import triton.language as tl

from longseq.kernels.linear_attention.triton_gates import (
    STRONGEST,
    add_gates,
    add_ranges,
    are_paired,
    block_ranges,
    decay,
    load_matrix,
    mild_level,
    multiply,
    pair_ranges,
    store_matrix,
)
from longseq.kernels.triton_tiles import (
    add_separated,
    decay_between,
    decay_of_logs,
    decay_since,
    decay_until,
    direction,
    find_chunk,
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
    as_tile,
    find_largest_of_both,
    in_units,
    load_column_units,
    load_scaled,
    load_unit,
    power_of_two,
    scale_down,
    store_unit,
    to_tf32,
)

# Arguments that Triton must not specialise on, because no kernel gets faster by it: fewer kernels to compile.
SIZES = ["T", "H", "tokens", "sequences", "span"]


@triton.jit
def _load_gates(g, stride, live, column, W: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    gate = load_tokens(g, stride, live, column, W, CHUNK, BLOCK).to(tl.float32)
    return tl.maximum(gate, STRONGEST, tl.PropagateNan.ALL)


# Where decays are not mild within blocks of NEAR tokens, pairs of tokens of a block are computed one by one.
NEAR = tl.constexpr(16)
NEAR_LEVEL = tl.constexpr(4)  # its logarithm


@triton.jit
def _load_at(base, stride, token, mask, column, W: tl.constexpr, BLOCK: tl.constexpr):
    """Float32 rows of `token` [CHUNK], zero where `mask` is False."""
    e = column + tl.arange(0, BLOCK)
    mask = mask[:, None]
    if W % BLOCK != 0:
        mask = mask & (e < W)[None, :]
    return tl.load(base + token[:, None] * stride + e[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_gates_at(base, stride, token, mask, column, W: tl.constexpr, BLOCK: tl.constexpr):
    """`_load_at` of gates, clamped."""
    return tl.maximum(_load_at(base, stride, token, mask, column, W, BLOCK), STRONGEST, tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=SIZES)
def decay_channels(
    q, k, g, cu_seqlens, sequence_of, queries, query_units, keys, key_units, whole, levels, scores, score_units,
    T, H, q_token, k_token, g_token,
    K: tl.constexpr, DTYPE: tl.constexpr, REVERSE: tl.constexpr, SCALED: tl.constexpr, CHUNK: tl.constexpr,
    LEVELS: tl.constexpr, LIMIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """For one chunk of one head: e^{b_C - b} K, e^{b_C} and the mild levels of tiles.

    With `queries`, also e^b Q; with `scores`, also A of chunks whose decays are mild.
    """
    tiles: tl.constexpr = (K + TILE - 1) // TILE
    head, slot, token, live = find_chunk(tl.program_id(0), T, H, cu_seqlens, sequence_of, CHUNK, REVERSE)
    if live <= 0:
        return
    place = slot * H + head
    NEXT = direction(REVERSE)
    q += token * q_token + head * K
    k += token * k_token + head * K
    g += token * g_token + head * K
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]

    q_unit, q_inverse, k_unit, k_inverse = 1.0, 1.0, 1.0, 1.0
    if SCALED:
        q_sizes = tl.zeros((CHUNK, TILE), tl.float32)
        k_sizes = tl.zeros((CHUNK, TILE), tl.float32)
        for column in tl.static_range(0, K, TILE):
            ks = load_tokens(k, k_token * NEXT, live, column, K, CHUNK, TILE).to(tl.float32)
            k_sizes = tl.maximum(k_sizes, tl.abs(ks))
            if queries is not None:
                qs = load_tokens(q, q_token * NEXT, live, column, K, CHUNK, TILE).to(tl.float32)
                q_sizes = tl.maximum(q_sizes, tl.abs(qs))
        k_unit, k_inverse = power_of_two(tl.max(tl.max(k_sizes, 1), 0))
        tl.store(key_units + place, k_unit)
        if queries is not None:
            q_unit, q_inverse = power_of_two(tl.max(tl.max(q_sizes, 1), 0))
            tl.store(query_units + place, q_unit)
    products = tl.zeros((CHUNK, CHUNK), tl.float32)
    mild = tl.full((), LEVELS, tl.int32)
    for column in range(0, K, TILE):
        gate = _load_gates(g, g_token * NEXT, live, column, K, CHUNK, TILE)
        total = tl.sum(gate, 0)
        e = column + tl.arange(0, TILE)
        tl.store(whole + place * K + e, tl.exp(total), mask=e < K)
        level = mild_level(gate, total, LIMIT, LEVELS)
        tl.store(levels + place * tiles + column // TILE, level)
        mild = tl.minimum(mild, level)
        ks = load_tokens(k, k_token * NEXT, live, column, K, CHUNK, TILE).to(tl.float32) * k_inverse
        decayed = as_tile(ks * tl.exp(add_gates(i < j, gate, DTYPE)), SCALED)
        store_block(keys + place * CHUNK * K, 0, column, decayed, CHUNK, K, CHUNK, TILE)
        if queries is not None:
            qs = load_tokens(q, q_token * NEXT, live, column, K, CHUNK, TILE).to(tl.float32) * q_inverse
            decayed = as_tile(qs * tl.exp(add_gates(i >= j, gate, DTYPE)), SCALED)
            store_block(queries + place * CHUNK * K, 0, column, decayed, CHUNK, K, CHUNK, TILE)
        if scores is not None:
            # A separate sum, not the products above: changing the layout of a product's result to that of an operand is
            # slow.
            exponent = tl.cumsum(gate, 0) - 0.5 * total[None, :]
            qs = to_tf32(qs * tl.exp(exponent), SCALED)
            ks = to_tf32(ks * tl.exp(-exponent), SCALED)
            products += multiply(qs, tl.trans(ks), SCALED)
    if scores is not None:
        if mild == LEVELS:
            _store_scores(scores, score_units, products, q_unit * k_unit, place, SCALED, CHUNK)


@triton.jit
def _decay_pairs(gate, SCALED: tl.constexpr, CHUNK: tl.constexpr):
    """Decays from each token j of a chunk to a later one i, with any numbers above the diagonal."""
    return decay_of_logs(log_decays(gate, CHUNK)[0]) if SCALED else decay_between(gate, CHUNK)


@triton.jit(do_not_specialize=SIZES)
def score(
    q, k, g, cu_seqlens, sequence_of, scores, score_units, q_tiles, q_units, k_tiles, k_units,
    T, H, q_token, k_token, g_token,
    K: tl.constexpr, REVERSE: tl.constexpr, SCALED: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A for one chunk of one head, decayed by a gate per head if there is one; Q and K as tiles, if there is room."""
    head, slot, token, live = find_chunk(tl.program_id(0), T, H, cu_seqlens, sequence_of, CHUNK, REVERSE)
    if live <= 0:
        return
    place = slot * H + head
    NEXT = direction(REVERSE)
    q += token * q_token + head * K
    k += token * k_token + head * K
    products = tl.zeros((CHUNK, CHUNK), tl.float32)
    for column in range(0, K, TILE):
        qs, q_unit = load_scaled(q, q_token * NEXT, live, column, K, SCALED, CHUNK, TILE)
        ks, k_unit = load_scaled(k, k_token * NEXT, live, column, K, SCALED, CHUNK, TILE)
        if q_tiles is not None:
            store_block(q_tiles + place * CHUNK * K, 0, column, qs, CHUNK, K, CHUNK, TILE)
            store_block(k_tiles + place * CHUNK * K, 0, column, ks, CHUNK, K, CHUNK, TILE)
            tile = place * ((K + TILE - 1) // TILE) + column // TILE
            store_unit(q_units, tile, q_unit, SCALED)
            store_unit(k_units, tile, k_unit, SCALED)
        products += multiply(qs, tl.trans(ks), SCALED) * (q_unit * k_unit)
    if g is not None:
        gate = load_numbers(g + token * g_token + head, g_token * NEXT, live, CHUNK)
        products *= _decay_pairs(gate, SCALED, CHUNK)
    _store_scores(scores, score_units, products, 1.0, place, SCALED, CHUNK)


@triton.jit
def _store_scores(scores, units, products, factor, place, SCALED: tl.constexpr, CHUNK: tl.constexpr):
    """Store the lower triangle of products · factor, where `factor` is a power of two."""
    i = tl.arange(0, CHUNK)
    products, unit = in_units(tl.where(i[:, None] >= i[None, :], products, 0.0), SCALED)
    store_block(scores + place * CHUNK * CHUNK, 0, 0, products, CHUNK, CHUNK, CHUNK, CHUNK)
    store_unit(units, place, unit * factor, SCALED)


@triton.jit(do_not_specialize=SIZES)
def score_by_level(
    q, k, g, cu_seqlens, sequence_of, levels, scores, score_units, T, H, q_token, k_token, g_token,
    K: tl.constexpr, REVERSE: tl.constexpr, SCALED: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A for one chunk of one head, decayed per channel, where decays are not mild."""
    tiles: tl.constexpr = (K + TILE - 1) // TILE
    head, slot, token, live = find_chunk(tl.program_id(0), T, H, cu_seqlens, sequence_of, CHUNK, REVERSE)
    if live <= 0:
        return
    place = slot * H + head
    tile = tl.arange(0, TILES)
    mild = tl.min(tl.load(levels + place * tiles + tile, mask=tile < tiles, other=LEVELS), 0)
    if mild == LEVELS:
        return
    NEXT = direction(REVERSE)
    q += token * q_token + head * K
    k += token * k_token + head * K
    g += token * g_token + head * K
    q_token *= NEXT
    k_token *= NEXT
    g_token *= NEXT
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    sums = tl.zeros((CHUNK, CHUNK), tl.float32)
    for column in range(0, K, BLOCK):
        gate = _load_gates(g, g_token, live, column, K, CHUNK, BLOCK)
        qs, q_unit = load_scaled(q, q_token, live, column, K, SCALED, CHUNK, BLOCK)
        ks, k_unit = load_scaled(k, k_token, live, column, K, SCALED, CHUNK, BLOCK)
        unit = q_unit * k_unit
        for level in range(tl.maximum(mild, NEAR_LEVEL), LEVELS):
            part = tl.exp(add_ranges(pair_ranges(i, j, level), gate))
            products = multiply(decay(qs, part), tl.trans(decay(ks, part)), SCALED)
            sums += tl.where(are_paired(i, j, level), products * unit, 0.0)
        if mild >= NEAR_LEVEL:
            exponent = add_ranges(block_ranges(i, j, mild), gate)
            # The decay's inverse is up to e^8, too large for tiles.
            ks = decay(ks, tl.exp(-exponent) * (1 / 4096))
            products = multiply(decay(qs, tl.exp(exponent)), tl.trans(ks), SCALED)
            sums += tl.where(((i >> mild) == (j >> mild)) & (i >= j), products * (unit * 4096), 0.0)
    if mild < NEAR_LEVEL:
        t = tl.arange(0, CHUNK)
        for column in range(0, K, TILE):
            qs = load_tokens(q, q_token, live, column, K, CHUNK, TILE).to(tl.float32)
            exponent = tl.zeros((CHUNK, TILE), tl.float32)
            for distance in range(0, NEAR):
                before = t - distance
                mask = (t % NEAR >= distance) & (t < live)
                ks = _load_at(k, k_token, before, mask, column, K, TILE)
                products = tl.sum(qs * ks * tl.exp(exponent), 1)
                sums += tl.where((i - j == distance) & mask[:, None], products[:, None], 0.0)
                exponent += _load_gates_at(g, g_token, before, mask, column, K, TILE)
    _store_scores(scores, score_units, sums, 1.0, place, SCALED, CHUNK)


@triton.jit
def _find_walk(
    walk, T, cu_seqlens, sequences, span, BACKWARD: tl.constexpr, SEGMENTED: tl.constexpr, CHUNK: tl.constexpr
):
    """The sequence of a walk: its number, the first token of its row, and `sequence`; the walk's first and end chunk.

    SEGMENTED walks are numbered by segments of time. The last two results are the numbers of segments of the sequence
    that the walk has before and after it. One of them is negative for a segment without chunks.
    """
    PACKED: tl.constexpr = cu_seqlens is not None
    n, number, last, begin, stop = walk, 0, 0, 0, 0
    if SEGMENTED:
        n, number, last, begin, stop = find_segment(walk, T, cu_seqlens, sequences, span, PACKED, CHUNK)
    row, start, end, slot = sequence(n, T, cu_seqlens, PACKED, CHUNK)
    if not SEGMENTED:
        stop = tl.cdiv((end - start).to(tl.int32), CHUNK)
        begin = stop * 0
    before, after = number, last - number
    if BACKWARD:
        before, after = last - number, number
    return n, row * T, start, end, slot, begin, stop, before, after


@triton.jit
def _decay_state(
    state, decays, place, row, column,
    K: tl.constexpr, V: tl.constexpr, GATE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of a state, times its decay at `place`: one number, one for each row or one for each column."""
    if GATE == "head":
        state *= tl.load(decays + place)
    if GATE == "key":
        e = row + tl.arange(0, ROWS)
        state *= tl.load(decays + place * K + e, mask=e < K, other=0.0)[:, None]
    if GATE == "value":
        e = column + tl.arange(0, COLUMNS)
        state *= tl.load(decays + place * V + e, mask=e < V, other=0.0)[None, :]
    return state


@triton.jit
def _load_start(
    first, ends, decays, n, walk, before, head, row, column, H,
    K: tl.constexpr, V: tl.constexpr, GATE: tl.constexpr, BACKWARD: tl.constexpr, SEGMENTED: tl.constexpr,
    TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of the state from which a walk begins: what the segments before it make of the sequence's first state."""
    state = tl.zeros((ROWS, COLUMNS), tl.float32)
    if first is not None:
        own = first + (n * H + head) * K * V
        state = load_matrix(own, row, column, K, V, TRANSPOSED, ROWS, COLUMNS).to(tl.float32)
    if SEGMENTED:
        for j in range(0, before):
            segment = walk + before - j if BACKWARD else walk - before + j
            place = segment * H + head
            end = load_matrix(ends + place * K * V, row, column, K, V, False, ROWS, COLUMNS)
            state = _decay_state(state, decays, place, row, column, K, V, GATE, ROWS, COLUMNS) + end
    return state


@triton.jit(do_not_specialize=SIZES)
def walk(
    k, k_units, v, v_units, g, whole, cu_seqlens, first, ends, decays, states, state_units, last,
    scale, sequences, span, T, H, k_token, v_token, g_token,
    K: tl.constexpr, V: tl.constexpr, SHARE: tl.constexpr, GATE: tl.constexpr, BACKWARD: tl.constexpr,
    SUMMARY: tl.constexpr, TRANSPOSED: tl.constexpr, REVERSE: tl.constexpr, SCALED: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """One tile of the states of one head of one sequence, S <- e^{b_C} S + scale Kᵀ V, before each chunk and at the
    end.

    BACKWARD runs from the last chunk to the first, for dS, with q and d_o in place of k and v. `first` and `last` are
    [K, V], or TRANSPOSED [V, K]. With `ends`, a walk goes through one segment of time. SUMMARY goes through it from
    zero, and stores only the state after it in `ends` and the decay over it in `decays`.
    """
    SEGMENTED: tl.constexpr = ends is not None
    tiles_k: tl.constexpr = (K + TILE - 1) // TILE
    tiles_v: tl.constexpr = (V + TILE - 1) // TILE
    tile = tl.program_id(0) % (tiles_k * tiles_v)
    row = tile // tiles_v * TILE
    column = tile % tiles_v * TILE
    head = (tl.program_id(0) // (tiles_k * tiles_v) % H).to(tl.int64)
    walk = (tl.program_id(0) // (tiles_k * tiles_v) // H).to(tl.int64)
    n, origin, start, end, slot, begin, stop, before, after = _find_walk(
        walk, T, cu_seqlens, sequences, span, BACKWARD, SEGMENTED, CHUNK
    )
    if SEGMENTED:
        if (before < 0) | (after < (1 if SUMMARY else 0)):
            return
    NEXT = direction(REVERSE)
    if GATE != "key":
        k += origin * k_token + head // SHARE * K
    if GATE != "value":
        v += origin * v_token + head * V
    if GATE == "head":
        g += origin * g_token + head

    state = _load_start(
        first, ends, decays, n, walk, before, head, row, column, H,
        K, V, GATE, BACKWARD, SEGMENTED and not SUMMARY, TRANSPOSED, TILE, TILE,
    )  # fmt: skip
    total = tl.full((TILE if GATE == "key" else 1, TILE if GATE == "value" else 1), 1.0, tl.float32)
    for m in range(begin, stop):
        index = m
        if BACKWARD:
            index = begin + stop - 1 - m
        t = token_after(index * CHUNK, start, end, REVERSE)
        live = end - start - index * CHUNK
        place = (slot + index) * H + head
        if GATE == "key":
            ks = load_block(k + place * CHUNK * K, 0, row, CHUNK, K, CHUNK, TILE)
            k_unit = load_unit(k_units, place, SCALED)
        else:
            ks = load_tokens(k + t * k_token, k_token * NEXT, live, row, K, CHUNK, TILE).to(tl.float32)
            if GATE == "head":
                if BACKWARD:
                    ks *= decay_since(load_numbers(g + t * g_token, g_token * NEXT, live, CHUNK))[:, None]
                else:
                    ks *= decay_until(g + t * g_token, g_token * NEXT, live, CHUNK)[:, None]
            ks, k_unit = in_units(ks, SCALED)
        if GATE == "value":
            vs = load_block(v + place * CHUNK * V, 0, column, CHUNK, V, CHUNK, TILE)
            v_unit = load_unit(v_units, place, SCALED)
        else:
            vs, v_unit = load_scaled(v + t * v_token, v_token * NEXT, live, column, V, SCALED, CHUNK, TILE)

        if not SUMMARY:
            kept, unit = in_units(state, SCALED)
            store_block(states + place * K * V, row, column, kept, K, V, TILE, TILE)
            store_unit(state_units, place * (tiles_k * tiles_v) + tile, unit, SCALED)
        update = multiply(tl.trans(ks), vs, SCALED)
        if GATE == "head":
            decay = tl.exp(tl.sum(load_numbers(g + t * g_token, g_token * NEXT, live, CHUNK), 0))
            state *= decay
            if SUMMARY:
                total *= decay
        else:
            state = _decay_state(state, whole, place, row, column, K, V, GATE, TILE, TILE)
            if SUMMARY:
                total = _decay_state(total, whole, place, row, column, K, V, GATE, TILE, TILE)
        state += update * (k_unit * v_unit * scale)
    if SUMMARY:
        place = walk * H + head
        store_matrix(ends + place * K * V, row, column, state, K, V, False, TILE, TILE)
        if GATE == "key":
            store_matrix(decays + place * K, row, 0, total, K, 1, False, TILE, 1)
        elif GATE == "value":
            store_matrix(decays + place * V, 0, column, total, 1, V, False, 1, TILE)
        elif GATE == "head":
            store_matrix(decays + place, 0, 0, total, 1, 1, False, 1, 1)
    else:
        if SEGMENTED:
            if after > 0:
                return
        store_matrix(last + (n * H + head) * K * V, row, column, state, K, V, TRANSPOSED, TILE, TILE)


@triton.jit(do_not_specialize=SIZES)
def walk_and_read(
    q, q_units, k, k_units, v, v_units, whole, cu_seqlens, scores, score_units, first, ends, decays, states,
    state_units, last, output, scale, sequences, span, T, H, v_token,
    K: tl.constexpr, V: tl.constexpr, BACKWARD: tl.constexpr, SAVE: tl.constexpr, TRANSPOSED: tl.constexpr,
    REVERSE: tl.constexpr, SCALED: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The states of one head of one sequence, or of one segment if there are `ends`, in TILE value columns, and o.

        O = scale (Q S + A V);   S <- e^{b_C} S + Kᵀ V

    BACKWARD, dV = K dS + scale Aᵀ dO and dS <- e^{b_C} dS + scale Qᵀ dO: with k, q and d_o in place of q, k and v. q
    and k are decayed by key channel. v is as the user gave it, d_o in tiles.
    """
    SEGMENTED: tl.constexpr = ends is not None
    tiles: tl.constexpr = (V + TILE - 1) // TILE
    tile = tl.program_id(0) % tiles
    column = tile * TILE
    head = (tl.program_id(0) // tiles % H).to(tl.int64)
    walk = (tl.program_id(0) // tiles // H).to(tl.int64)
    n, origin, start, end, slot, begin, stop, before, after = _find_walk(
        walk, T, cu_seqlens, sequences, span, BACKWARD, SEGMENTED, CHUNK
    )
    if SEGMENTED:
        if (before < 0) | (after < 0):
            return
    NEXT = direction(REVERSE)
    if not BACKWARD:
        v += head * V
    output += head * V
    start, end = origin + start, origin + end
    e = tl.arange(0, BLOCK_K)

    state = _load_start(
        first, ends, decays, n, walk, before, head, 0, column, H,
        K, V, "key", BACKWARD, SEGMENTED, TRANSPOSED, BLOCK_K, TILE,
    )  # fmt: skip
    index = tl.maximum(stop - 1, 0) if BACKWARD else begin
    t = token_after(index * CHUNK, start, end, REVERSE)
    if BACKWARD:
        place = (slot + index) * H + head
        next_vs = load_block(v + place * CHUNK * V, 0, column, CHUNK, V, CHUNK, TILE)
    else:
        next_vs = load_tokens(v + t * v_token, v_token * NEXT, end - start - index * CHUNK, column, V, CHUNK, TILE)
    for _ in range(begin, stop):
        live = end - start - index * CHUNK
        place = (slot + index) * H + head
        qs = load_block(q + place * CHUNK * K, 0, 0, CHUNK, K, CHUNK, BLOCK_K)
        ks = load_block(k + place * CHUNK * K, 0, 0, CHUNK, K, CHUNK, BLOCK_K)
        a = load_block(scores + place * CHUNK * CHUNK, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
        decay = tl.load(whole + place * K + e, mask=e < K, other=0.0)
        q_unit = load_unit(q_units, place, SCALED)
        k_unit = load_unit(k_units, place, SCALED)
        a_unit = load_unit(score_units, place, SCALED)
        now = t
        # Loaded one step early: the compiler prefetches only operands of products.
        index = tl.maximum(index - 1, begin) if BACKWARD else tl.minimum(index + 1, stop - 1)
        t = token_after(index * CHUNK, start, end, REVERSE)
        if BACKWARD:
            vs, v_unit = next_vs, load_unit(v_units, place * tiles + tile, SCALED)
            following = (slot + index) * H + head
            next_vs = load_block(v + following * CHUNK * V, 0, column, CHUNK, V, CHUNK, TILE)
        else:
            later = load_tokens(v + t * v_token, v_token * NEXT, end - start - index * CHUNK, column, V, CHUNK, TILE)
            vs, v_unit = in_units(next_vs.to(tl.float32), SCALED)
            next_vs = later

        kept, unit = in_units(state, SCALED)
        if SAVE:
            store_block(states + place * K * V, 0, column, kept, K, V, BLOCK_K, TILE)
            store_unit(state_units, place * tiles + tile, unit, SCALED)
        o = multiply(qs, kept, SCALED) * (unit * q_unit)
        if BACKWARD:
            o += multiply(tl.trans(a), vs, SCALED) * (a_unit * v_unit * scale)
        else:
            o += multiply(a, vs, SCALED) * (a_unit * v_unit)
            o *= scale
        update = multiply(tl.trans(ks), vs, SCALED)
        state = state * decay[:, None] + update * (k_unit * v_unit * (scale if BACKWARD else 1.0))
        store_tokens(output + now * H * V, H * V * NEXT, live, column, o, V, CHUNK, TILE)
    if SEGMENTED:
        if after > 0:
            return
    store_matrix(last + (n * H + head) * K * V, 0, column, state, K, V, TRANSPOSED, BLOCK_K, TILE)


@triton.jit(do_not_specialize=SIZES)
def read(
    q, q_units, v, g, cu_seqlens, sequence_of, scores, score_units, states, state_units, output,
    scale, T, H, q_token, v_token, g_token,
    E: tl.constexpr, W: tl.constexpr, BY_VALUE: tl.constexpr, SHARE: tl.constexpr, GATE: tl.constexpr,
    DECAYED: tl.constexpr, TRANSPOSED: tl.constexpr, REVERSE: tl.constexpr, SCALED: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of scale (Q S + A V) for one chunk of one head, or TRANSPOSED, of Q S + scale Aᵀ V.

    Q [CHUNK, E] is DECAYED unless the gate is one per head, and V is [CHUNK, W]. The states are stored as [E, W], or
    BY_VALUE as [W, E].
    """
    blocks: tl.constexpr = (W + BLOCK - 1) // BLOCK
    steps: tl.constexpr = (E + TILE - 1) // TILE
    tiles: tl.constexpr = (W + TILE - 1) // TILE
    column = tl.program_id(0) % blocks * BLOCK
    head, slot, token, live = find_chunk(tl.program_id(0) // blocks, T, H, cu_seqlens, sequence_of, CHUNK, REVERSE)
    if live <= 0:
        return
    place = slot * H + head
    NEXT = direction(REVERSE)
    if not DECAYED:
        q += token * q_token + head // SHARE * E
        q_token *= NEXT
    v += token * v_token + head * W
    states += place * E * W
    state_units += place * (steps * tiles)

    o = tl.zeros((CHUNK, BLOCK), tl.float32)
    for step in range(0, steps):
        e = step * TILE
        if DECAYED:
            qs = load_block(q + place * CHUNK * E, 0, e, CHUNK, E, CHUNK, TILE)
            q_unit = load_unit(q_units, place, SCALED)
        else:
            qs, q_unit = load_scaled(q, q_token, live, e, E, SCALED, CHUNK, TILE)
        state = load_matrix(states, e, column, E, W, BY_VALUE, TILE, BLOCK)
        units = state_units + step * (1 if BY_VALUE else tiles)
        unit = load_column_units(units, column, steps if BY_VALUE else 1, TILE, W, BLOCK, SCALED)
        o += multiply(qs, state, SCALED) * (q_unit * unit)[None, :]
    if GATE == "head":
        g += token * g_token + head
        g_token *= NEXT
        if TRANSPOSED:
            o *= decay_until(g, g_token, live, CHUNK)[:, None]
        else:
            o *= decay_since(load_numbers(g, g_token, live, CHUNK))[:, None]
    if not TRANSPOSED:
        o *= scale
    vs, v_unit = load_scaled(v, v_token * NEXT, live, column, W, SCALED, CHUNK, BLOCK)
    place = slot * (H // SHARE) + head // SHARE
    a = load_matrix(scores + place * CHUNK * CHUNK, 0, 0, CHUNK, CHUNK, TRANSPOSED, CHUNK, CHUNK)
    unit = load_unit(score_units, place, SCALED) * v_unit * scale
    if SHARE > 1 and GATE == "head":
        i = tl.arange(0, CHUNK)
        part = _decay_pairs(load_numbers(g, g_token, live, CHUNK), SCALED, CHUNK)
        part = tl.where(i[:, None] >= i[None, :], part, 0.0)
        a, a_unit = in_units(a.to(tl.float32) * (tl.trans(part) if TRANSPOSED else part), SCALED)
        unit *= a_unit
    o += multiply(a, vs, SCALED) * unit
    store_tokens(output + (token * H + head) * W, H * W * NEXT, live, column, o, W, CHUNK, BLOCK)


@triton.jit
def _load_pairs(scores, LATER: tl.constexpr, SCALED: tl.constexpr, CHUNK: tl.constexpr):
    """A, or with LATER Aᵀ, without its diagonal."""
    i = tl.arange(0, CHUNK)
    strict = i[:, None] < i[None, :] if LATER else i[:, None] > i[None, :]
    a = load_matrix(scores, 0, 0, CHUNK, CHUNK, LATER, CHUNK, CHUNK)
    return tl.where(strict, a, as_tile(tl.zeros((CHUNK, CHUNK), tl.float32), SCALED))


@triton.jit
def _add_pairs(
    scores, x, inner, outer, LATER: tl.constexpr, CHANNELS: tl.constexpr, SCALED: tl.constexpr, CHUNK: tl.constexpr
):
    """Σ_{j<i} a_ij x_jc e^{b_ic - b_jc}, or with LATER Σ_{j>i} a_ji x_jc e^{b_jc - b_ic}, for the scores a.

    `inner` and `outer` are the exponents of j and i relative to the middle of the chunk. Scores of a gate per head
    already contain the decays. Also returns x, with CHANNELS with the error that TF32's rounding of its decayed form
    leaves.
    """
    a = _load_pairs(scores, LATER, SCALED, CHUNK)
    rounded = x
    x, unit = scale_down(x, SCALED)
    if CHANNELS:
        x = to_tf32(x * tl.exp(inner), SCALED)
        back = tl.exp(outer)
        sums = multiply(a.to(tl.float32), x, SCALED) * back
        rounded = x * back * unit
    else:
        sums = multiply(a, as_tile(x, SCALED), SCALED)
    return sums * unit, rounded


@triton.jit
def _add_pairs_by_level(
    scores, q, k, gate, level, near, near_later, DTYPE: tl.constexpr, WRITES: tl.constexpr, SCALED: tl.constexpr,
    CHUNK: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """The sums of `_add_pairs` over k and, if WRITES, LATER over q, for a gate per channel that is not mild.

    `near` and `near_later` are those over pairs within blocks of NEAR tokens, where decays are not mild there, else 0.
    WRITES also gives the first sums times q_ic and the second ones times k_ic. In these, each level multiplies with the
    decayed form that it has rounded for the sums of the other side.
    """
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    a = _load_pairs(scores, False, SCALED, CHUNK).to(tl.float32)
    k, k_unit = scale_down(k, SCALED)
    earlier, later, weighed, weighed_later = near / k_unit, near_later, 0.0, 0.0
    if WRITES:
        a_t = _load_pairs(scores, True, SCALED, CHUNK).to(tl.float32)
        q, q_unit = scale_down(q, SCALED)
        later /= q_unit
        weighed, weighed_later = earlier * q, later * k
    if level >= NEAR_LEVEL:
        own = add_gates(block_ranges(i, j, level), gate, DTYPE)
        within = (i >> level) == (j >> level)
        k_part = to_tf32(k * tl.exp(-own), SCALED)
        earlier = multiply(tl.where(within, a, 0.0), k_part, SCALED)
        if WRITES:
            q_part = to_tf32(q * tl.exp(own), SCALED)
            later = multiply(tl.where(within, a_t, 0.0), q_part, SCALED)
            weighed = earlier * q_part
            weighed_later = later * k_part
            later *= tl.exp(-own)
        earlier *= tl.exp(own)
    for upper in range(tl.maximum(level, NEAR_LEVEL), LEVELS):
        part = tl.exp(add_gates(pair_ranges(i, j, upper), gate, DTYPE))
        k_part = to_tf32(k * part, SCALED)
        pairs = tl.where(are_paired(i, j, upper), a, 0.0)
        products = multiply(pairs, k_part, SCALED)
        earlier += products * part
        if WRITES:
            q_part = to_tf32(q * part, SCALED)
            weighed += products * q_part
            pairs = tl.where(are_paired(j, i, upper), a_t, 0.0)
            products = multiply(pairs, q_part, SCALED)
            later += products * part
            weighed_later += products * k_part
    if WRITES:
        later *= q_unit
        weighed *= q_unit * k_unit
        weighed_later *= q_unit * k_unit
    return earlier * k_unit, later, weighed, weighed_later


@triton.jit
def _add_near_pairs(
    scores, q, k, g, q_token, k_token, g_token, live, column,
    W: tl.constexpr, WRITES: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums of `_add_pairs` over k and, if WRITES, LATER over q, of pairs within blocks of NEAR tokens."""
    token = tl.arange(0, CHUNK)
    earlier = tl.zeros((CHUNK, BLOCK), tl.float32)
    later = tl.zeros((CHUNK, BLOCK), tl.float32)
    since = tl.zeros((CHUNK, BLOCK), tl.float32)
    until = tl.zeros((CHUNK, BLOCK), tl.float32)
    for distance in range(1, NEAR):
        other = token - distance
        mask = (token % NEAR >= distance) & (token < live)
        since += _load_gates_at(g, g_token, other + 1, mask, column, W, BLOCK)
        a = tl.load(scores + token * CHUNK + other, mask=mask, other=0.0).to(tl.float32)
        earlier += a[:, None] * (tl.exp(since) * _load_at(k, k_token, other, mask, column, W, BLOCK))
        if WRITES:
            other = token + distance
            mask = (token % NEAR + distance < NEAR) & (other < live)
            until += _load_gates_at(g, g_token, other, mask, column, W, BLOCK)
            a = tl.load(scores + other * CHUNK + token, mask=mask, other=0.0).to(tl.float32)
            later += a[:, None] * (tl.exp(until) * _load_at(q, q_token, other, mask, column, W, BLOCK))
    return earlier, later


# Tokens of a chunk are uneven if one's part of the gates' gradients is this many times as large as that of each of the
# chunk's first tokens. A sum that holds larger ones, which cancel, has an error of 2^-22 of those: up to here it is
# about that of half precision. Single small tokens among others do not count: in a language model in training the
# smallest of 64 often is 500 times smaller than the largest, whereas 3 % of chunks in one layer were uneven.
UNEVEN = tl.constexpr(512.0)
FIRST = tl.constexpr(8)  # tokens


@triton.jit(do_not_specialize=SIZES)
def differentiate(
    q, k, d_o, d_o_units, v, v_units, g, cu_seqlens, sequence_of, levels, scores, score_units, states, state_units,
    d_states, d_state_units, d_q, d_k, d_g, scale, T, H, tokens, q_token, k_token, d_o_token, v_token, g_token,
    K: tl.constexpr, V: tl.constexpr, GATE: tl.constexpr, UNITS: tl.constexpr, DTYPE: tl.constexpr,
    BY_LEVEL: tl.constexpr, REVERSE: tl.constexpr, SCALED: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of d_q, d_k and d_g for one chunk of one head; for a gate per head, this block's part of d_g.

        d_q = scale (e^b ⊙ dO Sᵀ + dA K);   d_k = e^{b_C - b} ⊙ V dSᵀ + scale dAᵀ Q

    `scores` are dA, decayed by a gate per head, or not yet by a gate per channel. dO and V are tiles, but as the user
    gave them for a gate per value channel; then d_q is o. The states have UNITS units along K. d_q and d_k are stored
    if they are given, and with d_k also d_g.

    BY_LEVEL, the chunks whose gates are not all mild, and those of uneven tokens (see UNEVEN), whose `levels` the
    launch before has changed.
    """
    WRITES: tl.constexpr = d_k is not None
    CHANNELS: tl.constexpr = GATE == "key" or GATE == "value"
    blocks: tl.constexpr = (K + BLOCK - 1) // BLOCK
    steps: tl.constexpr = (V + TILE - 1) // TILE
    block = tl.program_id(0) % blocks
    column = block * BLOCK
    head, slot, token, live = find_chunk(tl.program_id(0) // blocks, T, H, cu_seqlens, sequence_of, CHUNK, REVERSE)
    if live <= 0:
        return
    place = slot * H + head
    level = 0
    if CHANNELS:
        levels += place * ((K + TILE - 1) // TILE) + column // TILE
        level = tl.load(levels)
        if (level < LEVELS) != BY_LEVEL:
            return
    NEXT = direction(REVERSE)
    q += token * q_token + head * K
    k += token * k_token + head * K
    q_token *= NEXT
    k_token *= NEXT
    if GATE == "value":
        d_o += token * d_o_token + head * V
        v += token * v_token + head * V
        d_o_token *= NEXT
        v_token *= NEXT
    if GATE != "none":
        g += token * g_token + (head * K if CHANNELS else head)
        g_token *= NEXT
    states += place * K * V
    state_units += place * (UNITS * steps)
    if WRITES:
        d_states += place * K * V
        d_state_units += place * (UNITS * steps)
    scores += place * CHUNK * CHUNK
    token = token * H + head
    i = tl.arange(0, CHUNK)
    near, near_later = 0.0, 0.0
    if BY_LEVEL:
        near = tl.zeros((CHUNK, BLOCK), tl.float32)
        near_later = tl.zeros((CHUNK, BLOCK), tl.float32)
        if level < NEAR_LEVEL:
            near, near_later = _add_near_pairs(
                scores, q, k, g, q_token, k_token, g_token, live, column, K, WRITES, CHUNK, BLOCK
            )
    d_qs = tl.zeros((CHUNK, BLOCK), tl.float32)
    d_ks = tl.zeros((CHUNK, BLOCK), tl.float32)
    kept = tl.zeros((BLOCK,), tl.float32)
    unit_of_columns = column // TILE if UNITS > 1 else 0
    for step in range(0, steps):
        e = step * TILE
        tile = step * UNITS + unit_of_columns if GATE == "value" else step + unit_of_columns * steps
        if GATE == "value":
            d_os, d_o_unit = load_scaled(d_o, d_o_token, live, e, V, SCALED, CHUNK, TILE)
        else:
            d_os = load_block(d_o + place * CHUNK * V, 0, e, CHUNK, V, CHUNK, TILE)
            d_o_unit = load_unit(d_o_units, place * steps + step, SCALED)
        state = load_matrix(states, e, column, V, K, GATE != "value", TILE, BLOCK)
        unit = load_unit(state_units, tile, SCALED)
        d_qs += multiply(d_os, state, SCALED) * (d_o_unit * unit)
        if WRITES:
            if GATE == "value":
                vs, v_unit = load_scaled(v, v_token, live, e, V, SCALED, CHUNK, TILE)
            else:
                vs = load_block(v + place * CHUNK * V, 0, e, CHUNK, V, CHUNK, TILE)
                v_unit = load_unit(v_units, place * steps + step, SCALED)
            d_state = load_matrix(d_states, e, column, V, K, GATE != "value", TILE, BLOCK)
            d_unit = load_unit(d_state_units, tile, SCALED)
            d_ks += multiply(vs, d_state, SCALED) * (v_unit * d_unit)
            if GATE != "none":
                kept += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 0) * (unit * d_unit)

    unit = load_unit(score_units, place, SCALED) * scale
    itself = (tl.load(scores + i * (CHUNK + 1)).to(tl.float32) * unit)[:, None]
    d_qs *= scale
    gate, since, middle = 0.0, 0.0, 0.0
    if GATE == "head":
        own = load_numbers(g, g_token, live, CHUNK)
        from_start, to_end, whole, _ = find_decays(own, g, g_token, live, not SCALED, CHUNK)
        d_qs *= from_start[:, None]
        d_ks *= to_end[:, None]
        kept *= whole
    if CHANNELS:
        gate = _load_gates(g, g_token, live, column, K, CHUNK, BLOCK)
        since = add_gates(i[:, None] >= i[None, :], gate, DTYPE)
        total = tl.sum(gate, 0)
        middle = 0.5 * total[None, :]
        d_qs *= tl.exp(since)
        kept *= tl.exp(total)
        if WRITES:
            if BY_LEVEL:
                d_ks *= tl.exp(add_gates(i[:, None] < i[None, :], gate, DTYPE))
            else:
                d_ks *= tl.exp(total[None, :] - since)
    ks = load_tokens(k, k_token, live, column, K, CHUNK, BLOCK).to(tl.float32)
    qs = ks
    HEAD: tl.constexpr = WRITES and GATE == "head"
    PRECISE: tl.constexpr = WRITES and CHANNELS and (BY_LEVEL or not SCALED)
    if WRITES and (BY_LEVEL or HEAD):
        qs = load_tokens(q, q_token, live, column, K, CHUNK, BLOCK).to(tl.float32)
    if HEAD:
        reading = tl.sum(qs * d_qs, 1)
    later, weighed, weighed_later = 0.0, 0.0, 0.0
    if BY_LEVEL:
        earlier, later, weighed, weighed_later = _add_pairs_by_level(
            scores, qs, ks, gate, level, near, near_later, DTYPE, WRITES, SCALED, CHUNK, LEVELS
        )
    else:
        earlier, ks = _add_pairs(scores, ks, middle - since, since - middle, False, CHANNELS, SCALED, CHUNK)
    of_state = d_qs
    d_qs += unit * earlier
    if d_q is not None:
        store_tokens(d_q + token * K, H * K * NEXT, live, column, d_qs + itself * ks, K, CHUNK, BLOCK)
    if WRITES:
        if not (BY_LEVEL or HEAD):
            qs = load_tokens(q, q_token, live, column, K, CHUNK, BLOCK).to(tl.float32)
        if not BY_LEVEL:
            later, qs = _add_pairs(scores, qs, since - middle, middle - since, True, CHANNELS, SCALED, CHUNK)
        later *= unit
        d_k += token * K
        store_tokens(d_k, H * K * NEXT, live, column, d_ks + later + itself * qs, K, CHUNK, BLOCK)
        own = ks * d_ks
        if CHANNELS:
            # Each gate acts on pairs of an earlier write and a later read. A pair of tokens on the same side of the
            # gate is in both terms of `later`, with opposite signs; the diagonal is in neither. A pair must be the same
            # number in both, down to its rounding, or a pair that contains a large token leaves more of its error than
            # the others add up to. The sum of `later` starts at the end of the chunk: as the sum over the chunk minus
            # that over the tokens before the gate, it would hold what is left of the reads of a large query before the
            # gate, whose numbers are 1e8 times the others in slot attention with squared weights. `own` is summed over
            # the tokens before the gate, in one matrix product with `later`.
            if not PRECISE:
                reads = qs * d_qs
                later = reads - ks * later - own
                if SCALED:
                    # The launch BY_LEVEL, which comes after this one, does a chunk of uneven tokens again.
                    sizes = tl.max(tl.maximum(tl.abs(reads), tl.abs(later)), 1)
                    most, first = find_largest_of_both(sizes, tl.where(i < FIRST, sizes, 0.0))
                    if most > first * UNEVEN:
                        tl.store(levels, LEVELS - 1)
                dg = (kept + tl.sum(own, 0))[None, :] + add_ranges(i[:, None] <= i[None, :], later)
            else:
                # In float32, with strong gates and for uneven tokens each sum is made on its own, and that of pairs
                # also from the start of the chunk: of both, the one over tokens with smaller pairs holds less of their
                # errors.
                reads = unit * weighed if BY_LEVEL else qs * unit * earlier
                writes = unit * weighed_later if BY_LEVEL else ks * later
                pairs, sizes = reads - writes, tl.abs(reads) + tl.abs(writes)
                before, behind = i[:, None] > i[None, :], i[:, None] <= i[None, :]
                smaller = add_ranges(before, sizes) < add_ranges(behind, sizes)
                pairs = tl.where(smaller, -add_ranges(before, pairs), add_ranges(behind, pairs))
                dg = kept[None, :] + add_ranges(before, own) + add_ranges(behind, qs * of_state) + pairs
            store_tokens(d_g + token * K, H * K * NEXT, live, column, dg, K, CHUNK, BLOCK)
        if HEAD:
            # A gate acts on reads after it of writes before it, and only such pairs are added up.
            q_tile, q_unit = in_units(qs, SCALED)
            k_tile, k_unit = in_units(ks, SCALED)
            d_a = load_matrix(scores, 0, 0, CHUNK, CHUNK, False, CHUNK, CHUNK).to(tl.float32)
            pairs = multiply(q_tile, tl.trans(k_tile), SCALED) * d_a * (q_unit * k_unit * unit)
            before = of_token_before(tl.cumsum(tl.sum(own, 1), 0) + add_separated(pairs, CHUNK), CHUNK)
            dg = tl.sum(kept, 0) + tl.cumsum(reading, 0, reverse=True) + before
            tl.store(d_g + block.to(tl.int64) * tokens * H + token + i * H * NEXT, dg, mask=i < live)


@triton.jit(do_not_specialize=SIZES)
def differentiate_group(
    q, k, d_o, v, g, cu_seqlens, sequence_of, states, state_units, d_states, d_state_units, d_q, d_k, d_g,
    scale, T, H, tokens, q_token, k_token, d_o_token, v_token, g_token,
    K: tl.constexpr, V: tl.constexpr, SHARE: tl.constexpr, REVERSE: tl.constexpr, SCALED: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of d_q and d_k for one chunk of a group of SHARE heads, and this block's part of the heads' d_g.

        d_q = scale (Σ_h e^b ⊙ dO Sᵀ + dA K);   d_k = Σ_h e^{b_C - b} ⊙ V dSᵀ + scale dAᵀ Q

    dA is the sum of the heads' tril(dO Vᵀ), decayed. Heads are added one after the other: each run gives the same sums.
    """
    blocks: tl.constexpr = (K + BLOCK - 1) // BLOCK
    steps: tl.constexpr = (V + TILE - 1) // TILE
    tiles: tl.constexpr = (K + TILE - 1) // TILE * steps
    block = tl.program_id(0) % blocks
    column = block * BLOCK
    groups = H // SHARE
    group, slot, token, live = find_chunk(
        tl.program_id(0) // blocks, T, groups, cu_seqlens, sequence_of, CHUNK, REVERSE
    )
    if live <= 0:
        return
    NEXT = direction(REVERSE)
    if g is not None:
        d_g += block.to(tl.int64) * tokens * H + token * H
    i = tl.arange(0, CHUNK)
    qs, q_unit = load_scaled(q + token * q_token + group * K, q_token * NEXT, live, column, K, SCALED, CHUNK, BLOCK)
    ks, k_unit = load_scaled(k + token * k_token + group * K, k_token * NEXT, live, column, K, SCALED, CHUNK, BLOCK)
    a = multiply(qs, tl.trans(ks), SCALED) * (q_unit * k_unit * scale)
    d_a = tl.zeros((CHUNK, CHUNK), tl.float32)
    all_d_qs = tl.zeros((CHUNK, BLOCK), tl.float32)
    all_d_ks = tl.zeros((CHUNK, BLOCK), tl.float32)
    for head in range(group * SHARE, group * SHARE + SHARE):
        place = slot * H + head
        products = tl.zeros((CHUNK, CHUNK), tl.float32)
        d_qs = tl.zeros((CHUNK, BLOCK), tl.float32)
        d_ks = tl.zeros((CHUNK, BLOCK), tl.float32)
        kept = tl.zeros((BLOCK,), tl.float32)
        of_output = d_o + token * d_o_token + head * V
        of_value = v + token * v_token + head * V
        for step in range(0, steps):
            e = step * TILE
            tile = place * tiles + column // TILE * steps + step
            d_os, d_o_unit = load_scaled(of_output, d_o_token * NEXT, live, e, V, SCALED, CHUNK, TILE)
            vs, v_unit = load_scaled(of_value, v_token * NEXT, live, e, V, SCALED, CHUNK, TILE)
            state = load_matrix(states + place * K * V, e, column, V, K, True, TILE, BLOCK)
            d_state = load_matrix(d_states + place * K * V, e, column, V, K, True, TILE, BLOCK)
            unit = load_unit(state_units, tile, SCALED)
            d_unit = load_unit(d_state_units, tile, SCALED)
            products += multiply(d_os, tl.trans(vs), SCALED) * (d_o_unit * v_unit)
            d_qs += multiply(d_os, state, SCALED) * (d_o_unit * unit)
            d_ks += multiply(vs, d_state, SCALED) * (v_unit * d_unit)
            kept += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 0) * (unit * d_unit)
        if g is not None:
            gates = g + token * g_token + head
            own = load_numbers(gates, g_token * NEXT, live, CHUNK)
            from_start, to_end, whole, _ = find_decays(own, gates, g_token * NEXT, live, not SCALED, CHUNK)
            d_qs *= from_start[:, None]
            d_ks *= to_end[:, None]
            products *= _decay_pairs(own, SCALED, CHUNK)
        products = tl.where(i[:, None] >= i[None, :], products, 0.0)
        if g is not None:
            reads = tl.sum(qs.to(tl.float32) * d_qs, 1) * (q_unit * scale)
            writes = tl.sum(ks.to(tl.float32) * d_ks, 1) * k_unit
            before = of_token_before(tl.cumsum(writes, 0) + add_separated(products * a, CHUNK), CHUNK)
            dg = tl.sum(kept, 0) * whole + tl.cumsum(reads, 0, reverse=True) + before
            tl.store(d_g + head + i * H * NEXT, dg, mask=i < live)
        d_a += products
        all_d_qs += d_qs
        all_d_ks += d_ks
    d_a, unit = in_units(d_a, SCALED)
    earlier = multiply(d_a, ks, SCALED) * (unit * k_unit)
    later = multiply(tl.trans(d_a), qs, SCALED) * (unit * q_unit)
    token = (token * groups + group) * K
    store_tokens(d_q + token, groups * K * NEXT, live, column, scale * (all_d_qs + earlier), K, CHUNK, BLOCK)
    store_tokens(d_k + token, groups * K * NEXT, live, column, all_d_ks + scale * later, K, CHUNK, BLOCK)
