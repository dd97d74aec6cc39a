"""Segments of time for the delta rule in Triton: programs walk through the parts of a long sequence side by side.

With Y = e^{b_C - b} P (`writes`) a chunk's step is linear in the state, and so is that of the state's gradient back,

    Sᵀ <- Sᵀ F + (X V)ᵀ Y,   F = e^{b_C} I + Wᵀ Y            dSᵀ <- dSᵀ Fᵀ + ...

A segment is a run of chunks. `summarize` walks through it from the identity, which gives its transition, the product of
its F; and from a zero state, which gives its offset. `retreat` finds the offsets of gradients in the same way. The walk
of the first segment begins from the initial state, and backwards the walk of the last one from the final state's
gradient. So only the segments between them need transitions, which are the same for both passes. `connect` computes the
states at the segments' borders, from which `advance` and `retreat` begin. Transitions are rounded like the states in
the products of the walks, and have units by rows.
"""

import triton
import triton.language as tl

from longseq.kernels.delta_rule.triton_kept import (
    PACKED_UNITS,
    PRECISION,
    SIZE,
    TILE,
    U,
    find_place,
    find_units,
    load_by_columns,
    load_by_rows,
    unpack_queries,
    unpack_w,
    unpack_writes,
)
from longseq.kernels.triton_tiles import (
    MILD,
    SIZES_AND_STRIDES,
    direction,
    find_segment,
    load_block,
    load_numbers,
    load_tokens,
    sequence,
    store_block,
    token_after,
)
from longseq.kernels.triton_units import (
    LEAD,
    as_tile,
    bound_product,
    clamp_exponent,
    exponent_of,
    find_largest,
    find_largest_of_rows,
    load_column_units,
    power_of_two,
    store_column_units,
    times_two_to,
    two_to,
)

# Which rows a walk makes itself from what the call gave: queries, or write keys as well.
QUERIES = tl.constexpr(1)
BOTH = tl.constexpr(2)


@triton.jit
def across(x, BY_ROW: tl.constexpr):
    """Numbers that belong to the rows of a block, as a column; a number of the whole block as it is."""
    if BY_ROW:
        x = x[:, None]
    return x


@triton.jit
def _find_largest(x, BY_ROW: tl.constexpr):
    """The largest magnitude in a block, or in each of its rows."""
    return find_largest_of_rows(x) if BY_ROW else find_largest(x)


@triton.jit
def find_exponent(pieces, exponent, BY_ROW: tl.constexpr):
    """The exponent of the unit of a state in units of 2^exponent, or of the unit of each of its rows.

    BY_ROW: each row of the state has a unit. A row belongs to one warp, which finds its largest number alone, while all
    warps wait for each other to find that of a block. A state that other kernels read has one unit for all rows.
    """
    largest = _find_largest(pieces[0], BY_ROW)
    for i in tl.static_range(1, len(pieces)):
        largest = tl.maximum(largest, _find_largest(pieces[i], BY_ROW))
    return exponent + exponent_of(power_of_two(largest)[0])


@triton.jit
def multiply_pieces(pieces, factor):
    """The pieces of a state times a number, or times those of its rows, a column."""
    multiplied = ()
    for i in tl.static_range(0, len(pieces)):
        multiplied = multiplied + (pieces[i] * factor,)
    return multiplied


@triton.jit
def turn_to_tiles(pieces, exponent, SCALED: tl.constexpr, BY_ROW: tl.constexpr = False):
    """Pieces of a state in units of 2^exponent, converted to their own unit (see `find_exponent`), and its exponent."""
    if SCALED:
        own = tl.maximum(find_exponent(pieces, exponent, BY_ROW), -126)
        pieces = multiply_pieces(pieces, across(two_to(exponent - own), BY_ROW))
        exponent = own
    return pieces, exponent


