"""The delta rule with decays per key channel, value keys or reads before the decay in Triton: operations and launches.

Sums and the state are float32. Operands of matrix products are bfloat16 for bfloat16 values, TF32 for those of float16,
and three products of TF32 for those of float32. The forward pass keeps X and A for the backward pass, and with value
keys M and N: 2 C or 4 C numbers for each token and head; with `recompute` only its inputs. The backward pass computes
the states again. No sum depends on the order in which programs run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from longseq.kernels.custom_op import custom_op
from longseq.kernels.delta_rule.triton_channel_passes import (
    differentiate,
    differentiate_by_level,
    differentiate_products,
    prepare,
    relate,
    relate_by_level,
    retreat,
    sum_gates,
    walk,
)
from longseq.kernels.devices import is_emulated
from longseq.kernels.reading import Reverse, number_of
from longseq.kernels.triton_launch import (
    ROW,
    Launch,
    block_width,
    cdiv,
    count_sequences,
    count_slots,
    find_launch,
    fit_launches,
    sequence_of_slots,
)

# By the bytes of the operands of matrix products and by the width, max(K, V) rounded up to 64 or 128. Blocks have rows
# of at least 128 bytes: see `Launch` for what may happen otherwise.
LAUNCHES: dict[tuple[int, int], dict[str, Launch]] = {
    (2, width): {
        "sum_gates": Launch(0, 0, 4, 1),
        "relate": Launch(64, 0, 8, 1) if width == 64 else Launch(64, 0, 4, 1),
        "relate_by_level": Launch(64, 0, 4, 1),
        "prepare": Launch(64, 0, 4, 1) if width == 64 else Launch(128, 0, 8, 1),
        "prepare_inverse": Launch(64, 0, 4, 1),
        "walk": Launch(64, 0, 4, 2) if width == 64 else Launch(128, 0, 8, 2),
        "walk_for_states": Launch(64, 0, 4, 3) if width == 64 else Launch(64, 0, 4, 2),
        "retreat": Launch(64, 0, 4, 2) if width == 64 else Launch(128, 0, 8, 2),
        "differentiate_products": Launch(128, 0, 4, 1),
        "differentiate": Launch(64, 64, 8, 1),
        "differentiate_by_level": Launch(64, 0, 8, 1),
    }
    for width in (64, 128)
}
LAUNCHES |= {
    (4, width): {
        "sum_gates": Launch(0, 0, 4, 1),
        "relate": Launch(32, 0, 4, 1),
        "relate_by_level": Launch(32, 0, 4, 1),
        "prepare": Launch(32, 0, 4, 1),
        "prepare_inverse": Launch(32, 0, 4, 1),
        "walk": Launch(32, 0, 4, 1),
        "walk_for_states": Launch(32, 0, 4, 1),
        "retreat": Launch(32, 0, 4, 1),
        "differentiate_products": Launch(32, 0, 4, 1),
        "differentiate": Launch(32, 32, 4, 1),
        "differentiate_by_level": Launch(32, 0, 4, 1),
    }
    for width in (64, 128)
}
fit_launches(LAUNCHES)


class _Inputs(NamedTuple):
    """The sequences of a call, [B, T, H, ...], each with one distance between tokens."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    write_key: Tensor | None
    value_key: Tensor | None
    g: Tensor | None


class _Chunks(NamedTuple):
    """What `prepare` computes: by slot and head, in the type of matrix products but for `whole`."""

    queries: Tensor
    w: Tensor
    offered: Tensor
    writes: Tensor
    added: Tensor | None
    whole: Tensor  # e^{b_C}


# Triton's interpreter multiplies the bits of bfloat16 as if they were integers. Kernels are interpreted or compiled
# as the environment says at their import.
HALF_TILE = torch.float32 if is_emulated() else torch.bfloat16


def _tile(v: Tensor) -> tuple[torch.dtype, int, str]:
    """The type of matrix products, the tokens of a chunk, and the precision of products."""
    if v.dtype == torch.bfloat16:
        return HALF_TILE, 64, "tf32"
    return torch.float32, 32, "tf32" if v.dtype == torch.float16 else "tf32x3"


