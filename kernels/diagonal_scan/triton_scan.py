"""Longhorn's and Mamba's scans in Triton: one kernel forward, one backward; the state stays in registers.

    h_t = a_t ⊙ h_{t-1} + b_t;   o_t = h_t q_t

The kernels are in triton_forward.py and triton_backward.py. The forward kernel stores the state before every
CHECKPOINT-th token, 4 B T D N / CHECKPOINT bytes that stay until the backward pass (39 MB at (128, 197, 384, 16));
gradient checkpointing of the blocks frees them. No tensor [B, T, D, N] exists at any time. Where sequences and channels
are too few for the GPU, time is split into parts, and every part is computed twice.

The operations below hold states as [B or segments, W, D], where W is N rounded up to a power of two, and A as [W, D]
times log2(e).
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longseq.kernels.custom_op import Gradients, custom_op, empty_like, records_gradient
from longseq.kernels.devices import channels_adjacent, contiguous
from longseq.kernels.diagonal_scan.triton_backward import backward, gather
from longseq.kernels.diagonal_scan.triton_forward import forward, prepare, summarize
from longseq.kernels.reading import Reverse, number_of
from longseq.kernels.segments import find_span
from longseq.kernels.triton_launch import (
    Prepared,
    borders_on,
    cdiv,
    count_sequences,
    count_slots,
    find_launch,
    launch_options,
    longest_first,
    next_power_of_2,
    sequence_of_slots,
)


class Walk(NamedTuple):
    """How a kernel loops over time."""

    entries: int  # entries of a channel's state in one thread, at most
    vector: int  # adjacent channels in one thread
    tokens: int  # the step of the loop
    registers: int | None  # the limit for one thread

    def tile(self, width: int) -> dict[str, int]:
        """The part of a state that one warp holds."""
        entries = min(self.entries, width)
        sharing = width // entries
        return {"P": entries, "Q": sharing, "BLOCK_D": max(32 // sharing, 1) * self.vector}


CHECKPOINT = 16
STACKED = 4  # the most tokens whose gradients the backward kernel stores at a time
# Time is split into parts until there are about WARPS warps: as many as an H200 runs at once if each thread has 255
# registers. With 168 registers, half as many again run at once: launches with more than WARPS warps are "crowded" and
# have this limit. With 128 registers, twice WARPS run at once, each of them slower: "doubled" forward launches have
# this limit. Longhorn's forward launches with more than twice WARPS warps can be "queued": half as many warps, each of
# twice as many channels, then still fill the GPU. Warps are counted for FORWARD and BACKWARD, whatever the table holds.
# Mamba's forward launches have names of their own: A takes registers, so that Longhorn's launch of 16 tokens at a time
# would have more numbers than registers. They are never queued: with more than twice WARPS warps, 168 registers take as
# much time as any other launch, to a few percent.
WARPS = 1024
REGISTERS = 255
REGISTERS_CROWDED = 168
REGISTERS_DOUBLED = 128
FORWARD = Walk(8, 2, 8, REGISTERS)  # also of summaries
BACKWARD = Walk(4, 4, 4, REGISTERS)
# By the bytes of a state's numbers (float32 whatever the inputs are) and by W, the state's padded width. The launches
# for 16 were compared with others on an H200 (see benchmarks/README.md).
LAUNCHES: dict[tuple[int, int], dict[str, Walk]] = {
    (4, width): {
        "summarize": FORWARD,
        "summarize_crowded": FORWARD._replace(registers=REGISTERS_CROWDED),
        "forward": FORWARD,
        "forward_crowded": FORWARD._replace(registers=REGISTERS_CROWDED),
        "forward_doubled": FORWARD._replace(registers=REGISTERS_DOUBLED),
        "forward_queued": FORWARD._replace(registers=REGISTERS_CROWDED),
        "forward_selective": FORWARD,
        "forward_selective_crowded": FORWARD._replace(registers=REGISTERS_CROWDED),
        "forward_selective_doubled": FORWARD._replace(tokens=4, registers=REGISTERS_DOUBLED),
        "backward": BACKWARD,
        "backward_crowded": BACKWARD._replace(tokens=2, registers=REGISTERS_CROWDED),
    }
    for width in (1, 2, 4, 8, 16, 32, 64)
}
LAUNCHES[4, 16] |= {"forward": Walk(8, 2, 16, REGISTERS), "forward_queued": Walk(16, 2, 4, REGISTERS_CROWDED)}
SHORTEST_PART = 128
FEWEST_PARTS = 4  # fewer would not make up for computing every part twice
PREPARED = 64  # tokens of a program that prepares keys and queries
GATHERED = 16  # tokens of a program that adds up the gradients of keys and queries
LOG2E = 1.4426950408889634
assert SHORTEST_PART % CHECKPOINT == CHECKPOINT % STACKED == 0


class _Plan(NamedTuple):
    """What both passes derive from the shapes of a call."""

    width: int
    sequences: int
    slots: int  # an upper bound of the number of parts of all sequences
    sequence_of: Tensor | None
    constants: dict[str, Any]  # the compile-time arguments of every kernel that works on parts

    def name(self, kernel: str, channels: int) -> str:
        """The kernel's name in the table, by the number of warps.

        Above those that run at once with 168 registers, Longhorn's forward kernel is doubled, unless as queued it takes
        fewer rounds, of as many warps as run at once.
        """
        tile = (BACKWARD if kernel == "backward" else FORWARD).tile(self.width)
        warps = self.slots * cdiv(channels, tile["BLOCK_D"])
        if kernel == "forward":
            longhorn = self.constants["LONGHORN"]
            kernel = "forward" if longhorn else "forward_selective"
            rounds, rounds_queued = cdiv(warps, 2 * WARPS), cdiv(warps, 3 * WARPS)
            if longhorn and rounds > rounds_queued:
                return "forward_queued"
            if 2 * warps > 3 * WARPS and (longhorn or rounds == 1):
                return f"{kernel}_doubled"
        return f"{kernel}_crowded" if warps > WARPS else kernel

    def walk(self, kernel: str, channels: int) -> Walk:
        """The entry of the table for a kernel."""
        return LAUNCHES[4, self.width][self.name(kernel, channels)]

    def launch(
        self, kernel: Any, walk: Walk, x: Tensor, rate: Tensor, A: Tensor | None, *sizes: int, **constants: Any
    ) -> Prepared:
        """The launch of a kernel for all parts; its own `sizes` follow those of tokens and channels."""
        tokens, channels = x.shape[1:]
        tile = walk.tile(self.width)
        half = A.stride(0) if A is not None and A.dim() == 3 else 0  # from A to the A of the second half of the rows
        return find_launch(
            kernel, x.device, self.slots * cdiv(channels, tile["BLOCK_D"]),
            (tokens, channels, *sizes, half, *_strides(x, rate)),
            EVEN=channels % tile["BLOCK_D"] == 0, VECTOR=walk.vector, TOKENS=walk.tokens,
            **tile, **self.constants, **constants, **launch_options(1, maxnreg=walk.registers),
        )  # fmt: skip


def _plan(x: Tensor, key: Tensor, A: Tensor | None, cu_seqlens: Tensor | None, reverse: int) -> _Plan:
    batch, tokens, channels = x.shape
    width = next_power_of_2(key.shape[2])
    sequences = count_sequences(batch, cu_seqlens)
    warps = sequences * cdiv(channels, FORWARD.tile(width)["BLOCK_D"])
    # A program that walks a long sequence must not begin last, when the others are done.
    span, slots, sequence_of = 0, sequences, None if cu_seqlens is None else longest_first(cu_seqlens)
    if warps:
        mean = batch * tokens // sequences
        span = find_span(mean, warps, WARPS, fewest=FEWEST_PARTS, shortest=SHORTEST_PART, at_once=False)
    if span:
        slots = count_slots(batch, tokens, span, cu_seqlens)
        sequence_of = sequence_of_slots(slots, span, tokens, cu_seqlens)
    constants: dict[str, Any] = {"REVERSE": reverse, "LONGHORN": A is None, "SPAN": span}
    return _Plan(width, sequences, slots, sequence_of, constants)


def _prepare(plan: _Plan, key: Tensor, query: Tensor) -> Tensor:
    """Keys and queries in float32, in the layout that the kernels read."""
    batch, tokens, entries = key.shape
    longhorn = plan.constants["LONGHORN"]
    row = 2 * plan.width + (4 if longhorn else 0)
    prepared = key.new_empty((batch, tokens, row), dtype=torch.float32)
    if prepared.numel():
        find_launch(
            prepare, key.device, batch * cdiv(tokens, PREPARED), (tokens, entries, *_strides(key, query)),
            LONGHORN=longhorn, WIDTH=plan.width, TOKENS=PREPARED, **launch_options(2),
        )(key, query, prepared)  # fmt: skip
    return prepared


def _summarize(
    plan: _Plan, x: Tensor, rate: Tensor, prepared: Tensor, A: Tensor | None, cu_seqlens: Tensor | None, adjoint: bool
) -> tuple[Tensor | None, Tensor | None]:
    """What each part does to a state: products of decays, and final states from zero. None without parts."""
    if not plan.constants["SPAN"]:
        return None, None
    products, ends = (_allocate_states(x, plan.width, plan.slots) for _ in range(2))
    launch = plan.launch(summarize, plan.walk("summarize", x.shape[2]), x, rate, A, ADJOINT=adjoint)
    launch(x, rate, prepared, A, cu_seqlens, plan.sequence_of, products, ends)
    return products, ends


def _allocate(
    x: Tensor, rate: Tensor, key: Tensor, query: Tensor, A: Tensor | None, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, reverse: int, save: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Empty tensors for the output, the final state and the checkpoints."""
    final = _allocate_states(x, next_power_of_2(key.shape[2]), count_sequences(x.shape[0], cu_seqlens))
    return x.new_empty(x.shape), final, allocate_checkpoints(x, key, cu_seqlens, save)