@triton.jit
def share_unit(pieces, exponents):
    """Pieces of a state whose rows have units of their own, converted to one unit, and that unit's exponent."""
    exponent = tl.max(exponents, 0)
    shared = ()
    for i in tl.static_range(0, len(pieces)):
        shared = shared + (pieces[i] * two_to(exponents - exponent)[:, None],)
    return turn_to_tiles(shared, exponent, True)


@triton.jit
def end_walk(piece, exponent, SCALED: tl.constexpr):
    """A piece of a state, converted from units of 2^exponent to plain numbers."""
    if SCALED:
        piece = times_two_to(piece, exponent)
    return piece


# Bits by which a tile of rows may be coarser than its bound allows where other kernels read it, and a state's tile.
ROWS_SLACK = tl.constexpr(5)
STATE_SLACK = tl.constexpr(8)


@triton.jit
def find_exponents(own, bound, factor, growth, size, BY_ROW: tl.constexpr):
    """For a state and rows whose product with a tile is added to it in a chunk: the exponents of the units of both.

    `own` is the exponent of the state's own unit, `bound` that of a bound of the rows, `factor` that of the tile. The
    unit of the rows is that of the state divided by that of the tile: then the product is added without a factor, which
    the whole state would have to be multiplied by. Where the rows are too large for it, the state's unit grows: the
    state is small then beside what is added. Where they lose bits in it, these do not count beside the state.

    In three cases both have their own units, the third result is true, and `follow_unit` has to follow: if `growth`,
    the exponent of a bound of what a state becomes by a chunk, would cost the state's tile too many bits (unless the
    tile has a unit of its own, and `growth` is negative); if `size`, of the chunk's inverse, is above MILD; and if not
    BY_ROW, where other kernels read the rows, if these lose bits.
    """
    exponent = clamp_exponent(tl.maximum(own, bound + factor))
    rows = exponent - factor
    apart = (size > MILD) | (growth > STATE_SLACK)
    if not BY_ROW:
        apart = apart | (rows - bound > ROWS_SLACK)
    return tl.where(apart, clamp_exponent(own), exponent), tl.where(apart, clamp_exponent(bound), rows), apart


@triton.jit
def rescale_if_steep(x, exponent, size, BY_ROW: tl.constexpr):
    """A matrix in units of 2^exponent in the unit that its tile needs, and that unit's exponent.

    Where `size`, of the chunk's inverse, is above MILD, the unit is that of its largest number: there tokens after a
    large one can be so much larger than those before it that these need a tile's whole range. Elsewhere finding the
    largest number would delay the walk.
    """
    if size > MILD:
        unit, inverse = power_of_two(_find_largest(x, BY_ROW))
        x *= across(inverse, BY_ROW)
        exponent += exponent_of(unit)
    return x, exponent


@triton.jit
def follow_unit(state, exponent, product, apart, BY_ROW: tl.constexpr):
    """A state in units of 2^exponent in that of the product that is added to it, and that unit's exponent.

    `product` is the exponent of the product's unit, `apart` whether it may be another one (see `find_exponents`).
    """
    if apart:
        product = tl.maximum(product, exponent - LEAD)
        state = multiply_pieces(state, across(two_to(exponent - product), BY_ROW))
        exponent = product
    return state, exponent


@triton.jit
def load_betas(beta, beta_token, m, start, end, REVERSE: tl.constexpr, CHUNK: tl.constexpr):
    """beta of chunk m of a sequence."""
    beta += token_after(m * CHUNK, start, end, REVERSE) * beta_token
    return load_numbers(beta, beta_token * direction(REVERSE), end - start - m * CHUNK, CHUNK)


