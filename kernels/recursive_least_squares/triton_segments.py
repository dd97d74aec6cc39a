"""Segments of time for recursive least squares in Triton: a long sequence with few heads is computed in parallel.

A = X Z^{-1} makes both steps of the recurrence linear, starting from X = A and Z = I:

    a token: Z <- Z + u uᵀ X        a refresh: X <- X + refresh Z

Let e_i be what refreshes have added to the diagonal from the start of the chunk to before token i, and e what they have
added at its end. The tokens of a chunk see V_i = u_iᵀ X, which is

    V = M (U X + (e ⊙ U) Z)     M = (I - tril((e_i - e_j) ⊙ U Uᵀ, -1))^{-1}
    X <- X + e Z + ((e - e_i) ⊙ U)ᵀ V        Z <- Z + Uᵀ V

`transfer` computes M U and M (e ⊙ U) of all chunks. `summarize` applies each segment to (I, 0) and to (0, I). `connect`
composes these maps, starting from (A, I). `solve` divides. Z grows along time, by which A shrinks: `connect` multiplies
X and Z by an approximate inverse of Z where Z has become large. If Z has grown so much within one segment that X Z^{-1}
could lose too many bits, `solve` refuses the segment, and the program of the first segment computes the whole sequence.
X and Z are stored transposed, so that a kernel multiplies them from the left.
"""

import triton
import triton.language as tl

from longseq.kernels.recursive_least_squares.triton_forward import (
    WALK,
    first_state,
    identity,
    load_rows,
    load_transposed,
    product,
    refreshed_before,
    transpose,
)
from longseq.kernels.triton_tiles import (
    SIZES_AND_STRIDES,
    direction,
    load_block,
    load_numbers,
    store_block,
    token_after,
    unit_lower_inverse,
)

# The size of Z beyond which `connect` continues from a Z near I, and the largest condition of Z: the factor by which
# float32's rounding of X and Z grows.
GROWTH = tl.constexpr(64.0)
LIMIT = tl.constexpr(2000.0)


