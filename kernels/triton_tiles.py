"""What the Triton kernels that work in chunks share: their place in the work, tiles, decays, the inverse.

Sequences are cut into chunks of CHUNK tokens, numbered over the whole batch: the slots. Tensors of the user are read
where they lie ([B, T, H, D], any strides but for the last). What one kernel leaves for another is stored by slot and
head, [slots, H, rows, columns], so that a tile is one block of memory. Rows past the end of a sequence are read as
zeros, which leave the state as it is.
"""

import triton
import triton.language as tl

# Arguments of which no kernel gets faster by being compiled for their values: fewer kernels to compile.
PLAIN = ["T", "H", "tokens", "beta_row", "beta_token", "beta_head", "g_row", "g_token", "g_head"]


@triton.jit
def sequence(n, T, cu_seqlens, PACKED: tl.constexpr, CHUNK: tl.constexpr):
    """The batch row, first token, end and first slot of sequence n."""
    if PACKED:
        # Reading the borders on the host to check them would wait for the device; held inside the tokens they can at
        # least touch no foreign memory.
        start = tl.minimum(tl.maximum(tl.load(cu_seqlens + n).to(tl.int64), 0), T)
        end = tl.minimum(tl.maximum(tl.load(cu_seqlens + n + 1).to(tl.int64), start), T)
        return n * 0, start, end, start // CHUNK + n
    return n, n * 0, n * 0 + T, n * tl.cdiv(T, CHUNK)


@triton.jit
def chunk(
    slot, T, cu_seqlens, sequence_of, PACKED: tl.constexpr, CHUNK: tl.constexpr, REVERSE: tl.constexpr = False
):  # fmt: skip
    """The batch row, first token and number of tokens of a chunk; a slot of packed sequences may hold no token.

    Read in REVERSE, chunks begin at a sequence's end, and the first token of each is its last.
    """
    n = slot // tl.cdiv(T, CHUNK)
    if PACKED:
        n = tl.load(sequence_of + slot).to(tl.int64)
    row, start, end, first = sequence(n, T, cu_seqlens, PACKED, CHUNK)
    done = (slot - first) * CHUNK
    return row, end - 1 - done if REVERSE else start + done, end - start - done


