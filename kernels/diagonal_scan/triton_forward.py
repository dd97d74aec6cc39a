"""The diagonal scans forward in Triton, and what their kernels share.

A warp holds the states of BLOCK_D channels of one sequence as [Q, P, BLOCK_D]: P entries of a channel lie in one
thread, Q threads share a channel, and entry q P + p of keys and queries is at [q, p]. A thread holds the same entries
of VECTOR adjacent channels, for which it reads keys and queries once. Numbers for each channel are [Q, BLOCK_D], alike
in all Q. Triton itself chooses which thread holds what; the shapes, and which loads are contiguous, lead it there.

Where there are too few sequences and channels for the GPU, time is split into parts of SPAN tokens: `summarize` finds
what each does to a state (h -> product of its decays ⊙ h + end), and a part's program adds up those before it.

Keys and queries are used by all channels: `prepare` converts them once, and leaves float32 rows [tokens, 2 P Q], for
Longhorn with four numbers more, of which the first is the key's squared norm and the others are not used.

With so few warps a walk waits for memory unless its loads are in flight together, and long before they are used. All
loads of a block of tokens come first, of x and rate, which come from farthest, those of the block after it.
"""

import os

import triton
import triton.language as tl

from longseq.kernels.triton_tiles import SECOND_HALF, direction, sequence, token_after

# Of these, neither the values nor the alignment is compiled into a kernel.
UNSPECIALISED = ["T", "A_half"]
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def find_part(slot, T, cu_seqlens, sequence_of, PACKED: tl.constexpr, SPAN: tl.constexpr, REVERSE: tl.constexpr):
    """Of a program's part of a sequence (the whole if SPAN is 0), in the order of reading: the sequence's number, batch
    row, tokens and first slot, the part's first token, its tokens, and those before it."""
    n = slot
    if SPAN > 0:
        n = tl.load(sequence_of + slot).to(tl.int64) if PACKED else slot // tl.cdiv(T, SPAN)
    row, start, end, first = sequence(n, T, cu_seqlens, PACKED, SPAN if SPAN > 0 else 1)
    length = (end - start).to(tl.int32)
    done = length * 0
    live = length
    if SPAN > 0:
        done = (slot - first).to(tl.int32) * SPAN
        live = tl.minimum(tl.maximum(length - done, 0), SPAN)
    return n, row, length, first, token_after(done, start, end, REVERSE), live, done


@triton.jit
def first_checkpoint(n, T, cu_seqlens, PACKED: tl.constexpr, CHECKPOINT: tl.constexpr):
    """The number of a sequence's first checkpoint."""
    return sequence(n, T, cu_seqlens, PACKED, CHECKPOINT)[3]


@triton.jit
def find_tile(D, P: tl.constexpr, Q: tl.constexpr, BLOCK_D: tl.constexpr):
    """This program's channels as [BLOCK_D] and as [Q, BLOCK_D], and the entries [Q, P]."""
    d = (tl.program_id(0) % tl.cdiv(D, BLOCK_D)) * BLOCK_D + tl.arange(0, BLOCK_D)
    q = tl.arange(0, Q)
    return d, d[None, :] + (q * 0)[:, None], (q * P)[:, None] + tl.arange(0, P)[None, :]


@triton.jit
def find_state(base, e, d, D, VECTOR: tl.constexpr):
    """Pointers to a state [Q, P, BLOCK_D] in [P Q, D], VECTOR adjacent channels of which one thread is to hold.

    The threads beside each other are to hold the next channels, and the next ones to share these, not further entries
    of theirs: said to Triton as if shares were adjacent, too, but less so than channels. It takes as many channels for
    one thread as the alignment allows, which is therefore said to be no better than that.
    """
    offsets = e[:, :, None] * D + d[None, None, :]
    offsets = tl.max_contiguous(offsets, [2 if e.shape[0] > 1 else 1, 1, d.shape[0]])
    return tl.multiple_of(base + offsets, [4 * VECTOR, 4 * VECTOR, 4 * VECTOR])


@triton.jit
def load_state(base, e, d, D, limit, EVEN: tl.constexpr, VECTOR: tl.constexpr):
    """A state [Q, P, BLOCK_D] from [P Q, D], channels up to the limit; EVEN: all blocks are full and within it."""
    place = find_state(base, e, d, D, VECTOR)
    if EVEN:
        return tl.load(place)
    return tl.load(place, mask=(e >= 0)[:, :, None] & (d < limit)[None, None, :], other=0.0)


