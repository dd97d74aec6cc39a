"""The diagonal scans forward in Triton, and what all kernels of the scans share.

A warp holds the states of BLOCK_D channels of one sequence as [Q, P, BLOCK_D]. P entries of a channel lie in one
thread, Q threads share a channel, and entry q P + p of keys and queries is at [q, p]. A thread holds the same entries
of VECTOR adjacent channels, for which it reads keys and queries once. Numbers for each channel are [Q, BLOCK_D], equal
for all Q. Triton itself chooses which thread holds what; the shapes and the hints about contiguous loads lead to this
layout.

Where sequences and channels are too few for the GPU, time is split into parts of SPAN tokens. `summarize` finds what
each part does to a state (h -> product of its decays ⊙ h + end), and the program of a part first composes those of the
parts before it.

All channels use the same keys and queries. `prepare` converts them once to rows of float32, [tokens, 2 P Q]. For
Longhorn, a row has four more numbers: the first is the key's squared norm, the others are padding.

There are few warps, so that a loop waits for memory unless many loads are under way long before their use. Therefore
all loads of a block of tokens come first. Those of x and rate, which come from the GPU's memory, are loaded one block
ahead.
"""

import os

import triton
import triton.language as tl

from longseq.kernels.triton_tiles import SECOND_HALF, direction, sequence, token_after

# Triton must specialise neither on the values of these arguments nor on their divisibility.
UNSPECIALISED = ["T", "A_half"]
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def find_part(slot, T, cu_seqlens, sequence_of, SPAN: tl.constexpr, REVERSE: tl.constexpr):
    """This program's part of a sequence, in the order of reading; the whole sequence if SPAN is 0.

    `sequence_of` has the number of the sequence of each slot, where sequences are packed. Returns the number of the
    sequence, its batch row, length and first slot; the first token of the part, its number of tokens, and the number of
    tokens before it.
    """
    n = slot
    if cu_seqlens is not None:
        n = tl.load(sequence_of + slot).to(tl.int64)
    elif SPAN > 0:
        n = slot // tl.cdiv(T, SPAN)
    row, start, end, first = sequence(n, T, cu_seqlens, cu_seqlens is not None, SPAN if SPAN > 0 else 1)
    length = (end - start).to(tl.int32)
    done = length * 0
    live = length
    if SPAN > 0:
        done = (slot - first).to(tl.int32) * SPAN
        live = tl.minimum(tl.maximum(length - done, 0), SPAN)
    return n, row, length, first, token_after(done, start, end, REVERSE), live, done


@triton.jit
def first_checkpoint(n, T, cu_seqlens, CHECKPOINT: tl.constexpr):
    """The index of a sequence's first checkpoint."""
    return sequence(n, T, cu_seqlens, cu_seqlens is not None, CHECKPOINT)[3]


@triton.jit
def find_tile(D, P: tl.constexpr, Q: tl.constexpr, BLOCK_D: tl.constexpr):
    """This program's channels as [BLOCK_D] and as [Q, BLOCK_D], and the entries [Q, P]."""
    d = (tl.program_id(0) % tl.cdiv(D, BLOCK_D)) * BLOCK_D + tl.arange(0, BLOCK_D)
    q = tl.arange(0, Q)
    return d, d[None, :] + (q * 0)[:, None], (q * P)[:, None] + tl.arange(0, P)[None, :]


@triton.jit
def find_state(base, e, d, D, VECTOR: tl.constexpr):
    """Pointers to a state [Q, P, BLOCK_D] in a matrix [P Q, D], with hints for Triton's choice of a layout.

    One thread is to hold VECTOR adjacent channels, the next threads the next channels, and further threads the other
    shares q of these channels. Triton orders the dimensions by contiguity, so `max_contiguous` claims long runs of
    channels and, although it is not true, runs of two along q. Triton gives one thread as many channels as the
    alignment allows, so `multiple_of` claims an alignment of VECTOR numbers only.
    """
    offsets = e[:, :, None] * D + d[None, None, :]
    offsets = tl.max_contiguous(offsets, [2 if e.shape[0] > 1 else 1, 1, d.shape[0]])
    return tl.multiple_of(base + offsets, [4 * VECTOR, 4 * VECTOR, 4 * VECTOR])


@triton.jit
def load_state(base, e, d, D, limit, EVEN: tl.constexpr, VECTOR: tl.constexpr):
    """A state [Q, P, BLOCK_D] from [P Q, D]; zero for channels from `limit` on. EVEN: all blocks are full, no mask is
    needed.
    """
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
    """Mamba's A as a state. The second half of the rows has its own A, `A_half` numbers on, if that is not 0."""
    if REVERSE == SECOND_HALF:
        A += tl.where(direction(REVERSE) < 0, A_half, 0)
    return load_state(A, e, d, D, D, EVEN, VECTOR)


@triton.jit
def load_channels(base, wide, limit, EVEN: tl.constexpr):
    """One token's numbers for each channel below `limit`, [Q, BLOCK_D], in their stored type."""
    if EVEN:
        return tl.load(base + wide)
    return tl.load(base + wide, mask=wide < limit, other=0.0)


@triton.jit
def store_channels(base, wide, D, x, EVEN: tl.constexpr):
    """Store one token's numbers [1, BLOCK_D] for each channel; the first of the Q threads of a channel stores."""
    q = tl.arange(0, wide.shape[0])[:, None]
    mask = (q == 0) & (wide >= 0) if EVEN else wide < tl.where(q == 0, D, 0)
    tl.store(base + wide, x + q * 0.0, mask=mask)


