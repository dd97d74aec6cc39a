"""Chunks of TTT's recurrence forward in Triton. Letters are those of chunk.py: H, c, W and b.

`advance_chunks` loops over the chunks of one head of one sequence with the state in registers: a chunk has two
dependent products, one for H and one for U = Σ_s W_Cs h_s c_sᵀ. The kernel stores the states before the chunks, and H.
From these, `read_out` computes the outputs over chunks in parallel. States are stored as [slots of time, H, M, D].

In the loop over time, products of bfloat16 inputs are in that precision with float32 sums. One factor is an input, and
the other is split into two halves, so that the error is little more than that of rounding to float32. In kernels over
chunks, products are TF32, which has float16's digits and float32's range: gates need both. Products of float32 inputs
are three TF32 products each. The result of a product is never the transposed operand of another: that gives wrong
numbers on Hopper in Triton 3.4 to 3.7. Therefore tiles over chunks have slots as rows and tokens as columns, [M, C],
and a matrix of tokens against tokens that is needed transposed is computed twice.
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

UNSPECIALISED = [*SIZES_AND_STRIDES, "gamma_token"]


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
def load_outside(base, D: tl.constexpr, M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr):
    """The user's state [D, M] as [M, D] in float32, as the kernels store states."""
    return tl.trans(load_block(base, 0, 0, D, M, BLOCK_D, BLOCK)).to(tl.float32)


@triton.jit(do_not_specialize=UNSPECIALISED)
def advance_chunks(
    k, v, gamma, g, initial, cu_seqlens, states, directions, final, T, H, k_token, v_token, gamma_token, g_token,
    D: tl.constexpr, M: tl.constexpr, REVERSE: tl.constexpr, STAGES: tl.constexpr, DTYPE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of one sequence: for each chunk, the state before it and H. Loads run STAGES - 1 steps ahead."""
    head = tl.program_id(0) % H
    n = (tl.program_id(0) // H).to(tl.int64)
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
    state = load_outside(initial + corner, D, M, BLOCK_D, BLOCK)
    first, live = place_chunk(0, start, end, REVERSE, CHUNK)
    weight, whole = numbers_of_chunk(gamma, g, gamma_token, g_token, first, live, NEXT, BLOCK_C)
    for m in tl.range(0, chunks, num_stages=STAGES):
        place = (slot + m) * H + head
        first, live = place_chunk(m * CHUNK, start, end, REVERSE, CHUNK)
        key = load_tokens(k + first * k_token, k_token * NEXT, live, 0, M, BLOCK_C, BLOCK)
        value = load_tokens(v + first * v_token, v_token * NEXT, live, 0, D, BLOCK_C, BLOCK_D)
        # Loaded one step early: the compiler does not prefetch strided numbers of 16 bits.
        following, live = place_chunk(tl.minimum(m + 1, chunks - 1) * CHUNK, start, end, REVERSE, CHUNK)
        next_weight, next_whole = numbers_of_chunk(gamma, g, gamma_token, g_token, following, live, NEXT, BLOCK_C)

        store_block(states + place * D * M, 0, 0, state, M, D, BLOCK, BLOCK_D)
        z = precise_product(key, state, True, DTYPE)
        h = value.to(tl.float32)
        unit, shrinkage, component = decoded(z, h)
        h = (h - unit * component) * shrinkage
        store_block(directions + place * CHUNK * D, 0, 0, h, CHUNK, D, BLOCK_C, BLOCK_D)
        state = state * whole + precise_product(tl.trans(key), h * weight[:, None], True, DTYPE)
        weight = next_weight
        whole = next_whole
    store_block(final + corner, 0, 0, tl.trans(state), D, M, BLOCK_D, BLOCK)


@triton.jit
def weigh(x, gate, TRANSPOSED: tl.constexpr, GATED: tl.constexpr, BLOCK_C: tl.constexpr):
    """x ⊙ W for x [t, s] or TRANSPOSED [s, t]. W [t, s] is the decay from each token s to each later token t."""
    i = tl.arange(0, BLOCK_C)
    t, s = i[:, None], i[None, :]
    if TRANSPOSED:
        t, s = i[None, :], i[:, None]
    if GATED:
        terms = tl.where(t > s, gate[None, :] if TRANSPOSED else gate[:, None], 0.0)
        x *= tl.where(t >= s, tl.exp(tl.cumsum(terms, 1 if TRANSPOSED else 0)), 0.0)
    else:
        x = tl.where(t >= s, x, 0.0)
    return x


@triton.jit
def load_h(
    directions, place, D: tl.constexpr, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Hᵀ [D, C] in float32."""
    return tl.trans(load_block(directions + place * CHUNK * D, 0, 0, CHUNK, D, BLOCK_C, BLOCK_D)).to(tl.float32)


@triton.jit
def load_keys(k, k_token, live, column, M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr):
    """Kᵀ [BLOCK, C] in float32; also for queries."""
    return tl.trans(load_tokens(k, k_token, live, column, M, BLOCK_C, BLOCK)).to(tl.float32)


@triton.jit(do_not_specialize=UNSPECIALISED)
def read_out(
    q, k, gamma, g, cu_seqlens, sequence_of, states, directions, output, scale, T, H,
    q_token, k_token, gamma_token, g_token,
    D: tl.constexpr, M: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
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
    gamma += token * gamma_token + head
    q_token *= NEXT
    k_token *= NEXT
    gamma_token *= NEXT
    GATED: tl.constexpr = g is not None
    if GATED:
        g += token * g_token + head
        g_token *= NEXT
    gate = log_gates(g, g_token, live, BLOCK_C)
    since = decay_since(gate)
    strength = load_numbers(gamma, gamma_token, live, BLOCK_C)
    h_t = load_h(directions, place, D, CHUNK, BLOCK_C, BLOCK_D)
    o = tl.zeros((BLOCK_D, BLOCK_C), tl.float32)
    products = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
    for e in range(0, M, BLOCK):
        state = load_block(states + place * D * M, e, 0, M, D, BLOCK, BLOCK_D)
        read = load_keys(q, q_token, live, e, M, BLOCK_C, BLOCK) * scale
        key = load_keys(k, k_token, live, e, M, BLOCK_C, BLOCK)
        products += product(tl.trans(key), read, PRECISION)
        o += product(tl.trans(state), read * since[None, :], PRECISION)
    products = weigh(products, gate, True, GATED, BLOCK_C) * strength[:, None]
    o += product(h_t, products, PRECISION)
    output += (token * H + head) * D
    store_tokens(output, H * D * NEXT, live, 0, tl.trans(o), D, BLOCK_C, BLOCK_D)
