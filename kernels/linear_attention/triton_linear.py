"""Linear attention in Triton: its two custom operations, their launches and the constants of these.

Sums and the state are float32. For float32 inputs, each matrix product is three TF32 products. For bfloat16 and float16
inputs, matrix products have 11 significant bits: their operands are float16 tiles with units (see triton_units.py), or
TF32 for the few that need float32's range. bfloat16 has 8 bits; with 8 bits for intermediate values (A, decayed queries
and keys, states, their gradients), the error of a result was up to 2.4 times that of rounding it to bfloat16. With 11
bits it was at most 1.2 times (both emulated on a CPU). For float16 inputs it was up to 4.2 times the error of rounding
to float16.

A long sequence with few heads is cut into segments of time, through which programs walk side by side, twice. The first
walk begins from zero: it finds what a segment adds to the state, and its decay. The second walk begins from the state
that the segments before it leave.

No sum depends on the order in which programs run: the result is the same in every run. The forward pass saves A and the
states before each chunk for the backward pass, C + K V / C numbers for each token and head, where C = 64. The backward
pass computes decays, decayed queries and decayed keys again. If no backward pass follows, half precision inputs have a
gate per key channel, and K is at most WHOLE, the states stay in registers.
"""

from itertools import chain
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from longseq.kernels.custom_op import Gradients, custom_op, empty_like, records_gradient
from longseq.kernels.devices import contiguous
from longseq.kernels.linear_attention.chunk import Inputs
from longseq.kernels.linear_attention.reference import repeat_keys
from longseq.kernels.linear_attention.triton_passes import (
    decay_channels,
    differentiate,
    differentiate_group,
    read,
    score,
    score_by_level,
    walk,
    walk_and_read,
)
from longseq.kernels.reading import Reverse, number_of
from longseq.kernels.segments import find_walk_span
from longseq.kernels.triton_launch import (
    ROW,
    TRITON_DTYPES,
    Launch,
    add_up,
    allocate_parts,
    block_width,
    borders_on,
    cdiv,
    count_sequences,
    count_slots,
    evenly,
    find_launch,
    fit_launches,
    next_power_of_2,
    sequence_of_slots,
    steps,
)

# By the bytes of the products' type and by the width, max(K, V) rounded up to 64 or 512. Those of half precision were
# compared with others on an H200 (benchmarks/README.md has what that gained), those of float32 are chosen by the
# registers that the kernels need. A block of 0 means that blocks are tiles.
LAUNCHES: dict[tuple[int, int], dict[str, Launch]] = {
    (2, width): {
        "decay_channels": Launch(0, 0, 4, 1),
        "score": Launch(0, 0, 2, 2),
        "score_by_level": Launch(32, 0, 4, 1),
        "walk": Launch(0, 0, 4, 3) if width == 64 else Launch(0, 0, 2, 3),
        "walk_and_read": Launch(0, 0, 4, 3) if width == 64 else Launch(0, 0, 4, 2),
        "read": Launch(64, 0, 4, 2) if width == 64 else Launch(128, 0, 8, 2),
        "differentiate": Launch(64, 0, 4, 1),
        "differentiate_group": Launch(64, 0, 8, 2),
        "read_channels": Launch(64, 0, 4, 2),
        "read_channels_by_level": Launch(32, 0, 8, 1),
        "differentiate_channels": Launch(64, 0, 4, 1) if width == 64 else Launch(64, 0, 4, 2),
        "differentiate_channels_by_level": Launch(32, 0, 4, 1),
    }
    for width in (64, 512)
}
LAUNCHES |= {
    (4, width): {
        **dict.fromkeys(("decay_channels", "score", "walk"), Launch(0, 0, 4, 1)),
        **dict.fromkeys(("read", "read_channels"), Launch(32, 0, 4, 1)),
        **dict.fromkeys(("differentiate", "differentiate_group"), Launch(32, 0, 8, 1)),
        **dict.fromkeys(("score_by_level", "read_channels_by_level"), Launch(16, 0, 4, 1)),
        **dict.fromkeys(("differentiate_channels", "differentiate_channels_by_level"), Launch(16, 0, 4, 1)),
    }
    for width in (64, 512)
}
fit_launches(LAUNCHES)
WHOLE = 128  # the most key channels whose states one program holds in registers, to read them in the same loop
CHUNKS = {2: 64, 4: 32}  # tokens of a chunk, by the bytes of the products' type
# Decays over a chunk are mild above e^-LIMIT. For e^-64, float32 holds the sums over the chunk; for e^-8, the rounding
# errors of the exponents are small.
LIMITS = {2: 64.0, 4: 8.0}
# Warps of a walk that run side by side on a GPU of 132 multiprocessors: the registers of each hold eight that use all
# registers of a thread. Where sequences, heads and tiles are too few for so many, sequences are cut into segments of
# time.
WARPS = 8 * 132


