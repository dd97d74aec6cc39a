"""Linear attention in Triton: its two custom operations, their launches and the constants that those use.

Sums and the state are float32. Matrix products of float32 values are three TF32 products each; those of bfloat16 and
float16 values are products of numbers of 11 bits: float16 tiles that count in powers of two of their own (see
triton_gates.py), and TF32 for the few that need float32's range. With the 8 bits of bfloat16, what lies between two
products (P, decayed queries and keys, states, their gradients) made the error of a result up to 2.4 times that of
rounding it to bfloat16; with 11 bits it was at most 1.2 times, both emulated on a CPU. For float16 inputs it was up to
4.2 times the error of rounding to float16.

No sum depends on the order in which programs run: the result is the same in every run. The forward pass keeps P and the
states before each chunk for the backward pass, C + K V / C numbers for each token and head with C = 64; decays, decayed
queries and decayed keys are found again there. Without a backward pass to come, states of half inputs with a gate per
key channel, of up to WHOLE channels, stay on the chip.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from longseq.kernels.custom_op import custom_op
from longseq.kernels.devices import channels_adjacent
from longseq.kernels.linear_attention.triton_passes import (
    decay_channels,
    differentiate,
    read,
    score,
    score_by_level,
    walk,
    walk_and_read,
)
from longseq.kernels.reading import Reverse, number_of
from longseq.kernels.triton_launch import (
    ROW,
    TRITON_DTYPES,
    Launch,
    block_width,
    cdiv,
    count_sequences,
    count_slots,
    fit_launches,
    next_power_of_2,
    sequence_of_slots,
    strides,
)

# By the precision's bytes and the width, max(K, V) rounded up to 64 or 512. Chosen by the registers that the kernels
# need; what `longseq benchmark tune` found beyond is in benchmarks/README.md. A block of 0 is that of a tile.
LAUNCHES: dict[tuple[int, int], dict[str, Launch]] = {
    (2, width): {
        "decay_channels": Launch(0, 0, 4, 1),
        "score": Launch(0, 0, 4, 1),
        "score_by_level": Launch(16, 0, 4, 1),
        "walk": Launch(0, 0, 4, 3),
        "walk_and_read": Launch(0, 0, 4, 2),
        "read": Launch(64, 0, 4, 2) if width == 64 else Launch(128, 0, 8, 2),
        "differentiate": Launch(64, 0, 4, 1),
        "read_channels": Launch(64, 0, 4, 2),
        "read_channels_by_level": Launch(32, 0, 8, 1),
        "differentiate_channels": Launch(32, 0, 4, 1),
        "differentiate_channels_by_level": Launch(16, 0, 4, 1),
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
        "read_channels": Launch(32, 0, 4, 1),
        "read_channels_by_level": Launch(16, 0, 4, 1),
        "differentiate_channels": Launch(16, 0, 4, 1),
        "differentiate_channels_by_level": Launch(16, 0, 4, 1),
    }
    for width in (64, 512)
}
fit_launches("linear_attention", LAUNCHES)
WHOLE = 128  # key channels at most that one program holds states of in registers, so that it reads them as it walks
CHUNKS = {2: 64, 4: 32}  # tokens of a chunk, by the precision's bytes
# Decays over a chunk are mild down to e^-64, so that float32 holds the sums over it, or to e^-8, so that the exponents'
# rounding errors are small.
LIMITS = {2: 64.0, 4: 8.0}


class _Plan(NamedTuple):
    """What both passes derive from a call's shapes."""

    dtype: torch.dtype  # of the matrix products
    chunk: int
    slots: int  # chunks of all sequences, at most
    sequences: int
    key_dim: int
    value_dim: int
    gate: str  # none, head, key or value
    launches: dict[str, Launch]

    @property
    def scaled(self) -> bool:
        """Whether tiles have units."""
        return self.dtype == torch.float16

    @property
    def reads_in_walk(self) -> bool:
        """Whether the walk leaves what is read of the states, and writes them for the backward pass alone."""
        return self.scaled and self.gate == "key" and self.key_dim <= WHOLE

    @property
    def unit_rows(self) -> int:
        """The tiles of a state's rows that have units of their own."""
        return 1 if self.reads_in_walk else self.tiles(self.key_dim)

    def options(self, kernel: str) -> dict[str, int | None]:
        return self.launches[kernel].options

    @property
    def tile(self) -> int:
        """Rows and columns of a state's tiles, and columns of decayed queries' and keys'."""
        return ROW[self.dtype.itemsize]

    def tiles(self, width: int) -> int:
        return cdiv(width, self.tile)

    def block(self, kernel: str, width: int) -> int:
        """The width of a program's block of so many columns."""
        return min(self.launches[kernel].block, block_width(width, ROW[self.dtype.itemsize]))

    def units(self, like: Tensor, *shape: int) -> Tensor:
        """Room for the units of tiles, by slot and head."""
        heads = like.shape[2]
        return like.new_empty((self.slots, heads, *shape) if self.scaled else (0,), dtype=torch.float32)


