"""The delta rule with decays per key channel, value keys or reads before the decay in Triton: operations and launches.

Sums, the triangular inverse and the state are float32. Matrix products of half precision values have TF32 operands, 11
bits with the range of float32; those of float32 values are three such products. The forward pass keeps X and A for the
backward pass, and with value keys M and N: 2 C or 4 C numbers for each token and head; with `recompute` only its
inputs. The backward pass computes the states again. No sum depends on the order in which programs run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from longseq.kernels.custom_op import custom_op
from longseq.kernels.delta_rule.triton_channel_passes import (
    BLOCK,
    differentiate,
    differentiate_products,
    invert,
    relate,
    retreat,
    walk,
)
from longseq.kernels.devices import channels_adjacent
from longseq.kernels.reading import Reverse, number_of
from longseq.kernels.triton_launch import (
    Launch,
    block_width,
    cdiv,
    count_sequences,
    count_slots,
    find_launch,
    fit_launches,
    sequence_of_slots,
    strides,
)

CHUNKS = {2: 64, 4: 32}  # tokens of a chunk, by the bytes of the values
# By the bytes of the values and the width of keys. Not tuned yet.
LAUNCHES: dict[tuple[int, int], dict[str, Launch]] = {
    (size, 128): {
        "relate": Launch(0, 64, 4, 1),
        "invert": Launch(0, 0, 4, 1),
        "walk": Launch(32, 0, 8, 1),
        "retreat": Launch(32, 0, 8, 1),
        "differentiate_products": Launch(0, 32, 4, 1),
        "differentiate": Launch(32, 32, 4, 1),
    }
    for size in (2, 4)
}
fit_launches(LAUNCHES)


class _Call(NamedTuple):
    """A call's tensors as the kernels read them, and what all launches share."""

    q: Tensor
    k: Tensor
    v: Tensor
    write: Tensor
    beta: Tensor
    value_key: Tensor
    g: Tensor
    cu_seqlens: Tensor | None
    sequence_of: Tensor | None
    numbers: tuple[float, ...]  # scale, tokens and heads
    flags: dict[str, Any]  # of the formula
    layout: dict[str, Any]
    half: bool
    slots: int
    sequences: int

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, write_key: Tensor | None, value_key: Tensor | None,
        g: Tensor | None, cu_seqlens: Tensor | None, scale: float, before: bool, reverse: int, half: bool,
    ) -> _Call:  # fmt: skip
        batch, tokens, heads, _ = k.shape
        q, k, v = channels_adjacent(q), channels_adjacent(k), channels_adjacent(v)
        if g is None:
            g = k.new_zeros((1,), dtype=torch.float32)
        gates = (g.unsqueeze(-1) if g.dim() == 3 else g).expand(k.shape).contiguous()
        chunk = CHUNKS[2 if half else 4]
        slots = count_slots(batch, tokens, chunk, cu_seqlens)
        return cls(
            q=q,
            k=k,
            v=v,
            write=k if write_key is None else channels_adjacent(write_key),
            beta=k if beta is None else beta,
            value_key=k if value_key is None else channels_adjacent(value_key),
            g=gates,
            cu_seqlens=None if cu_seqlens is None else cu_seqlens.contiguous(),
            sequence_of=sequence_of_slots(slots, chunk, tokens, cu_seqlens),
            numbers=(scale, tokens, heads),
            flags={"BEFORE": before, "HAS_BETA": beta is not None, "HAS_VALUE_KEY": value_key is not None},
            layout={"PACKED": cu_seqlens is not None, "REVERSE": reverse, "CHUNK": chunk},
            half=half,
            slots=slots,
            sequences=count_sequences(batch, cu_seqlens),
        )

    @property
    def heads(self) -> int:
        return self.k.shape[2]

    @property
    def key_dim(self) -> int:
        return self.k.shape[3]

    @property
    def value_dim(self) -> int:
        return self.v.shape[3]

    @property
    def chunk(self) -> int:
        return self.layout["CHUNK"]

    @property
    def precision(self) -> str:
        return "tf32" if self.half else "tf32x3"

    def empty(self, *sizes: int) -> Tensor:
        """A float32 tensor by slot and head."""
        return self.k.new_empty((self.slots, self.heads, *sizes), dtype=torch.float32)

    def states(self) -> Tensor:
        """A float32 tensor with a state for each sequence."""
        return self.k.new_empty((self.sequences, self.heads, self.key_dim, self.value_dim), dtype=torch.float32)

    def entry(self, name: str) -> Launch:
        return LAUNCHES[2 if self.half else 4, 128][name]

    def launch(self, kernel: Any, name: str, programs: int, tensors: tuple[Tensor, ...], **constants: Any) -> Any:
        """A launch of a kernel, with the strides of `tensors`."""
        numbers = (*self.numbers, *(stride for x in tensors for stride in strides(x)))
        constants |= {**self.layout, **self.entry(name).options, "PRECISION": self.precision}
        return find_launch(kernel, self.k.device, programs, numbers, **constants)

    def relate(self) -> Tensor:
        """X and A, and with value keys M and N, [2 or 4, slots, H, C, C]."""
        own = self.flags["HAS_VALUE_KEY"]
        products = self.k.new_empty(
            (4 if own else 2, self.slots, self.heads, self.chunk, self.chunk), dtype=torch.float32
        )
        tensors = (self.q, self.k, self.write, self.beta, self.value_key, self.g)
        step = min(self.entry("relate").step, block_width(self.key_dim))
        programs = self.slots * self.heads
        self.launch(
            relate,
            "relate",
            programs * (self.chunk // BLOCK.value),
            tensors,
            K=self.key_dim,
            COLUMNS=step,
            **self.flags,
        )(*tensors, self.cu_seqlens, self.sequence_of, *_four(products))
        find_launch(
            invert, self.k.device, programs, self.numbers[1:], HALVES=self.half, **self.layout,
            **self.entry("invert").options,
        )(products[0], self.cu_seqlens, self.sequence_of)  # fmt: skip
        return products

    def walk(self, products: Tensor, first: Tensor | None, save: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The outputs and last states; with `save`, the states before each chunk and U."""
        batch, tokens = self.v.shape[:2]
        output = self.v.new_empty((batch, tokens, self.heads, self.value_dim))
        last = self.states()
        states = self.empty(self.key_dim, self.value_dim) if save else last
        written = self.empty(self.chunk, self.value_dim) if save else last
        tensors = (self.q, self.k, self.v, self.write, self.beta, self.value_key, self.g)
        self.launch(
            walk,
            "walk",
            self._programs("walk"),
            tensors,
            HAS_FIRST=first is not None,
            SAVE=save,
            **self._widths("walk"),
        )(*tensors, self.cu_seqlens, *_four(products), last if first is None else first, states, written, last, output)
        return output, last, states, written

    def retreat(self, products: Tensor, d_output: Tensor, d_last: Tensor | None) -> tuple[Tensor, ...]:
        """The gradients of the states after each chunk, of the errors, of the first states and of v."""
        d_first = self.states()
        d_states, d_errors = self.empty(self.key_dim, self.value_dim), self.empty(self.chunk, self.value_dim)
        d_v = d_output.new_empty(d_output.shape)
        tensors = (self.q, self.k, self.v, self.write, self.beta, self.value_key, self.g)
        self.launch(
            retreat, "retreat", self._programs("retreat"), tensors, HAS_LAST=d_last is not None,
            **self._widths("retreat"),
        )(
            *tensors, self.cu_seqlens, *_four(products), d_output, d_first if d_last is None else d_last, d_states,
            d_errors, d_first, d_v,
        )  # fmt: skip
        return d_states, d_errors, d_first, d_v

    def differentiate(
        self, products: Tensor, d_output: Tensor, states: Tensor, written: Tensor, d_states: Tensor, d_errors: Tensor
    ) -> list[Tensor]:
        """The gradients of q, k, the writes, value keys and gates, [B, T, H, K] in float32."""
        d_products = torch.empty_like(products)
        entry, own = self.entry("differentiate_products"), self.flags["HAS_VALUE_KEY"]
        self.launch(
            differentiate_products, "differentiate_products", self.slots * self.heads, (self.v,), V=self.value_dim,
            HAS_VALUE_KEY=own, BLOCK_V=min(entry.step, block_width(self.value_dim)),
        )(
            self.v, self.cu_seqlens, self.sequence_of, d_output, written, d_errors, *_four(d_products),
        )  # fmt: skip
        gradients = [self.k.new_empty(self.k.shape, dtype=torch.float32) for _ in range(5 if own else 4)]
        d_q, d_k, d_write, *d_value_key, d_g = gradients
        tensors = (self.q, self.k, self.v, self.write, self.beta, self.value_key, self.g)
        entry = self.entry("differentiate")
        columns = min(entry.block, block_width(self.key_dim))
        self.launch(
            differentiate, "differentiate", self.slots * self.heads * cdiv(self.key_dim, columns), tensors,
            K=self.key_dim, V=self.value_dim, COLUMNS=columns, BLOCK_V=min(entry.step, block_width(self.value_dim)),
            **self.flags,
        )(
            *tensors, self.cu_seqlens, self.sequence_of, d_output, states, d_states, written, d_errors,
            *_four(d_products), d_q, d_k, d_write, *(d_value_key or (d_write,)), d_g,
        )  # fmt: skip
        return gradients

    def _widths(self, name: str) -> dict[str, Any]:
        widths = {"K": self.key_dim, "V": self.value_dim, "BLOCK_K": block_width(self.key_dim)}
        return {**widths, "BLOCK_V": self._value_columns(name), **self.flags}

    def _value_columns(self, name: str) -> int:
        return min(self.entry(name).block, block_width(self.value_dim))

    def _programs(self, name: str) -> int:
        return self.sequences * self.heads * cdiv(self.value_dim, self._value_columns(name))


def _four(products: Tensor) -> tuple[Tensor, ...]:
    """L (or X), A, M and N; without value keys no kernel reads the last two."""
    lower, attention, *values = products
    return lower, attention, *(values or (lower, attention))


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
    half: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [B, T, H, V] in v's type, final state in float32, and X, A, M and N (empty unless `keep`)."""
    call = _Call.of(q, k, v, beta, write_key, value_key, g, cu_seqlens, scale, before, reverse, half)
    products = call.relate()
    output, last, _, _ = call.walk(products, None if initial_state is None else initial_state.contiguous(), False)
    return output, last, products if keep else products.new_empty((0,))


@delta_rule_channels.register_fake
def _(q, k, v, beta, write_key, value_key, g, initial_state, cu_seqlens, scale, before, reverse, half, keep):
    batch, tokens, heads, key_dim = k.shape
    chunk = CHUNKS[2 if half else 4]
    sequences, slots = count_sequences(batch, cu_seqlens), count_slots(batch, tokens, chunk, cu_seqlens)
    products = (2 if value_key is None else 4, slots, heads, chunk, chunk) if keep else (0,)
    final = k.new_empty((sequences, heads, key_dim, v.shape[3]), dtype=torch.float32)
    return v.new_empty(v.shape), final, k.new_empty(products, dtype=torch.float32)


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
    half: bool,
) -> list[Tensor]:
    """Gradients of v, the first states, q, k, the writes (beta times the write keys), value keys if given, and gates
    [B, T, H, K]. All but that of v are float32.
    """
    call = _Call.of(q, k, v, beta, write_key, value_key, g, cu_seqlens, scale, before, reverse, half)
    d_output = d_output.contiguous()
    products = products if products.numel() else call.relate()
    _, _, states, written = call.walk(products, None if initial_state is None else initial_state.contiguous(), True)
    d_final = None if d_final is None else d_final.contiguous()
    d_states, d_errors, d_first, d_v = call.retreat(products, d_output, d_final)
    return [d_v, d_first, *call.differentiate(products, d_output, states, written, d_states, d_errors)]


@delta_rule_channels_backward.register_fake
def _(
    q, k, v, beta, write_key, value_key, g, initial_state, cu_seqlens, products, d_output, d_final, scale, before,
    reverse, half,
):  # fmt: skip
    sequences = count_sequences(k.shape[0], cu_seqlens)
    d_first = k.new_empty((sequences, *k.shape[2:], v.shape[3]), dtype=torch.float32)
    gradients = [k.new_empty(k.shape, dtype=torch.float32) for _ in range(4 if value_key is None else 5)]
    return [d_output.new_empty(d_output.shape), d_first, *gradients]


def _setup_context(ctx, inputs, output):
    *tensors, ctx.scale, ctx.before, ctx.reverse, ctx.half, _ = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, d_output, d_final, _):
    q, k, v, beta, write_key, value_key, g, initial_state, cu_seqlens, products = ctx.saved_tensors
    if d_output is None:
        d_output = torch.zeros_like(v)
    d_v, d_first, d_q, d_k, d_write, *d_value_key, d_g = delta_rule_channels_backward(
        *(q, k, v, beta, write_key, value_key, g, initial_state, cu_seqlens, products, d_output, d_final),
        *(ctx.scale, ctx.before, ctx.reverse, ctx.half),
    )
    d_beta = None if beta is None else (d_write * (k if write_key is None else write_key)).sum(-1).to(beta.dtype)
    d_own = d_write if beta is None else d_write * beta.unsqueeze(-1)
    if write_key is None:
        d_k = d_k + d_own
    return (
        d_q.to(q.dtype),
        d_k.to(k.dtype),
        d_v.to(v.dtype),
        d_beta,
        None if write_key is None else d_own.to(write_key.dtype),
        None if value_key is None else d_value_key[0].to(value_key.dtype),
        None if g is None else (d_g if g.dim() == 4 else d_g.sum(-1)).to(g.dtype),
        None if initial_state is None else d_first.to(initial_state.dtype),
        *(None,) * 6,
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
    options = (float(scale), read_before_decay, number_of(reverse), v.dtype.itemsize == 2)
    return delta_rule_channels(*tensors, cu_seqlens, *options, differentiable and not recompute)[:2]