class _Plan(NamedTuple):
    """What both passes derive from the shapes of a call."""

    dtype: torch.dtype  # the type of matrix products
    chunk: int
    slots: int  # an upper bound of the number of chunks of all sequences
    sequences: int
    heads: int
    key_dim: int
    value_dim: int
    share: int  # heads that have the same queries and keys
    gate: str  # "none", "head", "key" or "value"
    launches: dict[str, Launch]

    @property
    def scaled(self) -> bool:
        """True if tiles have units."""
        return self.dtype == torch.float16

    @property
    def reads_in_walk(self) -> bool:
        """True if `walk_and_read` runs in place of `walk` and `read`; it stores states for the backward pass only."""
        return self.scaled and self.gate == "key" and self.key_dim <= WHOLE

    @property
    def unit_rows(self) -> int:
        """The number of tiles along a state's rows that have units of their own."""
        return 1 if self.reads_in_walk else self.tiles(self.key_dim)

    @property
    def tile(self) -> int:
        """The rows and columns of a state's tiles, and the columns of the tiles of decayed queries and keys."""
        return ROW[self.dtype.itemsize]

    def tiles(self, width: int) -> int:
        return cdiv(width, self.tile)

    def block(self, kernel: str, width: int) -> int:
        """The width of a program's block of `width` columns."""
        return min(self.launches[kernel].block, block_width(width, self.tile))

    def allocate(self, like: Tensor, slots: int, shape: tuple[int, ...], units: tuple[int, ...] = ()) -> "_Tiles":
        """Empty tiles for each head of each slot, with units by slot, head and `units`."""
        tiles = like.new_empty((slots, like.shape[2], *shape), dtype=self.dtype)
        sizes = (self.slots, like.shape[2], *units) if self.scaled else (0,)
        return _Tiles(tiles, like.new_empty(sizes, dtype=torch.float32))

    def scores(self, like: Tensor) -> "_Tiles":
        return self.allocate(like, self.slots, (self.chunk, self.chunk))

    def tokens(self, x: Tensor, units: int = 1) -> "_Tiles":
        """Tiles for x [B, T, H, D], with `units` units for each chunk of a head."""
        return self.allocate(x, self.slots, (self.chunk, x.shape[3]), (units,))

    def states(self, v: Tensor, *, kept: bool = True) -> "_Tiles":
        units = self.unit_rows, self.tiles(self.value_dim)
        return self.allocate(v, self.slots if kept else 0, (self.key_dim, self.value_dim), units)

    def state(self, like: Tensor, transposed: bool) -> Tensor:
        """One float32 state for each sequence."""
        shape = (self.value_dim, self.key_dim) if transposed else (self.key_dim, self.value_dim)
        return like.new_empty((self.sequences, self.heads, *shape), dtype=torch.float32)


