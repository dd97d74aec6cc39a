"""The kernels of linear attention. The formulas are those of chunk.py, with its P, e^b and S.

    decay_channels  e^b X, e^{b_C - b} Y and e^{b_C} for a gate per channel, and tril(X Yᵀ) if the gate decays it
    score           tril(X Yᵀ): P or its gradient; also copies of X and Y as tiles
    walk            a loop over chunks: the states before each, or in reverse order, their gradients; in segments of
                    time first only what each segment adds to the state, and its decay
    read            (e^b Q) S + P V: the outputs, and gradients of tensors whose columns have no gate
    walk_and_read   both in one kernel, for a gate per key channel where one program holds all key channels
    differentiate   `read` where its columns have the gate, with its transpose and the gate's gradient
    differentiate_group  gradients of queries and keys that heads share, and of a gate per head

Where SHARE heads have the same queries and keys, the scores are those of the group, and P without the gates' decays:
kernels that read them for one head decay them.

With a gate per channel, X and Y are the two tensors that have the gate's columns: queries and keys for a gate per key
channel, gradients of outputs and values for a gate per value channel. Either case is the transpose of the other: the
same kernels are forward in one case and backward in the other.

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
    pair_ranges,
    store_matrix,
)
from longseq.kernels.triton_tiles import (
    add_separated,
    chunk,
    decay_between,
    decay_of_logs,
    decay_since,
    decay_until,
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
    x, y, g, cu_seqlens, sequence_of, reads, read_units, writes, write_units, whole, levels, scores, score_units,
    T, H, x_row, x_token, x_head, y_row, y_token, y_head, g_row, g_token, g_head,
    W: tl.constexpr, READS: tl.constexpr, SCORES: tl.constexpr, DTYPE: tl.constexpr,
    PACKED: tl.constexpr, REVERSE: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, LEVELS: tl.constexpr, LIMIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """For one chunk of one head: e^{b_C - b} Y, e^{b_C}, the mild levels of tiles, and if READS, e^b X.

    With SCORES, also the decayed tril(X Yᵀ) of chunks whose decays are mild.
    """
    tiles: tl.constexpr = (W + TILE - 1) // TILE
    head = (tl.program_id(0) % H).to(tl.int64)
    slot = (tl.program_id(0) // H).to(tl.int64)
    place = slot * H + head
    row, start, live = chunk(slot, T, cu_seqlens, sequence_of, PACKED, CHUNK, REVERSE)
    if live <= 0:
        return
    NEXT = direction(REVERSE)
    x += row * x_row + start * x_token + head * x_head
    y += row * y_row + start * y_token + head * y_head
    g += row * g_row + start * g_token + head * g_head
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]

    x_unit, x_inverse, y_unit, y_inverse = 1.0, 1.0, 1.0, 1.0
    if SCALED:
        x_numbers = tl.zeros((CHUNK, TILE), tl.float32)
        y_numbers = tl.zeros((CHUNK, TILE), tl.float32)
        for column in tl.static_range(0, W, TILE):
            ys = load_tokens(y, y_token * NEXT, live, column, W, CHUNK, TILE).to(tl.float32)
            y_numbers = tl.maximum(y_numbers, tl.abs(ys))
            if READS:
                xs = load_tokens(x, x_token * NEXT, live, column, W, CHUNK, TILE).to(tl.float32)
                x_numbers = tl.maximum(x_numbers, tl.abs(xs))
        y_unit, y_inverse = power_of_two(tl.max(tl.max(y_numbers, 1), 0))
        tl.store(write_units + place, y_unit)
        if READS:
            x_unit, x_inverse = power_of_two(tl.max(tl.max(x_numbers, 1), 0))
            tl.store(read_units + place, x_unit)
    products = tl.zeros((CHUNK, CHUNK), tl.float32)
    mild = tl.full((), LEVELS, tl.int32)
    for column in range(0, W, TILE):
        gate = _load_gates(g, g_token * NEXT, live, column, W, CHUNK, TILE)
        total = tl.sum(gate, 0)
        e = column + tl.arange(0, TILE)
        tl.store(whole + place * W + e, tl.exp(total), mask=e < W)
        level = mild_level(gate, total, LIMIT, LEVELS)
        tl.store(levels + place * tiles + column // TILE, level)
        mild = tl.minimum(mild, level)
        ys = load_tokens(y, y_token * NEXT, live, column, W, CHUNK, TILE).to(tl.float32) * y_inverse
        decayed = as_tile(ys * tl.exp(add_gates(i < j, gate, DTYPE)), SCALED)
        store_block(writes + place * CHUNK * W, 0, column, decayed, CHUNK, W, CHUNK, TILE)
        if READS:
            xs = load_tokens(x, x_token * NEXT, live, column, W, CHUNK, TILE).to(tl.float32) * x_inverse
            decayed = as_tile(xs * tl.exp(add_gates(i >= j, gate, DTYPE)), SCALED)
            store_block(reads + place * CHUNK * W, 0, column, decayed, CHUNK, W, CHUNK, TILE)
        if SCORES:
            # A separate sum, not the products above: changing the layout of a product's result to that of an operand is
            # slow.
            exponent = tl.cumsum(gate, 0) - 0.5 * total[None, :]
            xs = to_tf32(xs * tl.exp(exponent), SCALED)
            ys = to_tf32(ys * tl.exp(-exponent), SCALED)
            products += tl.dot(xs, tl.trans(ys), input_precision=PRECISION)
    if SCORES and mild == LEVELS:
        _store_scores(scores, score_units, products, x_unit * y_unit, place, SCALED, CHUNK)


@triton.jit
def _lowest_level(levels, W: tl.constexpr, TILE: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr):
    """The lowest of the levels of a chunk's tiles."""
    tile = tl.arange(0, BLOCK)
    return tl.min(tl.load(levels + tile, mask=tile < (W + TILE - 1) // TILE, other=LEVELS), 0)


@triton.jit
def _decay_pairs(gate, SCALED: tl.constexpr, CHUNK: tl.constexpr):
    """Decays from each token j of a chunk to a later one i, with any numbers above the diagonal."""
    return decay_of_logs(log_decays(gate, CHUNK)[0]) if SCALED else decay_between(gate, CHUNK)


@triton.jit(do_not_specialize=SIZES)
def score(
    x, y, g, cu_seqlens, sequence_of, scores, score_units, x_tiles, x_units, y_tiles, y_units,
    T, H, x_row, x_token, x_head, y_row, y_token, y_head, g_row, g_token, g_head,
    W: tl.constexpr, GATE: tl.constexpr, LEAVES: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr,
    SCALED: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For one chunk of one head: tril(X Yᵀ), decayed by a gate per head if there is one.

    LEAVES also stores X and Y as tiles.
    """
    head = (tl.program_id(0) % H).to(tl.int64)
    slot = (tl.program_id(0) // H).to(tl.int64)
    place = slot * H + head
    row, start, live = chunk(slot, T, cu_seqlens, sequence_of, PACKED, CHUNK, REVERSE)
    if live <= 0:
        return
    NEXT = direction(REVERSE)
    x += row * x_row + start * x_token + head * x_head
    y += row * y_row + start * y_token + head * y_head
    products = tl.zeros((CHUNK, CHUNK), tl.float32)
    for column in range(0, W, BLOCK):
        xs, x_unit = load_scaled(x, x_token * NEXT, live, column, W, SCALED, CHUNK, BLOCK)
        ys, y_unit = load_scaled(y, y_token * NEXT, live, column, W, SCALED, CHUNK, BLOCK)
        if LEAVES:
            store_block(x_tiles + place * CHUNK * W, 0, column, xs, CHUNK, W, CHUNK, BLOCK)
            store_block(y_tiles + place * CHUNK * W, 0, column, ys, CHUNK, W, CHUNK, BLOCK)
            tile = place * ((W + BLOCK - 1) // BLOCK) + column // BLOCK
            store_unit(x_units, tile, x_unit, SCALED)
            store_unit(y_units, tile, y_unit, SCALED)
        products += tl.dot(xs, tl.trans(ys), input_precision=PRECISION) * (x_unit * y_unit)
    if GATE == "head":
        g += row * g_row + start * g_token + head * g_head
        gate = load_numbers(g, g_token * NEXT, live, CHUNK)
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
    x, y, g, cu_seqlens, sequence_of, levels, scores, score_units,
    T, H, x_row, x_token, x_head, y_row, y_token, y_head, g_row, g_token, g_head,
    W: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, LEVELS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For one chunk of one head: tril(X Yᵀ), decayed per channel, where decays are not mild."""
    head = (tl.program_id(0) % H).to(tl.int64)
    slot = (tl.program_id(0) // H).to(tl.int64)
    place = slot * H + head
    row, start, live = chunk(slot, T, cu_seqlens, sequence_of, PACKED, CHUNK, REVERSE)
    if live <= 0:
        return
    NEXT = direction(REVERSE)
    mild = _lowest_level(levels + place * ((W + TILE - 1) // TILE), W, TILE, LEVELS, TILES)
    if mild == LEVELS:
        return
    x += row * x_row + start * x_token + head * x_head
    y += row * y_row + start * y_token + head * y_head
    g += row * g_row + start * g_token + head * g_head
    x_token *= NEXT
    y_token *= NEXT
    g_token *= NEXT
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    sums = tl.zeros((CHUNK, CHUNK), tl.float32)
    for column in range(0, W, BLOCK):
        gate = _load_gates(g, g_token, live, column, W, CHUNK, BLOCK)
        xs, x_unit = load_scaled(x, x_token, live, column, W, SCALED, CHUNK, BLOCK)
        ys, y_unit = load_scaled(y, y_token, live, column, W, SCALED, CHUNK, BLOCK)
        unit = x_unit * y_unit
        for level in range(tl.maximum(mild, NEAR_LEVEL), LEVELS):
            part = tl.exp(add_ranges(pair_ranges(i, j, level), gate))
            products = tl.dot(decay(xs, part), tl.trans(decay(ys, part)), input_precision=PRECISION)
            sums += tl.where(are_paired(i, j, level), products * unit, 0.0)
        if mild >= NEAR_LEVEL:
            exponent = add_ranges(block_ranges(i, j, mild), gate)
            # The decay's inverse is up to e^8, too large for tiles.
            ys = decay(ys, tl.exp(-exponent) * (1 / 4096))
            products = tl.dot(decay(xs, tl.exp(exponent)), tl.trans(ys), input_precision=PRECISION)
            sums += tl.where(((i >> mild) == (j >> mild)) & (i >= j), products * (unit * 4096), 0.0)
    if mild < NEAR_LEVEL:
        token = tl.arange(0, CHUNK)
        for column in range(0, W, TILE):
            xs = load_tokens(x, x_token, live, column, W, CHUNK, TILE).to(tl.float32)
            exponent = tl.zeros((CHUNK, TILE), tl.float32)
            for distance in range(0, NEAR):
                before = token - distance
                mask = (token % NEAR >= distance) & (token < live)
                ys = _load_at(y, y_token, before, mask, column, W, TILE)
                products = tl.sum(xs * ys * tl.exp(exponent), 1)
                sums += tl.where((i - j == distance) & mask[:, None], products[:, None], 0.0)
                exponent += _load_gates_at(g, g_token, before, mask, column, W, TILE)
    _store_scores(scores, score_units, sums, 1.0, place, SCALED, CHUNK)


@triton.jit
def _find_walk(
    walk, T, cu_seqlens, sequences, span,
    PACKED: tl.constexpr, BACKWARD: tl.constexpr, SEGMENTED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sequence and chunks of a walk: the sequence's number and `sequence`, and the first and end chunk.

    SEGMENTED walks are numbered by segments of time. The last two results are the numbers of segments of the sequence
    that the walk has before and after it. One of them is negative for a segment without chunks.
    """
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
    return n, row, start, end, slot, begin, stop, before, after


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
    K: tl.constexpr, V: tl.constexpr, GATE: tl.constexpr, BACKWARD: tl.constexpr, HAS_FIRST: tl.constexpr,
    SEGMENTED: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of the state from which a walk begins: what the segments before it make of the sequence's first state."""
    state = tl.zeros((ROWS, COLUMNS), tl.float32)
    if HAS_FIRST:
        own = first + (n * H + head) * K * V
        state = load_matrix(own, row, column, K, V, ROW, COLUMN, ROWS, COLUMNS).to(tl.float32)
    if SEGMENTED:
        for j in range(0, before):
            segment = walk + before - j if BACKWARD else walk - before + j
            place = segment * H + head
            end = load_matrix(ends + place * K * V, row, column, K, V, V, 1, ROWS, COLUMNS)
            state = _decay_state(state, decays, place, row, column, K, V, GATE, ROWS, COLUMNS) + end
    return state


@triton.jit(do_not_specialize=SIZES)
def walk(
    a, a_units, b, b_units, g, whole, cu_seqlens, first, ends, decays, states, state_units, last,
    scale, sequences, span, T, H, a_row, a_token, a_head, b_row, b_token, b_head, g_row, g_token, g_head,
    K: tl.constexpr, V: tl.constexpr, SHARE: tl.constexpr, GATE: tl.constexpr, BACKWARD: tl.constexpr,
    HAS_FIRST: tl.constexpr, SEGMENTED: tl.constexpr, SUMMARY: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr,
    PACKED: tl.constexpr, REVERSE: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
    TILE_K: tl.constexpr, TILE_V: tl.constexpr,
):  # fmt: skip
    """One tile of the states of one head of one sequence, S <- e^{b_C} S + scale Aᵀ B, before each chunk and at the
    end.

    BACKWARD runs from the last chunk to the first. `first` and `last` have the strides ROW and COLUMN. SEGMENTED walks
    through one segment of time. SUMMARY walks through it from zero, and stores only the state after it in `ends` and
    the decay over it in `decays`.
    """
    tiles_k: tl.constexpr = (K + TILE_K - 1) // TILE_K
    tiles_v: tl.constexpr = (V + TILE_V - 1) // TILE_V
    tile = tl.program_id(0) % (tiles_k * tiles_v)
    tile_k = tile // tiles_v
    tile_v = tile % tiles_v
    row_of_tile = tile_k * TILE_K
    column = tile_v * TILE_V
    head = (tl.program_id(0) // (tiles_k * tiles_v) % H).to(tl.int64)
    walk = (tl.program_id(0) // (tiles_k * tiles_v) // H).to(tl.int64)
    n, row, start, end, slot, begin, stop, before, after = _find_walk(
        walk, T, cu_seqlens, sequences, span, PACKED, BACKWARD, SEGMENTED, CHUNK
    )
    if SEGMENTED:
        if (before < 0) | (after < (1 if SUMMARY else 0)):
            return
    NEXT = direction(REVERSE)
    if GATE != "key":
        a += row * a_row + head // SHARE * a_head
    if GATE != "value":
        b += row * b_row + head * b_head
    if GATE == "head":
        g += row * g_row + head * g_head

    state = _load_start(
        first, ends, decays, n, walk, before, head, row_of_tile, column, H,
        K, V, GATE, BACKWARD, HAS_FIRST, SEGMENTED and not SUMMARY, ROW, COLUMN, TILE_K, TILE_V,
    )  # fmt: skip
    total = tl.full((TILE_K if GATE == "key" else 1, TILE_V if GATE == "value" else 1), 1.0, tl.float32)
    for m in range(begin, stop):
        index = m
        if BACKWARD:
            index = begin + stop - 1 - m
        t = token_after(index * CHUNK, start, end, REVERSE)
        live = end - start - index * CHUNK
        place = (slot + index) * H + head
        if GATE == "key":
            x = load_block(a + place * CHUNK * K, 0, row_of_tile, CHUNK, K, CHUNK, TILE_K)
            x_unit = load_unit(a_units, place, SCALED)
        else:
            x = load_tokens(a + t * a_token, a_token * NEXT, live, row_of_tile, K, CHUNK, TILE_K).to(tl.float32)
            if GATE == "head":
                if BACKWARD:
                    x *= decay_since(load_numbers(g + t * g_token, g_token * NEXT, live, CHUNK))[:, None]
                else:
                    x *= decay_until(g + t * g_token, g_token * NEXT, live, CHUNK)[:, None]
            x, x_unit = in_units(x, SCALED)
        if GATE == "value":
            y = load_block(b + place * CHUNK * V, 0, column, CHUNK, V, CHUNK, TILE_V)
            y_unit = load_unit(b_units, place, SCALED)
        else:
            y, y_unit = load_scaled(b + t * b_token, b_token * NEXT, live, column, V, SCALED, CHUNK, TILE_V)

        if not SUMMARY:
            kept, unit = in_units(state, SCALED)
            store_block(states + place * K * V, row_of_tile, column, kept, K, V, TILE_K, TILE_V)
            store_unit(state_units, place * (tiles_k * tiles_v) + tile, unit, SCALED)
        update = tl.dot(tl.trans(x), y, input_precision=PRECISION)
        if GATE == "head":
            decay = tl.exp(tl.sum(load_numbers(g + t * g_token, g_token * NEXT, live, CHUNK), 0))
            state *= decay
            if SUMMARY:
                total *= decay
        else:
            state = _decay_state(state, whole, place, row_of_tile, column, K, V, GATE, TILE_K, TILE_V)
            if SUMMARY:
                total = _decay_state(total, whole, place, row_of_tile, column, K, V, GATE, TILE_K, TILE_V)
        state += update * (x_unit * y_unit * scale)
    if SUMMARY:
        place = walk * H + head
        store_matrix(ends + place * K * V, row_of_tile, column, state, K, V, V, 1, TILE_K, TILE_V)
        if GATE == "key":
            store_matrix(decays + place * K, row_of_tile, 0, total, K, 1, 1, 1, TILE_K, 1)
        elif GATE == "value":
            store_matrix(decays + place * V, 0, column, total, 1, V, 1, 1, 1, TILE_V)
        elif GATE == "head":
            store_matrix(decays + place, 0, 0, total, 1, 1, 1, 1, 1, 1)
    else:
        if SEGMENTED:
            if after > 0:
                return
        store_matrix(last + (n * H + head) * K * V, row_of_tile, column, state, K, V, ROW, COLUMN, TILE_K, TILE_V)


@triton.jit(do_not_specialize=SIZES)
def walk_and_read(
    x, x_units, y, y_units, v, v_units, whole, cu_seqlens, scores, score_units, first, ends, decays, states,
    state_units, last, output, scale, sequences, span, T, H, v_row, v_token, v_head,
    K: tl.constexpr, V: tl.constexpr, TILED: tl.constexpr, BACKWARD: tl.constexpr, HAS_FIRST: tl.constexpr,
    SEGMENTED: tl.constexpr, SAVE: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr, PACKED: tl.constexpr,
    REVERSE: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The states of one head of one sequence, or SEGMENTED of one segment, in TILE value columns, and their outputs.

        O = scale (X S + P V);   S <- e^{b_C} S + Yᵀ V     or BACKWARD     O = X S + scale Pᵀ V;   S <- ... + scale Yᵀ V

    X and Y are decayed by key channel. V is tiles if TILED, else as the user gave it.
    """
    tiles: tl.constexpr = (V + TILE - 1) // TILE
    tile = tl.program_id(0) % tiles
    column = tile * TILE
    head = (tl.program_id(0) // tiles % H).to(tl.int64)
    walk = (tl.program_id(0) // tiles // H).to(tl.int64)
    n, row, start, end, slot, begin, stop, before, after = _find_walk(
        walk, T, cu_seqlens, sequences, span, PACKED, BACKWARD, SEGMENTED, CHUNK
    )
    if SEGMENTED:
        if (before < 0) | (after < 0):
            return
    NEXT = direction(REVERSE)
    if not TILED:
        v += row * v_row + head * v_head
    output += (row * T * H + head) * V
    e = tl.arange(0, BLOCK_K)

    state = _load_start(
        first, ends, decays, n, walk, before, head, 0, column, H,
        K, V, "key", BACKWARD, HAS_FIRST, SEGMENTED, ROW, COLUMN, BLOCK_K, TILE,
    )  # fmt: skip
    index = tl.maximum(stop - 1, 0) if BACKWARD else begin
    t = token_after(index * CHUNK, start, end, REVERSE)
    if TILED:
        place = (slot + index) * H + head
        offered = load_block(v + place * CHUNK * V, 0, column, CHUNK, V, CHUNK, TILE)
    else:
        offered = load_tokens(v + t * v_token, v_token * NEXT, end - start - index * CHUNK, column, V, CHUNK, TILE)
    for _ in range(begin, stop):
        live = end - start - index * CHUNK
        place = (slot + index) * H + head
        xs = load_block(x + place * CHUNK * K, 0, 0, CHUNK, K, CHUNK, BLOCK_K)
        ys = load_block(y + place * CHUNK * K, 0, 0, CHUNK, K, CHUNK, BLOCK_K)
        among = load_block(scores + place * CHUNK * CHUNK, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
        decay = tl.load(whole + place * K + e, mask=e < K, other=0.0)
        x_unit = load_unit(x_units, place, SCALED)
        y_unit = load_unit(y_units, place, SCALED)
        score_unit = load_unit(score_units, place, SCALED)
        now = t
        # Loaded one step early: the compiler prefetches only operands of products.
        index = tl.maximum(index - 1, begin) if BACKWARD else tl.minimum(index + 1, stop - 1)
        t = token_after(index * CHUNK, start, end, REVERSE)
        if TILED:
            vs, v_unit = offered, load_unit(v_units, place * tiles + tile, SCALED)
            following = (slot + index) * H + head
            offered = load_block(v + following * CHUNK * V, 0, column, CHUNK, V, CHUNK, TILE)
        else:
            later = load_tokens(v + t * v_token, v_token * NEXT, end - start - index * CHUNK, column, V, CHUNK, TILE)
            vs, v_unit = in_units(offered.to(tl.float32), SCALED)
            offered = later

        kept, unit = in_units(state, SCALED)
        if SAVE:
            store_block(states + place * K * V, 0, column, kept, K, V, BLOCK_K, TILE)
            store_unit(state_units, place * tiles + tile, unit, SCALED)
        o = tl.dot(xs, kept, input_precision=PRECISION) * (unit * x_unit)
        if BACKWARD:
            o += tl.dot(tl.trans(among), vs, input_precision=PRECISION) * (score_unit * v_unit * scale)
        else:
            o += tl.dot(among, vs, input_precision=PRECISION) * (score_unit * v_unit)
            o *= scale
        update = tl.dot(tl.trans(ys), vs, input_precision=PRECISION)
        state = state * decay[:, None] + update * (y_unit * v_unit * (scale if BACKWARD else 1.0))
        store_tokens(output + now * H * V, H * V * NEXT, live, column, o, V, CHUNK, TILE)
    if SEGMENTED:
        if after > 0:
            return
    store_matrix(last + (n * H + head) * K * V, 0, column, state, K, V, ROW, COLUMN, BLOCK_K, TILE)


@triton.jit(do_not_specialize=SIZES)
def read(
    x, x_units, y, g, cu_seqlens, sequence_of, scores, score_units, states, state_units, output,
    scale, T, H, x_row, x_token, x_head, y_row, y_token, y_head, g_row, g_token, g_head,
    E: tl.constexpr, W: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr,
    UNIT_ROW: tl.constexpr, UNIT_COLUMN: tl.constexpr, TILES: tl.constexpr, SHARE: tl.constexpr,
    GATE: tl.constexpr, DECAYED: tl.constexpr, TRANSPOSED: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr,
    SCALED: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
    STEP: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of scale (X S + P Y) for one chunk of one head, or TRANSPOSED, of X S + scale Pᵀ Y.

    X [CHUNK, E] is DECAYED unless the gate is one per head. The states [E, W] have the strides ROW and COLUMN and tiles
    of [STEP, TILE], whose units have the strides UNIT_ROW and UNIT_COLUMN.
    """
    blocks: tl.constexpr = (W + BLOCK - 1) // BLOCK
    column = tl.program_id(0) % blocks * BLOCK
    head = (tl.program_id(0) // blocks % H).to(tl.int64)
    slot = (tl.program_id(0) // blocks // H).to(tl.int64)
    place = slot * H + head
    row, start, live = chunk(slot, T, cu_seqlens, sequence_of, PACKED, CHUNK, REVERSE)
    if live <= 0:
        return
    NEXT = direction(REVERSE)
    if not DECAYED:
        x += row * x_row + start * x_token + head // SHARE * x_head
        x_token *= NEXT
    y += row * y_row + start * y_token + head * y_head
    y_token *= NEXT
    states += place * E * W
    state_units += place * TILES

    o = tl.zeros((CHUNK, BLOCK), tl.float32)
    for step in range(0, (E + STEP - 1) // STEP):
        e = step * STEP
        if DECAYED:
            xs = load_block(x + place * CHUNK * E, 0, e, CHUNK, E, CHUNK, STEP)
            x_unit = load_unit(x_units, place, SCALED)
        else:
            xs, x_unit = load_scaled(x, x_token, live, e, E, SCALED, CHUNK, STEP)
        state = load_matrix(states, e, column, E, W, ROW, COLUMN, STEP, BLOCK)
        unit = load_column_units(state_units + step * UNIT_ROW, column, UNIT_COLUMN, TILE, W, BLOCK, SCALED)
        o += tl.dot(xs, state, input_precision=PRECISION) * (x_unit * unit)[None, :]
    if GATE == "head":
        g += row * g_row + start * g_token + head * g_head
        g_token *= NEXT
        if TRANSPOSED:
            o *= decay_until(g, g_token, live, CHUNK)[:, None]
        else:
            o *= decay_since(load_numbers(g, g_token, live, CHUNK))[:, None]
    if not TRANSPOSED:
        o *= scale
    ys, y_unit = load_scaled(y, y_token, live, column, W, SCALED, CHUNK, BLOCK)
    place = slot * (H // SHARE) + head // SHARE
    among = scores + place * CHUNK * CHUNK
    if TRANSPOSED:
        among = load_matrix(among, 0, 0, CHUNK, CHUNK, 1, CHUNK, CHUNK, CHUNK)
    else:
        among = load_matrix(among, 0, 0, CHUNK, CHUNK, CHUNK, 1, CHUNK, CHUNK)
    unit = load_unit(score_units, place, SCALED) * y_unit * scale
    if SHARE > 1 and GATE == "head":
        i = tl.arange(0, CHUNK)
        part = _decay_pairs(load_numbers(g, g_token, live, CHUNK), SCALED, CHUNK)
        part = tl.where(i[:, None] >= i[None, :], part, 0.0)
        among, among_unit = in_units(among.to(tl.float32) * (tl.trans(part) if TRANSPOSED else part), SCALED)
        unit *= among_unit
    o += tl.dot(among, ys, input_precision=PRECISION) * unit
    store_tokens(output + ((row * T + start) * H + head) * W, H * W * NEXT, live, column, o, W, CHUNK, BLOCK)


@triton.jit
def _load_earlier(scores, SCALED: tl.constexpr, CHUNK: tl.constexpr):
    """P without its diagonal."""
    i = tl.arange(0, CHUNK)
    among = load_matrix(scores, 0, 0, CHUNK, CHUNK, CHUNK, 1, CHUNK, CHUNK)
    return tl.where(i[:, None] > i[None, :], among, as_tile(tl.zeros((CHUNK, CHUNK), tl.float32), SCALED))


@triton.jit
def _load_later(scores, SCALED: tl.constexpr, CHUNK: tl.constexpr):
    """Pᵀ without its diagonal."""
    i = tl.arange(0, CHUNK)
    among = load_matrix(scores, 0, 0, CHUNK, CHUNK, 1, CHUNK, CHUNK, CHUNK)
    return tl.where(i[:, None] < i[None, :], among, as_tile(tl.zeros((CHUNK, CHUNK), tl.float32), SCALED))


@triton.jit
def _from_earlier(
    scores, y, since, middle, GATE: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr
):
    """Σ_{j<i} p_ij y_jc e^{b_ic - b_jc} for scores p. Scores of a gate per head already contain the decays.

    Also y; for a gate per channel with the error that TF32's rounding of its decayed form leaves.
    """
    among = _load_earlier(scores, SCALED, CHUNK)
    rounded = y
    y, unit = scale_down(y, SCALED)
    if GATE != "channel":
        read = tl.dot(among, as_tile(y, SCALED), input_precision=PRECISION)
    else:
        factor = to_tf32(y * tl.exp(middle - since), SCALED)
        back = tl.exp(since - middle)
        read = tl.dot(among.to(tl.float32), factor, input_precision=PRECISION) * back
        rounded = factor * back * unit
    return read * unit, rounded


@triton.jit
def _from_later(
    scores, x, since, middle, GATE: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr
):
    """Σ_{j>i} p_ji x_jc e^{b_jc - b_ic} for scores p, and x, as in `_from_earlier`."""
    among = _load_later(scores, SCALED, CHUNK)
    rounded = x
    x, unit = scale_down(x, SCALED)
    if GATE != "channel":
        written = tl.dot(among, as_tile(x, SCALED), input_precision=PRECISION)
    else:
        factor = to_tf32(x * tl.exp(since - middle), SCALED)
        back = tl.exp(middle - since)
        written = tl.dot(among.to(tl.float32), factor, input_precision=PRECISION) * back
        rounded = factor * back * unit
    return written * unit, rounded


@triton.jit
def _from_both_by_level(
    scores, x, y, gate, level, near, near_later, DTYPE: tl.constexpr, WRITES: tl.constexpr, SCALED: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """The sums of `_from_earlier` and, if WRITES, those of `_from_later`, for a gate per channel that is not mild.

    `near` and `near_later` are those over pairs within blocks of NEAR tokens, where decays are not mild there, else 0.
    WRITES also gives the first sums times x_ic and the second ones times y_ic. In these, each level multiplies with the
    decayed form that it has rounded for the sums of the other side.
    """
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    among = _load_earlier(scores, SCALED, CHUNK).to(tl.float32)
    y, y_unit = scale_down(y, SCALED)
    earlier, later, weighed, weighed_later = near / y_unit, near_later, 0.0, 0.0
    if WRITES:
        behind = _load_later(scores, SCALED, CHUNK).to(tl.float32)
        x, x_unit = scale_down(x, SCALED)
        later /= x_unit
        weighed, weighed_later = earlier * x, later * y
    if level >= NEAR_LEVEL:
        own = add_gates(block_ranges(i, j, level), gate, DTYPE)
        within = (i >> level) == (j >> level)
        y_part = to_tf32(y * tl.exp(-own), SCALED)
        earlier = tl.dot(tl.where(within, among, 0.0), y_part, input_precision=PRECISION)
        if WRITES:
            x_part = to_tf32(x * tl.exp(own), SCALED)
            later = tl.dot(tl.where(within, behind, 0.0), x_part, input_precision=PRECISION)
            weighed = earlier * x_part
            weighed_later = later * y_part
            later *= tl.exp(-own)
        earlier *= tl.exp(own)
    for upper in range(tl.maximum(level, NEAR_LEVEL), LEVELS):
        part = tl.exp(add_gates(pair_ranges(i, j, upper), gate, DTYPE))
        y_part = to_tf32(y * part, SCALED)
        pairs = tl.where(are_paired(i, j, upper), among, 0.0)
        products = tl.dot(pairs, y_part, input_precision=PRECISION)
        earlier += products * part
        if WRITES:
            x_part = to_tf32(x * part, SCALED)
            weighed += products * x_part
            pairs = tl.where(are_paired(j, i, upper), behind, 0.0)
            products = tl.dot(pairs, x_part, input_precision=PRECISION)
            later += products * part
            weighed_later += products * y_part
    if WRITES:
        later *= x_unit
        weighed *= x_unit * y_unit
        weighed_later *= x_unit * y_unit
    return earlier * y_unit, later, weighed, weighed_later


@triton.jit
def _from_near(
    scores, x, y, g, x_token, y_token, g_token, live, column,
    W: tl.constexpr, WRITES: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums of `_from_earlier` and, if WRITES, of `_from_later`, over pairs within blocks of NEAR tokens."""
    token = tl.arange(0, CHUNK)
    earlier = tl.zeros((CHUNK, BLOCK), tl.float32)
    later = tl.zeros((CHUNK, BLOCK), tl.float32)
    since = tl.zeros((CHUNK, BLOCK), tl.float32)
    until = tl.zeros((CHUNK, BLOCK), tl.float32)
    for distance in range(1, NEAR):
        other = token - distance
        mask = (token % NEAR >= distance) & (token < live)
        since += _load_gates_at(g, g_token, other + 1, mask, column, W, BLOCK)
        p = tl.load(scores + token * CHUNK + other, mask=mask, other=0.0).to(tl.float32)
        earlier += p[:, None] * (tl.exp(since) * _load_at(y, y_token, other, mask, column, W, BLOCK))
        if WRITES:
            other = token + distance
            mask = (token % NEAR + distance < NEAR) & (other < live)
            until += _load_gates_at(g, g_token, other, mask, column, W, BLOCK)
            p = tl.load(scores + other * CHUNK + token, mask=mask, other=0.0).to(tl.float32)
            later += p[:, None] * (tl.exp(until) * _load_at(x, x_token, other, mask, column, W, BLOCK))
    return earlier, later


# Tokens of a chunk are uneven if one's part of the gates' gradients is this many times as large as that of each of the
# chunk's first tokens. A sum that holds larger ones, which cancel, has an error of 2^-22 of those: up to here it is
# about that of half precision. Single small tokens among others do not count: in a language model in training the
# smallest of 64 often is 500 times smaller than the largest, whereas 3 % of chunks in one layer were uneven.
UNEVEN = tl.constexpr(512.0)
FIRST = tl.constexpr(8)  # tokens


@triton.jit(do_not_specialize=SIZES)
def differentiate(
    x, y, a, a_units, b, b_units, g, cu_seqlens, sequence_of, levels, scores, score_units, states, state_units,
    d_states, d_state_units, d_x, d_y, d_g, scale, T, H, tokens,
    x_row, x_token, x_head, y_row, y_token, y_head, a_row, a_token, a_head, b_row, b_token, b_head,
    g_row, g_token, g_head,
    W: tl.constexpr, E: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr,
    UNIT_ROW: tl.constexpr, UNIT_COLUMN: tl.constexpr, TILES: tl.constexpr,
    GATE: tl.constexpr, TILED: tl.constexpr, DTYPE: tl.constexpr, READS: tl.constexpr, WRITES: tl.constexpr,
    BY_LEVEL: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, LEVELS: tl.constexpr,
    STEP: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK columns for one chunk of one head: for each x a sum over earlier tokens, for each y one over later tokens.

        d_x = scale (e^b ⊙ A S + (P ⊙ decay) Y);   d_y = e^{b_C - b} ⊙ B dS + scale (P ⊙ decay)ᵀ X

    The states [E, W] and their units have the layout that `read` describes. d_x and d_y are the gradients of x and y if
    A and B are those of outputs and values. READS writes d_x. WRITES writes d_y and, with a gate, d_g: a gradient for
    each channel, or this block's part of that for the head.

    BY_LEVEL, the chunks whose gates are not all mild, and those of uneven tokens (see UNEVEN), whose `levels` the
    launch before has changed.
    """
    blocks: tl.constexpr = (W + BLOCK - 1) // BLOCK
    block = tl.program_id(0) % blocks
    column = block * BLOCK
    head = (tl.program_id(0) // blocks % H).to(tl.int64)
    slot = (tl.program_id(0) // blocks // H).to(tl.int64)
    place = slot * H + head
    level = 0
    if GATE == "channel":
        level = tl.load(levels + place * ((W + TILE - 1) // TILE) + column // TILE)
        if (level < LEVELS) != BY_LEVEL:
            return
    row, start, live = chunk(slot, T, cu_seqlens, sequence_of, PACKED, CHUNK, REVERSE)
    if live <= 0:
        return
    NEXT = direction(REVERSE)
    token = (row * T + start) * H + head
    x += row * x_row + start * x_token + head * x_head
    y += row * y_row + start * y_token + head * y_head
    x_token *= NEXT
    y_token *= NEXT
    if TILED:
        a += place * CHUNK * E
        b += place * CHUNK * E
    else:
        a += row * a_row + start * a_token + head * a_head
        b += row * b_row + start * b_token + head * b_head
        a_token *= NEXT
        b_token *= NEXT
    states += place * E * W
    state_units += place * TILES
    if WRITES:
        d_states += place * E * W
        d_state_units += place * TILES
    scores += place * CHUNK * CHUNK
    i = tl.arange(0, CHUNK)
    steps: tl.constexpr = (E + STEP - 1) // STEP
    near, near_later = 0.0, 0.0
    if BY_LEVEL:
        near = tl.zeros((CHUNK, BLOCK), tl.float32)
        near_later = tl.zeros((CHUNK, BLOCK), tl.float32)
        if level < NEAR_LEVEL:
            gates = g + row * g_row + start * g_token + head * g_head
            near, near_later = _from_near(
                scores, x, y, gates, x_token, y_token, g_token * NEXT, live, column, W, WRITES, CHUNK, BLOCK
            )
    read = tl.zeros((CHUNK, BLOCK), tl.float32)
    written = tl.zeros((CHUNK, BLOCK), tl.float32)
    kept = tl.zeros((BLOCK,), tl.float32)
    for step in range(0, steps):
        e = step * STEP
        tile = step * UNIT_ROW + column // TILE * UNIT_COLUMN
        if TILED:
            xs = load_block(a, 0, e, CHUNK, E, CHUNK, STEP)
            x_unit = load_unit(a_units, place * steps + step, SCALED)
        else:
            xs, x_unit = load_scaled(a, a_token, live, e, E, SCALED, CHUNK, STEP)
        state = load_matrix(states, e, column, E, W, ROW, COLUMN, STEP, BLOCK)
        unit = load_unit(state_units, tile, SCALED)
        read += tl.dot(xs, state, input_precision=PRECISION) * (x_unit * unit)
        if WRITES:
            if TILED:
                ys = load_block(b, 0, e, CHUNK, E, CHUNK, STEP)
                y_unit = load_unit(b_units, place * steps + step, SCALED)
            else:
                ys, y_unit = load_scaled(b, b_token, live, e, E, SCALED, CHUNK, STEP)
            after = load_matrix(d_states, e, column, E, W, ROW, COLUMN, STEP, BLOCK)
            d_unit = load_unit(d_state_units, tile, SCALED)
            written += tl.dot(ys, after, input_precision=PRECISION) * (y_unit * d_unit)
            if GATE != "none":
                kept += tl.sum(state.to(tl.float32) * after.to(tl.float32), 0) * (unit * d_unit)

    unit = load_unit(score_units, place, SCALED) * scale
    itself = (tl.load(scores + i * (CHUNK + 1)).to(tl.float32) * unit)[:, None]
    read *= scale
    gate, since, middle = 0.0, 0.0, 0.0
    if GATE == "head":
        g += row * g_row + start * g_token + head * g_head
        g_token *= NEXT
        own = load_numbers(g, g_token, live, CHUNK)
        from_start, to_end, whole, _ = find_decays(own, g, g_token, live, not SCALED, CHUNK)
        read *= from_start[:, None]
        written *= to_end[:, None]
        kept *= whole
    if GATE == "channel":
        g += row * g_row + start * g_token + head * g_head
        gate = _load_gates(g, g_token * NEXT, live, column, W, CHUNK, BLOCK)
        since = add_gates(i[:, None] >= i[None, :], gate, DTYPE)
        total = tl.sum(gate, 0)
        middle = 0.5 * total[None, :]
        read *= tl.exp(since)
        kept *= tl.exp(total)
        if WRITES:
            if BY_LEVEL:
                written *= tl.exp(add_gates(i[:, None] < i[None, :], gate, DTYPE))
            else:
                written *= tl.exp(total[None, :] - since)
    ys = load_tokens(y, y_token, live, column, W, CHUNK, BLOCK).to(tl.float32)
    xs = ys
    HEAD: tl.constexpr = WRITES and GATE == "head"
    PRECISE: tl.constexpr = WRITES and GATE == "channel" and (BY_LEVEL or not SCALED)
    if WRITES and (BY_LEVEL or HEAD):
        xs = load_tokens(x, x_token, live, column, W, CHUNK, BLOCK).to(tl.float32)
    if HEAD:
        reading = tl.sum(xs * read, 1)
    later, weighed, weighed_later = 0.0, 0.0, 0.0
    if BY_LEVEL:
        earlier, later, weighed, weighed_later = _from_both_by_level(
            scores, xs, ys, gate, level, near, near_later, DTYPE, WRITES, SCALED, PRECISION, CHUNK, LEVELS
        )
    else:
        earlier, ys = _from_earlier(scores, ys, since, middle, GATE, SCALED, PRECISION, CHUNK)
    of_state = read
    read += unit * earlier
    if READS:
        store_tokens(d_x + token * W, H * W * NEXT, live, column, read + itself * ys, W, CHUNK, BLOCK)
    if WRITES:
        if not (BY_LEVEL or HEAD):
            xs = load_tokens(x, x_token, live, column, W, CHUNK, BLOCK).to(tl.float32)
        if not BY_LEVEL:
            later, xs = _from_later(scores, xs, since, middle, GATE, SCALED, PRECISION, CHUNK)
        later *= unit
        d_y += token * W
        store_tokens(d_y, H * W * NEXT, live, column, written + later + itself * xs, W, CHUNK, BLOCK)
        own = ys * written
        if GATE == "channel":
            # Each gate acts on pairs of an earlier write and a later read. A pair of tokens on the same side of the
            # gate is in both terms of `later`, with opposite signs; the diagonal is in neither. A pair must be the same
            # number in both, down to its rounding, or a pair that contains a large token leaves more of its error than
            # the others add up to. The sum of `later` starts at the end of the chunk: as the sum over the chunk minus
            # that over the tokens before the gate, it would hold what is left of the reads of a large query before the
            # gate, whose numbers are 1e8 times the others in slot attention with squared weights. `own` is summed over
            # the tokens before the gate, in one matrix product with `later`.
            if not PRECISE:
                reads = xs * read
                later = reads - ys * later - own
                if SCALED:
                    # The launch BY_LEVEL, which comes after this one, does a chunk of uneven tokens again.
                    sizes = tl.max(tl.maximum(tl.abs(reads), tl.abs(later)), 1)
                    most, first = find_largest_of_both(sizes, tl.where(i < FIRST, sizes, 0.0))
                    if most > first * UNEVEN:
                        tl.store(levels + place * ((W + TILE - 1) // TILE) + column // TILE, LEVELS - 1)
                dg = (kept + tl.sum(own, 0))[None, :] + add_ranges(i[:, None] <= i[None, :], later)
            else:
                # In float32, with strong gates and for uneven tokens each sum is made on its own, and that of pairs
                # also from the start of the chunk: of both, the one over tokens with smaller pairs holds less of their
                # errors.
                reads = unit * weighed if BY_LEVEL else xs * unit * earlier
                writes = unit * weighed_later if BY_LEVEL else ys * later
                pairs, sizes = reads - writes, tl.abs(reads) + tl.abs(writes)
                before, behind = i[:, None] > i[None, :], i[:, None] <= i[None, :]
                smaller = add_ranges(before, sizes) < add_ranges(behind, sizes)
                pairs = tl.where(smaller, -add_ranges(before, pairs), add_ranges(behind, pairs))
                dg = kept[None, :] + add_ranges(before, own) + add_ranges(behind, xs * of_state) + pairs
            store_tokens(d_g + token * W, H * W * NEXT, live, column, dg, W, CHUNK, BLOCK)
        if HEAD:
            # A gate acts on reads after it of writes before it, and only such pairs are added up.
            x_tile, x_unit = in_units(xs, SCALED)
            y_tile, y_unit = in_units(ys, SCALED)
            among = load_matrix(scores, 0, 0, CHUNK, CHUNK, CHUNK, 1, CHUNK, CHUNK).to(tl.float32)
            pairs = tl.dot(x_tile, tl.trans(y_tile), input_precision=PRECISION) * among * (x_unit * y_unit * unit)
            before = of_token_before(tl.cumsum(tl.sum(own, 1), 0) + add_separated(pairs, CHUNK), CHUNK)
            dg = tl.sum(kept, 0) + tl.cumsum(reading, 0, reverse=True) + before
            tl.store(d_g + block.to(tl.int64) * tokens * H + token + i * H * NEXT, dg, mask=i < live)


@triton.jit(do_not_specialize=SIZES)
def differentiate_group(
    q, k, d_o, v, g, cu_seqlens, sequence_of, states, state_units, d_states, d_state_units, d_q, d_k, d_g,
    scale, T, H, tokens, q_row, q_token, q_head, k_row, k_token, k_head,
    d_o_row, d_o_token, d_o_head, v_row, v_token, v_head, g_row, g_token, g_head,
    K: tl.constexpr, V: tl.constexpr, SHARE: tl.constexpr, GATE: tl.constexpr,
    PACKED: tl.constexpr, REVERSE: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of d_q and d_k for one chunk of a group of SHARE heads, and this block's part of the heads' d_g.

        d_q = scale (Σ_h e^b ⊙ dO Sᵀ + dP K);   d_k = Σ_h e^{b_C - b} ⊙ V dSᵀ + scale dPᵀ Q

    dP is the sum of the heads' tril(dO Vᵀ), decayed. Heads are added one after the other: each run gives the same sums.
    """
    blocks: tl.constexpr = (K + BLOCK - 1) // BLOCK
    steps: tl.constexpr = (V + TILE - 1) // TILE
    tiles: tl.constexpr = (K + TILE - 1) // TILE * steps
    block = tl.program_id(0) % blocks
    column = block * BLOCK
    groups = H // SHARE
    group = (tl.program_id(0) // blocks % groups).to(tl.int64)
    slot = (tl.program_id(0) // blocks // groups).to(tl.int64)
    row, start, live = chunk(slot, T, cu_seqlens, sequence_of, PACKED, CHUNK, REVERSE)
    if live <= 0:
        return
    NEXT = direction(REVERSE)
    d_g += block.to(tl.int64) * tokens * H + (row * T + start) * H
    q += row * q_row + start * q_token + group * q_head
    k += row * k_row + start * k_token + group * k_head
    i = tl.arange(0, CHUNK)
    xs, x_unit = load_scaled(q, q_token * NEXT, live, column, K, SCALED, CHUNK, BLOCK)
    ys, y_unit = load_scaled(k, k_token * NEXT, live, column, K, SCALED, CHUNK, BLOCK)
    among = tl.dot(xs, tl.trans(ys), input_precision=PRECISION) * (x_unit * y_unit * scale)
    d_scores = tl.zeros((CHUNK, CHUNK), tl.float32)
    all_read = tl.zeros((CHUNK, BLOCK), tl.float32)
    all_written = tl.zeros((CHUNK, BLOCK), tl.float32)
    for head in range(group * SHARE, group * SHARE + SHARE):
        place = slot * H + head
        products = tl.zeros((CHUNK, CHUNK), tl.float32)
        read = tl.zeros((CHUNK, BLOCK), tl.float32)
        written = tl.zeros((CHUNK, BLOCK), tl.float32)
        kept = tl.zeros((BLOCK,), tl.float32)
        of_output = d_o + row * d_o_row + start * d_o_token + head * d_o_head
        of_value = v + row * v_row + start * v_token + head * v_head
        for step in range(0, steps):
            e = step * TILE
            tile = place * tiles + column // TILE * steps + step
            outs, out_unit = load_scaled(of_output, d_o_token * NEXT, live, e, V, SCALED, CHUNK, TILE)
            values, value_unit = load_scaled(of_value, v_token * NEXT, live, e, V, SCALED, CHUNK, TILE)
            state = load_matrix(states + place * K * V, e, column, V, K, 1, V, TILE, BLOCK)
            after = load_matrix(d_states + place * K * V, e, column, V, K, 1, V, TILE, BLOCK)
            unit = load_unit(state_units, tile, SCALED)
            d_unit = load_unit(d_state_units, tile, SCALED)
            products += tl.dot(outs, tl.trans(values), input_precision=PRECISION) * (out_unit * value_unit)
            read += tl.dot(outs, state, input_precision=PRECISION) * (out_unit * unit)
            written += tl.dot(values, after, input_precision=PRECISION) * (value_unit * d_unit)
            kept += tl.sum(state.to(tl.float32) * after.to(tl.float32), 0) * (unit * d_unit)
        if GATE == "head":
            gates = g + row * g_row + start * g_token + head * g_head
            own = load_numbers(gates, g_token * NEXT, live, CHUNK)
            from_start, to_end, whole, _ = find_decays(own, gates, g_token * NEXT, live, not SCALED, CHUNK)
            read *= from_start[:, None]
            written *= to_end[:, None]
            products *= _decay_pairs(own, SCALED, CHUNK)
        products = tl.where(i[:, None] >= i[None, :], products, 0.0)
        if GATE == "head":
            reads = tl.sum(xs.to(tl.float32) * read, 1) * (x_unit * scale)
            writes = tl.sum(ys.to(tl.float32) * written, 1) * y_unit
            before = of_token_before(tl.cumsum(writes, 0) + add_separated(products * among, CHUNK), CHUNK)
            dg = tl.sum(kept, 0) * whole + tl.cumsum(reads, 0, reverse=True) + before
            tl.store(d_g + head + i * H * NEXT, dg, mask=i < live)
        d_scores += products
        all_read += read
        all_written += written
    d_scores, unit = in_units(d_scores, SCALED)
    earlier = tl.dot(d_scores, ys, input_precision=PRECISION) * (unit * y_unit)
    later = tl.dot(tl.trans(d_scores), xs, input_precision=PRECISION) * (unit * x_unit)
    token = ((row * T + start) * groups + group) * K
    store_tokens(d_q + token, groups * K * NEXT, live, column, scale * (all_read + earlier), K, CHUNK, BLOCK)
    store_tokens(d_k + token, groups * K * NEXT, live, column, all_written + scale * later, K, CHUNK, BLOCK)
