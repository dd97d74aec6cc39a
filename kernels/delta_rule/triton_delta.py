"""The delta rule in Triton: its two custom operations, their launches and the constants that those use.

Sums, the triangular inverse and the state are float32. Matrix products of float32 values are three TF32 products each.
Those of bfloat16 values are float16 products, as those of float16 values are. Then the factors between two products (X,
U, states, their gradients) have 11 bits instead of 8, at the same speed, and the error of a result is that of rounding
it to bfloat16. Each tile has its own unit (see triton_units.py), so that the range is not limited.

No sum depends on the order in which programs run: the result is the same in every run. The forward pass keeps X, A, W,
U and the states before each chunk for the backward pass: about 2 C + K + V + K V / C numbers for each token and head,
with C = 64. With a gate, float32 keys, 256 columns or few segments these are 2 K more, for e^b Q and e^{b_C - b} P,
which the walks else make from q and k. For segments of time it also keeps transitions.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longseq.kernels.custom_op import Gradients, custom_op, empty_like, records_gradient
from longseq.kernels.delta_rule.triton_backward import differentiate_inputs, differentiate_scores, retreat
from longseq.kernels.delta_rule.triton_channels import delta_rule_channels
from longseq.kernels.delta_rule.triton_forward import advance, prepare, read_out, read_through
from longseq.kernels.delta_rule.triton_kept import TILE, count_gradient_units, count_units
from longseq.kernels.delta_rule.triton_segments import BOTH, QUERIES, connect, summarize
from longseq.kernels.devices import contiguous, longseq_shared_memory
from longseq.kernels.reading import Reverse, number_of
from longseq.kernels.segments import find_span
from longseq.kernels.triton_launch import (
    PREPARED,
    ROW,
    Launch,
    Prepared,
    add_up,
    allocate_parts,
    block_width,
    borders_on,
    capability_here,
    cdiv,
    count_sequences,
    count_slots,
    evenly,
    fit_launches,
    sequence_of_slots,
    steps,
)
from longseq.kernels.triton_tiles import SECOND_HALF

# By the precision's bytes and the width, max(K, V) rounded up to 64, 128 or 256; those of half precision were measured
# on an H200. The walks have three stages where shared memory holds them: with two, a chunk's tiles are loaded just
# before they are needed. Without an entry `read_out`, `advance` stores the output. It takes its wide launch where the
# programs of the other launch would not all run at the same time. `retreat` takes its gated launch, if the table has
# one, with a gate: a third stage makes it slower there. After wide walks, whose value columns have one unit,
# `differentiate_inputs` multiplies all of them at once: that takes 4 % less time.
LAUNCHES: dict[tuple[int, int], dict[str, Launch]] = {
    (2, 64): {
        "prepare": Launch(64, 0, 4, 1, 168),
        "read_through": Launch(64, 0, 4, 1),
        "summarize": Launch(64, 0, 4, 3),
        "connect": Launch(16, 0, 4, 3, 128),
        "advance": Launch(64, 0, 4, 3),
        "retreat_summary": Launch(64, 0, 4, 2),
        "retreat": Launch(64, 0, 4, 3),
        "retreat_gated": Launch(64, 0, 4, 2),
        "differentiate_scores": Launch(0, 64, 4, 1, 168),
        "differentiate_gated": Launch(64, 64, 4, 1),
        "differentiate_all": Launch(64, 64, 4, 1),
    },
    (2, 128): {
        "prepare": Launch(64, 0, 4, 1, 168),
        "summarize": Launch(64, 0, 4, 3),
        "connect": Launch(16, 0, 4, 3, 168),
        "advance": Launch(64, 0, 4, 3),
        "advance_wide": Launch(128, 0, 8, 3),
        "retreat_summary": Launch(64, 0, 4, 3),
        "retreat_summary_wide": Launch(128, 64, 8, 3),
        "retreat": Launch(64, 0, 4, 3),
        "retreat_wide": Launch(128, 64, 8, 3),
        "differentiate_scores": Launch(0, 64, 4, 1, 168),
        "differentiate_gated": Launch(64, 64, 4, 1),
        "differentiate_all": Launch(64, 64, 4, 1),
        "differentiate_all_wide": Launch(64, 128, 4, 1),
    },
    (2, 256): {
        "prepare": Launch(128, 0, 4, 1),
        "summarize": Launch(128, 64, 8, 2),
        "connect": Launch(16, 0, 8, 1),
        "advance": Launch(128, 64, 8, 2),
        "retreat_summary": Launch(128, 64, 8, 2),
        "retreat": Launch(128, 64, 8, 2),
        "differentiate_scores": Launch(0, 64, 4, 2, 168),
        "differentiate_inputs": Launch(64, 64, 4, 3),
        "differentiate_gated": Launch(64, 64, 4, 1),
    },
}
LAUNCHES |= {
    (4, width): {
        "prepare": Launch(32, 0, 4, 1),
        **dict.fromkeys(("summarize", "connect", "advance", "retreat_summary", "retreat"), Launch(16, 0, 8, 1)),
        "read_out": Launch(64, 32, 4, 1),
        "differentiate_scores": Launch(0, 32, 4, 1),
        **dict.fromkeys(("differentiate_inputs", "differentiate_gated"), Launch(64, 32, 8, 1)),
    }
    for width in (64, 128, 256)
}
if (capability_here() or [0])[0] == 10:
    # 128 columns take 576 columns of tensor memory, or 704, and GPUs of capability 10 have 512.
    for walk in ("advance", "retreat", "retreat_summary"):
        LAUNCHES[2, 256][walk] = LAUNCHES[2, 256][walk]._replace(block=64)
# Bytes of shared memory of a segment's `retreat` with 128 columns and three stages, and with two, by Triton 3.8; other
# versions take 8 KiB less. GPUs of capability 8.0 have 163 KiB; those of 8.6, 8.9 and 12.0 have 99, enough for two
# stages of a wide one.
THREE_STAGES, TWO_STAGES = 168 * 1024, 104 * 1024
if longseq_shared_memory("cuda", None) < THREE_STAGES:
    most = 1 if longseq_shared_memory("cuda", None) < TWO_STAGES else 2
    for walk in ("retreat", "retreat_summary"):
        LAUNCHES[2, 128][walk] = LAUNCHES[2, 128][walk]._replace(stages=most)
        LAUNCHES[2, 128][f"{walk}_wide"] = LAUNCHES[2, 128][f"{walk}_wide"]._replace(stages=2)
fit_launches(LAUNCHES)
CHUNKS = {2: 64, 4: 32}  # tokens of a chunk, by the precision's bytes
# Where nothing is kept for a backward pass, `read_through` can do all in one launch, for half precision of up to
# WALKED_WIDTH columns. Its programs walk along time, so it is faster for sequences of up to SHORT_TOKENS, or where
# FILLING sequences and heads fill a GPU. On an H200, 256 of them take 26 % less time at 64 tokens, and 7 % at 4,096;
# with a gate they take as much as by the other kernels from 2,048 on. With fewer, kernels over chunks in parallel are
# up to 9 times as fast. Packed sequences, of which one may have nearly all tokens, are read so up to PACKED_TOKENS.
WALKED_WIDTH = 64
SHORT_TOKENS = 64
FILLING = 192
PACKED_TOKENS = 1024
WALKED_CHUNK = 32  # registers do not suffice for both the inverse of 64 tokens and the state
# Programs of `advance` that walk side by side on a GPU of 132 multiprocessors, by the table's keys: where sequences,
# heads and blocks of columns are too few for so many, sequences are cut into segments of time. With 256 columns more
# segments lose, as the programs of `summarize` are more. A transition of 256 x 256 float32 numbers does not fit into
# shared memory: 0.
PROGRAMS = {(2, 64): 264, (2, 128): 132, (2, 256): 100, (4, 64): 132, (4, 128): 132, (4, 256): 0}
FEWEST_SEGMENTS = 3  # fewer do not make up for walking most of the sequence twice
# Chunks of a sequence that is cut: for fewer, the launches of two more kernels take as long as the walk.
FEWEST_CHUNKS = 32
SHORTEST_SEGMENT = 4  # chunks
MULTIPROCESSORS = 132  # of the GPU where this was measured
# Where sequences are cut, weighed queries and write keys of up to so many bytes are kept for the backward pass.
KEPT_ROWS = 1 << 25
ALIGNMENT = 64  # numbers
# Chunks that one program of the second launch of `prepare` looks at: a program for each takes 2 to 4 % of a call.
LOOKS = 8


class _Plan(NamedTuple):
    """Everything that both passes derive from a call's shapes."""

    batch: int
    tokens: int
    heads: int
    key_dim: int
    value_dim: int
    gated: bool
    dtype: torch.dtype  # of the matrix products
    chunk: int
    slots: int  # the largest number of chunks of all sequences
    sequences: int
    walked: bool  # whether `read_through` does all
    span: int  # chunks of a segment of time; 0 if sequences are not cut
    walks: int  # the largest number of sequences, or of segments of all sequences
    narrowest: int  # the smallest block of columns
    key: tuple[int, int]  # key of the table of launches
    wide: bool = False  # whether programs of the walks take more columns, if the table has such a launch
    weighs: bool = False  # whether the walks make e^b Q and e^{b_C - b} P; forward in segments, only e^b Q

    @property
    def launches(self) -> dict[str, Launch]:
        return LAUNCHES[self.key]

    @property
    def scaled(self) -> bool:
        """Whether tiles have units."""
        return self.dtype == torch.float16

    @property
    def along(self) -> bool:
        """Whether `advance` also stores the output, so that `read_out` is not needed."""
        return not self.walked and "read_out" not in self.launches

    def walk(self, kernel: str) -> str:
        """The table's name for a kernel that walks along time, or that follows the walks."""
        wide = f"{kernel}_wide"
        return wide if self.wide and wide in self.launches else kernel

    @property
    def advance(self) -> str:
        return self.walk("advance")

    @property
    def retreat(self) -> str:
        """The table's name for the kernel `retreat`, which may have a launch of its own for gates."""
        return "retreat_gated" if self.gated and "retreat_gated" in self.launches else self.walk("retreat")

    @property
    def fuses(self) -> bool:
        """Whether `differentiate_inputs` does the work of `differentiate_scores`, too.

        With a gate the program would spill registers, and each block of 256 columns would do that work four times.
        """
        return not self.gated and "differentiate_all" in self.launches

    @property
    def differentiate(self) -> str:
        """The table's name for the kernel `differentiate_inputs`: with a gate the same kernel has other registers."""
        if self.gated:
            return "differentiate_gated"
        return self.walk("differentiate_all") if self.fuses else "differentiate_inputs"

    def whole(self, width: int) -> int:
        """The width of a block that holds `width` columns."""
        return block_width(width, self.narrowest)

    def block(self, kernel: str, width: int) -> int:
        """The width of one program's block, out of `width` columns."""
        return min(self.launches[kernel].block, self.whole(width))

    def tiles(self, kernel: str, width: int) -> int:
        """`block` for results that have units: the block consists of whole tiles."""
        block = self.block(kernel, width)
        assert not self.scaled or block % TILE.value == 0 or block >= width, "no two programs share a unit"
        return block

    def step(self, kernel: str, width: int) -> int:
        """The width of the blocks over which a program loops, of `width` columns; all at once if the table has 0."""
        whole = self.whole(width)
        return min(self.launches[kernel].step or whole, whole)

    def tile(self, kernel: str, width: int) -> int:
        """`step` for a loop over tiles: one unit for each block."""
        step = self.step(kernel, width)
        assert not self.scaled or step == min(TILE.value, self.whole(width)), "one tile at a time"
        return step

    def value_step(self, kernel: str, width: int) -> int:
        """`step` for a loop over value columns in the units of the walks: a tile's, or all, if they have one unit.

        All columns have one unit where each walk's program has all of them.
        """
        step, whole = self.step(kernel, width), self.whole(width)
        if min(self.block(walk, width) for walk in (self.advance, self.retreat)) < step:
            step = min(TILE.value, whole)
        assert step in (min(TILE.value, whole), whole), "one tile at a time, or all"
        return step