def _plan(
    q: Tensor, v: Tensor, g: Tensor | None, g_value: Tensor | None, cu_seqlens: Tensor | None, precise: bool
) -> _Plan:
    batch, tokens, _, key_dim = q.shape
    value_dim = v.shape[3]
    dtype = torch.float32 if precise else torch.float16
    chunk = CHUNKS[dtype.itemsize]
    sequences = count_sequences(batch, cu_seqlens)
    slots = count_slots(batch, tokens, chunk, cu_seqlens)
    gate = "value" if g_value is not None else "none" if g is None else "head" if g.dim() == 3 else "key"
    launches = LAUNCHES[dtype.itemsize, 64 if max(key_dim, value_dim) <= 64 else 512]
    return _Plan(dtype, chunk, slots, sequences, key_dim, value_dim, gate, launches)


class _Tiles(NamedTuple):
    """A tensor of [B, T, H, D] in the type of matrix products, by slot and head, with units."""

    tiles: Tensor
    units: Tensor


class _Decayed(NamedTuple):
    """Two tensors that share the columns of a gate, decayed since the chunk's start and until its end."""

    reads: _Tiles
    writes: _Tiles
    whole: Tensor  # decays over chunks, by slot and head
    levels: Tensor  # down to which blocks of tokens are halved before their decays are mild


class _States(NamedTuple):
    """States, or their gradients, by slot and head."""

    states: Tensor
    units: Tensor


