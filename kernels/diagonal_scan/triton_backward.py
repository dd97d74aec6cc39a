"""The diagonal scans backward in Triton. States lie as in triton_forward.py.

A program takes the blocks between checkpoints from the last to the first. It walks through a block once, and leaves
the state before every few tokens, a piece, in scratch memory, which stays in the GPU's cache. Then it takes the pieces
from the last to the first: it computes a piece's states again, keeps them in registers, and runs the adjoint recurrence
through them. Sums over all channels (the gradients of keys and queries) are written once a program, and `gather` adds
them in a fixed order: the result is the same in every run.
"""

import triton
import triton.language as tl

from longseq.kernels.diagonal_scan.triton_forward import (
    advance,
    find_part,
    find_tile,
    first_checkpoint,
    load_channels,
    load_norm,
    load_rates,
    load_state,
    store_channels,
    store_state,
    strength,
)
from longseq.kernels.triton_tiles import direction


@triton.jit
def _within_threads(x, VECTOR: tl.constexpr):
    """Sums over the VECTOR adjacent channels that one thread holds: [Q, P, BLOCK_D / VECTOR]."""
    return tl.sum(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2] // VECTOR, VECTOR)), 3)


@triton.jit
def _step_back(
    g, d_rates, before, after, factor, do_t, query, x, rate, prepared, d_x, d_rate, d_prepared, rates, wide, e, D,
    LONGHORN: tl.constexpr, EVEN: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """From the gradient g of the state after one token to that of the state before; the pointers are to the token.

    All gradients are sums of products with g; those over entries are for a channel, those over channels for an entry.
    """
    STATE: tl.constexpr = e.shape[0] * e.shape[1]
    x_t = load_channels(x, wide, D, EVEN).to(tl.float32)
    rate_t = load_channels(rate, wide, D, EVEN).to(tl.float32)
    do_t = do_t.to(tl.float32)
    key = tl.load(prepared + e)
    keys = key[:, :, None]
    g += do_t[:, None, :] * query[:, :, None]
    d_query = tl.sum(do_t[:, None, :] * after, 2)
    along = tl.sum(tl.sum(g * keys, 1), 0)[None, :]
    if LONGHORN:
        step = rate_t * factor
        pull = g * (x_t[:, None, :] - keys * before)
        d_step = tl.sum(tl.sum(pull * keys, 1), 0)[None, :]
        d_x_t = step * along
        d_rate_t = d_step * (factor * factor)
        # The key acts through the step's norm, too: there alike for all entries but for its own factor.
        turn = (d_step * (step * step) + tl.arange(0, e.shape[0])[:, None] * 0.0)[:, None, :]
        d_key = _within_threads(pull * (2.0 * step)[:, None, :], VECTOR)
        d_key -= _within_threads(g * (step * x_t)[:, None, :], VECTOR)
        d_key = tl.sum(d_key - 2.0 * _within_threads(turn, VECTOR) * keys, 2)
        g *= 1.0 - step[:, None, :] * (keys * keys)
    else:
        d_key = tl.sum((rate_t * x_t)[:, None, :] * g, 2)
        g *= tl.exp2(rate_t[:, None, :] * rates)
        d_exponent = g * before
        d_rates += d_exponent * rate_t[:, None, :]
        LN2: tl.constexpr = 0.6931471805599453
        d_rate_t = LN2 * tl.sum(tl.sum(d_exponent * rates, 1), 0)[None, :] + x_t * along
        d_x_t = rate_t * along
    store_channels(d_x, wide, D, d_x_t, EVEN)
    store_channels(d_rate, wide, D, d_rate_t, EVEN)
    both = e[:, :, None] + STATE * tl.arange(0, 2)[None, None, :]
    tl.store(d_prepared + both, tl.join(d_key, d_query))
    return g, d_rates


@triton.jit(do_not_specialize=["T", "tokens", "A_half"])
def backward(
    x, rate, prepared, norm, A, cu_seqlens, sequence_of, products, ends, checkpoints, scratch, d_output, d_final,
    d_x, d_rate, d_prepared, d_A, d_initial,
    T, D, tokens, A_half, x_row, x_token, rate_row, rate_token,
    HAS_FINAL: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr, LONGHORN: tl.constexpr,
    SPAN: tl.constexpr, CHECKPOINT: tl.constexpr, EVEN: tl.constexpr,
    P: tl.constexpr, Q: tl.constexpr, BLOCK_D: tl.constexpr, VECTOR: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Gradients of x and rate, of keys and queries for each block of channels, of A for each part, of the state."""
    slot = (tl.program_id(0) // tl.cdiv(D, BLOCK_D)).to(tl.int64)
    block = (tl.program_id(0) % tl.cdiv(D, BLOCK_D)).to(tl.int64)
    n, row, length, first_slot, token, live, done = find_part(slot, T, cu_seqlens, sequence_of, PACKED, SPAN, REVERSE)
    d, wide, e = find_tile(D, P, Q, BLOCK_D)
    STEP = direction(REVERSE)
    STATE: tl.constexpr = P * Q
    zero = n * 0  # makes offsets 64 bits wide

    # Without a gradient nothing is read, but a load it must be: all that depends on it is laid out as it is.
    given = D if HAS_FINAL else tl.where(live < 0, D, 0)
    g = load_state(d_final + n * STATE * D, e, d, D, given, False)
    if SPAN > 0:
        for behind in range(0, tl.cdiv(length, SPAN) - 1 - done // SPAN):
            place = (first_slot + tl.cdiv(length, SPAN) - 1 - behind) * STATE * D
            g = load_state(products + place, e, d, D, D, EVEN) * g + load_state(ends + place, e, d, D, D, EVEN)
    rates = g
    if not LONGHORN:
        rates = load_rates(A, A_half, e, d, D, REVERSE, EVEN)
    d_rates = g * 0.0
    x += row * x_row + token * x_token
    rate += row * rate_row + token * rate_token
    prepared += (row * T + token) * (2 * STATE)
    if LONGHORN:
        norm += row * T + token
    d_output += (row * T + token) * D
    d_x += (row * T + token) * D
    d_rate += (row * T + token) * D
    d_prepared += (block * tokens + row * T + token) * (2 * STATE)  # partial sums: [blocks, tokens, 2, P Q]
    checkpoints += (first_checkpoint(n, T, cu_seqlens, PACKED, CHECKPOINT) + done // CHECKPOINT) * STATE * D
    scratch += tl.program_id(0).to(tl.int64) * (CHECKPOINT // TOKENS * STATE * BLOCK_D)
    own = tl.arange(0, BLOCK_D)
    x_step = (zero + x_token) * STEP
    rate_step = (zero + rate_token) * STEP
    output_step = (zero + D) * STEP
    NEXT = 2 * STATE * STEP

    for behind in range(0, tl.cdiv(live, CHECKPOINT)):
        number = tl.cdiv(live, CHECKPOINT) - 1 - behind
        begin = number * CHECKPOINT
        h = load_state(checkpoints + (zero + number) * STATE * D, e, d, D, D, EVEN)
        pieces = tl.minimum(live - begin, CHECKPOINT) // TOKENS
        rest = tl.minimum(live - begin, CHECKPOINT) - pieces * TOKENS
        # The state before the last piece, or before the rest, stays at hand. Loads are a piece ahead of their use.
        if CHECKPOINT > TOKENS:
            count = pieces - tl.where(rest > 0, 0, 1)
            ahead = ()
            for i in tl.static_range(TOKENS):
                t = zero + tl.minimum(begin + i, live - 1)
                near = load_channels(x + t * x_step, wide, D, EVEN)
                ahead = ahead + (near, load_channels(rate + t * rate_step, wide, D, EVEN))
                ahead = ahead + (tl.load(prepared + t * NEXT + e), load_norm(norm, t * STEP, LONGHORN))
            for piece in range(0, count):
                now = ahead
                ahead = ()
                first = zero + (begin + tl.minimum(piece + 1, count - 1) * TOKENS)
                for i in tl.static_range(TOKENS):
                    near = load_channels(x + first * x_step + i * x_step, wide, D, EVEN)
                    ahead = ahead + (near, load_channels(rate + first * rate_step + i * rate_step, wide, D, EVEN))
                    key_t = tl.load(prepared + first * NEXT + i * NEXT + e)
                    ahead = ahead + (key_t, load_norm(norm, (first + i) * STEP, LONGHORN))
                store_state(scratch + piece * (STATE * BLOCK_D), e, own, BLOCK_D, BLOCK_D, h, True)
                for i in tl.static_range(TOKENS):
                    x_t, rate_t = now[4 * i].to(tl.float32), now[4 * i + 1].to(tl.float32)
                    h = advance(h, x_t, rate_t, now[4 * i + 2], now[4 * i + 3], rates, LONGHORN)
            tl.debug_barrier()
        # Of a rest of fewer tokens than a piece the states are computed again for each.
        for left in range(0, rest):
            before = h
            for between in range(0, rest - 1 - left):
                t = zero + (begin + pieces * TOKENS + between)
                x_t = load_channels(x + t * x_step, wide, D, EVEN).to(tl.float32)
                rate_t = load_channels(rate + t * rate_step, wide, D, EVEN).to(tl.float32)
                key_t = tl.load(prepared + t * NEXT + e)
                before = advance(before, x_t, rate_t, key_t, load_norm(norm, t * STEP, LONGHORN), rates, LONGHORN)
            t = zero + (begin + pieces * TOKENS + rest - 1 - left)
            x_t = load_channels(x + t * x_step, wide, D, EVEN).to(tl.float32)
            rate_t = load_channels(rate + t * rate_step, wide, D, EVEN).to(tl.float32)
            do_t = load_channels(d_output + t * output_step, wide, D, EVEN)
            norm_t = load_norm(norm, t * STEP, LONGHORN)
            after = advance(before, x_t, rate_t, tl.load(prepared + t * NEXT + e), norm_t, rates, LONGHORN)
            g, d_rates = _step_back(
                g, d_rates, before, after, strength(rate_t, norm_t, LONGHORN), do_t,
                tl.load(prepared + t * NEXT + STATE + e), x + t * x_step, rate + t * rate_step, prepared + t * NEXT,
                d_x + t * output_step, d_rate + t * output_step, d_prepared + t * NEXT,
                rates, wide, e, D, LONGHORN, EVEN, VECTOR,
            )  # fmt: skip
        for left in range(0, pieces):
            piece = pieces - 1 - left
            if CHECKPOINT > TOKENS:
                if left + rest > 0:
                    h = load_state(scratch + piece * (STATE * BLOCK_D), e, own, BLOCK_D, BLOCK_D, True)
            first = zero + (begin + piece * TOKENS)
            states = (h,)
            factors = ()
            coming = ()  # what is used only on the way back, and comes from far
            for i in tl.static_range(TOKENS):
                x_t = load_channels(x + first * x_step + i * x_step, wide, D, EVEN).to(tl.float32)
                rate_t = load_channels(rate + first * rate_step + i * rate_step, wide, D, EVEN).to(tl.float32)
                key_t = tl.load(prepared + first * NEXT + i * NEXT + e)
                norm_t = load_norm(norm, (first + i) * STEP, LONGHORN)
                factors = factors + (strength(rate_t, norm_t, LONGHORN),)
                h = advance(h, x_t, rate_t, key_t, norm_t, rates, LONGHORN)
                states = states + (h,)
                do_t = load_channels(d_output + first * output_step + i * output_step, wide, D, EVEN)
                coming = coming + ((do_t, tl.load(prepared + first * NEXT + i * NEXT + STATE + e)),)
            for i in tl.static_range(TOKENS - 1, -1, -1):
                g, d_rates = _step_back(
                    g, d_rates, states[i], states[i + 1], factors[i], coming[i][0], coming[i][1],
                    x + first * x_step + i * x_step, rate + first * rate_step + i * rate_step,
                    prepared + first * NEXT + i * NEXT, d_x + first * output_step + i * output_step,
                    d_rate + first * output_step + i * output_step, d_prepared + first * NEXT + i * NEXT,
                    rates, wide, e, D, LONGHORN, EVEN, VECTOR,
                )  # fmt: skip
    store_state(d_initial + n * STATE * D, e, d, D, tl.where(done == 0, D, 0), g, False)
    if not LONGHORN:
        LN2: tl.constexpr = 0.6931471805599453
        store_state(d_A + slot * STATE * D, e, d, D, D, LN2 * d_rates, EVEN)


@triton.jit(do_not_specialize=["blocks", "tokens"])
def gather(d_prepared, d_key, d_query, blocks, tokens, N: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr):
    """Sums over the blocks of channels, [tokens, N] each, of the gradients of keys and queries."""
    i = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, 2 * WIDTH)
    live = (i < tokens)[:, None]
    place = d_prepared + i[:, None] * (2 * WIDTH) + e[None, :]
    total = tl.zeros((TOKENS, 2 * WIDTH), tl.float32)
    for _ in range(0, blocks):
        total += tl.load(place, mask=live, other=0.0)
        place += tokens.to(tl.int64) * (2 * WIDTH)
    tl.store(d_key + i[:, None] * N + e[None, :], total, mask=live & (e < N)[None, :])
    query = e - WIDTH
    own = live & (query >= 0)[None, :] & (query < N)[None, :]
    tl.store(d_query + i[:, None] * N + query[None, :], total, mask=own)