def _plan(
    q: Tensor, k: Tensor, v: Tensor, write_key: Tensor | None, g: Tensor | None, cu_seqlens: Tensor | None, half: bool,
    differentiable: bool,
) -> _Plan:  # fmt: skip
    """The plan of a call, which may have a backward pass. `v` may be any tensor of v's shape.

    The walks make e^b Q and e^{b_C - b} P from q and write keys in half precision, where there is no gate: this costs
    little, except in two cases, in which the forward pass keeps both. A state of 256 columns leaves the walks no
    registers for it: the walk back then takes twice the time. And walks of segments, which all run at the same time,
    wait for it in each chunk: on an H100 one sequence of 4 or 8 heads takes 8 to 12 % more time. One of 16 heads takes
    1 % more, and its rows may be many: 128 MiB for 16,384 tokens.
    """
    batch, tokens, heads, key_dim = k.shape
    value_dim = v.shape[3]
    dtype = torch.float16 if half else torch.float32
    width = max(key_dim, value_dim)
    sequences = count_sequences(batch, cu_seqlens)
    fills = sequences * heads >= FILLING and (cu_seqlens is None or tokens <= PACKED_TOKENS)
    walked = half and not differentiable and width <= WALKED_WIDTH and (fills or tokens <= SHORT_TOKENS)
    chunk = WALKED_CHUNK if walked else CHUNKS[dtype.itemsize]
    slots = count_slots(batch, tokens, chunk, cu_seqlens)
    key = dtype.itemsize, 64 if width <= 64 else 128 if width <= 128 else 256
    # Rows of one width (see `Launch`): a chunk's matrices are 64 wide. Those of short sequences and of float32 are
    # multiplied without descriptors, where they are narrower.
    narrowest = ROW[2] if half and not walked else 16
    shape = batch, tokens, heads, key_dim, value_dim, g is not None
    plan = _Plan(*shape, dtype, chunk, slots, sequences, walked, 0, sequences, narrowest, key)
    if walked:
        return plan
    lanes = heads * cdiv(value_dim, plan.block(plan._replace(wide=True).advance, value_dim))
    narrow = heads * cdiv(value_dim, plan.block("advance", value_dim))
    span = _find_span(PROGRAMS[key], lanes, narrow if half else 0, batch, sequences, cdiv(tokens, chunk))
    light = q.element_size() == (k if write_key is None else write_key).element_size() == 2
    weighs = half and light and g is None and key[1] < 256
    if span:
        weighs = weighs and 2 * slots * chunk * heads * key_dim * dtype.itemsize > KEPT_ROWS
        plan = plan._replace(span=span, walks=count_slots(batch, tokens, span * chunk, cu_seqlens))
    # A program with fewer columns finishes a chunk sooner, provided that all programs run at the same time.
    fit = narrow == lanes or plan.walks * narrow <= PROGRAMS[key]
    return plan._replace(wide=not fit, weighs=weighs)