def _plan(inputs: Inputs, cu_seqlens: Tensor | None, precise: bool) -> _Plan:
    batch, tokens, groups, key_dim = inputs.q.shape
    heads, value_dim = inputs.v.shape[2:]
    dtype = torch.float32 if precise else torch.float16
    chunk = CHUNKS[dtype.itemsize]
    sequences = count_sequences(batch, cu_seqlens)
    slots = count_slots(batch, tokens, chunk, cu_seqlens)
    g = inputs.g
    gate = "value" if inputs.g_value is not None else "none" if g is None else "head" if g.dim() == 3 else "key"
    launches = LAUNCHES[dtype.itemsize, 64 if max(key_dim, value_dim) <= 64 else 512]
    return _Plan(dtype, chunk, slots, sequences, heads, key_dim, value_dim, heads // groups, gate, launches)


class _Tiles(NamedTuple):
    """Matrices in the type of matrix products by slot and head, and their units: tokens, states or scores."""

    tiles: Tensor
    units: Tensor


class _Decayed(NamedTuple):
    """e^b Q, e^{b_C - b} K, and the gates of their channels."""

    queries: Any  # tiles, or None
    keys: _Tiles
    whole: Tensor  # decays over whole chunks, by slot and head
    levels: Tensor  # the largest level at which blocks of 2^level tokens have mild decays, by slot, head and tile


class _Segments(NamedTuple):
    """What segments of time make of a state, by segment and head; None where sequences are not cut."""

    ends: Tensor | None = None  # the state after a segment that begins from zero, in float32
    decays: Tensor | None = None  # the decay over a segment: a number, or one for each channel of the gate


class _Call:
    """The launches of one call, forward or backward. With `transposed`, the first and last states are [V, K]."""

    def __init__(
        self, inputs: Inputs, cu_seqlens: Tensor | None, scale: float, reverse: int, precise: bool, transposed: bool
    ) -> None:
        self.inputs = Inputs._make(evenly(x) for x in inputs)
        self.plan = plan = _plan(inputs, cu_seqlens, precise)
        self.batch, self.tokens, self.heads, _ = inputs.v.shape
        self.scale, self.transposed = scale, transposed
        self.cu_seqlens = cu_seqlens
        self.sequence_of = sequence_of_slots(plan.slots, plan.chunk, self.tokens, cu_seqlens)
        self.constants = {"REVERSE": reverse, "SCALED": plan.scaled, "CHUNK": plan.chunk, "TILE": plan.tile}
        self.levels: dict[str, Any] = {"LEVELS": plan.chunk.bit_length() - 1}
        self.gate_per_head = self.inputs.g if plan.gate == "head" else None
        lanes = self.heads * plan.tiles(plan.value_dim) * (1 if plan.reads_in_walk else plan.tiles(plan.key_dim))
        programs = WARPS // plan.launches["walk_and_read" if plan.reads_in_walk else "walk"].warps
        self.span = find_walk_span(cdiv(self.tokens, plan.chunk), lanes, self.batch, plan.sequences, programs)
        self.walks = plan.sequences
        if self.span:
            self.walks = count_slots(self.batch, self.tokens, self.span * plan.chunk, cu_seqlens)

    def _launch(
        self, kernel: Any, programs: int, numbers: tuple[float, ...], name: str | None = None, **constants: Any
    ) -> Any:
        options = self.plan.launches[name or kernel.__name__].options
        return find_launch(kernel, self.inputs.v.device, programs, numbers, **constants, **self.constants, **options)

    def decay(self, q: Tensor | None, k: Tensor, g: Tensor, scores: _Tiles | None = None) -> _Decayed:
        """Decay q, if it is given, and k by g. With `scores`, A is stored there."""
        plan, width, tiles = self.plan, k.shape[3], self.plan.tiles(k.shape[3])
        decayed = _Decayed(
            None if q is None else plan.tokens(k),
            plan.tokens(k),
            k.new_empty((plan.slots, self.heads, width), dtype=torch.float32),
            k.new_empty((plan.slots, self.heads, tiles), dtype=torch.int32),
        )
        q = k if q is None else q
        numbers = (self.tokens, self.heads, *steps(q, k, g))
        limit, dtype = LIMITS[plan.dtype.itemsize], _dtype_of_sums(g, plan.tile)
        self._launch(
            decay_channels, plan.slots * self.heads, numbers, K=width, DTYPE=dtype, LIMIT=limit, **self.levels
        )(
            *(q, k, g, self.cu_seqlens, self.sequence_of, *(decayed.queries or NOWHERE), *decayed.keys),
            *(decayed.whole, decayed.levels, *(scores or NOWHERE)),
        )
        if scores is not None:
            self._launch(
                score_by_level, plan.slots * self.heads, numbers,
                K=width, BLOCK=plan.block("score_by_level", width), TILES=next_power_of_2(tiles), **self.levels,
            )(q, k, g, self.cu_seqlens, self.sequence_of, decayed.levels, *scores)  # fmt: skip
        return decayed

    def score(self, q: Tensor, k: Tensor, tiles: tuple[_Tiles, _Tiles] | None = None) -> _Tiles:
        """A, decayed by a gate per head unless heads share keys. With `tiles`, q and k are stored there as tiles."""
        heads, scores = q.shape[2], self.plan.scores(q)
        g = self.gate_per_head if self.plan.share == 1 else None
        numbers = (self.tokens, heads, *steps(q, k, g))
        self._launch(score, self.plan.slots * heads, numbers, K=q.shape[3])(
            *(q, k, g, self.cu_seqlens, self.sequence_of, *scores, *chain(*(tiles or (NOWHERE, NOWHERE))))
        )
        return scores

    def walk(
        self, k: Tensor | _Tiles, v: Tensor | _Tiles, whole: Tensor | None, first: Tensor | None, backward: bool = False
    ) -> tuple[_Tiles, Tensor]:
        """The states before each chunk, starting from `first`, and the last one.

        With a gate per channel, `whole` is given, and k or v is decayed.
        """
        states, last = self.plan.states(self.inputs.v), self.plan.state(self.inputs.v, self.transposed)
        segments = self.summarize(k, v, whole, backward=backward)
        self._walk(k, v, whole, first, segments, states, last, backward)
        return states, last

    def summarize(
        self, k: Tensor | _Tiles, v: Tensor | _Tiles, whole: Tensor | None, *, backward: bool = False
    ) -> _Segments:
        """What the segments of time make of a state, if there are any; arguments as of `walk`."""
        if not self.span:
            return _Segments()
        key_dim, value_dim = self.plan.key_dim, self.plan.value_dim
        decays = {"none": 0, "head": 1, "key": key_dim, "value": value_dim}[self.plan.gate]
        sizes = (key_dim, value_dim), (decays,)
        segments = _Segments(
            *(self.inputs.v.new_empty((self.walks, self.heads, *size), dtype=torch.float32) for size in sizes)
        )
        self._walk(k, v, whole, None, segments, None, None, backward)
        return segments

    def _walk(
        self, k: Tensor | _Tiles, v: Tensor | _Tiles, whole: Tensor | None, first: Tensor | None, segments: _Segments,
        states: _Tiles | None, last: Tensor | None, backward: bool,
    ) -> None:  # fmt: skip
        """Without `last`, write the segments."""
        plan, g = self.plan, self.gate_per_head
        scale = self.scale if backward else 1.0
        numbers = (scale, plan.sequences, self.span, self.tokens, self.heads, *_steps(k, v, g))
        self._launch(
            walk, self.walks * self.heads * plan.tiles(plan.key_dim) * plan.tiles(plan.value_dim), numbers,
            K=plan.key_dim, V=plan.value_dim, SHARE=plan.share, GATE=plan.gate, BACKWARD=backward,
            SUMMARY=last is None, TRANSPOSED=self.transposed,
        )(
            *_with_units(k), *_with_units(v), g, whole, self.cu_seqlens, first, *segments, *(states or NOWHERE), last
        )  # fmt: skip

    def walk_and_read(
        self, decayed: _Decayed, v: Tensor, scores: _Tiles, first: Tensor | None, output: Tensor, *,
        save: bool = True, tiles: _Tiles | None = None,
    ) -> tuple[_Tiles, Tensor]:  # fmt: skip
        """Write `output`; return the states before each chunk, if they are to be saved, and the last one.

        Backward, v is d_o, which is also given as tiles.
        """
        plan, (q, k, whole, _), backward = self.plan, decayed, tiles is not None
        if backward:
            q, k = k, q
        segments = self.summarize(k, v, whole, backward=backward)
        states, last = plan.states(self.inputs.v, kept=save), plan.state(self.inputs.v, self.transposed)
        numbers = (self.scale, plan.sequences, self.span, self.tokens, self.heads, *steps(v))
        self._launch(
            walk_and_read, self.walks * self.heads * plan.tiles(plan.value_dim), numbers,
            K=plan.key_dim, V=plan.value_dim, BACKWARD=backward, SAVE=save, TRANSPOSED=self.transposed,
            BLOCK_K=block_width(plan.key_dim, plan.tile),
        )(
            *q, *k, *(tiles or (v, None)), whole, self.cu_seqlens, *scores, first, *segments, *states, last, output
        )  # fmt: skip
        return states, last

    def read(
        self, q: Tensor | _Tiles, v: Tensor, scores: _Tiles, states: _Tiles, output: Tensor, *,
        by_value: bool = False, transposed: bool = False,
    ) -> None:  # fmt: skip
        """Write `output`. q has key columns, or value columns with `by_value`; it is tiled if it is decayed."""
        plan, width, g = self.plan, output.shape[3], self.gate_per_head
        block = plan.block("read", width)
        self._launch(
            read, plan.slots * self.heads * cdiv(width, block),
            (self.scale, self.tokens, self.heads, *_steps(q, v, g)),
            E=plan.value_dim if by_value else plan.key_dim, W=width, BY_VALUE=by_value, SHARE=plan.share,
            GATE="none" if g is None else "head", DECAYED=isinstance(q, _Tiles), TRANSPOSED=transposed, BLOCK=block,
        )(*_with_units(q), v, g, self.cu_seqlens, self.sequence_of, *scores, *states, output)  # fmt: skip

    def differentiate(
        self, q: Tensor, k: Tensor, d_o: Tensor | _Tiles, v: Tensor | _Tiles, decayed: _Decayed | None, scores: _Tiles,
        states: _Tiles, d_states: _Tiles | None, gradients: Gradients,
    ) -> None:  # fmt: skip
        """Write those of d_q, d_k and d_g that are given; with a gate per channel, `decayed` is given."""
        plan, width = self.plan, q.shape[3]
        by_value = plan.gate == "value"
        g = self.inputs.g_value if by_value else self.inputs.g
        kernels = ["differentiate"]
        if decayed is not None:
            kernel = "read_channels" if gradients[1] is None else "differentiate_channels"
            kernels = [kernel, f"{kernel}_by_level"]
        for kernel in kernels:
            block = plan.block(kernel, width)
            assert block <= plan.tile, "a block of columns lies in one tile"
            self._launch(
                differentiate, plan.slots * self.heads * cdiv(width, block),
                (self.scale, self.tokens, self.heads, self.batch * self.tokens, *_steps(q, k, d_o, v, g)), kernel,
                K=width, V=plan.key_dim if by_value else plan.value_dim, GATE=plan.gate,
                UNITS=plan.tiles(width) if by_value else plan.unit_rows, DTYPE=_dtype_of_sums(g, block),
                BY_LEVEL=kernel.endswith("by_level"), BLOCK=block, **self.levels,
            )(
                q, k, *_with_units(d_o), *_with_units(v), g, self.cu_seqlens, self.sequence_of,
                None if decayed is None else decayed.levels, *scores, *states, *(d_states or NOWHERE), *gradients,
            )  # fmt: skip

    def differentiate_group(self, d_output: Tensor, states: _Tiles, d_states: _Tiles, gradients: Gradients) -> None:
        """Write the `gradients` of q, k and g where heads share q and k."""
        plan, (q, k, v, g, _) = self.plan, self.inputs
        block = plan.block("differentiate_group", plan.key_dim)
        numbers = (self.scale, self.tokens, self.heads, self.batch * self.tokens, *steps(q, k, d_output, v, g))
        self._launch(
            differentiate_group, plan.slots * q.shape[2] * cdiv(plan.key_dim, block), numbers,
            K=plan.key_dim, V=plan.value_dim, SHARE=plan.share, BLOCK=block,
        )(q, k, d_output, v, g, self.cu_seqlens, self.sequence_of, *states, *d_states, *gradients)  # fmt: skip


NOWHERE = (None, None)  # in place of tiles that are not there


def _with_units(x: Tensor | _Tiles) -> tuple[Tensor, Tensor | None]:
    return x if isinstance(x, _Tiles) else (x, None)


def _steps(*tensors: Tensor | _Tiles | None) -> tuple[int, ...]:
    return steps(*(None if isinstance(x, _Tiles) else x for x in tensors))


def _dtype_of_sums(g: Tensor | None, block: int) -> tl.dtype:
    """The type of operands that hold `block` columns of gates to be summed.

    It is the gates' own type of 16 bits where rows of `block` columns are 128 bytes wide (see `Launch`), else float32.
    bfloat16 on a CPU is float32, too: Triton's interpreter multiplies bfloat16 as integers.
    """
    if g is None or g.dtype.itemsize * block != 128 or (g.dtype == torch.bfloat16 and g.device.type == "cpu"):
        return tl.float32
    return TRITON_DTYPES[g.dtype]


def _allocate(q, k, v, g, g_value, initial_state, cu_seqlens, scale, reverse, precise, transposed, output_dtype, save):
    plan = _plan(Inputs(q, k, v, g, g_value), cu_seqlens, precise)
    kept = [*plan.scores(q), *plan.states(v)] if save else []
    return v.new_empty(v.shape, dtype=output_dtype), plan.state(v, transposed), kept


@custom_op("linear_attention", _allocate)
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, g_value: Tensor | None, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, scale: float, reverse: int, precise: bool, transposed: bool, output_dtype: torch.dtype,
    save: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """Returns o [B, T, H, V], the final state [B or segments, H, K, V] in float32, and if `save` A, states and units.

    The last is the list of tensors that the backward pass needs. The products have float32's precision if `precise`.
    With `transposed`, states given and returned are [..., V, K].
    """
    call = _Call(Inputs(q, k, v, g, g_value), cu_seqlens, scale, reverse, precise, transposed)
    q, k, v, g, g_value = call.inputs
    plan, first = call.plan, contiguous(initial_state)
    output = v.new_empty(v.shape, dtype=output_dtype)
    if g_value is not None:
        values = call.decay(None, v, g_value)
        scores = call.score(q, k)
        states, final = call.walk(k, values.keys, values.whole, first)
        call.differentiate(v, v, q, k, values, scores, states, None, (output, None, None))
    elif g is not None and plan.gate == "key":
        scores = plan.scores(q)
        keys = call.decay(q, k, g, scores)
        if plan.reads_in_walk:
            states, final = call.walk_and_read(keys, v, scores, first, output, save=save)
        else:
            states, final = call.walk(keys.keys, v, keys.whole, first)
            call.read(keys.queries, v, scores, states, output)
    else:
        scores = call.score(q, k)
        states, final = call.walk(k, v, None, first)
        call.read(q, v, scores, states, output)
    return output, final, [*scores, *states] if save else []


def _allocate_gradients(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, g_value: Tensor | None, cu_seqlens: Tensor | None,
    kept: list[Tensor], d_output: Tensor, d_final: Tensor | None, scale: float, reverse: int, precise: bool,
    transposed: bool,
) -> Gradients:  # fmt: skip
    plan = _plan(Inputs(q, k, v, g, g_value), cu_seqlens, precise)
    return *[empty_like(x) for x in (q, k, v, g, g_value)], plan.state(v, transposed)


@linear_attention.gradient("q k v g g_value initial_state", fake=_allocate_gradients)
def linear_attention_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, g_value: Tensor | None, cu_seqlens: Tensor | None,
    kept: list[Tensor], d_output: Tensor, d_final: Tensor | None, scale: float, reverse: int, precise: bool,
    transposed: bool,
) -> Gradients:  # fmt: skip
    """The gradients of all inputs; that of the first state in float32."""
    call = _Call(Inputs(q, k, v, g, g_value), cu_seqlens, scale, reverse, precise, transposed)
    q, k, v, g, g_value = call.inputs
    plan, d_output, d_last = call.plan, evenly(d_output), contiguous(d_final)
    scores, states = _Tiles(*kept[:2]), _Tiles(*kept[2:])
    d_q, d_k, d_v, d_g_value = empty_like(q), empty_like(k), empty_like(v), empty_like(g_value)
    kernel = "differentiate_group" if plan.share > 1 else "differentiate"
    parts = cdiv(plan.key_dim, plan.block(kernel, plan.key_dim)) if plan.gate == "head" else 1
    d_g = allocate_parts(parts, g)
    if g_value is not None:
        d_scores = plan.scores(q)
        values = call.decay(d_output, v, g_value, d_scores)
        d_states, d_initial = call.walk(q, values.queries, values.whole, d_last, backward=True)
        call.differentiate(d_output, v, q, k, values, scores, states, d_states, (None, d_v, d_g_value))
        call.read(values.queries, k, d_scores, states, d_q, by_value=True)
        call.read(values.keys, q, d_scores, d_states, d_k, by_value=True, transposed=True)
    elif plan.share > 1:
        d_states, d_initial = call.walk(q, d_output, None, d_last, backward=True)
        call.read(k, d_output, scores, d_states, d_v, transposed=True)
        call.differentiate_group(d_output, states, d_states, (d_q, d_k, d_g))
    else:
        keys = call.decay(q, k, g) if g is not None and plan.gate == "key" else None
        tiles = plan.tokens(d_output, plan.tiles(plan.value_dim)), plan.tokens(v, plan.tiles(plan.value_dim))
        d_scores = call.score(d_output, v, tiles)
        if keys is not None and plan.reads_in_walk:
            d_states, d_initial = call.walk_and_read(keys, d_output, scores, d_last, d_v, tiles=tiles[0])
        else:
            queries, side, whole = (q, k, None) if keys is None else (keys.queries, keys.keys, keys.whole)
            d_states, d_initial = call.walk(queries, d_output, whole, d_last, backward=True)
            call.read(side, d_output, scores, d_states, d_v, transposed=True)
        call.differentiate(q, k, *tiles, keys, d_scores, states, d_states, (d_q, d_k, d_g))
    return d_q, d_k, d_v, add_up(d_g, g), d_g_value, d_initial


