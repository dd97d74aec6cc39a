"""The diagonal scans backward in Triton. The layout of states is described in triton_forward.py.

A program takes the blocks of tokens between checkpoints from the last to the first. A piece is TOKENS tokens of a
block. The program first runs through the block forward and stores the state before each piece in scratch memory, which
stays in the GPU's cache. Then it takes the pieces from the last to the first: it computes the states of a piece again,
keeps in registers what their gradients need, and runs the adjoint recurrence. All loads of a piece come first, all its
stores last. The gradients of keys and queries are sums over all channels: each program writes its part, and `gather`
adds the parts in a fixed order, so that the result is the same in every run.
"""

import triton
import triton.language as tl

from longseq.kernels.diagonal_scan.triton_forward import (
    advance,
    find_part,
    find_tile,
    first_checkpoint,
    load_channels,
    load_entries,
    load_rates,
    load_state,
    load_values,
    row_of,
    store_channels,
    store_state,
    strength,
)
from longseq.kernels.triton_tiles import direction

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _within_threads(x, VECTOR: tl.constexpr):
    """Sums over the VECTOR adjacent channels that one thread holds: [Q, P, BLOCK_D / VECTOR]."""
    return tl.sum(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2] // VECTOR, VECTOR)), 3)


@triton.jit
def _stack(parts, TOKENS: tl.constexpr):
    """A tuple of 1, 2 or 4 tensors as one tensor, [..., TOKENS]."""
    stacked = tl.expand_dims(parts[0], 4)
    if TOKENS == 2:
        stacked = tl.join(parts[0], parts[1])
    if TOKENS == 4:
        four = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))
        stacked = tl.reshape(four, (four.shape[0], four.shape[1], four.shape[2], four.shape[3], 4))
    return stacked


@triton.jit
def _load_gradients(d_output, output_step, first, wide, limit, EVEN: tl.constexpr, TOKENS: tl.constexpr):
    """The gradients of the outputs of TOKENS tokens from `first` on, in their stored type."""
    d_output += first * output_step
    gradients = ()
    for i in tl.static_range(TOKENS):
        gradients = gradients + (load_channels(d_output + i * output_step, wide, limit, EVEN),)
    return gradients


@triton.jit
def _step_back(
    g, d_rates, kept, factor, do_t, x_t, rate_t, key, query, rates, LONGHORN: tl.constexpr, VECTOR: tl.constexpr
):  # fmt: skip
    """The gradient of the state before one token from g, that of the state after it, and the token's own gradients.

    `kept` is x minus what the state holds for the key (Longhorn), or the state before the token. Gradients of a channel
    are sums over entries. Gradients of an entry are sums over channels, here only over those of one thread.
    """
    keys = key[:, :, None]
    g += do_t[:, None, :] * query[:, :, None]
    along = tl.sum(tl.sum(g * keys, 1), 0)[None, :]
    if LONGHORN:
        step = rate_t * factor
        pull = g * kept
        d_step = tl.sum(tl.sum(pull * keys, 1), 0)[None, :]
        d_x_t = step * along
        d_rate_t = d_step * (factor * factor)
        # The key also acts through its squared norm in the step. That gradient is the same for all entries, up to the
        # factor key.
        turn = (d_step * (step * step))[:, None, :]
        d_key = _within_threads(pull * (2.0 * step)[:, None, :], VECTOR)
        d_key -= _within_threads(g * (step * x_t)[:, None, :], VECTOR)
        d_key -= 2.0 * _within_threads(turn, VECTOR) * keys
        g *= 1.0 - step[:, None, :] * (keys * keys)
    else:
        d_key = _within_threads((rate_t * x_t)[:, None, :] * g, VECTOR)
        g *= tl.exp2(rate_t[:, None, :] * rates)
        d_exponent = g * kept
        d_rates += d_exponent * rate_t[:, None, :]
        d_rate_t = tl.sum(tl.sum(d_exponent * rates, 1), 0)[None, :] * LN2 + x_t * along
        d_x_t = rate_t * along
    return g, d_rates, d_x_t, d_rate_t, d_key


