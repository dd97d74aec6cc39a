"""The diagonal scans forward in Triton, and what their kernels share.

A warp holds the states of BLOCK_D channels of one sequence as [Q, P, BLOCK_D]: P entries of a channel lie in one
thread, Q threads share a channel, and entry q P + p of keys and queries is at [q, p]. Of up to 16 entries a thread
holds all, so that a token's output needs no other thread. Numbers for each channel are [Q, BLOCK_D], alike in all Q.
Triton itself chooses which thread holds what; the shapes, and which loads are contiguous, lead it there.

Where there are too few sequences and channels for the GPU, time is split into parts of SPAN tokens: `summarize` finds
what each does to a state (h -> product of its decays ⊙ h + end), and a part's program adds up those before it.

Keys and queries are used by all channels: `prepare` converts them once, and leaves float32 [tokens, 2, P Q].
"""

import triton
import triton.language as tl

from longseq.kernels.triton_tiles import SECOND_HALF, direction, sequence, token_after

# Of these, neither the values nor the alignment is compiled into a kernel. That D and the strides of numbers for each
# channel are among them also keeps adjacent channels in adjacent threads, one in each.
PLAIN = ["T", "D", "A_half", "x_row", "x_token", "rate_row", "rate_token"]


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
def find_state(base, e, d, D):
    """Pointers to a state [Q, P, BLOCK_D] in [P Q, D].

    The threads beside each other are to hold adjacent channels, and the next ones to share these, not further entries
    of theirs: said to Triton as if shares were adjacent, too, but less so than channels.
    """
    offsets = e[:, :, None] * D + d[None, None, :]
    return base + tl.max_contiguous(offsets, [2 if e.shape[0] > 1 else 1, 1, d.shape[0]])


@triton.jit
def load_state(base, e, d, D, limit, EVEN: tl.constexpr):
    """A state [Q, P, BLOCK_D] from [P Q, D], channels up to the limit; EVEN: all blocks are full and within it."""
    if EVEN:
        return tl.load(find_state(base, e, d, D))
    return tl.load(find_state(base, e, d, D), mask=(e >= 0)[:, :, None] & (d < limit)[None, None, :], other=0.0)


@triton.jit
def store_state(base, e, d, D, limit, h, EVEN: tl.constexpr):
    if EVEN:
        tl.store(find_state(base, e, d, D), h)
    else:
        tl.store(find_state(base, e, d, D), h, mask=(e >= 0)[:, :, None] & (d < limit)[None, None, :])


@triton.jit
def load_rates(A, A_half, e, d, D, REVERSE: tl.constexpr, EVEN: tl.constexpr):
    """Mamba's A as a state; those of the second half of the rows, if that has its own, are A_half numbers on."""
    if REVERSE == SECOND_HALF:
        A += tl.where(direction(REVERSE) < 0, A_half, 0)
    return load_state(A, e, d, D, D, EVEN)


@triton.jit
def load_channels(base, wide, D, EVEN: tl.constexpr):
    """One token's numbers for each channel, [Q, BLOCK_D], as they are stored."""
    if EVEN:
        return tl.load(base + wide)
    return tl.load(base + wide, mask=wide < D, other=0.0)


@triton.jit
def store_channels(base, wide, D, x, EVEN: tl.constexpr):
    """One token's numbers [1, BLOCK_D] for each channel, by the first of the Q threads that hold them."""
    q = tl.arange(0, wide.shape[0])[:, None]
    mask = (q == 0) & (wide >= 0) if EVEN else wide < tl.where(q == 0, D, 0)
    tl.store(base + wide, x + q * 0.0, mask=mask)


@triton.jit
def load_norm(norm, t, LONGHORN: tl.constexpr):
    """The squared norm of one token's key, for Longhorn."""
    if LONGHORN:
        return tl.load(norm + t)
    return 0.0


@triton.jit
def strength(rate, norm, LONGHORN: tl.constexpr):
    """What a key's squared norm leaves of Longhorn's rate, as a factor."""
    if LONGHORN:
        return 1.0 / (1.0 + rate * norm)
    return rate


@triton.jit
def advance(h, x, rate, key, norm, A, LONGHORN: tl.constexpr):
    """The state after one token; `A` is Mamba's, times log2(e)."""
    if LONGHORN:
        step = rate * strength(rate, norm, LONGHORN)
        return h + (step[:, None, :] * key[:, :, None]) * (x[:, None, :] - key[:, :, None] * h)
    return tl.exp2(rate[:, None, :] * A) * h + (rate * x)[:, None, :] * key[:, :, None]


