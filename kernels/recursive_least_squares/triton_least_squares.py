"""Recursive least squares in Triton: its two custom operations, their launches and the constants of these.

A refresh may fall inside a chunk. Let e_t be what refreshes have added to the diagonal from the start of the chunk to
before token t (ē_t: to after it), A the matrix before the chunk, and min(e_i, e_j) = e_j for j <= i:

    P = U A + e ⊙ U        B = I + U A Uᵀ + min(e_i, e_j) ⊙ U Uᵀ = L Lᵀ        Y = L^{-1} P
    A_t = A + ē_t I - Σ_{s<=t} Y_s Y_sᵀ

This is the conditional covariance of a random walk that moves at each refresh and is observed along u_t at each token.
So chunks need not end at refreshes, and a token that does not count has u = 0. Let G be the gradient of y, D that of A
after the chunk, and

    a = tril(X Yᵀ) L^{-1}   x̃ = X - a U   (likewise b and β̃ for G)      N = L^{-T} Y      Φ = I - Nᵀ U

    y = x̃ A + ē ⊙ X - a (e ⊙ U)                        dX = β̃ A + ē ⊙ G - b (e ⊙ U)
    V = aᵀ β̃ + bᵀ x̃ + 2 N D Φ                          S = aᵀ b + bᵀ a + 2 N D Nᵀ
    dU = -(V A + e ⊙ V + (tril(S) ⊙ (e_i - e_j)) U)     dA = sym(β̃ᵀ x̃ + Φᵀ D Φ)

Only A and L (forward) and D (backward) are computed in a loop over time; everything else runs over chunks in parallel.
The time of such a loop is that of its chain of dependent steps, whatever their size: the factorisation of a chunk, four
rows at a time, and four products (for D: two). Therefore chunks are as long as registers allow, and long sequences with
few heads are cut into segments that run in parallel. triton_segments.py computes A before each segment. For D, a
segment is a linear map: the product of its Φ, and what its outputs add to D. Packed sequences are not cut. Neither are
float32 ones, which need more precision than these products have.

A is the inverse of a growing sum. Therefore the loop of A multiplies in three TF32 products, and that of D in three
products of float16 halves, after division of D by a unit in each step. Where rounding does not accumulate from chunk to
chunk, one TF32 product is enough for bfloat16, except for a, b, x̃ and β̃: with long or similar directions, the gradient
of u is a small rest of what these four contribute. Of bfloat16 they are found to 22 bits, for X, U and G of 11 bits.
Matrices that are needed transposed go through memory (see delta_rule/triton_backward.py).

No sum depends on the order in which programs run. The forward pass saves A before each chunk, L^{-1} and Y: K K / C + C
+ K numbers for each token and head. The backward pass takes 2 K K / C + 2 C + 3 K more while it runs.
"""

import math
from typing import Any

import torch
from torch import Tensor

from longseq.kernels.custom_op import Gradients, custom_op, empty_like
from longseq.kernels.devices import channels_adjacent, contiguous
from longseq.kernels.reading import Reverse, number_of, turn
from longseq.kernels.recursive_least_squares.reference import InverseState, refresh_due, symmetric
from longseq.kernels.recursive_least_squares.triton_backward import (
    accumulate,
    differentiate_directions,
    linearize,
    retreat,
)
from longseq.kernels.recursive_least_squares.triton_forward import MOST_SEGMENTS, advance, read_out
from longseq.kernels.recursive_least_squares.triton_segments import connect, solve, summarize, transfer
from longseq.kernels.segments import find_span
from longseq.kernels.triton_launch import (
    ROW,
    Launch,
    Prepared,
    block_width,
    borders_on,
    cdiv,
    count_sequences,
    count_slots,
    find_launch,
    fit_launches,
    sequence_of_slots,
    strides,
)