def linear_attention_triton(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor | None, g_value: Tensor | None, scale: float,
    initial_state: Tensor | None, output_final_state: bool, cu_seqlens: Tensor | None, chunk_size: int,
    reverse: Reverse,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`linear_attention` in Triton kernels.

    `chunk_size` is ignored: the table of launches determines the length of chunks.
    """
    if g_value is not None or (g is not None and g.dim() == 4):
        q, k = repeat_keys(q, k, v)
    precise = v.dtype.itemsize > 2  # v decides, as for the output; a feature map may give float32 keys and queries
    inputs = Inputs(q, k, v, g, g_value)
    o, final = run_linear_attention(inputs, initial_state, cu_seqlens, scale, reverse, precise=precise)
    return o, final if output_final_state else None


def run_linear_attention(
    inputs: Inputs, initial_state: Tensor | None, cu_seqlens: Tensor | None, scale: float, reverse: Reverse, *,
    precise: bool, transposed: bool = False, output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`linear_attention` above with gradients saved where needed; `output_dtype` is v's type unless given."""
    tensors, dtype = (*inputs, initial_state), output_dtype or inputs.v.dtype
    o, final, _ = linear_attention(
        *tensors, borders_on(inputs.q.device, cu_seqlens), float(scale), number_of(reverse), precise, transposed,
        dtype, records_gradient(*tensors),
    )  # fmt: skip
    return o, final