@triton.jit
def prepare(
    key, query, prepared, norm, T, N, key_row, key_token, query_row, query_token,
    LONGHORN: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Keys and queries in float32 as [tokens, 2, WIDTH], zero past N, and the squared norms of keys for Longhorn."""
    blocks = tl.cdiv(T, TOKENS)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    i = (tl.program_id(0) % blocks).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, WIDTH)
    own = (i < T)[:, None] & (e < N)[None, :]
    keys = tl.load(key + row * key_row + (i * key_token)[:, None] + e[None, :], mask=own, other=0.0).to(tl.float32)
    queries = tl.load(query + row * query_row + (i * query_token)[:, None] + e[None, :], mask=own, other=0.0)
    place = prepared + ((row * T + i) * (2 * WIDTH))[:, None] + e[None, :]
    tl.store(place, keys, mask=(i < T)[:, None])
    tl.store(place + WIDTH, queries.to(tl.float32), mask=(i < T)[:, None])
    if LONGHORN:
        tl.store(norm + row * T + i, tl.sum(keys * keys, 1), mask=i < T)


@triton.jit
def _take(h, x, rate, key, query, norm, A, LONGHORN: tl.constexpr):
    """The state after one token, and its output [1, BLOCK_D]."""
    h = advance(h, x.to(tl.float32), rate.to(tl.float32), key, norm, A, LONGHORN)
    return h, tl.sum(tl.sum(h * query[:, :, None], 1), 0)[None, :]


@triton.jit(do_not_specialize=PLAIN)
def forward(
    x, rate, prepared, norm, A, initial, cu_seqlens, sequence_of, products, ends, output, final, checkpoints,
    T, D, A_half, x_row, x_token, rate_row, rate_token,
    HAS_INITIAL: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr, LONGHORN: tl.constexpr,
    SAVE: tl.constexpr, SPAN: tl.constexpr, CHECKPOINT: tl.constexpr, EVEN: tl.constexpr,
    P: tl.constexpr, Q: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr,
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
    h = load_state(initial + n * STATE * D, e, d, D, given, False)
    if SPAN > 0:
        for before in range(first_slot, slot):
            decay = load_state(products + before * STATE * D, e, d, D, D, EVEN)
            h = decay * h + load_state(ends + before * STATE * D, e, d, D, D, EVEN)
    rates = h
    if not LONGHORN:
        rates = load_rates(A, A_half, e, d, D, REVERSE, EVEN)
    x += row * x_row + token * x_token
    rate += row * rate_row + token * rate_token
    prepared += (row * T + token) * (2 * STATE)
    if LONGHORN:
        norm += row * T + token
    output += (row * T + token) * D
    if SAVE:
        checkpoints += (first_checkpoint(n, T, cu_seqlens, PACKED, CHECKPOINT) + done // CHECKPOINT) * STATE * D
    x_step = (zero + x_token) * STEP
    rate_step = (zero + rate_token) * STEP
    output_step = (zero + D) * STEP
    NEXT = 2 * STATE * STEP

    # Numbers for each channel come from far: those of the next block are loaded before this one is worked on.
    full = live // TOKENS * TOKENS
    ahead = ()
    for i in tl.static_range(TOKENS):
        limit = tl.where(full > 0, D, 0)
        x_t = tl.load(x + i * x_step + wide, mask=wide < limit, other=0.0)
        ahead = ahead + (x_t, tl.load(rate + i * rate_step + wide, mask=wide < limit, other=0.0))
    for first in range(0, full, TOKENS):
        if SAVE:
            if first % CHECKPOINT == 0:
                store_state(checkpoints + (zero + first // CHECKPOINT) * STATE * D, e, d, D, D, h, EVEN)
        now = ahead
        ahead = ()
        coming = zero + tl.minimum(first + TOKENS, full - TOKENS)
        # All loads of a block come before its stores, so that they are in flight together.
        entries = ()
        for i in tl.static_range(TOKENS):
            x_t = load_channels(x + coming * x_step + i * x_step, wide, D, EVEN)
            ahead = ahead + (x_t, load_channels(rate + coming * rate_step + i * rate_step, wide, D, EVEN))
            here = prepared + (zero + first) * NEXT + i * NEXT
            norm_t = load_norm(norm, (first + i) * STEP, LONGHORN)
            entries = entries + ((tl.load(here + e), tl.load(here + STATE + e), norm_t),)
        outputs = ()
        for i in tl.static_range(TOKENS):
            key, query, norm_t = entries[i]
            h, o_t = _take(h, now[2 * i], now[2 * i + 1], key, query, norm_t, rates, LONGHORN)
            outputs = outputs + (o_t,)
        for i in tl.static_range(TOKENS):
            store_channels(output + (zero + first) * output_step + i * output_step, wide, D, outputs[i], EVEN)
    for i in range(full, live):
        if SAVE:
            if i % CHECKPOINT == 0:
                store_state(checkpoints + (zero + i // CHECKPOINT) * STATE * D, e, d, D, D, h, EVEN)
        x_t = load_channels(x + i * x_step, wide, D, EVEN)
        rate_t = load_channels(rate + i * rate_step, wide, D, EVEN)
        here = prepared + (zero + i) * NEXT
        norm_t = load_norm(norm, i * STEP, LONGHORN)
        h, o_t = _take(h, x_t, rate_t, tl.load(here + e), tl.load(here + STATE + e), norm_t, rates, LONGHORN)
        store_channels(output + i * output_step, wide, D, o_t, EVEN)
    # The last part of a sequence holds its last token; an empty sequence has one part, which is empty.
    last = tl.where(done + live < length, 0, tl.where(done + live > 0, tl.where(live > 0, D, 0), D))
    store_state(final + n * STATE * D, e, d, D, last, h, False)


@triton.jit(do_not_specialize=PLAIN)
def summarize(
    x, rate, prepared, norm, A, cu_seqlens, sequence_of, products, ends,
    T, D, A_half, x_row, x_token, rate_row, rate_token,
    PACKED: tl.constexpr, REVERSE: tl.constexpr, LONGHORN: tl.constexpr, ADJOINT: tl.constexpr, SPAN: tl.constexpr,
    EVEN: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """What a part of a sequence does to a state: the product of its decays, and the state it leaves from zero.

    The ADJOINT does it to the state's gradient, from the last token to the first; x is then that of the output.
    """
    slot = (tl.program_id(0) // tl.cdiv(D, BLOCK_D)).to(tl.int64)
    _, row, _, _, token, live, _ = find_part(slot, T, cu_seqlens, sequence_of, PACKED, SPAN, REVERSE)
    d, wide, e = find_tile(D, P, Q, BLOCK_D)
    STEP = -direction(REVERSE) if ADJOINT else direction(REVERSE)
    STATE: tl.constexpr = P * Q
    zero = row * 0  # makes offsets 64 bits wide
    if ADJOINT:
        token -= (live - 1) * STEP
    h = load_state(ends, e, d, D, tl.where(live < 0, D, 0), False)  # zeros, laid out as all loaded states are
    product = h + 1.0
    rates = h
    if not LONGHORN:
        rates = load_rates(A, A_half, e, d, D, REVERSE, EVEN)
    x += row * x_row + token * x_token
    rate += row * rate_row + token * rate_token
    prepared += (row * T + token) * (2 * STATE)
    if LONGHORN:
        norm += row * T + token
    x_step = (zero + x_token) * STEP
    rate_step = (zero + rate_token) * STEP

    ahead = ()
    for i in tl.static_range(TOKENS):
        limit = tl.where(live > i, D, 0)
        x_t = tl.load(x + i * x_step + wide, mask=wide < limit, other=0.0)
        ahead = ahead + (x_t, tl.load(rate + i * rate_step + wide, mask=wide < limit, other=0.0))
    for first in range(0, live, TOKENS):
        now = ahead
        ahead = ()
        for i in tl.static_range(TOKENS):
            coming = first + TOKENS + i
            limit = tl.where(coming < live, D, 0)
            x_t = tl.load(x + coming * x_step + wide, mask=wide < limit, other=0.0)
            ahead = ahead + (x_t, tl.load(rate + coming * rate_step + wide, mask=wide < limit, other=0.0))
        for i in tl.static_range(TOKENS):
            t = tl.minimum(first + i, live - 1) * STEP  # past the end rate is 0
            value = now[2 * i].to(tl.float32)
            rate_t = now[2 * i + 1].to(tl.float32)
            here = prepared + (zero + t) * (2 * STATE)
            key = tl.load(here + e)
            if LONGHORN:
                rate_t *= strength(rate_t, tl.load(norm + t), LONGHORN)
                decay = 1.0 - rate_t[:, None, :] * (key * key)[:, :, None]
            else:
                decay = tl.exp2(rate_t[:, None, :] * rates)
            if ADJOINT:
                h = decay * (h + value[:, None, :] * tl.load(here + STATE + e)[:, :, None])
            else:
                h = decay * h + (rate_t * value)[:, None, :] * key[:, :, None]
            product = product * decay
    store_state(products + slot * STATE * D, e, d, D, D, product, EVEN)
    store_state(ends + slot * STATE * D, e, d, D, D, h, EVEN)