# By the bytes of u's numbers (2 also if u is rounded to 11 bits) and the width, K rounded up to 64. Those for 2 bytes
# were measured on an H200 with bfloat16: in kernels over chunks, more programs at a time make up for spilled registers.
_WALKS = {"accumulate": Launch(64, 0, 4, 2), "retreat": Launch(64, 0, 4, 3)}
LAUNCHES: dict[tuple[int, int], dict[str, Launch]] = {
    (2, 64): _WALKS
    | dict.fromkeys(("transfer", "summarize", "connect", "solve", "advance"), Launch(64, 0, 4, 1))
    | dict.fromkeys(("read_out", "linearize", "differentiate_directions"), Launch(64, 0, 4, 1, 128)),
    (4, 64): _WALKS
    | dict.fromkeys(("advance", "linearize"), Launch(64, 0, 4, 1))
    | dict.fromkeys(("read_out", "differentiate_directions"), Launch(64, 0, 8, 1)),
}
fit_launches(LAUNCHES)
CHUNKS = {2: 32, 4: 16}  # tokens of a chunk, by the same bytes
PROGRAMS = 256  # the most programs that half precision sequences are cut into for the loops over time
FEWEST_SEGMENTS = 4  # fewer would not make up for two thirds of the work being done twice


class _Call:
    """What both passes derive from the arguments of a call, and the launches of their kernels."""

    def __init__(self, u: Tensor, cu_seqlens: Tensor | None, reverse: int, precision: str) -> None:
        batch, self.tokens, self.heads, width = u.shape
        # Whether u has no more bits than TF32, or is rounded to them.
        self.half = u.dtype.itemsize == 2 or precision == "tf32"
        size = 2 if self.half else 4
        self.device, self.cu_seqlens, self.chunk, self.launches = u.device, cu_seqlens, CHUNKS[size], LAUNCHES[size, 64]
        self.sequences = count_sequences(batch, cu_seqlens)
        self.slots = count_slots(batch, self.tokens, self.chunk, cu_seqlens)  # an upper bound of all chunks
        self.constants = {
            "K": width, "REVERSE": reverse, "EXACT": self.half, "PRECISION": precision, "CHUNK": self.chunk,
            "BLOCK": block_width(width, ROW[4]),
        }  # fmt: skip

    def cut(self) -> tuple[int, int]:
        """The number of segments into which the loops over time are cut, and the chunks of each."""
        chunks = cdiv(self.tokens, self.chunk)
        if not self.half or self.cu_seqlens is not None:
            return 1, chunks
        # `connect` loops over segments as the other kernels loop over chunks.
        shortest = cdiv(chunks, min(math.isqrt(chunks), MOST_SEGMENTS.value))
        few = FEWEST_SEGMENTS
        span = find_span(chunks, self.sequences * self.heads, PROGRAMS, fewest=few, shortest=shortest, least=few**2)
        return (cdiv(chunks, span), span) if span else (1, chunks)

    def launch(self, kernel: Any, programs: int, *numbers: float) -> Prepared:
        """The launch of `programs` programs for each head, with the compile-time arguments that the kernel has."""
        constants: dict[str, Any] = {name: x for name, x in self.constants.items() if name in kernel.arg_names}
        options = self.launches[kernel.__name__].options
        return find_launch(kernel, self.device, programs * self.heads, numbers, **constants, **options)


def _allocate(x, u, added, initial_state, cu_seqlens, lambda0, reverse, precision, dtype):
    call, (heads, width) = _Call(u, cu_seqlens, reverse, precision), u.shape[2:]
    shapes = (width, width), (call.chunk, call.chunk), (call.chunk, width)
    final = u.new_empty((call.sequences, heads, width, width), dtype=torch.float32)
    kept = [u.new_empty((call.slots, heads, *shape), dtype=torch.float32) for shape in shapes]
    return x.new_empty(x.shape, dtype=dtype), final, *kept