@triton.jit
def _walk_back(
    h, g, d_rates, values, entries, d_outputs, d_x, d_rate, d_prepared, first, output_step, rates, wide, e, D, STEP,
    LONGHORN: tl.constexpr, EVEN: tl.constexpr, VECTOR: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """From g, the gradient of the state after TOKENS tokens, to that of the state h before them.

    `first` is the first of these tokens, counted from the one to whose gradients the pointers point.
    """
    STATE: tl.constexpr = e.shape[0] * e.shape[1]
    kept = ()
    factors = ()
    d_queries = ()
    for i in tl.static_range(TOKENS):
        x_t, rate_t = values[i][0].to(tl.float32), values[i][1].to(tl.float32)
        key, _, norm_t = entries[i]
        factors = factors + (strength(rate_t, norm_t, LONGHORN),)
        if LONGHORN:
            kept = kept + (x_t[:, None, :] - key[:, :, None] * h,)
            h += ((rate_t * factors[i])[:, None, :] * key[:, :, None]) * kept[i]
        else:
            kept = kept + (h,)
            h = advance(h, x_t, rate_t, key, norm_t, rates, LONGHORN)
        d_queries = d_queries + (_within_threads(d_outputs[i].to(tl.float32)[:, None, :] * h, VECTOR),)
    d_values = ()
    d_entries = ()
    for i in tl.static_range(TOKENS - 1, -1, -1):
        g, d_rates, d_x_t, d_rate_t, d_key = _step_back(
            g, d_rates, kept[i], factors[i], d_outputs[i].to(tl.float32), values[i][0].to(tl.float32),
            values[i][1].to(tl.float32), entries[i][0], entries[i][1], rates, LONGHORN, VECTOR,
        )  # fmt: skip
        d_values = ((d_x_t.to(d_x.dtype.element_ty), d_rate_t.to(d_rate.dtype.element_ty)),) + d_values
        d_entries = (tl.join(d_key, d_queries[i]),) + d_entries
    d_prepared += first * (2 * STATE * STEP)
    place = e[:, :, None, None] + STATE * tl.arange(0, 2)[None, None, :, None]
    place += (2 * STATE * STEP) * tl.arange(0, TOKENS)[None, None, None, :]
    tl.store(d_prepared + place, tl.sum(_stack(d_entries, TOKENS), 2))
    d_x += first * output_step
    d_rate += first * output_step
    for i in tl.static_range(TOKENS):
        store_channels(d_x + i * output_step, wide, D, d_values[i][0], EVEN)
        store_channels(d_rate + i * output_step, wide, D, d_values[i][1], EVEN)
    return g, d_rates


@triton.jit(do_not_specialize=["T", "tokens", "output_rows", "A_half"])
def backward(
    x, rate, prepared, A, cu_seqlens, sequence_of, products, ends, checkpoints, scratch, d_output, d_final,
    d_x, d_rate, d_prepared, d_A, d_initial,
    T, D, tokens, output_rows, A_half, x_row, x_token, rate_row, rate_token,
    HAS_FINAL: tl.constexpr, REVERSE: tl.constexpr, LONGHORN: tl.constexpr,
    SPAN: tl.constexpr, CHECKPOINT: tl.constexpr, EVEN: tl.constexpr,
    P: tl.constexpr, Q: tl.constexpr, BLOCK_D: tl.constexpr, VECTOR: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The gradients of x and rate, of keys and queries for each block of channels, of A for each part, and of the
    state.

    d_output has `output_rows` rows: row r of x has the gradient r % output_rows.
    """
    slot = (tl.program_id(0) // tl.cdiv(D, BLOCK_D)).to(tl.int64)
    block = (tl.program_id(0) % tl.cdiv(D, BLOCK_D)).to(tl.int64)
    n, row, length, first_slot, token, live, done = find_part(slot, T, cu_seqlens, sequence_of, SPAN, REVERSE)
    d, wide, e = find_tile(D, P, Q, BLOCK_D)
    STEP = direction(REVERSE)
    STATE: tl.constexpr = P * Q
    zero = n * 0  # makes offsets 64 bits wide

    # Without a given gradient the mask is false, but the zeros are loaded, too: what depends on a load has its layout.
    given = D if HAS_FINAL else tl.where(live < 0, D, 0)
    g = load_state(d_final + n * STATE * D, e, d, D, given, False, VECTOR)
    if SPAN > 0:
        for behind in range(0, tl.cdiv(length, SPAN) - 1 - done // SPAN):
            place = (first_slot + tl.cdiv(length, SPAN) - 1 - behind) * STATE * D
            decay = load_state(products + place, e, d, D, D, EVEN, VECTOR)
            g = decay * g + load_state(ends + place, e, d, D, D, EVEN, VECTOR)
    rates = g
    if not LONGHORN:
        rates = load_rates(A, A_half, e, d, D, REVERSE, EVEN, VECTOR)
    d_rates = g * 0.0  # of A; not used, and so not computed, for Longhorn
    x += row * x_row + token * x_token
    rate += row * rate_row + token * rate_token
    prepared += (row * T + token) * row_of(STATE, LONGHORN)
    d_output += (row % output_rows * T + token) * D
    d_x += (row * T + token) * D
    d_rate += (row * T + token) * D
    d_prepared += (block * tokens + row * T + token) * (2 * STATE)  # partial sums: [blocks, tokens, 2, P Q]
    checkpoints += (first_checkpoint(n, T, cu_seqlens, CHECKPOINT) + done // CHECKPOINT) * STATE * D
    scratch += tl.program_id(0).to(tl.int64) * (CHECKPOINT // TOKENS * STATE * BLOCK_D)
    own = tl.arange(0, BLOCK_D)
    x_step = (zero + x_token) * STEP
    rate_step = (zero + rate_token) * STEP
    output_step = (zero + D) * STEP

    for behind in range(0, tl.cdiv(live, CHECKPOINT)):
        number = tl.cdiv(live, CHECKPOINT) - 1 - behind
        begin = number * CHECKPOINT
        h = load_state(checkpoints + (zero + number) * STATE * D, e, d, D, D, EVEN, VECTOR)
        pieces = tl.minimum(live - begin, CHECKPOINT) // TOKENS
        rest = tl.minimum(live - begin, CHECKPOINT) - pieces * TOKENS
        last = zero + (begin + (pieces - 1) * TOKENS)
        d_ahead = _load_gradients(d_output, output_step, last, wide, tl.where(pieces > 0, D, 0), False, TOKENS)
        # The state before the last piece, or before the rest, stays in registers.
        if CHECKPOINT > TOKENS:
            count = pieces - tl.where(rest > 0, 0, 1)
            ahead = load_values(
                x, rate, x_step, rate_step, zero + begin, wide, tl.where(count > 0, D, 0), False, TOKENS
            )  # fmt: skip
            for piece in range(0, count):
                now = ahead
                entries = load_entries(prepared, zero + (begin + piece * TOKENS), e, STEP, LONGHORN, TOKENS)
                coming = zero + (begin + tl.minimum(piece + 1, count - 1) * TOKENS)
                ahead = load_values(x, rate, x_step, rate_step, coming, wide, D, EVEN, TOKENS)
                store_state(scratch + piece * (STATE * BLOCK_D), e, own, BLOCK_D, BLOCK_D, h, True, VECTOR)
                for i in tl.static_range(TOKENS):
                    x_t, rate_t = now[i][0].to(tl.float32), now[i][1].to(tl.float32)
                    h = advance(h, x_t, rate_t, entries[i][0], entries[i][2], rates, LONGHORN)
            tl.debug_barrier()
        # The rest has fewer tokens than a piece: the state before each of its tokens is computed again from its start.
        for left in range(0, rest):
            before = h
            t = zero + (begin + pieces * TOKENS)
            for _ in range(0, rest - 1 - left):
                values = load_values(x, rate, x_step, rate_step, t, wide, D, EVEN, 1)
                entry = load_entries(prepared, t, e, STEP, LONGHORN, 1)[0]
                x_t, rate_t = values[0][0].to(tl.float32), values[0][1].to(tl.float32)
                before = advance(before, x_t, rate_t, entry[0], entry[2], rates, LONGHORN)
                t += 1
            g, d_rates = _walk_back(
                before, g, d_rates, load_values(x, rate, x_step, rate_step, t, wide, D, EVEN, 1),
                load_entries(prepared, t, e, STEP, LONGHORN, 1),
                _load_gradients(d_output, output_step, t, wide, D, EVEN, 1),
                d_x, d_rate, d_prepared, t, output_step, rates, wide, e, D, STEP, LONGHORN, EVEN, VECTOR, 1,
            )  # fmt: skip
        for left in range(0, pieces):
            piece = pieces - 1 - left
            if CHECKPOINT > TOKENS:
                if left + rest > 0:
                    h = load_state(scratch + piece * (STATE * BLOCK_D), e, own, BLOCK_D, BLOCK_D, True, VECTOR)
            t = zero + (begin + piece * TOKENS)
            values = load_values(x, rate, x_step, rate_step, t, wide, D, EVEN, TOKENS)
            entries = load_entries(prepared, t, e, STEP, LONGHORN, TOKENS)
            d_now = d_ahead
            coming = zero + (begin + tl.maximum(piece - 1, 0) * TOKENS)
            d_ahead = _load_gradients(d_output, output_step, coming, wide, D, EVEN, TOKENS)
            g, d_rates = _walk_back(
                h, g, d_rates, values, entries, d_now,
                d_x, d_rate, d_prepared, t, output_step, rates, wide, e, D, STEP, LONGHORN, EVEN, VECTOR, TOKENS,
            )  # fmt: skip
    store_state(d_initial + n * STATE * D, e, d, D, tl.where(done == 0, D, 0), g, False, VECTOR)
    if d_A is not None:
        store_state(d_A + slot * STATE * D, e, d, D, D, d_rates * LN2, EVEN, VECTOR)


@triton.jit(do_not_specialize=["blocks", "tokens"])
def gather(
    d_prepared, d_key, d_query, blocks, tokens, row, N: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """Sums over the blocks of channels of the gradients of keys and queries: [tokens, N] each, `row` numbers apart."""
    i = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, 2 * WIDTH)
    live = (i < tokens)[:, None]
    place = d_prepared + i[:, None] * (2 * WIDTH) + e[None, :]
    total = tl.zeros((TOKENS, 2 * WIDTH), tl.float32)
    for _ in range(0, blocks):
        total += tl.load(place, mask=live, other=0.0)
        place += tokens.to(tl.int64) * (2 * WIDTH)
    tl.store(d_key + i[:, None] * row + e[None, :], total, mask=live & (e < N)[None, :])
    query = e - WIDTH
    own = live & (query >= 0)[None, :] & (query < N)[None, :]
    tl.store(d_query + i[:, None] * row + query[None, :], total, mask=own)