def _find_span(programs: int, lanes: int, narrow: int, batch: int, sequences: int, chunks: int) -> int:
    """The number of chunks in a segment of time, for a row of `chunks` chunks; 0 if sequences are not cut.

    `lanes` programs walk through a sequence side by side, or `narrow` programs of fewer columns; 0 if those do not
    count. Packed sequences are cut like the row that holds them, unless there are enough of them.
    """
    if sequences * lanes > programs:
        return 0
    # `connect` walks through segments as the other kernels walk through chunks. Its steps are faster, so that half as
    # long segments take 4 to 10 % less time, but only where each program still has a multiprocessor for itself: with
    # two on each they take 5 to 17 % more.
    shortest = SHORTEST_SEGMENT
    while 2 * shortest * shortest < chunks:
        alone = 0 < narrow * batch * cdiv(chunks, shortest) <= MULTIPROCESSORS
        if alone and 4 * shortest * shortest >= chunks:
            break
        shortest *= 2
    return find_span(chunks, batch * lanes, programs, fewest=FEWEST_SEGMENTS, shortest=shortest, least=FEWEST_CHUNKS)


class _Call(NamedTuple):
    """What determines the launches of a pass."""

    plan: _Plan
    device: torch.device
    scale: float
    reverse: int
    own_write_key: bool
    raw: bool  # whether products of queries and keys are of their own type
    steps: tuple[int, ...]  # the distances between tokens, of `_Sequences`

    def prepare(self, kernel: Any, name: str, programs: int, numbers: tuple[float, ...], **constants: Any) -> Prepared:
        """The launch of a kernel with the table's entry `name`."""
        plan = self.plan
        constants |= {"K": plan.key_dim, "V": plan.value_dim, "CHUNK": plan.chunk, **plan.launches[name].options}
        return Prepared(kernel, self.device, programs, numbers, **constants)

    def prepare_connect(self, *, back: bool) -> Prepared:
        """The launch that computes the states, or with `back` their gradients, at the borders of the segments."""
        plan, block = self.plan, self.plan.block("connect", self.plan.value_dim)
        programs = plan.sequences * plan.heads * cdiv(plan.value_dim, block)
        numbers = (plan.span, plan.tokens, plan.heads)
        blocks = {"BLOCK": block, "BLOCK_K": plan.whole(plan.key_dim)}
        return self.prepare(connect, "connect", programs, numbers, BACK=back, **blocks)