@triton.jit
def load_rows(
    rows, stride, live, weight, column,
    K: tl.constexpr, WEIGH: tl.constexpr, SCALED: tl.constexpr, CUT: tl.constexpr, CHUNK: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """STEP columns of a chunk's queries or write keys, as a tile.

    WEIGH: `rows` points to the first token as the call gave it, and `weight` makes the tile of it, in the tile's unit.
    Otherwise `rows` is the tile that `prepare` stored.
    """
    if WEIGH:
        tile = as_tile(load_tokens(rows, stride, live, column, K, CHUNK, STEP).to(tl.float32) * weight, SCALED)
    else:
        tile = load_by_rows(rows, live, column, K, CUT, CHUNK, STEP)
    return tile


@triton.jit
def multiply_rows(
    x, x_token, x_inverse, y, y_token, y_inverse, live,
    K: tl.constexpr, RAW: tl.constexpr, DTYPE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """X Yᵀ of a chunk, of numbers of DTYPE as they came if RAW, else of tiles."""
    products = tl.zeros((CHUNK, CHUNK), tl.float32)
    for e in tl.static_range(0, K, BLOCK):
        xs = load_tokens(x, x_token, live, e, K, CHUNK, BLOCK)
        ys = load_tokens(y, y_token, live, e, K, CHUNK, BLOCK)
        if not RAW:
            xs = xs.to(tl.float32) * x_inverse
            ys = ys.to(tl.float32) * y_inverse
        products = tl.dot(xs.to(DTYPE), tl.trans(ys.to(DTYPE)), products, input_precision=PRECISION)
    return products


@triton.jit
def walk_through(
    state, exponent, xv, xv_exponents, xv_exponent, w,
    writes, write_token, write_weight, queries, q_token, query_weight, live, packed, size,
    states, units, place, column, whole,
    K: tl.constexpr, V: tl.constexpr, GATED: tl.constexpr, READ: tl.constexpr, WEIGH: tl.constexpr,
    SCALED: tl.constexpr, CUT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Of a chunk: Uᵀ as a tile and its exponent, the state after it, and if READ the state's part of the output.

    The states and that part are in units of 2 to an exponent, which is 0 if not SCALED. The state before the chunk is
    stored in `states`; with None each row of a state has an exponent (see `find_exponent`). States are in pieces of
    STEP key columns: beside a piece of 256 columns there are no registers for the same piece in half precision, as
    products take it. `units` is the chunk's row of units. `writes` and `queries` are the chunk's rows, as `load_rows`
    takes them.
    """
    SAVE: tl.constexpr = states is not None
    BITS: tl.constexpr = 6 if K <= 64 else 7 if K <= 128 else 8  # K is at most 2^BITS
    BY_ROW: tl.constexpr = SCALED and not SAVE
    u_exponent, before_exponent, read_exponent, after_exponent, fading = 0, 0, 0, exponent, 0
    if SCALED:
        own = find_exponent(state, exponent, BY_ROW)
        bound = tl.maximum(bound_product(own, unpack_w(packed), BITS), xv_exponent) + 1
        growth = bound_product(unpack_w(packed), unpack_writes(packed), BITS)
        if GATED:
            # Multiplied twice in any case, the state can have two units: one for its tile, and one after its decay,
            # whose power of two becomes part of the exponent. So fewer registers spill, and a state that fades
            # keeps its bits.
            fading = exponent_of(whole)
            whole *= two_to(-fading)
            growth = -1
            if not BY_ROW:
                # An earlier chunk can leave a state so small in its unit that the second factor would be too large for
                # a float32 number.
                if exponent - own > LEAD:
                    state = multiply_pieces(state, two_to(exponent - own))
                    exponent = own
        after_exponent, u_exponent, apart = find_exponents(
            own + fading, bound, unpack_writes(packed), growth, size, BY_ROW
        )  # fmt: skip
        before_exponent = clamp_exponent(own) if GATED else after_exponent
        read_exponent = before_exponent + unpack_queries(packed)
        factor = across(two_to(exponent - before_exponent), BY_ROW)
        if not GATED:
            state = multiply_pieces(state, factor)
        # U's sum begins with X V, in the unit of the products with the state.
        sum_exponent = tl.maximum(before_exponent + unpack_w(packed), xv_exponent - LEAD)
        u = xv.to(tl.float32) * across(two_to(xv_exponents - sum_exponent), BY_ROW or BLOCK > TILE)
    else:
        u = xv
    # A state of 256 columns is read in the first loop, where its tiles are in registers anyway. One of fewer columns is
    # read in the second, between the products with U: that was measured to be faster.
    READ_EARLY: tl.constexpr = READ and K > 128
    o = tl.zeros((BLOCK, CHUNK), tl.float32)
    befores = ()
    for e in tl.static_range(0, K, STEP):
        w_tile = load_by_rows(w + place * CHUNK * K, live, e, K, CUT, CHUNK, STEP)
        before = as_tile(state[e // STEP] * factor if GATED and SCALED else state[e // STEP], SCALED)
        befores = befores + (before,)
        if SAVE:
            store_block(states + place * K * V, column, e, before, V, K, BLOCK, STEP)
        u = tl.dot(before, tl.trans(w_tile), u, input_precision=PRECISION)
        if READ_EARLY:
            query = load_rows(queries, q_token, live, query_weight, e, K, WEIGH > 0, SCALED, CUT, CHUNK, STEP)
            o = tl.dot(before, tl.trans(query), o, input_precision=PRECISION)
    if SCALED:
        if SAVE:
            of_states = units + U + (V + TILE - 1) // TILE
            store_column_units(of_states, column, two_to(before_exponent), TILE, V, BLOCK, SCALED)
        u *= across(two_to(sum_exponent - u_exponent), BY_ROW)
        u, u_exponent = rescale_if_steep(u, u_exponent, size, BY_ROW)
        product = u_exponent + unpack_writes(packed)
        if GATED:
            after_exponent = tl.where(apart, tl.maximum(product, after_exponent - LEAD), after_exponent)
            whole = across(whole * two_to(exponent + fading - after_exponent), BY_ROW)
        else:
            state, after_exponent = follow_unit(state, after_exponent, product, apart, BY_ROW)
    u = as_tile(u, SCALED)
    after = ()
    for e in tl.static_range(0, K, STEP):
        write = load_rows(writes, write_token, live, write_weight, e, K, WEIGH == BOTH, SCALED, CUT, CHUNK, STEP)
        piece = state[e // STEP]
        if GATED:
            piece *= whole
        after = after + (tl.dot(u, write, piece, input_precision=PRECISION),)
        if READ and not READ_EARLY:
            query = load_rows(queries, q_token, live, query_weight, e, K, WEIGH > 0, SCALED, CUT, CHUNK, STEP)
            o = tl.dot(befores[e // STEP], tl.trans(query), o, input_precision=PRECISION)
    return u, u_exponent, after, after_exponent, o, read_exponent


@triton.jit
def load_xv(
    u, units, place, live, column,
    V: tl.constexpr, PAST: tl.constexpr, SCALED: tl.constexpr, CUT: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK value columns of (X V)ᵀ of a chunk, the exponents of their units, and the largest of those.

    PAST: the block may lie past V, where all is zero.
    """
    tile = load_by_columns(u + place * CHUNK * V, live, column, V, CUT, BLOCK, CHUNK, PAST)
    exponents, exponent = 0, 0
    if SCALED:
        of_chunk = find_units(units, place, V) + U
        unit = 0.0
        for e in tl.static_range(0, BLOCK, TILE):
            unit = tl.maximum(unit, tl.load(of_chunk + (column + e) // TILE, mask=column + e < V, other=0.0))
        exponent = exponent_of(unit)
        exponents = exponent
        if BLOCK > TILE:
            exponents = exponent_of(load_column_units(of_chunk, column, 1, TILE, V, BLOCK, SCALED))
    return tile, exponents, exponent


@triton.jit(do_not_specialize=[*SIZES_AND_STRIDES, "sequences", "span"])
def summarize(
    initial, units, cu_seqlens, writes, w, u, decays, offsets, transitions, transition_units,
    sequences, span, T, H,
    K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """BLOCK rows of the offset [V, K], or after those of the transition [K, K], of one segment of one head."""
    GATED: tl.constexpr = decays is not None
    SCALED: tl.constexpr = w.dtype.element_ty == tl.float16
    CUT: tl.constexpr = SCALED and (K <= 64 and V <= 64)
    of_offset: tl.constexpr = (V + BLOCK - 1) // BLOCK
    blocks: tl.constexpr = of_offset + (K + BLOCK - 1) // BLOCK
    block = tl.program_id(0) % blocks
    head = (tl.program_id(0) // blocks % H).to(tl.int64)
    segment = (tl.program_id(0) // blocks // H).to(tl.int64)
    n, number, last, first, end = find_segment(segment, T, cu_seqlens, sequences, span, cu_seqlens is not None, CHUNK)
    _, begin, stop, slot = sequence(n, T, cu_seqlens, cu_seqlens is not None, CHUNK)
    tokens = (stop - begin).to(tl.int32)
    # The last segment has no successor, and the first has only the initial state before it.
    needed = (number < last) & ((block < of_offset) | (number > 0))
    end = tl.where(needed, end, first)

    column = block * BLOCK
    i = column + tl.arange(0, BLOCK)
    state = ()
    for e in tl.static_range(0, K, STEP):
        j = e + tl.arange(0, STEP)
        piece = tl.where((i - of_offset * BLOCK)[:, None] == j[None, :], 1.0, 0.0)
        if initial is not None:
            mask = (j < K)[:, None] & (i < tl.where(number == 0, V, 0))[None, :]
            given = tl.load(initial + (n * H + head) * K * V + j[:, None] * V + i[None, :], mask=mask, other=0.0)
            piece += tl.trans(given.to(tl.float32))
        state = state + (piece,)
    state, exponent = turn_to_tiles(state, 0, SCALED, SCALED)
    place = (slot + first) * H + head  # a transition has no input
    xv, xv_exponents, xv_exponent = load_xv(
        u, units, place, tokens - first * CHUNK, column, V, True, SCALED, CUT, CHUNK, BLOCK
    )
    if SCALED:
        later_packed = tl.load(find_units(units, place, V) + PACKED_UNITS)
        later_size = tl.load(find_units(units, place, V) + SIZE)
    if GATED:
        later_whole = tl.load(decays + place)
    for m in range(first, end):
        place = (slot + m) * H + head
        next_chunk = tl.minimum(m + 1, end - 1)
        following = (slot + next_chunk) * H + head
        later, later_exponents, later_exponent = load_xv(
            u, units, following, tokens - next_chunk * CHUNK, column, V, True, SCALED, CUT, CHUNK, BLOCK
        )
        packed, size = 1.0, 1.0
        if SCALED:
            packed, size = later_packed, later_size
            later_packed = tl.load(find_units(units, following, V) + PACKED_UNITS)
            later_size = tl.load(find_units(units, following, V) + SIZE)
        whole = 1.0
        if GATED:
            whole = later_whole
            later_whole = tl.load(decays + following)
        rows = writes + place * CHUNK * K
        walked = walk_through(
            state, exponent, xv, xv_exponents, xv_exponent, w, rows, 0, 1.0, rows, 0, 1.0,
            tokens - m * CHUNK, packed, size, None, units, place, column, whole,
            K, V, GATED, False, 0, SCALED, CUT, CHUNK, BLOCK, STEP,
        )  # fmt: skip
        state = walked[2]
        if SCALED:
            exponent = walked[3]
        xv = later
        if SCALED:
            xv_exponents, xv_exponent = later_exponents, later_exponent
    place = segment * H + head
    if needed:
        row = column - of_offset * BLOCK
        if block < of_offset:
            for e in tl.static_range(0, K, STEP):
                left = end_walk(state[e // STEP], across(exponent, SCALED), SCALED)
                store_block(offsets + place * V * K, column, e, left, V, K, BLOCK, STEP)
        else:
            shared = state
            if SCALED:
                shared, unit_exponent = share_unit(state, exponent)
                of_transition = transition_units + place * ((K + TILE - 1) // TILE)
                store_column_units(of_transition, row, two_to(unit_exponent), TILE, K, BLOCK, SCALED)
            for e in tl.static_range(0, K, STEP):
                store_block(transitions + place * K * K, row, e, shared[e // STEP], K, K, BLOCK, STEP)


@triton.jit
def _load_border(
    offsets, transition_units, first, j, segments, head, column, H,
    K: tl.constexpr, V: tl.constexpr, BACK: tl.constexpr, SCALED: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Offset and units of the rows of the transition of segment j, or of the last that has both, in reading order."""
    j = tl.maximum(tl.minimum(j, segments - 2), 0)
    place = (first - j if BACK else first + j) * H + head
    offset = load_block(offsets + place * V * K, column, 0, V, K, BLOCK, BLOCK_K)
    TILES: tl.constexpr = (K + TILE - 1) // TILE
    row_units = ()
    for i in tl.static_range(0, TILES if SCALED else 0):
        row_units = row_units + (tl.load(transition_units + place * TILES + i),)
    return offset, row_units


@triton.jit
def _spread(row_units, BLOCK_K: tl.constexpr):
    """The unit of each row of a transition, as a row, from those of its tiles; 1 without units."""
    unit = tl.full((1, BLOCK_K), 1.0, tl.float32)
    for i in tl.static_range(0, len(row_units)):
        unit = tl.where(tl.arange(0, BLOCK_K)[None, :] // TILE == i, row_units[i], unit)
    return unit


@triton.jit(do_not_specialize=[*SIZES_AND_STRIDES, "span"])
def connect(
    cu_seqlens, offsets, transitions, transition_units, span, T, H,
    K: tl.constexpr, V: tl.constexpr, BACK: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK value columns of one head of one sequence: the states that segments leave, in place of their offsets.

    BACK: the gradients of the states before segments, from the last segment on.
    """
    SCALED: tl.constexpr = transitions.dtype.element_ty == tl.float16
    column, head, n = find_place(H, V, BLOCK)
    _, start, end, _ = sequence(n, T, cu_seqlens, cu_seqlens is not None, CHUNK)
    segments = tl.cdiv((end - start).to(tl.int32), span * CHUNK)
    first = n * segments
    if cu_seqlens is not None:
        first = start // (span * CHUNK) + n
    if BACK:
        first += tl.maximum(segments - 1, 0)
    before = first * H + head
    state = load_block(offsets + before * V * K, column, 0, V, K, BLOCK, BLOCK_K)
    # Loaded one iteration early, because the compiler prefetches only operands of products.
    later, later_units = _load_border(
        offsets, transition_units, first, 1, segments, head, column, H, K, V, BACK, SCALED, BLOCK_K, BLOCK
    )
    for j in range(1, segments - 1):
        place = (first - j if BACK else first + j) * H + head
        offset, row_unit = later, _spread(later_units, BLOCK_K)
        later, later_units = _load_border(
            offsets, transition_units, first, j + 1, segments, head, column, H, K, V, BACK, SCALED, BLOCK_K, BLOCK
        )
        transition = load_block(transitions + place * K * K, 0, 0, K, K, BLOCK_K, BLOCK_K)
        if BACK:
            transition = tl.trans(transition)
        factor = state if BACK else state * row_unit
        unit = row_unit
        if SCALED:
            own_unit, inverse = power_of_two(find_largest_of_rows(factor))
            factor *= inverse[:, None]
            unit = own_unit[:, None] * row_unit if BACK else own_unit[:, None]
        product = tl.dot(as_tile(factor, SCALED), transition, input_precision=PRECISION)
        # The state before is stored here, while the product is computed: after the product it would delay the next.
        store_block(offsets + before * V * K, column, 0, state, V, K, BLOCK, BLOCK_K)
        state = offset + (product * unit if SCALED else product)
        before = place
    if segments > 2:
        store_block(offsets + before * V * K, column, 0, state, V, K, BLOCK, BLOCK_K)
