"""The delta rule with decays per key channel, value keys or reads before the decay in Triton: operations and launches.

Sums and the state are float32. Operands of matrix products are bfloat16 for bfloat16 values; other values are
multiplied in float32, by three products of TF32. The forward pass keeps X and A for the backward pass, and with value
keys M and N: 2 C or 4 C numbers for each token and head. The backward pass computes
the states again. No sum depends on the order in which programs run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longseq.kernels.custom_op import Gradients, custom_op, empty_like
from longseq.kernels.delta_rule.chunk import Inputs
from longseq.kernels.delta_rule.triton_channel_passes import (
    connect,
    differentiate,
    differentiate_products,
    prepare,
    relate,
    retreat,
    sum_gates,
    walk,
)
from longseq.kernels.devices import contiguous, is_emulated
from longseq.kernels.segments import find_walk_span
from longseq.kernels.triton_launch import (
    ROW,
    Launch,
    block_width,
    cdiv,
    count_sequences,
    count_slots,
    evenly,
    find_launch,
    fit_launches,
    sequence_of_slots,
    steps,
)

# By the bytes of the operands of matrix products and by the width, max(K, V) rounded up to 64 or 128. Blocks have rows
# of at least 128 bytes: see `Launch` for what may happen otherwise.
LAUNCHES: dict[tuple[int, int], dict[str, Launch]] = {
    (2, width): {
        "sum_gates": Launch(0, 0, 4, 1),
        "relate": Launch(64, 0, 4, 1, 168 if width == 64 else None),
        "relate_blocks": Launch(64, 0, 4, 1),
        "prepare": Launch(64, 0, 4, 1) if width == 64 else Launch(128, 0, 8, 1),
        "prepare_inverse": Launch(64, 0, 4, 1, 168),
        "walk": Launch(64, 0, 4, 1),
        "walk_for_states": Launch(64, 0, 4, 2),
        "connect": Launch(32, 0, 4, 1) if width == 64 else Launch(32, 0, 8, 1),
        "retreat": Launch(64, 0, 4, 2) if width == 64 else Launch(128, 0, 8, 2),
        "differentiate_products": Launch(64, 0, 4, 1) if width == 64 else Launch(128, 0, 4, 1, 168),
        "differentiate": Launch(64, 64, 4, 1),
        "differentiate_blocks": Launch(64, 64, 8, 1),
    }
    for width in (64, 128)
}
LAUNCHES |= {
    (4, width): dict.fromkeys(LAUNCHES[2, width], Launch(32, 32, 4, 1))
    | {"sum_gates": Launch(0, 0, 4, 1), "connect": Launch(32, 0, 4 if width == 64 else 8, 1)}
    for width in (64, 128)
}
fit_launches(LAUNCHES)
# Programs that look for chunks with more than one block: most launches have few of these or none.
SEARCHERS = 1024
# Programs of walks that run side by side on a GPU of 132 multiprocessors. Where sequences, heads and tiles are too few
# for so many, sequences are cut into segments of time.
WALKERS = 264


class _Chunks(NamedTuple):
    """What `prepare` computes: by slot and head, in the type of matrix products but for `whole`."""

    queries: Tensor
    w: Tensor
    offered: Tensor | None  # X V; None for the transition of a state
    writes: Tensor
    added: Tensor | None
    whole: Tensor  # e^{b_C}


# Triton's interpreter multiplies the bits of bfloat16 as if they were integers. Kernels are interpreted or compiled
# as the environment says at their import.
HALF_TILE = torch.float32 if is_emulated() else torch.bfloat16


def _tile(v: Tensor) -> tuple[torch.dtype, int, str]:
    """The type of matrix products, the tokens of a chunk, and the precision of products in float32."""
    return (HALF_TILE, 64, "tf32") if v.dtype == torch.bfloat16 else (torch.float32, 32, "tf32x3")


class _Call:
    """The launches of one call, forward or backward."""

    def __init__(self, inputs: Inputs, cu_seqlens: Tensor | None, scale: float, before: bool, reverse: int) -> None:
        self.q, self.k, self.v, self.beta, write_key, self.value_key, g = Inputs._make(evenly(x) for x in inputs)
        self.write = self.k if write_key is None else write_key
        self.batch, self.tokens, self.heads, self.key_dim = self.k.shape
        self.value_dim = self.v.shape[3]
        self.scale, self.before = scale, before
        self.dtype, self.chunk, self.precision = _tile(self.v)
        self.launches = LAUNCHES[self.dtype.itemsize, 64 if max(self.key_dim, self.value_dim) <= 64 else 128]
        self.cu_seqlens = cu_seqlens
        self.sequences = count_sequences(self.batch, cu_seqlens)
        self.slots = count_slots(self.batch, self.tokens, self.chunk, cu_seqlens)
        self.sequence_of = sequence_of_slots(self.slots, self.chunk, self.tokens, cu_seqlens)
        self.layout = {"REVERSE": reverse, "CHUNK": self.chunk}
        self.options: dict[str, Any] = {**self.layout, "PRECISION": self.precision}
        self.levels = {"LEVELS": self.chunk.bit_length() - 1}
        self.places = self.slots * self.heads
        lanes = self.heads * cdiv(self.value_dim, self.launches["walk"].block)
        self.span = find_walk_span(cdiv(self.tokens, self.chunk), lanes, self.batch, self.sequences, WALKERS)
        self.segments, self.segment_of = self.sequences, None
        if self.span:
            length = self.span * self.chunk
            self.segments = count_slots(self.batch, self.tokens, length, cu_seqlens)
            self.segment_of = sequence_of_slots(self.segments, length, self.tokens, cu_seqlens)
        self.sums, self.mild = self._sum_gates(g)

    def _launch(
        self, kernel: Any, programs: int, numbers: tuple[float, ...], name: str | None, constants: dict[str, Any]
    ) -> Any:
        options = self.launches[name or kernel.__name__].options
        return find_launch(kernel, self.k.device, programs, numbers, **constants, **options)

    def _width(self, width: int) -> int:
        return block_width(width, ROW[self.dtype.itemsize])

    def _by_value(
        self, kernel: Any, numbers: tuple[float, ...], tensors: int, name: str | None = None, **constants: Any
    ) -> Any:
        """A launch for programs that have some columns of one of `tensors` states; a state has V of them by default."""
        width = constants.get("V", self.value_dim)
        block = min(self.launches[name or kernel.__name__].block, self._width(width))
        widths = {"K": self.key_dim, "V": width, "BLOCK_K": self._width(self.key_dim), "BLOCK_V": block}
        constants = {**widths, "SPAN": self.span, **constants}
        return self._launch(kernel, tensors * cdiv(width, block) * self.heads, numbers, name, constants)

    def _empty(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor by slot and head."""
        return self.k.new_empty((self.slots, self.heads, *sizes), dtype=dtype or self.dtype)

    def _states(self, count: int | None = None) -> Tensor:
        """A float32 tensor with `count` states of all heads, without it one for each sequence."""
        return self.k.new_empty(
            (count or self.sequences, self.heads, self.key_dim, self.value_dim), dtype=torch.float32
        )

    def _sum_gates(self, g: Tensor | None) -> tuple[Tensor, Tensor]:
        """b [slots, H, C, K], and the sizes of blocks, n."""
        if g is None:
            g = self.k.new_zeros((1,), dtype=torch.float32)
        g = (g.unsqueeze(-1) if g.dim() == 3 else g).expand(self.k.shape).contiguous()
        exact = torch.float64 if self.precision == "tf32x3" else torch.float32
        sums, mild = self._empty(self.chunk, self.key_dim, dtype=exact), self._empty(dtype=torch.int32)
        constants = {"K": self.key_dim, "BLOCK_K": block_width(self.key_dim), **self.levels, **self.layout}
        launch = self._launch(sum_gates, self.places, (self.tokens, self.heads, steps(g)[0]), None, constants)
        launch(g, self.cu_seqlens, self.sequence_of, sums, mild)
        return sums, mild

    def relate(self) -> tuple[Tensor, Tensor]:
        """L, and products [2 or 4, slots, H, C, C]: a place for X, then A, and with value keys M and N."""
        lower = self._empty(self.chunk, self.chunk, dtype=torch.float32)
        products = lower.new_empty((2 if self.value_key is None else 4, *lower.shape), dtype=self.dtype)
        self._relate(self.write, self.beta, lower, products[1])
        if self.value_key is not None:
            self._relate(self.value_key, None, products[2], products[3])
        return lower, products

    def _relate(self, write: Tensor, beta: Tensor | None, lower: Tensor, attention: Tensor) -> None:
        numbers = (self.scale, self.tokens, self.heads, self.places, *steps(self.q, self.k, write, beta))
        columns = min(self.launches["relate"].block, self._width(self.key_dim))
        constants = {"K": self.key_dim, "BEFORE": self.before, "COLUMNS": columns, **self.levels, **self.options}
        for launch in self._by_blocks(relate, self.places, numbers, constants):
            launch(
                self.q, self.k, write, beta, self.sums, self.mild, self.cu_seqlens, self.sequence_of, lower, attention
            )

    def _by_blocks(
        self, kernel: Any, programs: int, numbers: tuple[float, ...], constants: dict[str, Any]
    ) -> Iterator[Any]:
        """Launches for the chunks of a single block, and for the others."""
        name = kernel.__name__
        yield self._launch(kernel, programs, numbers, name, {**constants, "WHOLE": True})
        yield self._launch(kernel, min(programs, SEARCHERS), numbers, f"{name}_blocks", {**constants, "WHOLE": False})

    def prepare(self, products: Tensor, lower: Tensor | None = None) -> _Chunks:
        """What walks read; with L, also X, into `products`."""
        queries, w, writes = (self._empty(self.chunk, self.key_dim) for _ in range(3))
        added = None if self.value_key is None else torch.empty_like(queries)
        offered = self._empty(self.chunk, self.value_dim)
        whole = self._empty(self.key_dim, dtype=torch.float32)
        sequences = (self.q, self.k, self.v, self.write, self.beta, self.value_key)
        name = "prepare" if lower is None else "prepare_inverse"
        columns = min(self.launches[name].block, self._width(max(self.key_dim, self.value_dim)))
        constants = {"K": self.key_dim, "V": self.value_dim, "BEFORE": self.before, "COLUMNS": columns, **self.options}
        numbers = (self.scale, self.tokens, self.heads, *steps(*sequences))
        self._launch(prepare, self.places, numbers, name, constants)(
            *(*sequences, self.sums, self.cu_seqlens, self.sequence_of, lower, products[0]),
            *(None if added is None else products[2], queries, w, offered, writes, added, whole),
        )
        return _Chunks(queries, w, offered, writes, added, whole)

    def walk(self, products: Tensor, chunks: _Chunks, first: Tensor | None) -> tuple[Tensor, Tensor]:
        """The outputs and the last states."""
        output, last = self.v.new_empty(self.v.shape), self._states()
        if (transitions := self.transitions(chunks)) is not None:
            starts = self._connect(transitions, self._ends(chunks), first, last)
            self._walk("walk", products, chunks, starts, None, None, None, output)
        else:
            self._walk("walk", products, chunks, first, None, None, last, output)
        return output, last

    def walk_for_states(
        self, products: Tensor, chunks: _Chunks, first: Tensor | None, transitions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The states before each chunk, and U."""
        states, u = self._empty(self.key_dim, self.value_dim), self._empty(self.chunk, self.value_dim)
        if transitions is not None:
            first = self._connect(transitions, self._ends(chunks), first, self._states())
        self._walk("walk_for_states", products, chunks, first, states, u, None, None)
        return states, u

    def transitions(self, chunks: _Chunks) -> Tensor | None:
        """The products of the transitions of the chunks of segments, [segments, H, K, K]; None without segments."""
        if not self.span:
            return None
        found = self.k.new_empty((self.segments, self.heads, self.key_dim, self.key_dim), dtype=torch.float32)
        self._walk("walk_for_states", None, chunks._replace(offered=None, added=None), None, None, None, found, None)
        return found

    def _ends(self, chunks: _Chunks) -> Tensor:
        """The states after segments that begin from zero."""
        ends = self._states(self.segments)
        self._walk("walk_for_states", None, chunks, None, None, None, ends, None)
        return ends

    def _connect(
        self, transitions: Tensor, ends: Tensor, first: Tensor | None, last: Tensor, back: bool = False
    ) -> Tensor:
        """The states before segments; stores the last ones. `back`, gradients from the last segment to the first."""
        starts = torch.empty_like(ends)
        self._by_value(connect, (self.tokens, self.heads), self.sequences, BACKWARD=back, CHUNK=self.chunk)(
            self.cu_seqlens, transitions, ends, first, starts, last
        )
        return starts

    def _walk(self, name: str, products: Tensor | None, chunks: _Chunks, *tensors: Tensor | None) -> None:
        numbers = (self.tokens, self.heads, steps(self.v)[0])
        attention = None if products is None else products[1]
        values = None if products is None or chunks.added is None else products[3]
        width = self.key_dim if chunks.offered is None else self.value_dim
        self._by_value(walk, numbers, self.segments, name, V=width, **self.options)(
            self.v, self.cu_seqlens, self.segment_of, attention, values, *chunks, *tensors
        )

    def retreat(
        self, attention: Tensor, chunks: _Chunks, d_output: Tensor, d_last: Tensor | None, transitions: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of the states after each chunk, of U, and of the first states."""
        d_states, d_u = self._empty(self.key_dim, self.value_dim), self._empty(self.chunk, self.value_dim)
        d_first = self._states()
        launch = self._by_value(retreat, (self.tokens, self.heads), self.segments, None, **self.options)
        inputs = (d_output, self.cu_seqlens, self.segment_of, attention)
        tiles = (chunks.queries, chunks.w, chunks.writes, chunks.whole)
        if transitions is None:
            launch(*inputs, *tiles, d_last, d_states, d_u, d_first)
        else:
            ends = self._states(self.segments)
            launch(*inputs, *tiles, None, None, None, ends)
            starts = self._connect(transitions, ends, d_last, d_first, back=True)
            launch(*inputs, *tiles, starts, d_states, d_u, None)
        return d_states, d_u, d_first

    def differentiate_products(
        self, products: Tensor, chunks: _Chunks, d_output: Tensor, u: Tensor, d_u: Tensor, d_states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The gradients of L, A, M and N and of v; `d_u` becomes the gradient of the errors."""
        d_products, d_v = torch.empty_like(products), d_output.new_empty(d_output.shape)
        inverse, _, *values = products
        numbers = (self.scale, self.tokens, self.heads, steps(self.v)[0])
        launch = self._launch(
            differentiate_products, self.places, numbers, None,
            {
                "K": self.key_dim, "V": self.value_dim, "BLOCK_K": self._width(self.key_dim),
                "BLOCK_V": min(self.launches["differentiate_products"].block, self._width(self.value_dim)),
                **self.options,
            },
        )  # fmt: skip
        launch(
            *(self.v, self.cu_seqlens, self.sequence_of, inverse, *(values or (None, None)), chunks.added, d_output),
            *(u, d_u, d_states, *d_products, *(() if values else (None, None)), d_v),
        )
        return d_products, d_v

    def differentiate(
        self, d_products: Tensor, d_output: Tensor, states: Tensor, d_states: Tensor, u: Tensor, d_errors: Tensor,
        d_write: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        """The gradients of q, k, g [B, T, H, K] in float32, beta and value keys; that of write keys into `d_write`."""
        d_q, d_k, d_value_key = empty_like(self.q), empty_like(self.k), empty_like(self.value_key)
        d_g = self.k.new_empty(self.k.shape, dtype=torch.float32)
        columns = min(self.launches["differentiate"].block, self._width(self.key_dim))
        d_beta = None
        if self.beta is not None:
            d_beta = d_g.new_empty((*self.beta.shape, cdiv(self.key_dim, columns)))
        calls = [(self.write, self.beta, u, d_write, d_beta)]
        if self.value_key is not None:
            calls.append((self.value_key, None, self.v, d_value_key, None))
        for n, (write, beta, values, d_key, d_part) in enumerate(calls):
            inputs = (self.q, self.k, write, beta, self.sums, self.mild, self.cu_seqlens, self.sequence_of)
            of_products, gradients = (d_products[2 * n], d_products[2 * n + 1]), (d_q, d_k, d_key, d_g, d_part)
            strides = steps(self.q, self.k, write, beta, self.v)
            numbers = (self.scale, self.tokens, self.heads, self.places, *strides)
            programs = self.places * cdiv(self.key_dim, columns)
            block = min(self.launches["differentiate"].step, self._width(self.value_dim))
            constants = {
                "K": self.key_dim, "V": self.value_dim, "BEFORE": self.before, "VALUES": n > 0, "COLUMNS": columns,
                "BLOCK_V": block, **self.levels, **self.options,
            }  # fmt: skip
            for launch in self._by_blocks(differentiate, programs, numbers, constants):
                launch(*inputs, d_output, states, d_states, values, d_errors, *of_products, *gradients)
        if self.beta is not None and d_beta is not None:
            d_beta = d_beta.sum(-1).to(self.beta.dtype)
        return d_q, d_k, d_g, d_beta, d_value_key


def _allocate(q, k, v, beta, write_key, value_key, g, initial_state, cu_seqlens, scale, before, reverse, save):
    batch, tokens, heads, key_dim = k.shape
    dtype, chunk, _ = _tile(v)
    sequences, slots = count_sequences(batch, cu_seqlens), count_slots(batch, tokens, chunk, cu_seqlens)
    products = (2 if value_key is None else 4, slots, heads, chunk, chunk) if save else (0,)
    final = k.new_empty((sequences, heads, key_dim, v.shape[3]), dtype=torch.float32)
    return v.new_empty(v.shape), final, k.new_empty(products, dtype=dtype)


@custom_op("delta_rule_channels", _allocate)
def delta_rule_channels(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, write_key: Tensor | None, value_key: Tensor | None,
    g: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None, scale: float, before: bool, reverse: int,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Output [B, T, H, V] in v's type, final state in float32, and X, A, M and N (empty unless `save`)."""
    call = _Call(Inputs(q, k, v, beta, write_key, value_key, g), cu_seqlens, scale, before, reverse)
    lower, products = call.relate()
    chunks = call.prepare(products, lower)
    output, last = call.walk(products, chunks, contiguous(initial_state))
    return output, last, products if save else products.new_empty((0,))


def _allocate_gradients(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, write_key: Tensor | None, value_key: Tensor | None,
    g: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None, *_: Any,
) -> Gradients:  # fmt: skip
    sequences = count_sequences(k.shape[0], cu_seqlens)
    d_first = k.new_empty((sequences, *k.shape[2:], v.shape[3]), dtype=torch.float32)
    return *[empty_like(x) for x in (q, k, v, beta, write_key, value_key, g)], d_first


@delta_rule_channels.gradient("q k v beta write_key value_key g initial_state", outputs=1, fake=_allocate_gradients)
def delta_rule_channels_backward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, write_key: Tensor | None, value_key: Tensor | None,
    g: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None, products: Tensor, d_output: Tensor,
    d_final: Tensor | None, scale: float, before: bool, reverse: int,
) -> Gradients:  # fmt: skip
    """The gradients of all inputs; that of the first state in float32."""
    call = _Call(Inputs(q, k, v, beta, write_key, value_key, g), cu_seqlens, scale, before, reverse)
    d_output = d_output.contiguous()
    chunks = call.prepare(products)
    transitions = call.transitions(chunks)
    states, u = call.walk_for_states(products, chunks, contiguous(initial_state), transitions)
    d_states, d_u, d_first = call.retreat(products[1], chunks, d_output, contiguous(d_final), transitions)
    d_products, d_v = call.differentiate_products(products, chunks, d_output, u, d_u, d_states)
    d_write = empty_like(write_key)
    d_q, d_k, d_g, d_beta, d_value_key = call.differentiate(d_products, d_output, states, d_states, u, d_u, d_write)
    d_gate = None if g is None else (d_g if g.dim() == 4 else d_g.sum(-1)).to(g.dtype)
    return d_q, d_k, d_v, d_beta, d_write, d_value_key, d_gate, d_first