class _Scores(NamedTuple):
    """Products of tokens with those before them, by slot and head."""

    scores: Tensor
    units: Tensor


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

    def decay(self, x: Tensor | None, y: Tensor, g: Tensor, scores: "_Scores | None" = None) -> _Decayed:
        """Without x the reads are empty; into `scores` those of x with y."""
        plan, width = self.plan, y.shape[3]
        tiles, reads = plan.tiles(width), x is not None
        decayed = _Decayed(
            _allocate_tiles(plan, y) if reads else _Tiles(y, y),
            _allocate_tiles(plan, y),
            y.new_empty((plan.slots, self.heads, width), dtype=torch.float32),
            y.new_empty((plan.slots, self.heads, tiles), dtype=torch.int32),
        )
        x = y if x is None else x
        decay_channels[(plan.slots * self.heads,)](
            x, y, g, self.cu_seqlens, self.sequence_of, *decayed.reads, *decayed.writes, decayed.whole, decayed.levels,
            *(scores or (x, x)), self.tokens, self.heads, *strides(x), *strides(y), *strides(g),
            W=width, READS=reads, SCORES=scores is not None, DTYPE=_dtype_of_sums(g, plan.tile),
            TILE=plan.tile, LIMIT=LIMITS[plan.dtype.itemsize],
            **self.constants, **self.levels, **plan.options("decay_channels"),
        )  # fmt: skip
        if scores is not None:
            score_by_level[(plan.slots * self.heads,)](
                x, y, g, self.cu_seqlens, self.sequence_of, decayed.levels, *scores,
                self.tokens, self.heads, *strides(x), *strides(y), *strides(g),
                W=width, BLOCK=plan.block("score_by_level", width), TILE=plan.tile, TILES=next_power_of_2(tiles),
                **self.constants, **self.levels, **plan.options("score_by_level"),
            )  # fmt: skip
        return decayed

    def score(self, x: Tensor, y: Tensor, g: Tensor | None, tiles: tuple[_Tiles, _Tiles] | None = None) -> _Scores:
        """`g` is the gate of heads, if there is one; into `tiles` x and y."""
        plan, width = self.plan, x.shape[3]
        scores = _allocate_scores(plan, x)
        into = (x, x, x, x) if tiles is None else (*tiles[0], *tiles[1])
        score[(plan.slots * self.heads,)](
            x, y, g, self.cu_seqlens, self.sequence_of, *scores, *into,
            self.tokens, self.heads, *strides(x), *strides(y), *strides(g),
            W=width, GATE="none" if g is None else "head", LEAVES=tiles is not None, BLOCK=plan.tile,
            **self.constants, **plan.options("score"),
        )  # fmt: skip
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
        """From `first` to `last`. With a gate per channel comes `whole`, and a or b is decayed."""
        plan = self.plan
        row, column = (1, plan.key_dim) if transposed else (plan.value_dim, 1)
        walk[(plan.sequences * self.heads * plan.tiles(plan.key_dim) * plan.tiles(plan.value_dim),)](
            *_with_units(a), *_with_units(b), g, whole, self.cu_seqlens, first, *states, last,
            self.scale if backward else 1.0, self.tokens, self.heads, *_strides(a), *_strides(b), *strides(g),
            K=plan.key_dim, V=plan.value_dim, GATE=plan.gate, BACKWARD=backward, HAS_FIRST=first is not None,
            ROW=row, COLUMN=column, TILE_K=plan.tile, TILE_V=plan.tile,
            **self.constants, **plan.options("walk"),
        )  # fmt: skip

    def walk_and_read(
        self,
        decayed: _Decayed,
        v: Tensor | _Tiles,
        scores: _Scores,
        first: Tensor | None,
        states: _States,
        last: Tensor,
        output: Tensor,
        *,
        save: bool,
        transposed: bool,
        backward: bool = False,
    ) -> None:
        """From `first` to `last`, into `output` and, to `save` them, `states`."""
        plan = self.plan
        x, y = (decayed.writes, decayed.reads) if backward else (decayed.reads, decayed.writes)
        row, column = (1, plan.key_dim) if transposed else (plan.value_dim, 1)
        walk_and_read[(plan.sequences * self.heads * plan.tiles(plan.value_dim),)](
            *x, *y, *_with_units(v), decayed.whole, self.cu_seqlens, *scores, first, *states, last, output,
            self.scale, self.tokens, self.heads, *_strides(v),
            K=plan.key_dim, V=plan.value_dim, TILED=isinstance(v, _Tiles), BACKWARD=backward,
            HAS_FIRST=first is not None, SAVE=save, ROW=row, COLUMN=column,
            BLOCK_K=block_width(plan.key_dim, plan.tile), TILE=plan.tile,
            **self.constants, **plan.options("walk_and_read"),
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
        """Into `output`. x has key columns, or with `by_value` value columns, and is tiled if it is decayed."""
        plan, width = self.plan, output.shape[3]
        block = plan.block("read", width)
        read[(plan.slots * self.heads * cdiv(width, block),)](
            *_with_units(x), y, g, self.cu_seqlens, self.sequence_of, *scores, *states, output,
            self.scale, self.tokens, self.heads, *_strides(x), *strides(y), *strides(g),
            GATE="head" if plan.gate == "head" else "none", DECAYED=isinstance(x, _Tiles), TRANSPOSED=transposed,
            BLOCK=block, **self._state_layout(by_value), **self.constants, **plan.options("read"),
        )  # fmt: skip

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
        """Into d_x, d_y and d_g as far as they are given; `decayed` comes with a gate per channel."""
        plan, width = self.plan, x.shape[3]
        kernels = ["differentiate"]
        if decayed is not None:
            kernel = "read_channels" if d_y is None else "differentiate_channels"
            kernels = [kernel, f"{kernel}_by_level"]
        for kernel in kernels:
            block = plan.block(kernel, width)
            assert block <= plan.tile, "a block of columns lies in one tile"
            differentiate[(plan.slots * self.heads * cdiv(width, block),)](
                x, y, *_with_units(a), *_with_units(b), g, self.cu_seqlens, self.sequence_of,
                x if decayed is None else decayed.levels, *scores, *states, *(d_states or states),
                *(x if out is None else out for out in (d_x, d_y, d_g)),
                self.scale, self.tokens, self.heads, x.shape[0] * self.tokens,
                *strides(x), *strides(y), *_strides(a), *_strides(b), *strides(g),
                GATE="none" if g is None else "head" if decayed is None else "channel",
                TILED=isinstance(a, _Tiles), DTYPE=_dtype_of_sums(g, block),
                READS=d_x is not None, WRITES=d_y is not None, BY_LEVEL=kernel.endswith("by_level"),
                BLOCK=block, **self._state_layout(plan.gate != "value"),
                **self.constants, **self.levels, **plan.options(kernel),
            )  # fmt: skip

    def _state_layout(self, by_value: bool) -> dict[str, int]:
        """States as matrices whose rows are read by key columns, or with `by_value` transposed."""
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
    """The type of operands that hold `block` columns of gates to be added up.

    16 bits if that is what the gates have, their rows then are 128 bytes wide (see `Launch`), and the emulator, which
    multiplies bfloat16 as integers, does not run.
    """
    if g is None or g.dtype.itemsize * block != 128 or (g.dtype == torch.bfloat16 and g.device.type == "cpu"):
        return tl.float32
    return TRITON_DTYPES[g.dtype]


def _allocate_scores(plan: _Plan, like: Tensor) -> _Scores:
    matrices = like.new_empty((plan.slots, like.shape[2], plan.chunk, plan.chunk), dtype=plan.dtype)
    return _Scores(matrices, plan.units(like))


def _allocate_tiles(plan: _Plan, x: Tensor, units: int = 1) -> _Tiles:
    """With so many units for each chunk of a head."""
    shape = (plan.slots, x.shape[2], plan.chunk, x.shape[3])
    return _Tiles(x.new_empty(shape, dtype=plan.dtype), plan.units(x, units))


def _allocate_states(plan: _Plan, like: Tensor, *, kept: bool = True) -> _States:
    slots = plan.slots if kept else 0
    states = like.new_empty((slots, like.shape[2], plan.key_dim, plan.value_dim), dtype=plan.dtype)
    return _States(states, plan.units(like, plan.unit_rows, plan.tiles(plan.value_dim)))


def _allocate_state(plan: _Plan, like: Tensor, transposed: bool) -> Tensor:
    """One state of each sequence in float32."""
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
    """Returns o [B, T, H, V], the final state [B or segments, H, K, V] in float32, and if `save` what the backward pass
    needs: P and the states, with their units.

    The products are those of float32 inputs if `precise`. States given and returned are `transposed`: [.., V, K].
    """
    q, k, v = channels_adjacent(q), channels_adjacent(k), channels_adjacent(v)
    g, g_value, initial_state, cu_seqlens = _adjacent(g, g_value, initial_state, cu_seqlens)
    plan = _plan(q, v, g, g_value, cu_seqlens, precise)
    passes = _Passes(plan, q.shape[1], q.shape[2], scale, cu_seqlens, reverse)
    final = _allocate_state(plan, q, transposed)
    states = _allocate_states(plan, q, kept=save or not plan.reads_in_walk)
    output = v.new_empty(v.shape, dtype=output_dtype)
    with torch.cuda.device_of(q):  # Triton launches on the current device
        if g_value is not None:
            values = passes.decay(None, v, g_value)
            scores = passes.score(q, k, None)
            passes.walk(k, values.writes, None, values.whole, initial_state, states, final, transposed=transposed)
            passes.differentiate(v, v, q, k, g_value, values, scores, states, None, output, None, None)
        elif g is not None and plan.gate == "key":
            scores = _allocate_scores(plan, q)
            keys = passes.decay(q, k, g, scores)
            if plan.reads_in_walk:
                passes.walk_and_read(
                    *(keys, v, scores, initial_state, states, final, output), save=save, transposed=transposed
                )
            else:
                passes.walk(keys.writes, v, g, keys.whole, initial_state, states, final, transposed=transposed)
                passes.read(keys.reads, v, g, scores, states, output)
        else:
            scores = passes.score(q, k, g)
            passes.walk(k, v, g, None, initial_state, states, final, transposed=transposed)
            passes.read(q, v, g, scores, states, output)
    return output, final, [*scores, *states] if save else []


@linear_attention.register_fake
def _(q, k, v, g, g_value, initial_state, cu_seqlens, scale, reverse, precise, transposed, output_dtype, save):
    plan = _plan(q, v, g, g_value, cu_seqlens, precise)
    kept = [*_allocate_scores(plan, q), *_allocate_states(plan, q)] if save else []
    return v.new_empty(v.shape, dtype=output_dtype), _allocate_state(plan, q, transposed), kept


def _adjacent(
    g: Tensor | None, g_value: Tensor | None, state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gates with adjacent channels, the rest contiguous."""
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
    """Gradients of q, k, v, g and g_value (empty where they are None) and of the first state (in float32).

    Those of q, k and v are also empty where they are not `wanted` and no other comes with them; no kernel runs for
    these alone.
    """
    q, k, v, d_output = channels_adjacent(q), channels_adjacent(k), channels_adjacent(v), channels_adjacent(d_output)
    g, g_value, d_final, cu_seqlens = _adjacent(g, g_value, d_final, cu_seqlens)
    plan = _plan(q, v, g, g_value, cu_seqlens, precise)
    passes = _Passes(plan, q.shape[1], q.shape[2], scale, cu_seqlens, reverse)
    scores, states = _Scores(*kept[:2]), _States(*kept[2:])
    d_states, d_initial = _allocate_states(plan, q), _allocate_state(plan, q, transposed)
    wanted = _find_needed(plan, g, g_value, wanted)
    d_q, d_k, d_v = _allocate_gradients(q, k, v, wanted)
    parts = cdiv(plan.key_dim, plan.block("differentiate", plan.key_dim)) if plan.gate == "head" else 1
    d_g, d_g_value = _allocate_parts(parts, q, g), _allocate_parts(1, q, g_value)
    with torch.cuda.device_of(q):
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
                passes.walk_and_read(keys, sides[0], scores, d_final, d_states, d_initial, d_v, save=True, **ends)
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
    return *gradients, *gates, _allocate_state(plan, q, transposed)


def _find_needed(plan: _Plan, g: Tensor | None, g_value: Tensor | None, wanted: list[bool]) -> list[bool]:
    """Whether q, k and v get gradients: if they are wanted, or come from a kernel that must run for another one."""
    q, k, v = wanted
    return [q, k or g is not None, v or g_value is not None or plan.reads_in_walk]


def _allocate_gradients(q: Tensor, k: Tensor, v: Tensor, needed: list[bool]) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape if need else 0) for x, need in zip((q, k, v), needed, strict=True))


def _allocate_parts(parts: int, q: Tensor, gate: Tensor | None) -> Tensor:
    """A gate's gradient in as many parts as programs share it: in float32 until they are added up."""
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
    """`linear_attention` in Triton kernels. `chunk_size` has no meaning here: the table says how tokens are cut."""
    precise = v.dtype.itemsize > 2  # as the output; keys and queries may come in float32 from a feature map
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
    """The operation with gradients; `output_dtype` is v's unless given. See `linear_attention` above."""
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
