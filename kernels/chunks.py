"""Functions that the chunk forms share: chunks of time, decays, the triangular inverse and the loop over chunks.

All of them can be compiled by TorchScript and traced by torch.export. Chunked tensors are [n, M, C, ...]: chunks come
first, so that one chunk of every sequence is one block of memory; M = B * H; C is the number of tokens of a chunk.
Decays are exponentials of sums of logs g <= 0 over a range of tokens. Each sum is added up over its own range, or each
decay multiplied up from those of parts of the range. No decay is found as a difference of two prefix sums: nothing
cancels, and every exponent is <= 0 whatever the size of g.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from longseq.kernels.dispatch import is_exporting


def fit_chunk_size(chunk_size: int, tokens: int) -> int:
    """The chunk size for `tokens` tokens: the given one, halved while over an eighth of the chunks would be padding.

    It stays at least 16, unless there are fewer tokens.
    """
    while chunk_size >= 2 * tokens and chunk_size > 1:
        chunk_size = chunk_size // 2
    while chunk_size > 16 and 8 * (-tokens % chunk_size) > tokens + -tokens % chunk_size:
        chunk_size = chunk_size // 2
    return chunk_size


def balanced_chunk_size(tokens: int) -> int:
    """The least power of two whose square is at least T: about as many chunks as tokens in one. T may be symbolic."""
    size = 1
    while size * size < tokens:
        size *= 2
    return size


def split_chunks(x: Tensor, dtype: torch.dtype, chunks: int, chunk_size: int) -> Tensor:
    """[B, T, H, D] -> [n, B * H, C, D], zeros after the last token."""
    batch, tokens, heads, width = x.shape
    x = F.pad(x.to(dtype), (0, 0, 0, 0, 0, chunks * chunk_size - tokens))
    x = x.reshape(batch, chunks, chunk_size, heads, width).permute(1, 0, 3, 2, 4)
    return x.reshape(chunks, batch * heads, chunk_size, width).contiguous()


def join_chunks(x: Tensor, batch: int, heads: int, tokens: int) -> Tensor:
    """[n, B * H, C, D] -> [B, T, H, D], the inverse of `split_chunks`, also for B = 0."""
    chunks, _, chunk_size, width = x.shape
    x = x.reshape(chunks, batch, heads, chunk_size, width).permute(1, 0, 3, 2, 4)
    return x.reshape(batch, chunks * chunk_size, heads, width)[:, :tokens]


def times(x: Tensor, decay: Tensor | None) -> Tensor:
    """x ⊙ decay, where no decay is a decay of one."""
    return x if decay is None else x * decay


def reverse_cumsum(x: Tensor) -> Tensor:
    """Sums over the rows from each one to the last; x [..., C, D]."""
    return x.flip(-2).cumsum(-2).flip(-2)


def later_sum(x: Tensor) -> Tensor:
    """Sums over the rows after each one; x [..., C, D]."""
    return F.pad(reverse_cumsum(x)[..., 1:, :], (0, 0, 0, 1))


def earlier_sum(x: Tensor) -> Tensor:
    """Sums over the rows before each one; x [..., C, D]."""
    return F.pad(x.cumsum(-2)[..., :-1, :], (0, 0, 1, 0))


def decay_matrix(g: Tensor) -> Tensor:
    """exp(g_{j+1} + ... + g_i) for i >= j, else 0: how much of token j is left at token i; g [..., C, 1]."""
    size = g.shape[-2]
    return (g + g.new_zeros(size)).tril(-1).cumsum(-2).exp().tril()


def decay_matrix_backward(d_log: Tensor) -> Tensor:
    """Gradient of g [..., C, 1] from the gradient of the logarithm of `decay_matrix` (zero above the diagonal)."""
    return reverse_cumsum(d_log).tril(-1).sum(-1, keepdim=True)


def decayed_products(q: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """Σ_c q_ic k_jc exp(g_{j+1,c} + ... + g_ic) for i >= j, else 0; q, k, g [m, C, K], C a power of two -> [m, C, C].

    Blocks double from 1. The lower left quarter of a block of 2b is a plain product of queries decayed since the middle
    and keys decayed until the middle, so that decays are never divided.
    """
    rows, size, _ = q.shape
    half = _first_rows(size)
    if half > 1:
        decays, since, until = _decays_between(g, half)
        left = decays * k.reshape(-1, 1, half, k.shape[-1])
        products = torch.matmul(left, q.reshape(-1, half, q.shape[-1], 1)).squeeze(-1).tril()
    else:
        products = (q * k).sum(-1).reshape(rows * size, 1, 1)
        since, until = _first_decays(g)
    while half < size:
        query = _halves(q, half)[1] * _halves(since, half)[1]
        key = _halves(k, half)[0] * _halves(until, half)[0]
        early, late = _halves(products, half)
        left = F.pad(torch.cat((early, torch.bmm(query, key.transpose(-1, -2))), 1), (0, half))
        products = left + F.pad(late, (half, 0, half, 0))
        since, until = _merge_decays(since, until, half)
        half *= 2
    return products.reshape(rows, size, size)


def _first_rows(size: int) -> int:
    """The rows of the blocks that double: one, but eight in an exported graph, which is smaller and faster so."""
    if torch.jit.is_scripting():
        return 1
    return min(size, 8) if is_exporting() else 1


def _decays_between(g: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """exp(g_{j+1,c} + ... + g_ic) at [i, j, c], 1 above the diagonal: [m * C / rows, rows, rows, D], in blocks of rows.

    Also the decays within blocks since the start and until the end. The sums are one product with zeros and ones.
    """
    token = torch.arange(rows, device=g.device)
    between = (token > token[:, None]) & (token <= token[:, None, None])
    blocks = g.reshape(-1, rows, g.shape[-1])
    sums = torch.matmul(between.flatten(0, 1).to(g.dtype), blocks.clamp_min(-1e4))  # times zero, -inf would be NaN
    decays = sums.exp().unflatten(1, (rows, rows))
    return decays, blocks.cumsum(1).exp().reshape(g.shape), decays[:, -1].reshape(g.shape)


def decayed_sums(weights: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Σ_{j<=i} w_ij v_jc exp(g_{j+1,c} + ... + g_ic); weights [m, C, C], v, g [m, C, V], C a power of two -> [m, C, V].

    What the weights hold above the diagonal is not read. Blocks double as in `decayed_products`, whose transpose this
    is: there the decay belongs to the channels that are summed, here to those that stay.
    """
    size = v.shape[-2]
    spaced = _space_evenly(weights)
    half = _first_rows(size)
    if half > 1:
        decays, since, until = _decays_between(g, half)
        own = _diagonal(spaced, size, half).tril().unsqueeze(-2)
        sums = torch.matmul(own, decays * v.reshape(-1, 1, half, v.shape[-1])).reshape(v.shape)
    else:
        sums = weights.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * v
        since, until = _first_decays(g)
    while half < size:
        value = _halves(v, half)[0] * _halves(until, half)[0]
        across = torch.bmm(_below(spaced, size, half), value)
        early, late = _halves(sums, half)
        sums = torch.cat((early, torch.addcmul(late, across, _halves(since, half)[1])), 1)
        since, until = _merge_decays(since, until, half)
        half *= 2
    return sums.view(v.shape)