@triton.jit
def store_state(base, e, d, D, limit, h, EVEN: tl.constexpr, VECTOR: tl.constexpr):
    place = find_state(base, e, d, D, VECTOR)
    if EVEN:
        tl.store(place, h)
    else:
        tl.store(place, h, mask=(e >= 0)[:, :, None] & (d < limit)[None, None, :])


@triton.jit
def load_rates(A, A_half, e, d, D, REVERSE: tl.constexpr, EVEN: tl.constexpr, VECTOR: tl.constexpr):
    """Mamba's A as a state; those of the second half of the rows, if that has its own, are A_half numbers on."""
    if REVERSE == SECOND_HALF:
        A += tl.where(direction(REVERSE) < 0, A_half, 0)
    return load_state(A, e, d, D, D, EVEN, VECTOR)


@triton.jit
def load_channels(base, wide, limit, EVEN: tl.constexpr):
    """One token's numbers for each channel up to the limit, [Q, BLOCK_D], as they are stored."""
    if EVEN:
        return tl.load(base + wide)
    return tl.load(base + wide, mask=wide < limit, other=0.0)


@triton.jit
def store_channels(base, wide, D, x, EVEN: tl.constexpr):
    """One token's numbers [1, BLOCK_D] for each channel, by the first of the Q threads that hold them."""
    q = tl.arange(0, wide.shape[0])[:, None]
    mask = (q == 0) & (wide >= 0) if EVEN else wide < tl.where(q == 0, D, 0)
    tl.store(base + wide, x + q * 0.0, mask=mask)


@triton.jit
def load_values(x, rate, x_step, rate_step, first, wide, limit, EVEN: tl.constexpr, TOKENS: tl.constexpr):
    """x and rate of so many tokens from the first on, as they are stored."""
    x += first * x_step
    rate += first * rate_step
    values = ()
    for i in tl.static_range(TOKENS):
        x_t = load_channels(x + i * x_step, wide, limit, EVEN)
        values = values + ((x_t, load_channels(rate + i * rate_step, wide, limit, EVEN)),)
    return values


@triton.jit
def row_of(STATE: tl.constexpr, LONGHORN: tl.constexpr):
    """Numbers of a prepared token: rows begin at multiples of 16 bytes, so many of which are read at a time."""
    return 2 * STATE + 4 if LONGHORN else 2 * STATE


@triton.jit
def load_entries(prepared, first, e, STEP, LONGHORN: tl.constexpr, TOKENS: tl.constexpr):
    """Key, query, and for Longhorn the key's squared norm, of so many tokens from the first on."""
    STATE: tl.constexpr = e.shape[0] * e.shape[1]
    NEXT = row_of(STATE, LONGHORN) * STEP
    prepared += first * NEXT
    entries = ()
    for i in tl.static_range(TOKENS):
        here = prepared + i * NEXT
        norm = tl.load(here + 2 * STATE) if LONGHORN else 0.0
        entries = entries + ((tl.load(here + e), tl.load(here + STATE + e), norm),)
    return entries


@triton.jit
def strength(rate, norm, LONGHORN: tl.constexpr):
    """What a key's squared norm leaves of Longhorn's rate, as a factor."""
    if not LONGHORN:
        return rate
    if INTERPRETED:
        return 1.0 / (1.0 + rate * norm)
    # One instruction instead of eight, as accurate: a division is also right where 1 + rate norm is below 1e-38.
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + rate * norm], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def advance(h, x, rate, key, norm, A, LONGHORN: tl.constexpr):
    """The state after one token; `A` is Mamba's, times log2(e)."""
    if LONGHORN:
        step = rate * strength(rate, norm, LONGHORN)
        return h + (step[:, None, :] * key[:, :, None]) * (x[:, None, :] - key[:, :, None] * h)
    return tl.exp2(rate[:, None, :] * A) * h + (rate * x)[:, None, :] * key[:, :, None]