class _Sequences(NamedTuple):
    """The sequences of a call as kernels take them (see `evenly`); backward, `v` is the gradient of the outputs."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    write: Tensor
    g: Tensor | None

    def call(self, plan: _Plan, scale: float, reverse: int, own_write_key: bool) -> _Call:
        raw = not plan.scaled or _have_type_of_products(plan, self.q, self.k, self.write)
        return _Call(plan, self.q.device, scale, reverse, own_write_key, raw, steps(*self))


def _lay_out(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, write_key: Tensor | None, g: Tensor | None) -> _Sequences:
    k = evenly(k)
    write = k if write_key is None else evenly(write_key)
    return _Sequences(evenly(q), k, evenly(v), evenly(beta), write, evenly(g))


def _have_type_of_products(plan: _Plan, *tensors: Tensor) -> bool:
    """Whether tensors share one type, of the width of tiles, in which matrix products can take them."""
    # Triton's interpreter, which runs on the CPU, multiplies matrices of bfloat16 as integers.
    dtype = tensors[0].dtype
    own = len({x.dtype for x in tensors}) == 1 and (dtype == torch.float16 or tensors[0].device.type != "cpu")
    return own and dtype.itemsize == plan.dtype.itemsize


def _allocate_results(q, k, v, beta, write_key, g, initial_state, cu_seqlens, scale, reverse, half, save):
    plan = _plan(q, k, v, write_key, g, cu_seqlens, half, save)
    output, final, buffers = _allocate(plan, v, _kept_sizes(plan, save))
    return output, final, buffers if save else []


@custom_op("delta_rule", _allocate_results)
def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, write_key: Tensor | None, g: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, scale: float, reverse: int, half: bool, save: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """Returns o [B, T, H, V] in v's dtype, the final state [B or segments, H, K, V] in float32, and if `save` what the
    backward pass needs, in the order of `_Kept`. `half`: the products are of float16 numbers, whatever the inputs are.
    """
    inputs = _lay_out(q, k, v, beta, write_key, g)
    initial_state = contiguous(initial_state)
    plan = _plan(q, k, v, write_key, g, cu_seqlens, half, save)
    sizes = _kept_sizes(plan, save)
    output, final, buffers = _allocate(plan, v, sizes)
    call = inputs.call(plan, scale, reverse, write_key is not None)
    if plan.walked:
        _prepare_read_through(call)(*inputs, initial_state, cu_seqlens, output, final)
        return output, final, []
    kept = _find_kept(plan, sizes, buffers)
    # Write keys are read by two walks of a segment, which take longer to weigh them than `prepare` takes to store them.
    weigh = 0
    if plan.weighs:
        weigh = QUERIES.value if plan.span else BOTH.value
        kept = kept._replace(queries=inputs.q, writes=torch.empty_like(kept.w) if plan.span else inputs.write)
    launches = _prepare_forward(call, save, weigh)
    sequence_of = sequence_of_slots(plan.slots, plan.chunk, plan.tokens, cu_seqlens)
    for launch in launches.prepare:
        launch(*inputs, cu_seqlens, sequence_of, *kept[:5], kept.decays, kept.units)
    offsets = None
    if launches.borders is not None:
        summarize_segments, connect_segments = launches.borders
        offsets = _allocate_offsets(plan, v)
        summarize_segments(
            *(initial_state, kept.units, cu_seqlens, kept.writes, kept.w, kept.u, kept.decays, offsets),
            *(kept.transitions, kept.transition_units),
        )
        connect_segments(cu_seqlens, offsets, kept.transitions, kept.transition_units)
    launches.advance(
        *(inputs.beta, initial_state, kept.units, cu_seqlens, *kept[:5], kept.decays, offsets),
        *(kept.states if save or not plan.along else None, output if plan.along else None, final),
    )
    if launches.read_out is not None:
        launches.read_out(inputs.q, inputs.g, cu_seqlens, sequence_of, kept.products, kept.u, kept.states, output)
    return output, final, buffers if save else []


class _Forward(NamedTuple):
    """The launches of a forward pass; None for those that it does not need."""

    prepare: list[Prepared]
    borders: tuple[Prepared, Prepared] | None  # of segments of time: `summarize`, then `connect`
    advance: Prepared
    read_out: Prepared | None


@lru_cache(PREPARED)
def _prepare_forward(call: _Call, save: bool, weigh: int) -> _Forward:
    plan, sizes = call.plan, (call.plan.tokens, call.plan.heads)
    key_dim, value_dim = plan.key_dim, plan.value_dim
    q_step, _, _, beta_step, write_step, g_step = call.steps
    places = plan.slots * plan.heads
    # The second launch computes the chunks that are not mild again, if there are any: in the first one, the registers
    # of this would make all chunks slower, the whole forward pass of a long sequence by a third. A program looks at
    # several. Read in both directions, none may look at both halves of the batch.
    looks = math.gcd(places // 2, LOOKS) if call.reverse == SECOND_HALF.value else LOOKS
    prepares = [
        call.prepare(
            prepare, "prepare", cdiv(places, again) if again else places,
            (call.scale, places, *sizes, *call.steps), BLOCK=plan.tiles("prepare", max(key_dim, value_dim)),
            REVERSE=call.reverse, SAVE=save, ROWS=min(2 - weigh, 2 if save or plan.along else 1), RAW=call.raw,
            AGAIN=again, OWN_WRITE_KEY=call.own_write_key,
        )
        for again in ((0, looks) if plan.scaled else (0,))
    ]  # fmt: skip
    borders = None
    if plan.span:
        block = plan.tiles("summarize", max(key_dim, value_dim))
        programs = plan.walks * plan.heads * (cdiv(value_dim, block) + cdiv(key_dim, block))
        numbers, step = (plan.sequences, plan.span, *sizes), plan.step("summarize", key_dim)
        summary = call.prepare(summarize, "summarize", programs, numbers, BLOCK=block, STEP=step)
        borders = summary, call.prepare_connect(back=False)
    block = plan.tiles(plan.advance, value_dim)
    advancing = call.prepare(
        advance, plan.advance, plan.walks * plan.heads * cdiv(value_dim, block),
        (call.scale, plan.sequences, plan.span, *sizes, q_step, beta_step, write_step),
        REVERSE=call.reverse, WEIGH=weigh, BLOCK=block, STEP=plan.step(plan.advance, key_dim),
    )  # fmt: skip
    reading = None
    if not plan.along:
        block = plan.block("read_out", value_dim)
        reading = call.prepare(
            read_out, "read_out", places * cdiv(value_dim, block), (call.scale, *sizes, q_step, g_step),
            REVERSE=call.reverse, BLOCK=block, STEP=plan.step("read_out", key_dim),
        )  # fmt: skip
    return _Forward(prepares, borders, advancing, reading)


@lru_cache(PREPARED)
def _prepare_read_through(call: _Call) -> Prepared:
    plan = call.plan
    return call.prepare(
        read_through, "read_through", plan.sequences * plan.heads, (call.scale, plan.tokens, plan.heads, *call.steps),
        REVERSE=call.reverse, OWN_WRITE_KEY=call.own_write_key, RAW=call.raw, BLOCK_K=plan.whole(plan.key_dim),
        BLOCK=plan.whole(plan.value_dim),
    )  # fmt: skip


class _Kept(NamedTuple):
    """What `prepare` and `advance` store by slot and head, in one buffer for each type."""

    products: Tensor  # X and A
    queries: Tensor  # e^b Q
    writes: Tensor  # e^{b_C - b} P
    w: Tensor  # W
    u: Tensor  # (X V)ᵀ, then Uᵀ
    states: Tensor  # Sᵀ before each chunk
    transitions: Tensor  # of each segment of time from the second to the last but one
    units: Tensor  # see triton_kept.py; empty for float32
    transition_units: Tensor
    decays: Tensor | None  # e^{b_C}; None without gates


def _kept_sizes(plan: _Plan, save: bool) -> tuple[list[int], list[int]]:
    """The elements of the parts of `_Kept`: of tiles, and of float32. Each part is aligned for vector loads."""
    places = 0 if plan.walked else plan.heads * plan.slots
    keys = places * plan.chunk * plan.key_dim
    tiles = [
        2 * places * plan.chunk**2,
        0 if plan.weighs or not (save or plan.along) else keys,
        0 if plan.weighs else keys,
        keys,
        places * plan.chunk * plan.value_dim,
        0 if plan.along and not save else places * plan.key_dim * plan.value_dim,
        plan.walks * plan.heads * plan.key_dim**2 if plan.span else 0,
    ]
    # A segment without chunks loads the numbers of the slot behind it, which may be the one behind the last, in vain.
    read = places + plan.heads if places else 0
    numbers = [
        read * count_units(plan.value_dim) if plan.scaled else 0,
        plan.walks * plan.heads * cdiv(plan.key_dim, TILE.value) if plan.scaled and plan.span else 0,
        read if plan.gated else 0,
    ]
    return [cdiv(size, ALIGNMENT) * ALIGNMENT for size in tiles], [
        cdiv(size, ALIGNMENT) * ALIGNMENT for size in numbers
    ]


def _find_kept(plan: _Plan, sizes: tuple[list[int], list[int]], buffers: list[Tensor]) -> _Kept:
    kept = _Kept(*(part for buffer, own in zip(buffers, sizes, strict=True) for part in buffer.split(own)))
    return kept if plan.gated else kept._replace(decays=None)


def _allocate(plan: _Plan, v: Tensor, sizes: tuple[list[int], list[int]]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The output, the final state and the buffers of the other results, not yet written."""
    final = v.new_empty((plan.sequences, plan.heads, plan.key_dim, plan.value_dim), dtype=torch.float32)
    tiles, numbers = sizes
    buffers = v.new_empty((sum(tiles),), dtype=plan.dtype), v.new_empty((sum(numbers),), dtype=torch.float32)
    return v.new_empty(v.shape), final, list(buffers)