@triton.jit
def load_tokens(base, stride, live, column, WIDTH: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows of a chunk, [CHUNK, COLUMNS] from `column` on; `base` points to its first token."""
    i = tl.arange(0, CHUNK)
    e = column + tl.arange(0, COLUMNS)
    mask = (i < live)[:, None]
    if WIDTH % COLUMNS != 0:
        mask = mask & (e < WIDTH)[None, :]
    return tl.load(base + i[:, None] * stride + e[None, :], mask=mask, other=0.0)


@triton.jit
def store_tokens(base, stride, live, column, x, WIDTH: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr):
    i = tl.arange(0, CHUNK)
    e = column + tl.arange(0, COLUMNS)
    mask = (i < live)[:, None]
    if WIDTH % COLUMNS != 0:
        mask = mask & (e < WIDTH)[None, :]
    tl.store(base + i[:, None] * stride + e[None, :], x, mask=mask)


@triton.jit
def load_numbers(base, stride, live, CHUNK: tl.constexpr):
    """One number for each token of a chunk, [CHUNK], in float32."""
    i = tl.arange(0, CHUNK)
    return tl.load(base + i * stride, mask=i < live, other=0.0).to(tl.float32)


@triton.jit
def load_block(base, row, column, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS] of a contiguous matrix [HEIGHT, WIDTH], zero outside."""
    i = row + tl.arange(0, ROWS)
    e = column + tl.arange(0, COLUMNS)
    place = base + i[:, None] * WIDTH + e[None, :]
    if HEIGHT % ROWS == 0 and WIDTH % COLUMNS == 0:
        return tl.load(place)
    return tl.load(place, mask=(i < HEIGHT)[:, None] & (e < WIDTH)[None, :], other=0.0)


@triton.jit
def store_block(
    base, row, column, x, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    i = row + tl.arange(0, ROWS)
    e = column + tl.arange(0, COLUMNS)
    place = base + i[:, None] * WIDTH + e[None, :]
    if HEIGHT % ROWS == 0 and WIDTH % COLUMNS == 0:
        tl.store(place, x)
    else:
        tl.store(place, x, mask=(i < HEIGHT)[:, None] & (e < WIDTH)[None, :])


@triton.jit
def unit_scale(largest, SCALED: tl.constexpr):
    """The power of two that brings numbers up to `largest` into float16's range, or 1 for float32."""
    if SCALED:
        return tl.exp2(-tl.ceil(tl.log2(tl.maximum(tl.load(largest), 1e-30))))
    return 1.0


@triton.jit
def decay_since(gate):
    """Decays from the start of the chunk to each token, for log gates [CHUNK]."""
    return tl.exp(tl.cumsum(gate, 0))


@triton.jit
def decay_until(base, stride, live, CHUNK: tl.constexpr):
    """Decays from each token to the end of the chunk, for log gates at `base`: sums, never differences of sums."""
    later = load_numbers(base + stride, stride, tl.minimum(live, CHUNK) - 1, CHUNK)
    return tl.exp(tl.cumsum(later, 0, reverse=True))


@triton.jit
def decay_between(gate, CHUNK: tl.constexpr):
    """exp(g_{j+1} + ... + g_i) for i >= j, each added up over its own range; 1 above the diagonal."""
    i = tl.arange(0, CHUNK)
    terms = tl.where(i[:, None] > i[None, :], gate[:, None], 0.0)
    return tl.exp(tl.cumsum(terms, 0))


@triton.jit
def _diagonal_blocks(matrix, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """The blocks [COUNT, SIZE, SIZE] on the diagonal of a matrix."""
    n = tl.arange(0, COUNT)
    same = n[:, None, None, None] == n[None, None, :, None]
    return tl.sum(tl.where(same, tl.reshape(matrix, (COUNT, SIZE, COUNT, SIZE)), 0.0), 2)


@triton.jit
def _product(a, b, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Products of matrices [COUNT, SIZE, SIZE] in plain float32."""
    if COUNT == 1:
        ab = tl.dot(tl.reshape(a, (SIZE, SIZE)), tl.reshape(b, (SIZE, SIZE)), input_precision="ieee")
        return tl.reshape(ab, (1, SIZE, SIZE))
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _merge(inverse, lower, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """From inverses of 2 COUNT blocks of SIZE to those of COUNT blocks of twice that: [[A, 0], [-B L A, B]]."""
    half = tl.arange(0, 2)
    pairs = tl.reshape(inverse, (COUNT, 2, SIZE, SIZE))
    above = tl.sum(tl.where(half[None, :, None, None] == 0, pairs, 0.0), 1)
    below = tl.sum(tl.where(half[None, :, None, None] == 1, pairs, 0.0), 1)
    quarters = tl.reshape(_diagonal_blocks(lower, COUNT, 2 * SIZE), (COUNT, 2, SIZE, 2, SIZE))
    left = tl.sum(tl.where(half[None, None, None, :, None] == 0, quarters, 0.0), 3)
    left = tl.sum(tl.where(half[None, :, None, None] == 1, left, 0.0), 1)
    left = -_product(_product(below, left, COUNT, SIZE), above, COUNT, SIZE)
    i = half[None, :, None, None, None]
    j = half[None, None, None, :, None]
    merged = tl.where(i == j, pairs[:, :, :, None, :], tl.where(i > j, left[:, None, :, None, :], 0.0))
    return tl.reshape(merged, (COUNT, 2 * SIZE, 2 * SIZE))


@triton.jit
def unit_lower_inverse(lower, CHUNK: tl.constexpr):
    """(I + L)^{-1} for strictly lower triangular L [CHUNK, CHUNK] in float32; CHUNK is 16, 32 or 64.

    Blocks of 16 by forward substitution, all of them at a time, then merged in pairs: stable for repeated keys, which
    the product of powers of L is not.
    """
    i = tl.arange(0, 16)
    blocks = _diagonal_blocks(lower, CHUNK // 16, 16)
    inverse = tl.where(i[None, :, None] == i[None, None, :], 1.0, 0.0) + tl.zeros_like(blocks)
    for j in tl.static_range(15):
        column = tl.sum(tl.where(i[None, None, :] == j, blocks, 0.0), 2)
        row = tl.sum(tl.where(i[None, :, None] == j, inverse, 0.0), 1)
        inverse -= column[:, :, None] * row[:, None, :]
    if CHUNK >= 32:
        inverse = _merge(inverse, lower, CHUNK // 32, 16)
    if CHUNK == 64:
        inverse = _merge(inverse, lower, 1, 32)
    return tl.reshape(inverse, (CHUNK, CHUNK))