@custom_op("recursive_least_squares", _allocate)
def recursive_least_squares(
    x: Tensor, u: Tensor, added: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None, lambda0: float,
    reverse: int, precision: str, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns y in `dtype`, the final A, and for the backward pass A before each chunk, L^{-1} and Y.

    The final A is [B or segments, H, K, K] in float32. `added` [B, T] in float32 is what a refresh adds to the diagonal
    after each token, in the order of reading.
    """
    x, u = channels_adjacent(x), channels_adjacent(u)
    added, initial_state = contiguous(added), contiguous(initial_state)
    call = _Call(u, cu_seqlens, reverse, precision)
    sequence_of = sequence_of_slots(call.slots, call.chunk, call.tokens, cu_seqlens)
    output, final, states, inverse, written = _allocate(
        x, u, added, initial_state, cu_seqlens, lambda0, reverse, precision, dtype
    )
    segments, span = call.cut()
    sizes = call.tokens, call.heads
    segment_starts, refused = None, None
    if segments > 1:
        squares = (*final.shape[:2], segments, *final.shape[2:])
        meeting, entering = (final.new_empty(written.shape if added is not None else 0) for _ in range(2))
        passed, starts = final.new_empty((4, *squares)), final.new_empty((2, *squares))
        segment_starts, refused = final.new_empty(squares), final.new_empty(squares[:3], dtype=torch.int32)
        if added is not None:
            call.launch(transfer, call.slots, *sizes, *strides(u))(u, added, meeting, entering)
        programs = call.sequences * (segments - 1)
        call.launch(summarize, 2 * programs, segments, span, *sizes, *strides(u))(u, added, meeting, entering, passed)
        call.launch(connect, call.sequences, 1.0 / lambda0, segments)(initial_state, passed, starts)
        call.launch(solve, programs, segments)(starts, segment_starts, refused)
    call.launch(advance, call.sequences * segments, 1.0 / lambda0, segments, span, *sizes, *strides(u))(
        u, added, initial_state, cu_seqlens, segment_starts, refused, states, inverse, written, final
    )
    call.launch(read_out, call.slots, *sizes, *strides(x), *strides(u))(
        x, u, added, cu_seqlens, sequence_of, states, inverse, written, output
    )
    return output, final, states, inverse, written


def _allocate_gradients(
    x: Tensor, u: Tensor, added: Tensor | None, cu_seqlens: Tensor | None, states: Tensor, inverse: Tensor,
    written: Tensor, d_output: Tensor, *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    d_x = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, d_output.dtype))
    return d_x, empty_like(u), states.new_empty((count_sequences(u.shape[0], cu_seqlens), *states.shape[1:]))


@recursive_least_squares.gradient("x u initial_state", outputs=3, fake=_allocate_gradients)
def recursive_least_squares_backward(
    x: Tensor, u: Tensor, added: Tensor | None, cu_seqlens: Tensor | None, states: Tensor, inverse: Tensor,
    written: Tensor, d_output: Tensor, d_final: Tensor | None, reverse: int, precision: str, wanted: list[bool],
) -> Gradients:  # fmt: skip
    """The gradients of x (in the wider of its and the output's types), of u and of the first A (in float32)."""
    x, u, d_output = channels_adjacent(x), channels_adjacent(u), channels_adjacent(d_output)
    added, d_final = contiguous(added), contiguous(d_final)
    call = _Call(u, cu_seqlens, reverse, precision)
    sequence_of = sequence_of_slots(call.slots, call.chunk, call.tokens, cu_seqlens)
    d_x, d_u, d_initial = _allocate_gradients(x, u, added, cu_seqlens, states, inverse, written, d_output)
    transitions = states.new_empty((2, *states.shape), dtype=torch.float16)
    read, d_read, solved = (torch.empty_like(written) for _ in range(3))
    d_states, weights, d_weights = torch.empty_like(states), torch.empty_like(inverse), torch.empty_like(inverse)
    segments, span = call.cut()
    sizes = call.tokens, call.heads
    call.launch(linearize, 2 * call.slots, *sizes, *strides(x), *strides(u), *strides(d_output))(
        x, u, added, cu_seqlens, sequence_of, states, inverse, written, d_output, transitions, read, d_read, weights,
        d_weights, solved, d_x,
    )  # fmt: skip
    segment_transitions, segment_gains = None, None
    if segments > 1:
        squares = (*d_initial.shape[:2], segments, *d_initial.shape[2:])
        segment_transitions, segment_gains = transitions.new_empty((2, *squares)), states.new_empty(squares)
        call.launch(accumulate, 2 * call.sequences * (segments - 1), segments, span, *sizes)(
            transitions, read, d_read, segment_transitions, segment_gains
        )
    call.launch(retreat, call.sequences * segments, segments, span, *sizes)(
        cu_seqlens, transitions, read, d_read, segment_transitions, segment_gains, d_final, d_states, d_initial
    )
    call.launch(differentiate_directions, call.slots, *sizes, *strides(u))(
        u, added, cu_seqlens, sequence_of, states, d_states, read, d_read, weights, d_weights, solved, d_u
    )
    if not wanted[2]:
        return d_x, d_u, None
    if cu_seqlens is None:
        return d_x, d_u, symmetric(d_initial)
    # The final state of an empty sequence is its first one, not symmetrised.
    empty = (cu_seqlens.diff() == 0)[:, None, None, None]
    return d_x, d_u, torch.where(empty, d_initial, symmetric(d_initial))


def recursive_least_squares_triton(
    x: Tensor, u: Tensor, *, count: Tensor, lambda0: float, refresh_period: int | None, refresh: float,
    initial_state: InverseState | None, output_final_state: bool, cu_seqlens: Tensor | None, chunk_size: int,
    reverse: Reverse,
) -> tuple[Tensor, InverseState | None]:  # fmt: skip
    """`recursive_least_squares` in Triton kernels.

    `chunk_size` is ignored: the table of launches determines the length of chunks. For bfloat16 inputs, matrix products
    are one TF32 product, with 11 bits, where these are enough (see above), and otherwise up to three.
    """
    cu_seqlens = borders_on(u.device, cu_seqlens)
    precision = "tf32" if x.dtype == u.dtype == torch.bfloat16 else "tf32x3"
    A, steps = (None, None) if initial_state is None else initial_state
    added, final_steps = find_refreshes(count, steps, cu_seqlens, reverse, refresh_period, refresh)
    y, final, *_ = recursive_least_squares(
        x, u, added, A, cu_seqlens, float(lambda0), number_of(reverse), precision, x.dtype
    )
    return y, (final, final_steps) if output_final_state else None


def find_refreshes(
    count: Tensor, steps: Tensor | None, cu_seqlens: Tensor | None, reverse: Reverse, period: int | None, refresh: float
) -> tuple[Tensor | None, Tensor]:
    """What a refresh adds to the diagonal after each token, and the counted tokens of each sequence, with `steps`.

    The former is [B, T] in the order of reading, None where there is no refresh; the latter is [B or segments].
    """
    if reverse:
        count = turn(count, reverse)
    seen = count.cumsum(1)
    if cu_seqlens is None:
        seen = seen if steps is None else seen + steps[:, None]
        last = seen[:, -1].clone()
    else:
        tokens = count.shape[1]
        bounds = cu_seqlens.clamp(0, tokens)
        if reverse:  # the last segment comes first
            bounds, steps = tokens - bounds.flip(0), None if steps is None else steps.flip(0)
        before = torch.nn.functional.pad(seen[0], (1, 0))[bounds]
        first = -before[:-1] if steps is None else steps - before[:-1]
        order = torch.arange(tokens, device=bounds.device, dtype=bounds.dtype)
        segment = torch.searchsorted(bounds, order, right=True) - 1
        seen, last = seen + first[segment.clamp(0, first.shape[0] - 1)], first + before[1:]
        last = last.flip(0) if reverse else last
    return refresh_due(seen, count, period, refresh, torch.float32) if period else None, last
