"""Recursive least squares in chunks of matrix products.

With the tokens of one chunk as rows and A the matrix before it,

    B = I + U A Uᵀ = L Lᵀ       W = L^{-1} U,   Y = W A       row t: A_{t-1} u_t / sqrt(1 + u_tᵀ A_{t-1} u_t)
    (A_t x_t)_t = X A - tril(X Yᵀ) Y
    A <- A - Yᵀ Y

because row t of L^{-1} depends on tokens up to t alone. Only the lines with A <- run over chunks one after the other.
A chunk ends where a refresh is due. Where that is depends on a row's number of steps so far and on its padding.
Therefore the tokens of each row are first moved to slots: a chunk has C slots, the last of which can be empty (u = 0).

The gradient needs no Cholesky factor's derivative. With G the gradient of y, β_t = A_t G_t and D that of A after the
chunk, dA_t = - A_t d(Σ u uᵀ) A_t gives

    dX = β      dU = - triu(U yᵀ) β - triu(U βᵀ) y - 2 U A_C D A_C
    dA = sym(β̃ᵀ ỹ) + (I - Wᵀ Y) D (I - Yᵀ W)         ỹ = X - tril(X Yᵀ) W = y A^{-1},  likewise β̃

where triu(U yᵀ) = L^{-T} triu(Y Xᵀ) and U A_C = L^{-T} Y, which stay exact where u is long and A u small.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longseq.kernels.chunks import export_plan, fit_chunk_size, join_chunks, scan, split_chunks
from longseq.kernels.custom_op import once_differentiable
from longseq.kernels.dispatch import is_exporting
from longseq.kernels.precision import without_autocast
from longseq.kernels.recurrence import Sequences, State, run_padded, run_recurrence
from longseq.kernels.recursive_least_squares.reference import (
    InverseState,
    first_state,
    identity,
    refresh_due,
    symmetric,
    update,
)

_EXPORTED_BLOCK = 8  # tokens: a token is six nodes in the body of a Scan, and 197 take the least time with 8 or 16


def recursive_least_squares_chunk(
    x: Tensor, u: Tensor, *, count: Tensor, lambda0: float, refresh_period: int | None, refresh: float, chunk_size: int,
    **call: Any,
) -> tuple[Tensor, InverseState | None]:  # fmt: skip
    """`recursive_least_squares` in chunks; saves its inputs, L and the states between chunks for the backward."""

    def core(sequences: Sequences, state: State) -> tuple[Tensor, State]:
        x, u, count = sequences
        A, steps = state
        seen = steps[:, None] + count.cumsum(1)
        added = refresh_due(seen, count, refresh_period, refresh, A.dtype)
        if torch.jit.is_tracing():
            y, A = _scripted(x, u, added, A)
        elif is_exporting():
            y, A = _exported(x, u, added, A)
        else:
            layout = _Layout.choose(x.shape[1], chunk_size, refresh_period, fresh=call["initial_state"] is None)
            slots = layout.slots(seen, count, steps)
            y, A = _RecursiveLeastSquares.apply(x, u, added, slots, A, layout)
        return y, (A, seen[:, -1].clone())

    first = partial(first_state, x=x, lambda0=lambda0)
    return run_recurrence(core, (x, u, count), state_shape=first, output_dtype=x.dtype, unpack=run_padded, **call)


def _exported(x: Tensor, u: Tensor, added: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """The form for torch.export: one Scan over blocks of tokens, which need not end where a refresh is due.

    With c_t the sum of what refreshes added in a block before token t, u_sᵀ A_{t-1} u_t gets c_t u_sᵀ u_t for s >= t.
    """
    batch, tokens, heads, _ = u.shape
    size, blocks, _ = export_plan(_EXPORTED_BLOCK, tokens)
    read, rows = split_chunks(x, A.dtype, blocks, size), split_chunks(u, A.dtype, blocks, size)
    refresh = split_chunks(added[..., None, None].expand(-1, -1, heads, 1), A.dtype, blocks, size)
    after = refresh.cumsum(-2)
    before = after - refresh
    own = torch.eye(size, dtype=A.dtype, device=A.device) + torch.minimum(before, before.mT) * (rows @ rows.mT)
    final, y = scan(_block, symmetric(A).flatten(0, 1), [read, rows, before, after, own], (identity(A),))
    return join_chunks(y, batch, heads, tokens), final.unflatten(0, (batch, heads))


def _block(A: Tensor, x: Tensor, u: Tensor, before: Tensor, after: Tensor, own: Tensor, eye: Tensor) -> list[Tensor]:
    """The next A [M, K, K] and y [M, C, K], by Gaussian elimination: ONNX has no Cholesky factorisation.

    Step t makes row t of (B, U A) zero and subtracts its multiples from the rows of later tokens. Before the step it
    holds the pivot 1 + u_tᵀ A_{t-1} u_t and A_{t-1} u_t.
    """
    size = u.shape[1]
    product = u @ A
    table = torch.cat((own + product @ u.mT, product + before * u), -1)
    columns, pivots = [], []
    for t in range(size):
        row, pivot = table[:, t : t + 1], table[:, t : t + 1, t : t + 1]
        columns.append(row)
        pivots.append(pivot)
        table = table - table[..., t : t + 1] / pivot * row
    written = torch.cat(columns, 1)[..., size:] * torch.cat(pivots, 1).rsqrt()
    y = x @ A - (x @ written.mT).tril() @ written + after * x
    return [A - written.mT @ written + after[:, -1:] * eye, y]


@torch.jit.script_if_tracing
def _scripted(x: Tensor, u: Tensor, added: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """The form for torch.jit.trace: a loop over time, whose length stays dynamic in the traced graph."""
    x, u, A = x.to(A.dtype), u.to(A.dtype), symmetric(A)
    eye = identity(A)
    outputs: list[Tensor] = []
    for t in range(x.shape[1]):
        y, A = update(x[:, t], u[:, t], added[:, t], A, eye)
        outputs.append(y)
    return torch.stack(outputs, 1), A


@dataclass(frozen=True)
class _Layout:
    """Chunks of `size` slots, `per_period` of them in a period of the refresh."""

    chunks: int
    size: int
    period: int
    per_period: int
    aligned: bool  # to the steps of the state; without a refresh there is nothing to align to

    @classmethod
    def choose(cls, tokens: int, chunk_size: int, period: int | None, *, fresh: bool) -> "_Layout":
        """The fewest chunks that hold the tokens from any place in a refresh period; from its start if `fresh`."""
        if not period:
            size = fit_chunk_size(chunk_size, tokens)
            return cls(-(-tokens // size), size, size, 1, aligned=False)
        per_period = -(-period // chunk_size)
        size = -(-period // per_period)
        periods, rest = (tokens - 1) // period, (tokens - 1) % period
        if fresh:
            crossed = rest // size
        else:
            shortest = period - (per_period - 1) * size
            crossed = 2 + (rest - 1 - shortest) // size if rest else 0
        return cls(1 + periods * per_period + crossed, size, period, per_period, aligned=True)

    def slots(self, seen: Tensor, count: Tensor, steps: Tensor) -> Tensor:
        """The slot of each token [B, T]; padding shares one behind the last."""
        if not self.aligned:
            seen, steps = seen - steps[:, None], torch.zeros_like(steps)
        position = seen - 1
        slot = (self._chunk(position) - self._chunk(steps)[:, None]) * self.size + position % self.period % self.size
        return torch.where(count > 0, slot, self.chunks * self.size)

    def _chunk(self, position: Tensor) -> Tensor:
        return position // self.period * self.per_period + position % self.period // self.size

    def split(self, x: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, T, H, D] -> [n, B * H, C, D], zeros in empty slots."""
        slots_of_a_row = self.chunks * self.size + 1
        room = x.new_zeros(x.shape[0] * slots_of_a_row, *x.shape[2:])
        filled = room.index_copy(0, self._rows(slots), x.flatten(0, 1)).unflatten(0, (x.shape[0], slots_of_a_row))
        return split_chunks(filled[:, :-1], dtype, self.chunks, self.size)

    def join(self, x: Tensor, slots: Tensor, heads: int) -> Tensor:
        """The inverse of `split`, zeros at padding."""
        batch, tokens = slots.shape
        filled = F.pad(join_chunks(x, batch, heads, self.chunks * self.size), (0, 0, 0, 0, 0, 1))
        return filled.flatten(0, 1).index_select(0, self._rows(slots)).unflatten(0, (batch, tokens))

    def _rows(self, slots: Tensor) -> Tensor:
        first = torch.arange(slots.shape[0], device=slots.device) * (self.chunks * self.size + 1)
        return (slots + first[:, None]).flatten()