class _Call:
    """The launches of one call, forward or backward."""

    def __init__(self, inputs: _Inputs, cu_seqlens: Tensor | None, scale: float, before: bool, reverse: int) -> None:
        q, k, v, beta, write_key, value_key, g = (None if x is None else _evenly(x) for x in inputs)
        self.batch, self.tokens, self.heads, self.key_dim = k.shape
        self.value_dim = v.shape[3]
        self.q, self.k, self.v, self.beta, self.value_key = q, k, v, beta, value_key
        self.write = k if write_key is None else write_key
        self.scale, self.before = scale, before
        self.cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
        self.dtype, self.chunk, precision = _tile(v)
        self.launches = LAUNCHES[self.dtype.itemsize, 64 if max(self.key_dim, self.value_dim) <= 64 else 128]
        self.sequences = count_sequences(self.batch, cu_seqlens)
        self.slots = count_slots(self.batch, self.tokens, self.chunk, cu_seqlens)
        self.sequence_of = sequence_of_slots(self.slots, self.chunk, self.tokens, cu_seqlens)
        self.layout = {"REVERSE": reverse, "CHUNK": self.chunk}
        self.levels = {"LEVELS": self.chunk.bit_length() - 1}
        self.options = {**self.layout, "PRECISION": precision}
        self.size = self.slots * self.heads * self.chunk**2
        self.places = self.slots * self.heads
        self.walks = self.sequences * self.heads
        self.sums, self.mild = self._sum_gates(g)

    def _launch(
        self, kernel: Any, programs: int, numbers: tuple[float, ...], name: str | None = None, **constants: Any
    ) -> Any:
        launch = self.launches[name or kernel.__name__]
        return find_launch(kernel, self.k.device, programs, numbers, **constants, **launch.options)

    def _block(self, name: str, width: int, step: bool = False) -> int:
        launch = self.launches[name]
        return min(launch.step if step else launch.block, block_width(width, ROW[self.dtype.itemsize]))

    def _empty(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor by slot and head."""
        return self.k.new_empty((self.slots, self.heads, *sizes), dtype=dtype or self.dtype)

    def _states(self) -> Tensor:
        """A float32 tensor with a state for each sequence."""
        return self.k.new_empty((self.sequences, self.heads, self.key_dim, self.value_dim), dtype=torch.float32)

    def _by_value(self, name: str) -> dict[str, int]:
        """The widths of a kernel whose programs have some value columns."""
        widths = {
            "K": self.key_dim,
            "V": self.value_dim,
            "BLOCK_K": block_width(self.key_dim, ROW[self.dtype.itemsize]),
        }
        return {**widths, "BLOCK_V": self._block(name, self.value_dim), **self.options}

    def _sum_gates(self, g: Tensor | None) -> tuple[Tensor, Tensor]:
        """b [slots, H, C, K], and the sizes of blocks, n."""
        if g is None:
            g = self.k.new_zeros((1,), dtype=torch.float32)
        g = (g.unsqueeze(-1) if g.dim() == 3 else g).expand(self.k.shape).contiguous()
        exact = torch.float64 if self.options["PRECISION"] == "tf32x3" else torch.float32
        sums, mild = self._empty(self.chunk, self.key_dim, dtype=exact), self._empty(dtype=torch.int32)
        self._launch(
            sum_gates, self.places, (self.tokens, self.heads, g.stride(1)), K=self.key_dim,
            BLOCK_K=block_width(self.key_dim), **self.levels, **self.layout,
        )(g, self.cu_seqlens, self.sequence_of, sums, mild)  # fmt: skip
        return sums, mild

    def relate(self) -> tuple[Tensor, Tensor]:
        """L, and A in the second place of what becomes X and A, with value keys X, A, M and N [4, slots, H, C, C]."""
        lower = self._empty(self.chunk, self.chunk, dtype=torch.float32)
        products = lower.new_empty((2 if self.value_key is None else 4, *lower.shape), dtype=self.dtype)
        self._relate(self.write, self.beta, lower, products[1])
        if self.value_key is not None:
            self._relate(self.value_key, None, products[2], products[3])
        return lower, products

    def _relate(self, write: Tensor, beta: Tensor | None, lower: Tensor, attention: Tensor) -> None:
        numbers = (self.scale, self.tokens, self.heads, *_steps(self.q, self.k, write, beta))
        for kernel, levels in ((relate, {}), (relate_by_level, self.levels)):
            self._launch(
                kernel, self.places, numbers, K=self.key_dim, BEFORE=self.before,
                COLUMNS=self._block(kernel.__name__, self.key_dim), **levels, **self.options,
            )(
                self.q, self.k, write, beta, self.sums, self.mild, self.cu_seqlens, self.sequence_of, lower, attention,
            )  # fmt: skip

    def prepare(self, products: Tensor, lower: Tensor | None = None) -> _Chunks:
        """What walks read; with L, also X, into `products`."""
        queries, w, writes = (self._empty(self.chunk, self.key_dim) for _ in range(3))
        added = None if self.value_key is None else torch.empty_like(queries)
        offered = self._empty(self.chunk, self.value_dim)
        whole = self._empty(self.key_dim, dtype=torch.float32)
        sequences = (self.q, self.k, self.v, self.write, self.beta, self.value_key)
        name = "prepare" if lower is None else "prepare_inverse"
        self._launch(
            prepare, self.places, (self.scale, self.tokens, self.heads, *_steps(*sequences)), name,
            K=self.key_dim, V=self.value_dim, BEFORE=self.before,
            COLUMNS=self._block(name, max(self.key_dim, self.value_dim)), **self.options,
        )(
            *sequences, self.sums, self.cu_seqlens, self.sequence_of, lower, products[0],
            None if added is None else products[2], queries, w, offered, writes, added, whole,
        )  # fmt: skip
        return _Chunks(queries, w, offered, writes, added, whole)

    def walk(self, products: Tensor, chunks: _Chunks, first: Tensor | None) -> tuple[Tensor, Tensor]:
        """The outputs and the last states."""
        output, last = self.v.new_empty((self.batch, self.tokens, self.heads, self.value_dim)), self._states()
        self._walk("walk", products, chunks, first, None, None, last, output)
        return output, last

    def walk_for_states(self, products: Tensor, chunks: _Chunks, first: Tensor | None) -> tuple[Tensor, Tensor]:
        """The states before each chunk, and U."""
        states, u = self._empty(self.key_dim, self.value_dim), torch.empty_like(chunks.offered)
        self._walk("walk_for_states", products, chunks, first, states, u, self._states(), None)
        return states, u

    def _walk(self, name: str, products: Tensor, chunks: _Chunks, *tensors: Tensor | None) -> None:
        widths = self._by_value(name)
        self._launch(
            walk, self.walks * cdiv(self.value_dim, widths["BLOCK_V"]), (self.tokens, self.heads, *_steps(self.v)),
            name, **widths,
        )(
            self.v, self.cu_seqlens, products[1], None if chunks.added is None else products[3], *chunks, *tensors,
        )  # fmt: skip

    def retreat(
        self, products: Tensor, chunks: _Chunks, d_output: Tensor, d_last: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of the states after each chunk, of U, and of the first states."""
        d_states, d_u, d_first = (
            self._empty(self.key_dim, self.value_dim), torch.empty_like(chunks.offered), self._states()
        )  # fmt: skip
        widths = self._by_value("retreat")
        self._launch(
            retreat, self.walks * cdiv(self.value_dim, widths["BLOCK_V"]), (self.tokens, self.heads, self.size),
            **widths,
        )(
            d_output, self.cu_seqlens, products, chunks.queries, chunks.w, chunks.writes, chunks.whole, d_last,
            d_states, d_u, d_first,
        )  # fmt: skip
        return d_states, d_u, d_first

    def differentiate_products(
        self, products: Tensor, chunks: _Chunks, d_output: Tensor, u: Tensor, d_u: Tensor, d_states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The gradients of L, A, M and N and of v; `d_u` becomes the gradient of the errors."""
        d_products, d_v = torch.empty_like(products), d_output.new_empty(d_output.shape)
        self._launch(
            differentiate_products, self.places, (self.scale, self.tokens, self.heads, self.size, *_steps(self.v)),
            **self._by_value("differentiate_products"),
        )(
            self.v, self.cu_seqlens, self.sequence_of, products, chunks.added, d_output, u, d_u, d_states, d_products,
            d_v,
        )  # fmt: skip
        return d_products, d_v

    def differentiate(
        self, d_products: Tensor, d_output: Tensor, states: Tensor, d_states: Tensor, u: Tensor, d_errors: Tensor,
        own: bool,
    ) -> list[Tensor]:  # fmt: skip
        """The gradients of q, k and g, then of beta, write keys (with `own`) and value keys, where given."""
        d_q, d_k = self.q.new_empty(self.q.shape), self.k.new_empty(self.k.shape)
        d_g = self.k.new_empty(self.k.shape, dtype=torch.float32)
        d_write = self.write.new_empty(self.write.shape) if own else None
        d_value_key = None if self.value_key is None else self.value_key.new_empty(self.value_key.shape)
        columns = self._block("differentiate", self.key_dim)
        tiles = cdiv(self.key_dim, columns)
        d_beta = None if self.beta is None else d_g.new_empty((*self.beta.shape, tiles))
        writes = [(self.write, self.beta, u, d_write, d_beta, False)]
        if self.value_key is not None:
            writes.append((self.value_key, None, self.v, d_value_key, None, True))
        for n, (write, beta, values, d_write_key, d_part, added) in enumerate(writes):
            inputs = (self.q, self.k, write, beta, self.sums, self.mild, self.cu_seqlens, self.sequence_of)
            steps = _steps(self.q, self.k, write, beta)
            of_products = (d_products[2 * n], d_products[2 * n + 1])
            gradients = (d_q, d_k, d_write_key, d_g, d_part)
            options = {"K": self.key_dim, "BEFORE": self.before, "COLUMNS": columns, **self.options}
            self._launch(
                differentiate, self.places * tiles,
                (self.scale, self.tokens, self.heads, *steps, self.v.stride(1)), V=self.value_dim, VALUES=added,
                BLOCK_V=self._block("differentiate", self.value_dim, step=True), **options,
            )(*inputs, d_output, states, d_states, values, d_errors, *of_products, *gradients)  # fmt: skip
            self._launch(
                differentiate_by_level, self.places * tiles, (self.tokens, self.heads, *steps), **self.levels, **options
            )(*inputs, *of_products, *gradients)
        d_beta = None if d_beta is None else d_beta.sum(-1).to(self.beta.dtype)
        return [d_q, d_k, d_g, *(x for x in (d_beta, d_write, d_value_key) if x is not None)]


def _evenly(x: Tensor) -> Tensor:
    """The tensor [B, T, H, ...] with one distance between tokens, rows one after the other and adjacent heads."""
    token = x.stride(1)
    even = (
        x.shape[2:].numel() <= token
        and x[0, 0].is_contiguous()
        and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * token)
    )
    return x if even else x.contiguous()


def _steps(*sequences: Tensor | None) -> tuple[int, ...]:
    """The distances between tokens; 0 for None."""
    return tuple(0 if x is None else x.stride(1) for x in sequences)


@custom_op("delta_rule_channels")
def delta_rule_channels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    write_key: Tensor | None,
    value_key: Tensor | None,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    before: bool,
    reverse: int,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [B, T, H, V] in v's type, final state in float32, and X, A, M and N (empty unless `keep`)."""
    call = _Call(_Inputs(q, k, v, beta, write_key, value_key, g), cu_seqlens, scale, before, reverse)
    lower, products = call.relate()
    chunks = call.prepare(products, lower)
    output, last = call.walk(products, chunks, None if initial_state is None else initial_state.contiguous())
    return output, last, products if keep else products.new_empty((0,))


@delta_rule_channels.register_fake
def _(q, k, v, beta, write_key, value_key, g, initial_state, cu_seqlens, scale, before, reverse, keep):
    batch, tokens, heads, key_dim = k.shape
    dtype, chunk, _ = _tile(v)
    sequences, slots = count_sequences(batch, cu_seqlens), count_slots(batch, tokens, chunk, cu_seqlens)
    products = (2 if value_key is None else 4, slots, heads, chunk, chunk) if keep else (0,)
    final = k.new_empty((sequences, heads, key_dim, v.shape[3]), dtype=torch.float32)
    return v.new_empty(v.shape), final, k.new_empty(products, dtype=dtype)


@custom_op("delta_rule_channels_backward")
def delta_rule_channels_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    write_key: Tensor | None,
    value_key: Tensor | None,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    products: Tensor,
    d_output: Tensor,
    d_final: Tensor | None,
    scale: float,
    before: bool,
    reverse: int,
) -> list[Tensor]:
    """Gradients of v, the first states, q, k and g [B, T, H, K] (in float32), then of beta, write keys and value keys,
    where they are given.
    """
    call = _Call(_Inputs(q, k, v, beta, write_key, value_key, g), cu_seqlens, scale, before, reverse)
    d_output = d_output.contiguous()
    if products.numel():
        chunks = call.prepare(products)
    else:
        lower, products = call.relate()
        chunks = call.prepare(products, lower)
    first = None if initial_state is None else initial_state.contiguous()
    states, u = call.walk_for_states(products, chunks, first)
    d_last = None if d_final is None else d_final.contiguous()
    d_states, d_u, d_first = call.retreat(products, chunks, d_output, d_last)
    d_products, d_v = call.differentiate_products(products, chunks, d_output, u, d_u, d_states)
    rest = call.differentiate(d_products, d_output, states, d_states, u, d_u, write_key is not None)
    return [d_v, d_first, *rest]


@delta_rule_channels_backward.register_fake
def _(
    q, k, v, beta, write_key, value_key, g, initial_state, cu_seqlens, products, d_output, d_final, scale, before,
    reverse,
):  # fmt: skip
    sequences = count_sequences(k.shape[0], cu_seqlens)
    d_first = k.new_empty((sequences, *k.shape[2:], v.shape[3]), dtype=torch.float32)
    d_g = k.new_empty(k.shape, dtype=torch.float32)
    others = [x.new_empty(x.shape) for x in (beta, write_key, value_key) if x is not None]
    return [d_output.new_empty(d_output.shape), d_first, q.new_empty(q.shape), k.new_empty(k.shape), d_g, *others]


def _setup_context(ctx, inputs, output):
    *tensors, ctx.scale, ctx.before, ctx.reverse, _ = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, d_output, d_final, _):
    q, k, v, beta, write_key, value_key, g, initial_state, cu_seqlens, products = ctx.saved_tensors
    if d_output is None:
        d_output = torch.zeros_like(v)
    d_v, d_first, d_q, d_k, d_g, *others = delta_rule_channels_backward(
        *(q, k, v, beta, write_key, value_key, g, initial_state, cu_seqlens, products, d_output, d_final),
        *(ctx.scale, ctx.before, ctx.reverse),
    )
    return (
        d_q,
        d_k,
        d_v,
        *(None if x is None else others.pop(0) for x in (beta, write_key, value_key)),
        None if g is None else (d_g if g.dim() == 4 else d_g.sum(-1)).to(g.dtype),
        None if initial_state is None else d_first.to(initial_state.dtype),
        *(None,) * 5,
    )


delta_rule_channels.register_autograd(_differentiate, setup_context=_setup_context)


def delta_rule_channels_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    write_key: Tensor | None,
    value_key: Tensor | None,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    read_before_decay: bool,
    reverse: Reverse,
    recompute: bool,
) -> tuple[Tensor, Tensor]:
    """Output and final state of `delta_rule`."""
    tensors = (q, k, v, beta, write_key, value_key, g, initial_state)
    differentiable = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    options = (float(scale), read_before_decay, number_of(reverse))
    return delta_rule_channels(*tensors, cu_seqlens, *options, differentiable and not recompute)[:2]