@triton.jit(do_not_specialize=SIZES_AND_STRIDES)
def transfer(
    u, added, meeting, entering, T, H, u_row, u_token, u_head,
    K: tl.constexpr, REVERSE: tl.constexpr, EXACT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """M U and M (e ⊙ U) for one chunk of one head; NaN where M could be large."""
    head = (tl.program_id(0) % H).to(tl.int64)
    slot = (tl.program_id(0) // H).to(tl.int64)
    place = (slot * H + head) * CHUNK * K
    n = slot // tl.cdiv(T, CHUNK)
    start = slot % tl.cdiv(T, CHUNK) * CHUNK
    live = T - start
    i = tl.arange(0, CHUNK)
    before = refreshed_before(added + n * T + start, live, CHUNK)
    u += n * u_row + token_after(start, 0, T, REVERSE) * u_token + head * u_head
    rows = load_rows(u, u_token * direction(REVERSE), live, K, EXACT, CHUNK, BLOCK)
    lower = product(rows, tl.trans(rows), EXACT_A=EXACT) * (before[None, :] - before[:, None])
    lower = tl.where(i[:, None] > i[None, :], lower, 0.0)
    largest = tl.max(tl.max(tl.abs(lower), 1), 0)
    inverse = unit_lower_inverse(lower, CHUNK, CHUNK, EXACT)
    inverse = tl.where(largest <= 1.0, inverse, float("nan"))
    store_block(meeting + place, 0, 0, product(inverse, rows, EXACT_B=EXACT), CHUNK, K, CHUNK, BLOCK)
    inverse *= before[None, :]
    store_block(entering + place, 0, 0, product(inverse, rows, EXACT_B=EXACT), CHUNK, K, CHUNK, BLOCK)


@triton.jit(do_not_specialize=WALK)
def summarize(
    u, added, meeting, entering, passed, segments, span, T, H, u_row, u_token, u_head,
    K: tl.constexpr, REVERSE: tl.constexpr, EXACT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For one segment (not the last) of one head of one sequence: what (I, 0) becomes, or for odd programs (0, I)."""
    from_z = tl.program_id(0) % 2
    segment = tl.program_id(0) // 2 % (segments - 1)
    head = (tl.program_id(0) // 2 // (segments - 1) % H).to(tl.int64)
    n = (tl.program_id(0) // 2 // (segments - 1) // H).to(tl.int64)
    u += n * u_row + token_after(n * 0, 0, T, REVERSE) * u_token + head * u_head
    u_token *= direction(REVERSE)
    chunks = tl.cdiv(T, CHUNK)
    x = identity(BLOCK) * (1 - from_z)
    z = identity(BLOCK) * from_z
    for m in range(segment * span, tl.minimum((segment + 1) * span, chunks)):
        t = m * CHUNK
        place = ((n * chunks + m) * H + head) * CHUNK * K
        rows = load_rows(u + t.to(tl.int64) * u_token, u_token, T - t, K, EXACT, CHUNK, BLOCK)
        if added is not None:
            later = load_numbers(added + n * T + t, 1, T - t, CHUNK)
            total = tl.sum(later, 0)
            later = tl.cumsum(later, 0, reverse=True)
            met = product(x, load_transposed(meeting + place, CHUNK, K, CHUNK, BLOCK))
            met += product(z, load_transposed(entering + place, CHUNK, K, CHUNK, BLOCK))
            x += total * z + product(met * later[None, :], rows, EXACT_B=EXACT)
        else:
            met = product(x, tl.trans(rows), EXACT_B=EXACT)
        z += product(met, rows, EXACT_B=EXACT)
    place = (((n * H + head) * segments + segment) * 2 + from_z) * 2 * K * K
    store_block(passed + place, 0, 0, x, K, K, BLOCK, BLOCK)
    store_block(passed + place + K * K, 0, 0, z, K, K, BLOCK, BLOCK)


@triton.jit
def _beyond(K: tl.constexpr, BLOCK: tl.constexpr):
    """The identity from row K on, where a matrix that was loaded is zero."""
    i = tl.arange(0, BLOCK)
    return tl.where((i[:, None] == i[None, :]) & (i >= K)[None, :], 1.0, 0.0)


@triton.jit
def _size(matrix):
    """The largest sum of magnitudes along a row."""
    return tl.max(tl.sum(tl.abs(matrix), 1), 0)


@triton.jit
def _invert(z, transposed):
    """z^{-1} to three digits or more, and the size of its residual, by Newton's method from a start that converges."""
    inverse = transposed / (_size(z) * _size(transposed))
    rest = 1.0
    steps = 0
    while (rest > 1e-3) & (steps < 40):
        error = identity(z.shape[0]) - product(inverse, z)
        rest = _size(error)
        inverse += product(error, inverse)
        steps += 1
    return inverse, rest


@triton.jit(do_not_specialize=WALK)
def connect(initial, passed, starts, first, segments, K: tl.constexpr, BLOCK: tl.constexpr):
    """For one head of one sequence: X and Z before each segment but the first; a large Z is replaced by one near I."""
    place = tl.program_id(0).to(tl.int64)
    x = first_state(initial, first, place, True, K, BLOCK)
    z = identity(BLOCK)
    for segment in range(0, segments - 1):
        square = (place * segments + segment) * 4 * K * K
        after = product(x, load_block(passed + square, 0, 0, K, K, BLOCK, BLOCK))
        after += product(z, load_block(passed + square + 2 * K * K, 0, 0, K, K, BLOCK, BLOCK))
        square += K * K
        below = product(x, load_block(passed + square, 0, 0, K, K, BLOCK, BLOCK))
        z = below + product(z, load_block(passed + square + 2 * K * K, 0, 0, K, K, BLOCK, BLOCK))
        x = after
        square = (place * segments + segment + 1) * 2 * K * K
        store_block(starts + square, 0, 0, x, K, K, BLOCK, BLOCK)
        store_block(starts + square + K * K, 0, 0, z, K, K, BLOCK, BLOCK)
        if _size(z) > GROWTH:
            tl.debug_barrier()
            inverse, _ = _invert(z, load_transposed(starts + square + K * K, K, K, BLOCK, BLOCK) + _beyond(K, BLOCK))
            x = product(inverse, x)
            z = product(inverse, z)


@triton.jit(do_not_specialize=WALK)
def solve(starts, segment_starts, refused, segments, K: tl.constexpr, BLOCK: tl.constexpr):
    """A before one segment (not the first) of one head of one sequence, and whether it is refused as imprecise."""
    sequence_head = (tl.program_id(0) // (segments - 1)).to(tl.int64)
    place = sequence_head * segments + tl.program_id(0) % (segments - 1) + 1
    square = place * 2 * K * K
    z = load_block(starts + square + K * K, 0, 0, K, K, BLOCK, BLOCK) + _beyond(K, BLOCK)
    inverse, rest = _invert(z, load_transposed(starts + square + K * K, K, K, BLOCK, BLOCK) + _beyond(K, BLOCK))
    condition = _size(inverse) * _size(z)
    x = load_block(starts + square, 0, 0, K, K, BLOCK, BLOCK)
    state = product(inverse, x)
    state += product(inverse, x - product(z, state))
    state = 0.5 * (state + transpose(state, segment_starts + place * K * K, K, K, BLOCK, BLOCK))
    tl.debug_barrier()
    store_block(segment_starts + place * K * K, 0, 0, state, K, K, BLOCK, BLOCK)
    # NaN fails both conditions
    tl.store(refused + place, tl.where((rest <= 1e-3) & (condition <= LIMIT), 0, 1))