@triton.jit
def prepare(
    key, query, prepared, T, N, key_row, key_token, query_row, query_token,
    LONGHORN: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Rows of keys and queries in float32, zero past N, and for Longhorn the squared norms of keys."""
    blocks = tl.cdiv(T, TOKENS)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    i = (tl.program_id(0) % blocks).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, WIDTH)
    own = (i < T)[:, None] & (e < N)[None, :]
    keys = tl.load(key + row * key_row + (i * key_token)[:, None] + e[None, :], mask=own, other=0.0).to(tl.float32)
    queries = tl.load(query + row * query_row + (i * query_token)[:, None] + e[None, :], mask=own, other=0.0)
    place = prepared + (row * T + i) * row_of(WIDTH, LONGHORN)
    tl.store(place[:, None] + e[None, :], keys, mask=(i < T)[:, None])
    tl.store(place[:, None] + WIDTH + e[None, :], queries.to(tl.float32), mask=(i < T)[:, None])
    if LONGHORN:
        tl.store(place + 2 * WIDTH, tl.sum(keys * keys, 1), mask=i < T)


@triton.jit
def _take(
    h, values, entries, rates, output, output_step, wide, D,
    LONGHORN: tl.constexpr, EVEN: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The state after so many tokens, whose outputs it writes."""
    for i in tl.static_range(TOKENS):
        x_t, rate_t = values[i]
        key, query, norm_t = entries[i]
        h = advance(h, x_t.to(tl.float32), rate_t.to(tl.float32), key, norm_t, rates, LONGHORN)
        o_t = tl.sum(tl.sum(h * query[:, :, None], 1), 0)[None, :]
        store_channels(output + i * output_step, wide, D, o_t, EVEN)
    return h


@triton.jit(do_not_specialize=UNSPECIALISED)
def forward(
    x, rate, prepared, A, initial, cu_seqlens, sequence_of, products, ends, output, final, checkpoints,
    T, D, A_half, x_row, x_token, rate_row, rate_token,
    HAS_INITIAL: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr, LONGHORN: tl.constexpr,
    SAVE: tl.constexpr, SPAN: tl.constexpr, CHECKPOINT: tl.constexpr, EVEN: tl.constexpr,
    P: tl.constexpr, Q: tl.constexpr, BLOCK_D: tl.constexpr, VECTOR: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Outputs, the final state, and the state before every CHECKPOINT-th token if SAVE."""
    slot = (tl.program_id(0) // tl.cdiv(D, BLOCK_D)).to(tl.int64)
    n, row, length, first_slot, token, live, done = find_part(slot, T, cu_seqlens, sequence_of, PACKED, SPAN, REVERSE)
    d, wide, e = find_tile(D, P, Q, BLOCK_D)
    STEP = direction(REVERSE)
    STATE: tl.constexpr = P * Q
    zero = n * 0  # makes offsets 64 bits wide

    # Without a state nothing is read, but a load it must be: all that depends on it is laid out as it is.
    given = D if HAS_INITIAL else tl.where(live < 0, D, 0)
    h = load_state(initial + n * STATE * D, e, d, D, given, False, VECTOR)
    if SPAN > 0:
        for before in range(first_slot, slot):
            decay = load_state(products + before * STATE * D, e, d, D, D, EVEN, VECTOR)
            h = decay * h + load_state(ends + before * STATE * D, e, d, D, D, EVEN, VECTOR)
    rates = h
    if not LONGHORN:
        rates = load_rates(A, A_half, e, d, D, REVERSE, EVEN, VECTOR)
    x += row * x_row + token * x_token
    rate += row * rate_row + token * rate_token
    prepared += (row * T + token) * row_of(STATE, LONGHORN)
    output += (row * T + token) * D
    if SAVE:
        checkpoints += (first_checkpoint(n, T, cu_seqlens, PACKED, CHECKPOINT) + done // CHECKPOINT) * STATE * D
    x_step = (zero + x_token) * STEP
    rate_step = (zero + rate_token) * STEP
    output_step = (zero + D) * STEP

    full = live // TOKENS * TOKENS
    ahead = load_values(x, rate, x_step, rate_step, zero, wide, tl.where(full > 0, D, 0), False, TOKENS)
    for first in range(0, full, TOKENS):
        if SAVE:
            if first % CHECKPOINT == 0:
                store_state(checkpoints + (zero + first // CHECKPOINT) * STATE * D, e, d, D, D, h, EVEN, VECTOR)
        now = ahead
        entries = load_entries(prepared, zero + first, e, STEP, LONGHORN, TOKENS)
        coming = zero + tl.minimum(first + TOKENS, full - TOKENS)
        ahead = load_values(x, rate, x_step, rate_step, coming, wide, D, EVEN, TOKENS)
        h = _take(h, now, entries, rates, output + first * output_step, output_step, wide, D, LONGHORN, EVEN, TOKENS)
    for i in range(full, live):
        if SAVE:
            if i % CHECKPOINT == 0:
                store_state(checkpoints + (zero + i // CHECKPOINT) * STATE * D, e, d, D, D, h, EVEN, VECTOR)
        now = load_values(x, rate, x_step, rate_step, zero + i, wide, D, EVEN, 1)
        entries = load_entries(prepared, zero + i, e, STEP, LONGHORN, 1)
        h = _take(h, now, entries, rates, output + i * output_step, output_step, wide, D, LONGHORN, EVEN, 1)
    # The last part of a sequence holds its last token; an empty sequence has one part, which is empty.
    last = tl.where(done + live < length, 0, tl.where(done + live > 0, tl.where(live > 0, D, 0), D))
    store_state(final + n * STATE * D, e, d, D, last, h, False, VECTOR)


@triton.jit
def _compose(
    product, h, values, entries, rates, LONGHORN: tl.constexpr, ADJOINT: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """The product of decays and the state after so many tokens more."""
    for i in tl.static_range(TOKENS):
        value, step = values[i][0].to(tl.float32), values[i][1].to(tl.float32)
        key, query, norm_t = entries[i]
        if LONGHORN:
            step *= strength(step, norm_t, LONGHORN)
            decay = 1.0 - step[:, None, :] * (key * key)[:, :, None]
        else:
            decay = tl.exp2(step[:, None, :] * rates)
        if ADJOINT:
            h = decay * (h + value[:, None, :] * query[:, :, None])
        else:
            h = decay * h + (step * value)[:, None, :] * key[:, :, None]
        product = product * decay
    return product, h


@triton.jit(do_not_specialize=UNSPECIALISED)
def summarize(
    x, rate, prepared, A, cu_seqlens, sequence_of, products, ends,
    T, D, A_half, x_row, x_token, rate_row, rate_token,
    PACKED: tl.constexpr, REVERSE: tl.constexpr, LONGHORN: tl.constexpr, ADJOINT: tl.constexpr, SPAN: tl.constexpr,
    EVEN: tl.constexpr,
    P: tl.constexpr, Q: tl.constexpr, BLOCK_D: tl.constexpr, VECTOR: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """What a part of a sequence does to a state: the product of its decays, and the state it leaves from zero.

    The ADJOINT does it to the state's gradient, from the last token to the first; x is then that of the output.
    """
    slot = (tl.program_id(0) // tl.cdiv(D, BLOCK_D)).to(tl.int64)
    _, row, length, _, token, live, done = find_part(slot, T, cu_seqlens, sequence_of, PACKED, SPAN, REVERSE)
    # No part comes after the last one, nor, on the way back, after the first.
    live = tl.where(done > 0 if ADJOINT else done + live < length, live, 0)
    d, wide, e = find_tile(D, P, Q, BLOCK_D)
    STEP = -direction(REVERSE) if ADJOINT else direction(REVERSE)
    STATE: tl.constexpr = P * Q
    zero = row * 0  # makes offsets 64 bits wide
    if ADJOINT:
        token -= (live - 1) * STEP
    h = load_state(ends, e, d, D, tl.where(live < 0, D, 0), False, VECTOR)  # zeros, laid out as all loaded states are
    product = h + 1.0
    rates = h
    if not LONGHORN:
        rates = load_rates(A, A_half, e, d, D, REVERSE, EVEN, VECTOR)
    x += row * x_row + token * x_token
    rate += row * rate_row + token * rate_token
    prepared += (row * T + token) * row_of(STATE, LONGHORN)
    x_step = (zero + x_token) * STEP
    rate_step = (zero + rate_token) * STEP

    full = live // TOKENS * TOKENS
    ahead = load_values(x, rate, x_step, rate_step, zero, wide, tl.where(full > 0, D, 0), False, TOKENS)
    for first in range(0, full, TOKENS):
        now = ahead
        entries = load_entries(prepared, zero + first, e, STEP, LONGHORN, TOKENS)
        coming = zero + tl.minimum(first + TOKENS, full - TOKENS)
        ahead = load_values(x, rate, x_step, rate_step, coming, wide, D, EVEN, TOKENS)
        product, h = _compose(product, h, now, entries, rates, LONGHORN, ADJOINT, TOKENS)
    for i in range(full, live):
        now = load_values(x, rate, x_step, rate_step, zero + i, wide, D, EVEN, 1)
        entries = load_entries(prepared, zero + i, e, STEP, LONGHORN, 1)
        product, h = _compose(product, h, now, entries, rates, LONGHORN, ADJOINT, 1)
    store_state(products + slot * STATE * D, e, d, D, D, product, EVEN, VECTOR)
    store_state(ends + slot * STATE * D, e, d, D, D, h, EVEN, VECTOR)
