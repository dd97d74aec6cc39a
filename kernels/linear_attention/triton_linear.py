"""Linear attention in Triton: its two custom operations, their launches and the constants of these.

Sums and the state are float32. For float32 inputs, each matrix product is three TF32 products. For bfloat16 and float16
inputs, matrix products have 11 significant bits: their operands are float16 tiles with units (see triton_units.py), or
TF32 for the few that need float32's range. bfloat16 has 8 bits; with 8 bits for intermediate values (P, decayed queries
and keys, states, their gradients), the error of a result was up to 2.4 times that of rounding it to bfloat16. With 11
bits it was at most 1.2 times (both emulated on a CPU). For float16 inputs it was up to 4.2 times the error of rounding
to float16.

A long sequence with few heads is cut into segments of time, through which programs walk side by side, twice. The first
walk begins from zero: it finds what a segment adds to the state, and its decay. The second walk begins from the state
that the segments before it leave.

No sum depends on the order in which programs run: the result is the same in every run. The forward pass saves P and the
states before each chunk for the backward pass, C + K V / C numbers for each token and head, where C = 64. The backward
pass computes decays, decayed queries and decayed keys again. If no backward pass follows, half precision inputs have a
gate per key channel, and K is at most WHOLE, the states stay in registers.
"""

import math
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from longseq.kernels.custom_op import custom_op
from longseq.kernels.devices import channels_adjacent
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
from longseq.kernels.segments import find_span
from longseq.kernels.triton_launch import (
    ROW,
    TRITON_DTYPES,
    Launch,
    block_width,
    cdiv,
    count_sequences,
    count_slots,
    find_launch,
    fit_launches,
    next_power_of_2,
    sequence_of_slots,
    strides,
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
        "decay_channels": Launch(0, 0, 4, 1),
        "score": Launch(0, 0, 4, 1),
        "score_by_level": Launch(16, 0, 4, 1),
        "walk": Launch(0, 0, 4, 1),
        "read": Launch(32, 0, 4, 1),
        "differentiate": Launch(32, 0, 8, 1),
        "differentiate_group": Launch(32, 0, 8, 1),
        "read_channels": Launch(32, 0, 4, 1),
        "read_channels_by_level": Launch(16, 0, 4, 1),
        "differentiate_channels": Launch(16, 0, 4, 1),
        "differentiate_channels_by_level": Launch(16, 0, 4, 1),
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
FEWEST_SEGMENTS = 3  # fewer do not make up for walking most of the sequence twice
FEWEST_CHUNKS = 64  # of a sequence that is cut
SHORTEST_SEGMENT = 4  # chunks


class _Plan(NamedTuple):
    """What both passes derive from the shapes of a call."""

    dtype: torch.dtype  # the type of matrix products
    chunk: int
    slots: int  # an upper bound of the number of chunks of all sequences
    sequences: int
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

    def options(self, kernel: str) -> dict[str, int | None]:
        return self.launches[kernel].options

    @property
    def tile(self) -> int:
        """The rows and columns of a state's tiles, and the columns of the tiles of decayed queries and keys."""
        return ROW[self.dtype.itemsize]

    def tiles(self, width: int) -> int:
        return cdiv(width, self.tile)

    def block(self, kernel: str, width: int) -> int:
        """The width of a program's block of `width` columns."""
        return min(self.launches[kernel].block, block_width(width, ROW[self.dtype.itemsize]))

    def units(self, like: Tensor, *shape: int) -> Tensor:
        """An empty tensor for units of tiles, by slot and head."""
        heads = like.shape[2]
        return like.new_empty((self.slots, heads, *shape) if self.scaled else (0,), dtype=torch.float32)


def _plan(
    q: Tensor, v: Tensor, g: Tensor | None, g_value: Tensor | None, cu_seqlens: Tensor | None, precise: bool
) -> _Plan:
    batch, tokens, groups, key_dim = q.shape
    heads, value_dim = v.shape[2:]
    dtype = torch.float32 if precise else torch.float16
    chunk = CHUNKS[dtype.itemsize]
    sequences = count_sequences(batch, cu_seqlens)
    slots = count_slots(batch, tokens, chunk, cu_seqlens)
    gate = "value" if g_value is not None else "none" if g is None else "head" if g.dim() == 3 else "key"
    launches = LAUNCHES[dtype.itemsize, 64 if max(key_dim, value_dim) <= 64 else 512]
    return _Plan(dtype, chunk, slots, sequences, key_dim, value_dim, heads // groups, gate, launches)


class _Tiles(NamedTuple):
    """A tensor [B, T, H, D] in the type of matrix products, stored by slot and head, with units."""

    tiles: Tensor
    units: Tensor


class _Decayed(NamedTuple):
    """The two tensors whose columns a gate decays: X since the start of the chunk, Y until its end."""

    reads: _Tiles
    writes: _Tiles
    whole: Tensor  # decays over whole chunks, by slot and head
    levels: Tensor  # the largest level at which blocks of 2^level tokens have mild decays, by slot, head and tile


class _States(NamedTuple):
    """States or their gradients, by slot and head."""

    states: Tensor
    units: Tensor


class _Scores(NamedTuple):
    """Products of each token with those before it, by slot and head."""

    scores: Tensor
    units: Tensor


class _Segments(NamedTuple):
    """What segments of time make of a state, by segment and head; None where sequences are not cut."""

    ends: Tensor | None  # the state after a segment that begins from zero, in float32
    decays: Tensor | None  # the decay over a segment: a number, or one for each channel of the gate


def _find_span(plan: _Plan, tokens: int, heads: int, packed: bool) -> int:
    """The number of chunks in a segment of time; 0 if sequences are not cut.

    Packed sequences are cut like the row that holds them, unless there are enough of them.
    """
    lanes = heads * plan.tiles(plan.value_dim) * (1 if plan.reads_in_walk else plan.tiles(plan.key_dim))
    programs = WARPS // plan.launches["walk_and_read" if plan.reads_in_walk else "walk"].warps
    if plan.sequences * lanes > programs:
        return 0
    chunks = cdiv(tokens, plan.chunk)
    # Each walk adds up the segments before it one by one, which takes about as long as so many chunks.
    shortest = max(SHORTEST_SEGMENT, math.isqrt(chunks // 2))
    walkers = lanes * (1 if packed else plan.sequences)
    return find_span(chunks, walkers, programs, fewest=FEWEST_SEGMENTS, shortest=shortest, least=FEWEST_CHUNKS)


class _Passes:
    """The launches of one call, forward or backward."""

    def __init__(
        self, plan: _Plan, tokens: int, heads: int, scale: float, cu_seqlens: Tensor | None, reverse: int
    ) -> None:
        self.plan, self.tokens, self.heads, self.scale, self.cu_seqlens = plan, tokens, heads, scale, cu_seqlens
        self.sequence_of = sequence_of_slots(plan.slots, plan.chunk, tokens, cu_seqlens)
        self.layout = {"PACKED": cu_seqlens is not None, "REVERSE": reverse, "SCALED": plan.scaled, "CHUNK": plan.chunk}
        self.constants = {**self.layout, "PRECISION": "tf32" if plan.scaled else "tf32x3"}
        self.levels = {"LEVELS": plan.chunk.bit_length() - 1}
        self.span = _find_span(plan, tokens, heads, cu_seqlens is not None)
        self.walks = plan.sequences
        if self.span:
            batch = plan.sequences if cu_seqlens is None else 1
            self.walks = count_slots(batch, tokens, self.span * plan.chunk, cu_seqlens)

    def decay(self, x: Tensor | None, y: Tensor, g: Tensor, scores: "_Scores | None" = None) -> _Decayed:
        """Decay x and y by g; without x, `reads` is left empty. With `scores`, tril(X Yᵀ) is stored there, decayed."""
        plan, width = self.plan, y.shape[3]
        tiles, reads = plan.tiles(width), x is not None
        decayed = _Decayed(
            _allocate_tiles(plan, y) if reads else _Tiles(y, y),
            _allocate_tiles(plan, y),
            y.new_empty((plan.slots, self.heads, width), dtype=torch.float32),
            y.new_empty((plan.slots, self.heads, tiles), dtype=torch.int32),
        )
        x = y if x is None else x
        find_launch(
            decay_channels, y.device, plan.slots * self.heads,
            (self.tokens, self.heads, *strides(x), *strides(y), *strides(g)),
            W=width, READS=reads, SCORES=scores is not None, DTYPE=_dtype_of_sums(g, plan.tile), TILE=plan.tile,
            LIMIT=LIMITS[plan.dtype.itemsize], **self.constants, **self.levels, **plan.options("decay_channels"),
        )(
            x, y, g, self.cu_seqlens, self.sequence_of, *decayed.reads, *decayed.writes, decayed.whole, decayed.levels,
            *(scores or (x, x)),
        )  # fmt: skip
        if scores is not None:
            find_launch(
                score_by_level, x.device, plan.slots * self.heads,
                (self.tokens, self.heads, *strides(x), *strides(y), *strides(g)),
                W=width, BLOCK=plan.block("score_by_level", width), TILE=plan.tile, TILES=next_power_of_2(tiles),
                **self.constants, **self.levels, **plan.options("score_by_level"),
            )(x, y, g, self.cu_seqlens, self.sequence_of, decayed.levels, *scores)  # fmt: skip
        return decayed

    def score(self, x: Tensor, y: Tensor, g: Tensor | None, tiles: tuple[_Tiles, _Tiles] | None = None) -> _Scores:
        """tril(X Yᵀ), decayed by the gate per head `g` if given. With `tiles`, x and y are stored there as tiles."""
        plan, heads, width = self.plan, *x.shape[2:]
        scores = _allocate_scores(plan, x)
        into = (x, x, x, x) if tiles is None else (*tiles[0], *tiles[1])
        find_launch(
            score, x.device, plan.slots * heads, (self.tokens, heads, *strides(x), *strides(y), *strides(g)),
            W=width, GATE="none" if g is None else "head", LEAVES=tiles is not None, BLOCK=plan.tile, **self.constants,
            **plan.options("score"),
        )(x, y, g, self.cu_seqlens, self.sequence_of, *scores, *into)  # fmt: skip
        return scores

    def walk(
        self,
        a: Tensor | _Tiles,
        b: Tensor | _Tiles,
        g: Tensor | None,
        whole: Tensor | None,
        first: Tensor | None,
        states: _States,
        last: Tensor,
        *,
        transposed: bool,
        backward: bool = False,
    ) -> None:
        """Write the states before each chunk to `states`, starting from `first`, and the last one to `last`.

        With a gate per channel, `whole` is given, and a or b is decayed.
        """
        segments = self.summarize(a, b, g, whole, last, backward=backward)
        self._walk((a, b, g, whole), first, segments, states, last, transposed=transposed, backward=backward)

    def summarize(
        self,
        a: Tensor | _Tiles,
        b: Tensor | _Tiles,
        g: Tensor | None,
        whole: Tensor | None,
        like: Tensor,
        *,
        backward: bool = False,
    ) -> _Segments:
        """What the segments of time make of a state, if there are any; arguments as of `walk`."""
        if not self.span:
            return _Segments(None, None)
        key_dim, value_dim = self.plan.key_dim, self.plan.value_dim
        width = {"none": 0, "head": 1, "key": key_dim, "value": value_dim}[self.plan.gate]
        segments = _Segments(
            like.new_empty((self.walks, self.heads, key_dim, value_dim)),
            like.new_empty((self.walks, self.heads, width)),
        )
        unwritten = _States(like, like)
        self._walk((a, b, g, whole), None, segments, unwritten, like, backward=backward, summary=True)
        return segments

    def _walk(
        self,
        inputs: tuple[Tensor | _Tiles, Tensor | _Tiles, Tensor | None, Tensor | None],
        first: Tensor | None,
        segments: _Segments,
        states: _States,
        last: Tensor,
        *,
        transposed: bool = False,
        backward: bool,
        summary: bool = False,
    ) -> None:
        plan, (a, b, g, whole) = self.plan, inputs
        row, column = (1, plan.key_dim) if transposed else (plan.value_dim, 1)
        find_launch(
            walk, last.device, self.walks * self.heads * plan.tiles(plan.key_dim) * plan.tiles(plan.value_dim),
            (self.scale if backward else 1.0, plan.sequences, self.span, self.tokens, self.heads,
             *_strides(a), *_strides(b), *strides(g)),
            K=plan.key_dim, V=plan.value_dim, SHARE=plan.share, GATE=plan.gate, BACKWARD=backward,
            HAS_FIRST=first is not None, SEGMENTED=self.span > 0, SUMMARY=summary, ROW=row, COLUMN=column,
            TILE_K=plan.tile, TILE_V=plan.tile, **self.constants, **plan.options("walk"),
        )(*_with_units(a), *_with_units(b), g, whole, self.cu_seqlens, first, *segments, *states, last)  # fmt: skip

    def walk_and_read(
        self,
        decayed: _Decayed,
        v: Tensor | _Tiles,
        scores: _Scores,
        first: Tensor | None,
        segments: _Segments,
        states: _States,
        last: Tensor,
        output: Tensor,
        *,
        save: bool,
        transposed: bool,
        backward: bool = False,
    ) -> None:
        """Loop from `first` to `last`, write `output`, and if `save`, the states before each chunk to `states`."""
        plan = self.plan
        x, y = (decayed.writes, decayed.reads) if backward else (decayed.reads, decayed.writes)
        row, column = (1, plan.key_dim) if transposed else (plan.value_dim, 1)
        find_launch(
            walk_and_read, last.device, self.walks * self.heads * plan.tiles(plan.value_dim),
            (self.scale, plan.sequences, self.span, self.tokens, self.heads, *_strides(v)),
            K=plan.key_dim, V=plan.value_dim, TILED=isinstance(v, _Tiles), BACKWARD=backward,
            HAS_FIRST=first is not None, SEGMENTED=self.span > 0, SAVE=save, ROW=row, COLUMN=column,
            BLOCK_K=block_width(plan.key_dim, plan.tile), TILE=plan.tile, **self.constants,
            **plan.options("walk_and_read"),
        )(
            *x, *y, *_with_units(v), decayed.whole, self.cu_seqlens, *scores, first, *segments, *states, last, output
        )  # fmt: skip

    def read(
        self,
        x: Tensor | _Tiles,
        y: Tensor,
        g: Tensor | None,
        scores: _Scores,
        states: _States,
        output: Tensor,
        *,
        by_value: bool = False,
        transposed: bool = False,
    ) -> None:
        """Write `output`. x has key columns, or value columns with `by_value`; it is tiled if it is decayed."""
        plan, width = self.plan, output.shape[3]
        block = plan.block("read", width)
        find_launch(
            read, output.device, plan.slots * self.heads * cdiv(width, block),
            (self.scale, self.tokens, self.heads, *_strides(x), *strides(y), *strides(g)),
            GATE="head" if plan.gate == "head" else "none", DECAYED=isinstance(x, _Tiles), TRANSPOSED=transposed,
            SHARE=plan.share, BLOCK=block, **self._state_layout(by_value), **self.constants, **plan.options("read"),
        )(*_with_units(x), y, g, self.cu_seqlens, self.sequence_of, *scores, *states, output)  # fmt: skip

    def differentiate(
        self,
        x: Tensor,
        y: Tensor,
        a: Tensor | _Tiles,
        b: Tensor | _Tiles,
        g: Tensor | None,
        decayed: _Decayed | None,
        scores: _Scores,
        states: _States,
        d_states: _States | None,
        d_x: Tensor | None,
        d_y: Tensor | None,
        d_g: Tensor | None,
    ) -> None:
        """Write those of d_x, d_y and d_g that are given; with a gate per channel, `decayed` is given."""
        plan, width = self.plan, x.shape[3]
        kernels = ["differentiate"]
        if decayed is not None:
            kernel = "read_channels" if d_y is None else "differentiate_channels"
            kernels = [kernel, f"{kernel}_by_level"]
        for kernel in kernels:
            block = plan.block(kernel, width)
            assert block <= plan.tile, "a block of columns lies in one tile"
            find_launch(
                differentiate, x.device, plan.slots * self.heads * cdiv(width, block),
                (self.scale, self.tokens, self.heads, x.shape[0] * self.tokens,
                 *strides(x), *strides(y), *_strides(a), *_strides(b), *strides(g)),
                GATE="none" if g is None else "head" if decayed is None else "channel", TILED=isinstance(a, _Tiles),
                DTYPE=_dtype_of_sums(g, block), READS=d_x is not None, WRITES=d_y is not None,
                BY_LEVEL=kernel.endswith("by_level"), BLOCK=block, **self._state_layout(plan.gate != "value"),
                **self.constants, **self.levels, **plan.options(kernel),
            )(
                x, y, *_with_units(a), *_with_units(b), g, self.cu_seqlens, self.sequence_of,
                x if decayed is None else decayed.levels, *scores, *states, *(d_states or states),
                *(x if out is None else out for out in (d_x, d_y, d_g)),
            )  # fmt: skip

    def differentiate_group(
        self, inputs: Sequence[Tensor | None], states: _States, d_states: _States, gradients: Sequence[Tensor]
    ) -> None:
        """Write the `gradients` of q, k and g for the `inputs` q, k, d_o, v and g, where heads share q and k."""
        plan, like = self.plan, gradients[0]
        block = plan.block("differentiate_group", plan.key_dim)
        find_launch(
            differentiate_group, like.device, plan.slots * like.shape[2] * cdiv(plan.key_dim, block),
            (self.scale, self.tokens, self.heads, like.shape[0] * self.tokens, *chain(*map(strides, inputs))),
            K=plan.key_dim, V=plan.value_dim, SHARE=plan.share, GATE=plan.gate, TILE=plan.tile, BLOCK=block,
            **self.constants, **plan.options("differentiate_group"),
        )(*inputs, self.cu_seqlens, self.sequence_of, *states, *d_states, *gradients)  # fmt: skip

    def _state_layout(self, by_value: bool) -> dict[str, int]:
        """The constants for states as matrices with key rows and value columns, or transposed with `by_value`."""
        plan = self.plan
        tiles = plan.tiles(plan.value_dim)
        layout = {"TILES": plan.unit_rows * tiles}
        if by_value:
            layout |= {"E": plan.value_dim, "W": plan.key_dim, "ROW": 1, "COLUMN": plan.value_dim}
            layout |= {"UNIT_ROW": 1, "UNIT_COLUMN": tiles if plan.unit_rows > 1 else 0}
        else:
            layout |= {"E": plan.key_dim, "W": plan.value_dim, "ROW": plan.value_dim, "COLUMN": 1}
            layout |= {"UNIT_ROW": tiles, "UNIT_COLUMN": 1}
        return layout | {"STEP": plan.tile, "TILE": plan.tile}


def _with_units(x: Tensor | _Tiles) -> tuple[Tensor, Tensor]:
    return x if isinstance(x, _Tiles) else (x, x)


def _strides(x: Tensor | _Tiles) -> tuple[int, ...]:
    return strides(None if isinstance(x, _Tiles) else x)


def _dtype_of_sums(g: Tensor | None, block: int) -> tl.dtype:
    """The type of operands that hold `block` columns of gates to be summed.

    It is the gates' own type of 16 bits where rows of `block` columns are 128 bytes wide (see `Launch`), else float32.
    bfloat16 on a CPU is float32, too: Triton's interpreter multiplies bfloat16 as integers.
    """
    if g is None or g.dtype.itemsize * block != 128 or (g.dtype == torch.bfloat16 and g.device.type == "cpu"):
        return tl.float32
    return TRITON_DTYPES[g.dtype]


def _allocate_scores(plan: _Plan, like: Tensor) -> _Scores:
    matrices = like.new_empty((plan.slots, like.shape[2], plan.chunk, plan.chunk), dtype=plan.dtype)
    return _Scores(matrices, plan.units(like))


def _allocate_tiles(plan: _Plan, x: Tensor, units: int = 1) -> _Tiles:
    """Empty tiles for x, with `units` units for each chunk of a head."""
    shape = (plan.slots, x.shape[2], plan.chunk, x.shape[3])
    return _Tiles(x.new_empty(shape, dtype=plan.dtype), plan.units(x, units))


def _allocate_states(plan: _Plan, like: Tensor, *, kept: bool = True) -> _States:
    slots = plan.slots if kept else 0
    states = like.new_empty((slots, like.shape[2], plan.key_dim, plan.value_dim), dtype=plan.dtype)
    return _States(states, plan.units(like, plan.unit_rows, plan.tiles(plan.value_dim)))


def _allocate_state(plan: _Plan, like: Tensor, transposed: bool) -> Tensor:
    """An empty tensor for one float32 state of each sequence."""
    shape = (plan.value_dim, plan.key_dim) if transposed else (plan.key_dim, plan.value_dim)
    return like.new_empty((plan.sequences, like.shape[2], *shape), dtype=torch.float32)


@custom_op("linear_attention")
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    g_value: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    reverse: int,
    precise: bool,
    transposed: bool,
    output_dtype: torch.dtype,
    save: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns o [B, T, H, V], the final state [B or segments, H, K, V] in float32, and if `save` P, states and units.

    The last is the list of tensors that the backward pass needs. The products have float32's precision if `precise`.
    With `transposed`, states given and returned are [..., V, K].
    """
    q, k, v = channels_adjacent(q), channels_adjacent(k), channels_adjacent(v)
    g, g_value, initial_state, cu_seqlens = _adjacent(g, g_value, initial_state, cu_seqlens)
    plan = _plan(q, v, g, g_value, cu_seqlens, precise)
    passes = _Passes(plan, v.shape[1], v.shape[2], scale, cu_seqlens, reverse)
    final = _allocate_state(plan, v, transposed)
    states = _allocate_states(plan, v, kept=save or not plan.reads_in_walk)
    output = v.new_empty(v.shape, dtype=output_dtype)
    if g_value is not None:
        values = passes.decay(None, v, g_value)
        scores = passes.score(q, k, None)
        passes.walk(k, values.writes, None, values.whole, initial_state, states, final, transposed=transposed)
        passes.differentiate(v, v, q, k, g_value, values, scores, states, None, output, None, None)
    elif g is not None and plan.gate == "key":
        scores = _allocate_scores(plan, q)
        keys = passes.decay(q, k, g, scores)
        if plan.reads_in_walk:
            segments = passes.summarize(keys.writes, v, g, keys.whole, final)
            passes.walk_and_read(
                *(keys, v, scores, initial_state, segments, states, final, output), save=save, transposed=transposed
            )
        else:
            passes.walk(keys.writes, v, g, keys.whole, initial_state, states, final, transposed=transposed)
            passes.read(keys.reads, v, g, scores, states, output)
    else:
        scores = passes.score(q, k, None if plan.share > 1 else g)
        passes.walk(k, v, g, None, initial_state, states, final, transposed=transposed)
        passes.read(q, v, g, scores, states, output)
    return output, final, [*scores, *states] if save else []


@linear_attention.register_fake
def _(q, k, v, g, g_value, initial_state, cu_seqlens, scale, reverse, precise, transposed, output_dtype, save):
    plan = _plan(q, v, g, g_value, cu_seqlens, precise)
    kept = [*_allocate_scores(plan, q), *_allocate_states(plan, v)] if save else []
    return v.new_empty(v.shape, dtype=output_dtype), _allocate_state(plan, v, transposed), kept


def _adjacent(
    g: Tensor | None, g_value: Tensor | None, state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gates with adjacent channels; the state and the borders contiguous."""
    return (
        channels_adjacent(g) if g is not None and g.dim() == 4 else g,
        None if g_value is None else channels_adjacent(g_value),
        None if state is None else state.contiguous(),
        None if cu_seqlens is None else cu_seqlens.contiguous(),
    )


@custom_op("linear_attention_backward")
def linear_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    g_value: Tensor | None,
    cu_seqlens: Tensor | None,
    kept: list[Tensor],
    d_output: Tensor,
    d_final: Tensor | None,
    scale: float,
    reverse: int,
    precise: bool,
    transposed: bool,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, g and g_value (empty where these are None) and of the first state (in float32).

    Those of q, k and v are also empty where they are not `wanted` and no needed kernel computes them.
    """
    q, k, v, d_output = channels_adjacent(q), channels_adjacent(k), channels_adjacent(v), channels_adjacent(d_output)
    g, g_value, d_final, cu_seqlens = _adjacent(g, g_value, d_final, cu_seqlens)
    plan = _plan(q, v, g, g_value, cu_seqlens, precise)
    passes = _Passes(plan, v.shape[1], v.shape[2], scale, cu_seqlens, reverse)
    scores, states = _Scores(*kept[:2]), _States(*kept[2:])
    d_states, d_initial = _allocate_states(plan, v), _allocate_state(plan, v, transposed)
    wanted = _find_needed(plan, g, g_value, wanted)
    d_q, d_k, d_v = _allocate_gradients(q, k, v, wanted)
    kernel = "differentiate_group" if plan.share > 1 else "differentiate"
    parts = cdiv(plan.key_dim, plan.block(kernel, plan.key_dim)) if plan.gate == "head" else 1
    d_g, d_g_value = _allocate_parts(parts, q, g), _allocate_parts(1, q, g_value)
    if g_value is not None:
        d_scores = _allocate_scores(plan, q)
        values = passes.decay(d_output, v, g_value, d_scores)
        y, whole, out = values.reads, values.whole, (None, d_v, d_g_value[0])
        passes.walk(q, y, None, whole, d_final, d_states, d_initial, transposed=transposed, backward=True)
        passes.differentiate(d_output, v, q, k, g_value, values, scores, states, d_states, *out)
        if wanted[0]:
            passes.read(values.reads, k, None, d_scores, states, d_q, by_value=True)
        if wanted[1]:
            passes.read(values.writes, q, None, d_scores, d_states, d_k, by_value=True, transposed=True)
    elif plan.share > 1:
        passes.walk(q, d_output, g, None, d_final, d_states, d_initial, transposed=transposed, backward=True)
        if wanted[2]:
            passes.read(k, d_output, g, scores, d_states, d_v, transposed=True)
        if wanted[0]:
            passes.differentiate_group((q, k, d_output, v, g), states, d_states, (d_q, d_k, d_g))
    else:
        keys = passes.decay(q, k, g) if g is not None and plan.gate == "key" else None
        tiles = plan.tiles(plan.value_dim)
        sides = _allocate_tiles(plan, d_output, tiles), _allocate_tiles(plan, v, tiles)
        differentiated = wanted[0] or wanted[1]
        d_scores = None
        if differentiated or plan.reads_in_walk:
            d_scores = passes.score(d_output, v, g if plan.gate == "head" else None, sides)
        ends = {"transposed": transposed, "backward": True}
        if keys is None:
            passes.walk(q, d_output, g, None, d_final, d_states, d_initial, **ends)
            if wanted[2]:
                passes.read(k, d_output, g, scores, d_states, d_v, transposed=True)
        elif plan.reads_in_walk:
            segments = passes.summarize(keys.reads, d_output, g, keys.whole, d_initial, backward=True)
            passes.walk_and_read(keys, sides[0], scores, d_final, segments, d_states, d_initial, d_v, save=True, **ends)
        else:
            passes.walk(keys.reads, d_output, g, keys.whole, d_final, d_states, d_initial, **ends)
            if wanted[2]:
                passes.read(keys.writes, d_output, g, scores, d_states, d_v, transposed=True)
        if differentiated:
            assert d_scores is not None
            passes.differentiate(
                q, k, *sides, g, keys, d_scores, states, d_states,
                d_q if wanted[0] else None, d_k if wanted[1] else None, d_g,
            )  # fmt: skip
    return d_q, d_k, d_v, _add_up(d_g, g), _add_up(d_g_value, g_value), d_initial


@linear_attention_backward.register_fake
def _(q, k, v, g, g_value, cu_seqlens, kept, d_output, d_final, scale, reverse, precise, transposed, wanted):
    plan = _plan(q, v, g, g_value, cu_seqlens, precise)
    gates = (q.new_empty((0,)) if x is None else x.new_empty(x.shape) for x in (g, g_value))
    gradients = _allocate_gradients(q, k, v, _find_needed(plan, g, g_value, wanted))
    return *gradients, *gates, _allocate_state(plan, v, transposed)


def _find_needed(plan: _Plan, g: Tensor | None, g_value: Tensor | None, wanted: list[bool]) -> list[bool]:
    """Which of q, k and v get gradients: the wanted ones, and those that a kernel computes that must run anyway."""
    q, k, v = wanted
    if plan.share > 1:
        q = k = q or k or g is not None
    return [q, k or g is not None, v or g_value is not None or plan.reads_in_walk]


def _allocate_gradients(q: Tensor, k: Tensor, v: Tensor, needed: list[bool]) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape if need else 0) for x, need in zip((q, k, v), needed, strict=True))


def _allocate_parts(parts: int, q: Tensor, gate: Tensor | None) -> Tensor:
    """Room for a gate's gradient, a part for each contributing program; several parts are float32 until summed."""
    if gate is None:
        return q.new_empty((1, 0))
    return gate.new_empty((parts, *gate.shape), dtype=gate.dtype if parts == 1 else torch.float32)


def _add_up(parts: Tensor, gate: Tensor | None) -> Tensor:
    return parts[0] if gate is None or parts.shape[0] == 1 else parts.sum(0).to(gate.dtype)


def _setup_context(ctx, inputs, output):
    q, k, v, g, g_value, initial_state, cu_seqlens, *options, output_dtype, saved = inputs
    ctx.options = options  # scale, reverse, precise, transposed
    ctx.save_for_backward(q, k, v, g, g_value, cu_seqlens, *output[2])
    ctx.initial_dtype = None if initial_state is None else initial_state.dtype
    ctx.output_dtype, ctx.saved = output_dtype, saved
    ctx.set_materialize_grads(False)


def _differentiate(ctx, d_output, d_final, *_):
    q, k, v, g, g_value, cu_seqlens, *kept = ctx.saved_tensors
    assert ctx.saved, "the forward pass ran without keeping what the backward pass needs"
    if d_output is None:
        d_output = v.new_zeros(v.shape, dtype=ctx.output_dtype)
    d_q, d_k, d_v, d_g, d_g_value, d_initial = linear_attention_backward(
        q, k, v, g, g_value, cu_seqlens, kept, d_output, d_final, *ctx.options, list(ctx.needs_input_grad[:3])
    )
    return (
        *(d if need else None for d, need in zip((d_q, d_k, d_v), ctx.needs_input_grad, strict=False)),
        None if g is None else d_g,
        None if g_value is None else d_g_value,
        None if ctx.initial_dtype is None else d_initial.to(ctx.initial_dtype),
        *(None,) * 7,
    )


linear_attention.register_autograd(_differentiate, setup_context=_setup_context)


def linear_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor | None,
    g_value: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    chunk_size: int,
    reverse: Reverse,
) -> tuple[Tensor, Tensor | None]:
    """`linear_attention` in Triton kernels.

    `chunk_size` is ignored: the table of launches determines the length of chunks.
    """
    if g_value is not None or (g is not None and g.dim() == 4):
        q, k = repeat_keys(q, k, v)
    precise = v.dtype.itemsize > 2  # v decides, as for the output; a feature map may give float32 keys and queries
    o, final = run_linear_attention(q, k, v, g, g_value, initial_state, cu_seqlens, scale, reverse, precise=precise)
    return o, final if output_final_state else None


def run_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    g_value: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    reverse: Reverse,
    *,
    precise: bool,
    transposed: bool = False,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """`linear_attention` above with gradients saved where needed; `output_dtype` is v's type unless given."""
    tensors = (q, k, v, g, g_value, initial_state)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(q.device)
    output_dtype = v.dtype if output_dtype is None else output_dtype
    o, final, *_ = linear_attention(
        *(q, k, v, g, g_value, initial_state, cu_seqlens),
        float(scale),
        number_of(reverse),
        precise,
        transposed,
        output_dtype,
        save,
    )
    return o, final