class _RecursiveLeastSquares(torch.autograd.Function):
    """The eager form. Saves its inputs, L and the states before each chunk; recomputes the rest."""

    @staticmethod
    def forward(ctx, x, u, added, slots, A, layout):
        y, final, factors, starts = _forward(x, u, added, slots, A, layout)
        ctx.save_for_backward(x, u, added, slots, factors, starts)
        ctx.layout = layout
        return y, final

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y, d_final):
        arguments: tuple[Any, ...] = (*ctx.saved_tensors, ctx.layout, d_y, d_final)
        with without_autocast(d_final):
            d_x, d_u, d_A = _backward(*arguments)
        return d_x, d_u, None, None, d_A, None


def _forward(
    x: Tensor, u: Tensor, added: Tensor, slots: Tensor, A: Tensor, layout: _Layout
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y [B, T, H, K], final A [B, H, K, K]; for the backward L [n, M, C, C] and A before each chunk [n, M, K, K]."""
    rows = layout.split(u, slots, A.dtype)
    refresh = layout.split(added[..., None, None].expand(-1, -1, u.shape[2], 1), slots, A.dtype)
    starts, factors, written, final = _state_pass(symmetric(A).flatten(0, 1), rows, refresh.sum(-2, keepdim=True))
    read = layout.split(x, slots, A.dtype)
    y = read @ starts - (read @ written.mT).tril_() @ written
    y = layout.join(y, slots, u.shape[2]) + added[..., None, None] * x
    return y, final.reshape(A.shape), factors, starts


def _state_pass(A: Tensor, rows: Tensor, refresh: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loop over chunks: A before each [n, M, K, K], L [n, M, C, C], Y [n, M, C, K] and the final A [M, K, K]."""
    eye, unit = identity(A), torch.eye(rows.shape[2], dtype=A.dtype, device=A.device)
    starts, factors, written = [], [], []
    for u, added in zip(rows.unbind(), refresh.unbind(), strict=True):
        starts.append(A)
        product = u @ A
        # without its check, which would wait for the GPU; no eigenvalue of B is below 1
        factors.append(torch.linalg.cholesky_ex(torch.baddbmm(unit, product, u.mT)).L)
        written.append(torch.linalg.solve_triangular(factors[-1], product, upper=False))
        A = torch.baddbmm(A + added * eye, written[-1].mT, written[-1], alpha=-1)
    return torch.stack(starts), torch.stack(factors), torch.stack(written), A


def _backward(
    x: Tensor, u: Tensor, added: Tensor, slots: Tensor, factors: Tensor, starts: Tensor, layout: _Layout,
    d_y: Tensor, d_final: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, u and the initial A."""
    weights = torch.linalg.solve_triangular(factors, layout.split(u, slots, starts.dtype), upper=False)
    written = weights @ starts
    d_read = layout.split(d_y, slots, starts.dtype)
    d_seen = (d_read @ written.mT).tril_()
    d_read = d_read - d_seen @ weights  # β̃
    read = layout.split(x, slots, starts.dtype)
    seen = (read @ written.mT).tril_()
    read = read - seen @ weights  # ỹ
    local = symmetric(d_read.mT @ read)
    d_start, d_ends = _state_pass_backward(symmetric(d_final).flatten(0, 1), local, weights, written)
    d_read = d_read @ starts
    ends = starts - written.mT @ written
    d_rows = seen.mT @ d_read + d_seen.mT @ (read @ starts) + 2 * written @ d_ends @ ends
    d_rows = torch.linalg.solve_triangular(factors.mT, d_rows, upper=True)
    # The solution of a single chunk has other strides than torch.compile expects, and views are taken of it.
    d_rows = d_rows.clone(memory_format=torch.contiguous_format).neg_()
    d_u = layout.join(d_rows, slots, u.shape[2]).to(u.dtype)
    d_x = (layout.join(d_read, slots, u.shape[2]) + added[..., None, None] * d_y).to(x.dtype)
    return d_x, d_u, d_start.unflatten(0, (d_y.shape[0], -1))


def _state_pass_backward(D: Tensor, local: Tensor, weights: Tensor, written: Tensor) -> tuple[Tensor, Tensor]:
    """The loop backward: gradients of the first A [M, K, K] and of A after each chunk [n, M, K, K].

    `local` [n, M, K, K] is the gradient of A before each chunk through the chunk's own outputs.
    """
    d_ends = torch.empty_like(local)
    for i in reversed(range(local.shape[0])):
        d_ends[i] = D
        seen = written[i] @ D
        half = weights[i].mT @ torch.baddbmm(seen, seen @ written[i].mT, weights[i], alpha=-0.5)
        D = D + local[i] - half - half.mT
    return D, d_ends