def _allocate_offsets(plan: _Plan, v: Tensor) -> Tensor:
    """The offset of each segment of time, transposed as states are."""
    return v.new_empty((plan.walks, plan.heads, plan.value_dim, plan.key_dim), dtype=torch.float32)


def _allocate_gradients(
    q: Tensor, k: Tensor, beta: Tensor, write_key: Tensor | None, g: Tensor | None, cu_seqlens: Tensor | None,
    kept: list[Tensor], d_output: Tensor, *_: Any,
) -> Gradients:  # fmt: skip
    """Empty gradients, as `delta_rule_backward` returns them."""
    d_q, d_k, d_write_key = (
        None if x is None else x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, d_output.dtype))
        for x in (q, k, write_key)
    )
    sequences = count_sequences(k.shape[0], cu_seqlens)
    d_initial = q.new_empty((sequences, *k.shape[2:], d_output.shape[3]), dtype=torch.float32)
    return d_q, d_k, empty_like(d_output), empty_like(beta), d_write_key, empty_like(g), d_initial


@delta_rule.gradient("q k v beta write_key g initial_state", fake=_allocate_gradients)
def delta_rule_backward(
    q: Tensor, k: Tensor, beta: Tensor, write_key: Tensor | None, g: Tensor | None, cu_seqlens: Tensor | None,
    kept: list[Tensor], d_output: Tensor, d_final: Tensor | None, scale: float, reverse: int, half: bool,
) -> Gradients:  # fmt: skip
    """The gradients of all inputs, in at least the type of `d_output`; that of the first state in float32."""
    inputs = _lay_out(q, k, d_output, beta, write_key, g)
    d_final = contiguous(d_final)
    plan = _plan(q, k, d_output, write_key, g, cu_seqlens, half, True)
    places = plan.slots * plan.heads
    sequence_of = sequence_of_slots(plan.slots, plan.chunk, plan.tokens, cu_seqlens)
    ours = _find_kept(plan, _kept_sizes(plan, True), kept)
    d_units = q.new_empty((places * count_gradient_units(plan.value_dim) if plan.scaled else 0,), dtype=torch.float32)
    lengths = [len(ours.states), len(ours.u), 0 if plan.fuses else len(ours.products)]
    d_states, d_u, d_products = ours.states.new_empty((sum(lengths),)).split(lengths)
    d_gates = q.new_empty((places * plan.chunk,), dtype=torch.float32) if plan.gated else None
    d_q, d_k, d_v, _, d_write_key, _, d_initial = _allocate_gradients(
        q, k, beta, write_key, g, cu_seqlens, kept, d_output
    )
    parts = cdiv(plan.key_dim, plan.block(plan.differentiate, plan.key_dim))
    d_beta, d_g = (allocate_parts(parts, x) for x in (beta, g))
    # On an H200, products of queries and gradients as they came make the walk of segments 5 to 11 % faster, and that of
    # whole sequences 10 % slower.
    raw_walk = plan.weighs and plan.span > 0 and _have_type_of_products(plan, q, d_output)
    call = inputs.call(plan, scale, reverse, write_key is not None)
    launches = _prepare_backward(call, raw_walk)
    if plan.weighs:
        ours = ours._replace(queries=inputs.q, writes=inputs.write)
    read = (inputs.beta, ours.units, d_units, cu_seqlens, *ours[:4], ours.decays, inputs.v, d_final)
    d_offsets = None
    if launches.borders is not None:
        summarize_segments, connect_segments = launches.borders
        d_offsets = _allocate_offsets(plan, d_output)
        summarize_segments(*read, d_offsets, None, d_u, d_initial)
        connect_segments(cu_seqlens, d_offsets, ours.transitions, ours.transition_units)
    launches.retreat(*read, d_offsets, d_states, d_u, d_initial)
    known = (
        *(inputs.q, inputs.k, inputs.beta, inputs.write, inputs.g, ours.units, d_units, cu_seqlens, sequence_of),
        *(ours.products, ours.u),
    )
    if launches.scores is not None:
        launches.scores(*known, inputs.v, d_u, d_v, d_products, d_gates)
    launches.inputs(
        *(*known, ours.states, inputs.v, d_u, d_states, None if plan.fuses else d_products, d_gates),
        *(d_q, d_k, d_v, d_beta, d_write_key, d_g),
    )
    return d_q, d_k, d_v, add_up(d_beta, beta), d_write_key, add_up(d_g, g), d_initial