@triton.jit
def load_values(x, rate, x_step, rate_step, first, wide, limit, EVEN: tl.constexpr, TOKENS: tl.constexpr):
    """x and rate of TOKENS tokens from `first` on, in their stored type."""
    x += first * x_step
    rate += first * rate_step
    values = ()
    for i in tl.static_range(TOKENS):
        x_t = load_channels(x + i * x_step, wide, limit, EVEN)
        values = values + ((x_t, load_channels(rate + i * rate_step, wide, limit, EVEN)),)
    return values


@triton.jit
def row_of(STATE: tl.constexpr, LONGHORN: tl.constexpr):
    """The numbers of a prepared token. Rows begin at multiples of 16 bytes, which are loaded at once."""
    return 2 * STATE + 4 if LONGHORN else 2 * STATE


@triton.jit
def load_entries(prepared, first, e, STEP, LONGHORN: tl.constexpr, TOKENS: tl.constexpr):
    """Key, query, and (Longhorn) the key's squared norm of TOKENS tokens from `first` on."""
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
    """Longhorn's factor 1 / (1 + rate norm), for the squared norm of the key. Mamba does not use the result."""
    if not LONGHORN:
        return rate
    if INTERPRETED:
        return 1.0 / (1.0 + rate * norm)
    # One instruction instead of eight. It is as accurate as the division, but flushes results below 1e-38 to zero.
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + rate * norm], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def advance(h, x, rate, key, norm, A, LONGHORN: tl.constexpr):
    """The state after one token. `A` is Mamba's A times log2(e)."""
    if LONGHORN:
        step = rate * strength(rate, norm, LONGHORN)
        return h + (step[:, None, :] * key[:, :, None]) * (x[:, None, :] - key[:, :, None] * h)
    return tl.exp2(rate[:, None, :] * A) * h + (rate * x)[:, None, :] * key[:, :, None]


@triton.jit
def prepare(
    key, query, prepared, T, N, key_row, key_token, query_row, query_token,
    LONGHORN: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Rows of keys and queries in float32, zero from entry N on, and (Longhorn) the squared norms of keys."""
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
    """The state after TOKENS tokens, whose outputs it writes."""
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
    HAS_INITIAL: tl.constexpr, REVERSE: tl.constexpr, LONGHORN: tl.constexpr,
    SAVE: tl.constexpr, SPAN: tl.constexpr, CHECKPOINT: tl.constexpr, EVEN: tl.constexpr,
    P: tl.constexpr, Q: tl.constexpr, BLOCK_D: tl.constexpr, VECTOR: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The outputs and the final state; if SAVE, also the state before every CHECKPOINT-th token."""
    slot = (tl.program_id(0) // tl.cdiv(D, BLOCK_D)).to(tl.int64)
    n, row, length, first_slot, token, live, done = find_part(slot, T, cu_seqlens, sequence_of, SPAN, REVERSE)
    d, wide, e = find_tile(D, P, Q, BLOCK_D)
    STEP = direction(REVERSE)
    STATE: tl.constexpr = P * Q
    zero = n * 0  # makes offsets 64 bits wide

    # Without a given state the mask is false, but the zeros are loaded, too: what depends on a load has its layout.
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
        checkpoints += (first_checkpoint(n, T, cu_seqlens, CHECKPOINT) + done // CHECKPOINT) * STATE * D
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
    # The last part of a sequence contains its last token. An empty sequence has one part, which is empty.
    last = tl.where(done + live < length, 0, tl.where(done + live > 0, tl.where(live > 0, D, 0), D))
    store_state(final + n * STATE * D, e, d, D, last, h, False, VECTOR)


@triton.jit
def _compose(
    product, h, values, entries, rates, LONGHORN: tl.constexpr, ADJOINT: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """The product of decays and the state after TOKENS more tokens."""
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
    REVERSE: tl.constexpr, LONGHORN: tl.constexpr, ADJOINT: tl.constexpr, SPAN: tl.constexpr, EVEN: tl.constexpr,
    P: tl.constexpr, Q: tl.constexpr, BLOCK_D: tl.constexpr, VECTOR: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """What a part of a sequence does to a state: the product of its decays, and the final state for zero as the first.

    ADJOINT: the same for the gradient of the state, from the last token to the first; x is then the gradient of the
    output.
    """
    slot = (tl.program_id(0) // tl.cdiv(D, BLOCK_D)).to(tl.int64)
    _, row, length, _, token, live, done = find_part(slot, T, cu_seqlens, sequence_of, SPAN, REVERSE)
    # The last part is not needed (ADJOINT: the first), as no part comes after it.
    live = tl.where(done > 0 if ADJOINT else done + live < length, live, 0)
    d, wide, e = find_tile(D, P, Q, BLOCK_D)
    STEP = -direction(REVERSE) if ADJOINT else direction(REVERSE)
    STATE: tl.constexpr = P * Q
    zero = row * 0  # makes offsets 64 bits wide
    if ADJOINT:
        token -= (live - 1) * STEP
    # Zeros, but loaded: what depends on a load has its layout.
    h = load_state(ends, e, d, D, tl.where(live < 0, D, 0), False, VECTOR)
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