def allocate_checkpoints(x: Tensor, key: Tensor, cu_seqlens: Tensor | None, save: bool) -> Tensor:
    """An empty tensor for the states before every CHECKPOINT-th token; without `save`, for none."""
    batch, tokens, _ = x.shape
    slots = count_slots(batch, tokens, CHECKPOINT, cu_seqlens) if save else 0
    return _allocate_states(x, next_power_of_2(key.shape[2]), slots)


def _allocate_states(x: Tensor, width: int, count: int) -> Tensor:
    """An empty tensor for `count` states [W, D]."""
    return x.new_empty((count, width, x.shape[2]), dtype=torch.float32)


@custom_op("diagonal_scan", _allocate)
def diagonal_scan(
    x: Tensor, rate: Tensor, key: Tensor, query: Tensor, A: Tensor | None, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, reverse: int, save: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The scan: without `A`, `rate` is Longhorn's beta; with it, Mamba's delta.

    x, rate [B, T, D]; key, query [B, T, N]; A [W, D], or [2, W, D] for each half of the rows; states [B or segments, W,
    D]. Returns o [B, T, D] in x's type, the final state, and the checkpoints that the backward pass needs (empty
    without `save`).
    """
    output, final, checkpoints = _allocate(x, rate, key, query, A, initial_state, cu_seqlens, reverse, save)
    x, rate, key, query = (channels_adjacent(tensor) for tensor in (x, rate, key, query))
    A, initial_state = contiguous(A), contiguous(initial_state)
    if final.numel():
        plan = _plan(x, key, A, cu_seqlens, reverse)
        prepared = _prepare(plan, key, query)
        products, ends = _summarize(plan, x, rate, prepared, A, cu_seqlens, adjoint=False)
        launch = plan.launch(
            forward, plan.walk("forward", x.shape[2]), x, rate, A,
            HAS_INITIAL=initial_state is not None, SAVE=save, CHECKPOINT=CHECKPOINT,
        )  # fmt: skip
        launch(
            x, rate, prepared, A, final if initial_state is None else initial_state, cu_seqlens,
            plan.sequence_of, products, ends, output, final, checkpoints,
        )  # fmt: skip
    return output, final, checkpoints


def _allocate_gradients(
    x: Tensor, rate: Tensor, key: Tensor, query: Tensor, A: Tensor | None, cu_seqlens: Tensor | None, *_: Any
) -> Gradients:
    d_A = None if A is None else A.new_empty(A.shape, dtype=torch.float32)
    state = _allocate_states(x, next_power_of_2(key.shape[2]), count_sequences(x.shape[0], cu_seqlens))
    return *[empty_like(tensor) for tensor in (x, rate, key, query)], d_A, state


@diagonal_scan.gradient("x rate key query A initial_state", outputs=1, fake=_allocate_gradients)
def diagonal_scan_backward(
    x: Tensor, rate: Tensor, key: Tensor, query: Tensor, A: Tensor | None, cu_seqlens: Tensor | None,
    checkpoints: Tensor, d_output: Tensor, d_final: Tensor | None, reverse: int,
) -> Gradients:  # fmt: skip
    """The gradients of all inputs; those of A and the initial state in float32."""
    gradients = empty_like(x), empty_like(rate), empty_like(key), empty_like(query)
    d_A, d_initial = differentiate_scan(
        x, rate, key, query, A, cu_seqlens, checkpoints, d_output, d_final, reverse, *gradients
    )
    return *gradients, d_A, d_initial


def differentiate_scan(
    x: Tensor, rate: Tensor, key: Tensor, query: Tensor, A: Tensor | None, cu_seqlens: Tensor | None,
    checkpoints: Tensor, d_output: Tensor, d_final: Tensor | None, reverse: int,
    d_x: Tensor, d_rate: Tensor, d_key: Tensor, d_query: Tensor,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """Writes the gradients of tokens; returns those of A and the state.

    Rows of the gradients of key and query have the same stride. A `d_output` with half as many rows as x is the
    gradient of both halves.
    """
    x, rate, key, query = (channels_adjacent(tensor) for tensor in (x, rate, key, query))
    batch, tokens, channels = x.shape
    d_output, A = d_output.contiguous(), contiguous(A)
    plan = _plan(x, key, A, cu_seqlens, reverse)
    d_initial = _allocate_states(x, plan.width, plan.sequences)
    d_A = None if A is None else _allocate_states(x, plan.width, plan.slots)
    if d_initial.numel():
        prepared = _prepare(plan, key, query)
        if plan.constants["SPAN"] and d_output.shape[0] < batch:
            d_output = torch.cat((d_output, d_output))
        products, ends = _summarize(plan, d_output, rate, prepared, A, cu_seqlens, adjoint=True)
        launched = plan.walk("backward", channels)
        block = launched.tile(plan.width)["BLOCK_D"]
        blocks = cdiv(channels, block)
        d_prepared = x.new_empty((blocks, batch, tokens, 2, plan.width), dtype=torch.float32)
        pieces = (plan.slots * blocks, CHECKPOINT // launched.tokens, plan.width, block)
        scratch = x.new_empty(pieces, dtype=torch.float32)
        launch = plan.launch(
            backward, launched, x, rate, A, batch * tokens, d_output.shape[0],
            HAS_FINAL=d_final is not None, CHECKPOINT=CHECKPOINT,
        )  # fmt: skip
        launch(
            x, rate, prepared, A, cu_seqlens, plan.sequence_of, products, ends, checkpoints, scratch,
            d_output, checkpoints if d_final is None else d_final.contiguous(),
            d_x, d_rate, d_prepared, d_A, d_initial,
        )  # fmt: skip
        if d_key.numel():
            find_launch(
                gather, x.device, cdiv(batch * tokens, GATHERED), (blocks, batch * tokens, d_key.stride(1)),
                N=key.shape[2], WIDTH=plan.width, TOKENS=GATHERED, **launch_options(2),
            )(d_prepared, d_key, d_query)  # fmt: skip
    if A is not None and d_A is not None:
        d_A = d_A.sum(0) if A.dim() == 2 else d_A.unflatten(0, (2, -1)).sum(1)
    return d_A, d_initial


def _strides(*tensors: Tensor) -> list[int]:
    return [tensor.stride(dim) for tensor in tensors for dim in (0, 1)]


def longhorn_scan_triton(x: Tensor, q: Tensor, k: Tensor, beta: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
    """`longhorn_scan` in Triton."""
    return _scan(x, beta, k, q, None, **options)


def selective_scan_triton(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """`selective_scan` in Triton."""
    return _scan(x, delta, B, C, A, **options)


def _scan(
    x: Tensor, rate: Tensor, key: Tensor, query: Tensor, A: Tensor | None, *, initial_state: Tensor | None,
    output_final_state: bool, cu_seqlens: Tensor | None, reverse: Reverse,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`diagonal_scan` for A and states in the user's layout, [D, N] or [2, D, N] and [B or segments, D, N]."""
    save = records_gradient(x, rate, key, query, A, initial_state)
    entries = key.shape[2]
    spare = (0, 0, 0, next_power_of_2(entries) - entries)
    A = None if A is None else F.pad(LOG2E * A.float().mT, spare)
    initial_state = None if initial_state is None else F.pad(initial_state.float().mT, spare)
    cu_seqlens = borders_on(x.device, cu_seqlens)
    o, final, _ = diagonal_scan(x, rate, key, query, A, initial_state, cu_seqlens, number_of(reverse), save)
    return o, final[:, :entries].mT.contiguous() if output_final_state else None