def _first_decays(g: Tensor) -> tuple[Tensor, Tensor]:
    """Decays within blocks of one row: since the block's start, the row included, and until its end, excluded."""
    return g.exp(), torch.ones_like(g)


def _merge_decays(since: Tensor, until: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Turn decays within blocks of `half` rows into those within blocks of twice as many."""
    early, late = _halves(since, half)
    first, second = _halves(until, half)
    whole_early, whole_late = early.narrow(1, half - 1, 1), late.narrow(1, half - 1, 1)
    return torch.cat((early, late * whole_early), 1), torch.cat((first * whole_late, second), 1)


def _space_evenly(x: Tensor) -> Tensor:
    """[m, C, C] -> [m, C (C + 1)]: the rows in a line, and C zeros.

    The zeros put the diagonal blocks at equal distances, also from one matrix to the next.
    """
    return F.pad(x.flatten(1), (0, x.shape[-1]))


def _diagonal(spaced: Tensor, size: int, rows: int) -> Tensor:
    """The diagonal blocks: a view [m * C / rows, rows, rows]."""
    blocks = spaced.view(-1, rows * (size + 1)).narrow(1, 0, rows * size)
    return blocks.unflatten(1, (rows, size)).narrow(2, 0, rows)


def _below(spaced: Tensor, size: int, half: int) -> Tensor:
    """The lower left quarter of each diagonal block of 2 * half rows: a view [m * C / (2 * half), half, half]."""
    rows = spaced.view(-1, 2 * half * (size + 1)).narrow(1, half * size, half * size)
    return rows.unflatten(1, (half, size)).narrow(2, 0, half)


def _halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """The first and the second halves of each block of 2 * half rows: two views [m * C / (2 * half), half, K]."""
    pairs = x.view(-1, 2, half, x.shape[-1])
    return pairs.select(1, 0), pairs.select(1, 1)


def _lower_left(x: Tensor, rows: int, every: int) -> Tensor:
    """The lower left squares of the diagonal blocks of `every` rows: as `_below`, by copies, which are fast if few."""
    squares = [x[:, i + every - rows : i + every, i : i + rows] for i in range(0, x.shape[-1], every)]
    return torch.stack(squares, 1).flatten(0, 1)


def unit_lower_inverse(strict: Tensor) -> Tensor:
    """(I + L)^{-1} for strictly lower triangular L [m, C, C], C a power of two, by block forward substitution.

    Blocks of up to 16 are inverted in place, doubling from 1: X <- X - X L_b X, where L_b is the part of L between the
    two halves of each block of 2b. Above that, halves are merged: [[A, 0], [-B L A, B]]. Unlike the product of powers
    of L, this is stable for repeated and correlated keys. ONNX has no triangular solve.
    """
    size = strict.shape[-1]
    base = min(size, 16)
    lower = _lower_left(strict, base, base)
    index = torch.arange(base, device=strict.device)
    inverse = torch.eye(base, dtype=strict.dtype, device=strict.device).expand(lower.shape)
    half = 1
    while half < base:
        same = index[:, None] // (2 * half) == index // (2 * half)
        part = lower * (same & (index[:, None] // half > index // half))
        inverse = inverse - (part if half == 1 else torch.bmm(torch.bmm(inverse, part), inverse))
        half *= 2
    while half < size:
        lower = _lower_left(strict, half, 2 * half)
        top, bottom = _halves(inverse, half)
        left = F.pad(torch.cat((top, -torch.bmm(torch.bmm(bottom, lower), top)), 1), (0, half))
        inverse = left + F.pad(bottom, (half, 0, half, 0))
        half *= 2
    return inverse


def export_plan(chunk_size: int, tokens: int) -> tuple[int, int, bool]:
    """For torch.export: the chunk size, the number of chunks, and whether to unroll the loop over them.

    With a symbolic T the number of chunks is always at least two: a number that could be one would become a condition
    of the exported program.
    """
    if not isinstance(tokens, int):
        return chunk_size, (tokens + 2 * chunk_size - 1) // chunk_size, False
    chunk_size = fit_chunk_size(chunk_size, tokens)
    chunks = -(-tokens // chunk_size)
    return chunk_size, chunks, chunks <= 16


def scan(
    step: Callable[..., list[Tensor]], carry: Tensor, xs: list[Tensor], constants: tuple[Tensor, ...] = ()
) -> list[Tensor]:
    """Apply step(carry, *slices of xs, *constants) -> [carry, *outputs] along dimension 0: one Scan when exported.

    Returns the final carry and the stacked outputs. What a step returns must not share memory. The operator is called
    directly because its documented wrapper runs dynamo, in which one export leaves traces for the next.
    """
    return torch.ops.higher_order.scan(step, [carry.contiguous()], xs, constants)