class _Backward(NamedTuple):
    """The launches of a backward pass."""

    borders: tuple[Prepared, Prepared] | None  # of segments of time: the summary of `retreat`, then `connect`
    retreat: Prepared
    scores: Prepared | None  # None where `inputs` does its work
    inputs: Prepared


@lru_cache(PREPARED)
def _prepare_backward(call: _Call, raw_walk: bool) -> _Backward:
    """`raw_walk`: `retreat` multiplies queries and the gradients of outputs as they came."""
    plan, sizes = call.plan, (call.plan.tokens, call.plan.heads)
    key_dim, value_dim, reverse = plan.key_dim, plan.value_dim, call.reverse
    q_step, k_step, do_step, beta_step, write_step, g_step = call.steps
    places = plan.slots * plan.heads

    def walk(name: str) -> Prepared:
        block = plan.tiles(name, value_dim)
        numbers = (call.scale, plan.sequences, plan.span, *sizes, do_step, q_step, beta_step, write_step)
        return call.prepare(
            retreat, name, plan.walks * plan.heads * cdiv(value_dim, block), numbers,
            REVERSE=reverse, WEIGH=plan.weighs, RAW=raw_walk, BLOCK=block, STEP=plan.step(name, key_dim),
        )  # fmt: skip

    borders = None
    if plan.span:
        borders = walk(plan.walk("retreat_summary")), call.prepare_connect(back=True)
    steps = (q_step, k_step, beta_step, write_step, g_step, do_step)
    scores = None
    if not plan.fuses:
        name = "differentiate_scores"
        scores = call.prepare(
            differentiate_scores, name, places, (call.scale, *sizes, *steps),
            REVERSE=reverse, RAW=call.raw, STEP=plan.tile(name, value_dim),
        )  # fmt: skip
    name = plan.differentiate
    block = plan.block(name, key_dim)
    inputs = call.prepare(
        differentiate_inputs, name, places * cdiv(key_dim, block),
        (call.scale, *sizes, plan.batch * plan.tokens, *steps),
        REVERSE=reverse, BLOCK=block, STEP=(plan.value_step if plan.fuses else plan.tile)(name, value_dim),
    )  # fmt: skip
    return _Backward(borders, walk(plan.retreat), scores, inputs)


def delta_rule_triton(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, *, write_key: Tensor | None, value_key: Tensor | None,
    g: Tensor | None, read_before_decay: bool, scale: float, initial_state: Tensor | None, output_final_state: bool,
    cu_seqlens: Tensor | None, chunk_size: int, reverse: Reverse,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`delta_rule` in Triton kernels. `chunk_size` has no meaning here: the tables say how tokens are cut.

    Products are of float16 numbers where the values, and so the output, are of half precision. Keys and queries that
    come in float32 beside them, from a norm, keep their gradients in float32.
    """
    cu_seqlens = borders_on(k.device, cu_seqlens)
    tensors = (q, k, v, beta, write_key, value_key, g, initial_state)
    scale, direction, save = float(scale), number_of(reverse), records_gradient(*tensors)
    if value_key is not None or (g is not None and (read_before_decay or g.dim() == v.dim())):
        before = read_before_decay and g is not None
        o, final, _ = delta_rule_channels(*tensors, cu_seqlens, scale, before, direction, save)
    else:
        beta = torch.ones_like(v[..., 0]) if beta is None else beta
        half = v.dtype.itemsize == 2
        o, final, _ = delta_rule(q, k, v, beta, write_key, g, initial_state, cu_seqlens, scale, direction, half, save)
    return o, final if output_final_state else None
