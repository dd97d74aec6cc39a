"""The diagonal scans h_t = a_t ⊙ h_{t-1} + key_t ⊗ value_t, o_t = h_t query_t, in two levels.

Time is cut into chunks of L tokens. All chunks of a block are lanes that take their L steps together: once from a zero
state to find what each chunk does to a state (h -> product of decays ⊙ h + local state), then, when the states at the
chunks' starts are known, once more for the outputs. Nothing is divided and no logarithm is taken, so decays may be 0.

A state is kept as [lanes, N, D] with the channels last, which makes a step faster on a CPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longseq.kernels.chunks import balanced_chunk_size, scan
from longseq.kernels.custom_op import once_differentiable
from longseq.kernels.diagonal_scan.reference import finite_rates
from longseq.kernels.dispatch import is_exporting
from longseq.kernels.precision import without_autocast
from longseq.kernels.reading import run_each_way
from longseq.kernels.recurrence import Sequences, run_padded, run_recurrence

# How many numbers one step should work on: enough to hide the cost of a launch, few enough to stay in a cache.
_NUMBERS_PER_STEP = {"cpu": 2**15, "cuda": 2**22}


def longhorn_scan_chunk(x: Tensor, q: Tensor, k: Tensor, beta: Tensor, **call: Any) -> tuple[Tensor, Tensor | None]:
    """`longhorn_scan` in two levels; saves its inputs and the states at the chunks' starts for the backward."""
    return _scan(x, beta, k, q, None, **call)


def selective_scan_chunk(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, **call: Any
) -> tuple[Tensor, Tensor | None]:
    """`selective_scan` in two levels; saves its inputs and the states at the chunks' starts for the backward."""
    if A.dim() == 3 and not is_exporting():
        return run_each_way(selective_scan_chunk, {"A": A}, {"x": x, "delta": delta, "B": B, "C": C}, **call)
    return _scan(x, delta, B, C, A, **call)


def _scan(
    x: Tensor, rate: Tensor, key: Tensor, query: Tensor, A: Tensor | None, **call: Any
) -> tuple[Tensor, Tensor | None]:
    """Mamba's scan, for which `rate` is delta, or without A Longhorn's, for which it is beta."""

    def core(sequences: Sequences, state: Tensor) -> tuple[Tensor, Tensor]:
        if not is_exporting():
            return _DiagonalScan.apply(*sequences, A, state)
        x, step, key, query = (sequence.to(state.dtype) for sequence in sequences)
        loop, rates = _scripted if torch.jit.is_tracing() else _exported, None
        if A is None:
            step = _epsilon(key, step)
        else:
            rates = finite_rates(A, state.dtype).mT
            if A.dim() == 3:  # one scan of all rows, each half of which has its own rate
                rates = rates.unsqueeze(1).expand(-1, x.shape[0] // 2, -1, -1).flatten(0, 1)
        return loop(key, step * x, query, step, rates, state)

    sequences, shape = (x, rate, key, query), (x.shape[2], key.shape[2])
    return run_recurrence(core, sequences, state_shape=shape, output_dtype=x.dtype, unpack=run_padded, **call)


def _epsilon(k: Tensor, beta: Tensor) -> Tensor:
    return beta / (1 + beta * (k * k).sum(-1, keepdim=True))


def _exported(
    key: Tensor, value: Tensor, query: Tensor, step: Tensor, rate: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The form for torch.export: one Scan over time, whose operands get their shapes before it.

    A token is a few nodes on [B, N, D]. In onnxruntime blocks of unrolled tokens are slower: their numbers, such as all
    decays of a block, do not fit into a cache.
    """
    key, value, query, step = (x.transpose(0, 1) for x in (key, value, query, step))
    key, value, query, step = key.unsqueeze(-1), value.unsqueeze(-2), query.unsqueeze(-2), step.unsqueeze(-2)
    if rate is None:  # the decays 1 - k² ⊗ epsilon as one product
        square = torch.cat((-key * key, torch.ones_like(key)), -1)
        step = torch.cat((step, torch.ones_like(step)), -2)
        final, output = scan(_longhorn_token, state.mT, [key, value, query, step, square])
    else:
        final, output = scan(_selective_token, state.mT, [key, value, query, step], (rate,))
    return output.squeeze(-2).transpose(0, 1), final.mT


def _longhorn_token(
    state: Tensor, key: Tensor, value: Tensor, query: Tensor, step: Tensor, square: Tensor
) -> list[Tensor]:
    state = torch.baddbmm(state * torch.bmm(square, step), key, value)
    return [state, torch.bmm(query, state)]


def _selective_token(
    state: Tensor, key: Tensor, value: Tensor, query: Tensor, step: Tensor, rate: Tensor
) -> list[Tensor]:
    state = torch.baddbmm(state * (rate * step).exp(), key, value)
    return [state, torch.bmm(query, state)]


@torch.jit.script_if_tracing
def _scripted(
    key: Tensor, value: Tensor, query: Tensor, step: Tensor, rate: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The form for torch.jit.trace: a loop over time, whose length stays dynamic in the traced graph."""
    state = state.transpose(-1, -2)
    outputs: list[Tensor] = []
    for t in range(value.shape[1]):
        state, output = _token(state, key[:, t], value[:, t], query[:, t], step[:, t], rate)
        outputs.append(output)
    return torch.stack(outputs, 1), state.transpose(-1, -2)


def _token(
    state: Tensor, key: Tensor, value: Tensor, query: Tensor, step: Tensor, rate: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The next state [B, N, D] and the output [B, D].

    Decays are Mamba's from its rate, [N, D] or [B, N, D], and step delta, or Longhorn's from its key and step epsilon.
    """
    step = step.unsqueeze(-2)
    decay = 1 - (key * key).unsqueeze(-1) * step if rate is None else (rate * step).exp()
    state = torch.addcmul(state * decay, key.unsqueeze(-1), value.unsqueeze(-2))
    return state, torch.bmm(query.unsqueeze(-2), state).squeeze(-2)


class _DiagonalScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rate, key, query, A, state):
        ctx.layout = layout = _Layout.choose(x, state)
        output, starts, final = _forward(layout, _split(layout, x, rate, key, query, A, state.dtype), state)
        ctx.save_for_backward(x, rate, key, query, A, starts)
        # No view: torch.compile of torch 2.11 loses the gradient of a first output that is one.
        return layout.join(output, output.dtype).clone(), final

    @staticmethod
    @once_differentiable
    def backward(ctx, d_output, d_final):
        x, rate, key, query, A, starts = ctx.saved_tensors
        with without_autocast(d_final):
            return _backward(ctx.layout, x, rate, key, query, A, starts, d_output, d_final)


@dataclass(frozen=True)
class _Layout:
    """Time cut into blocks of `lanes` chunks of `length` tokens each."""

    batch: int
    tokens: int
    length: int
    lanes: int
    blocks: int

    @classmethod
    def choose(cls, x: Tensor, state: Tensor) -> "_Layout":
        """Chunks of about √T tokens; as many lanes as a step of this device can use."""
        batch, tokens, _ = x.shape
        length = min(tokens, balanced_chunk_size(tokens))
        chunks = -(-tokens // length)
        width = _NUMBERS_PER_STEP.get(x.device.type, _NUMBERS_PER_STEP["cuda"])
        lanes = max(1, min(chunks, width // state.numel()))
        return cls(batch, tokens, length, lanes, -(-chunks // lanes))

    def split(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, T, D] -> [blocks, L, lanes * B, D], zeros after the last token."""
        x = F.pad(x.to(dtype), (0, 0, 0, self.blocks * self.lanes * self.length - self.tokens))
        x = x.reshape(self.batch, self.blocks, self.lanes, self.length, -1).permute(1, 3, 2, 0, 4)
        return x.reshape(self.blocks, self.length, self.lanes * self.batch, -1)

    def join(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The inverse of `split`, without gaps.

        With one lane, or chunks of one token, the reshape is a view with the tokens outside of the batch. Operations of
        torch that read such a gradient have other strides in torch.compile's trace than when they run.
        """
        x = x.reshape(self.blocks, self.length, self.lanes, self.batch, -1).permute(3, 0, 2, 1, 4)
        x = x.reshape(self.batch, self.blocks * self.lanes * self.length, -1)[:, : self.tokens]
        return x.to(dtype).contiguous()


class _Lanes(NamedTuple):
    """The operands of the scan in lanes, and `fill(block, positions, out)`, which writes decays of a block.

    `step` is Longhorn's epsilon or Mamba's delta, and value is x times it.
    """

    key: Tensor
    value: Tensor
    query: Tensor
    step: Tensor
    fill: Callable[[int, int | slice, Tensor], Tensor]


def _split(
    layout: _Layout, x: Tensor, rate: Tensor, key: Tensor, query: Tensor, A: Tensor | None, dtype: torch.dtype
) -> _Lanes:
    key, step = layout.split(key, dtype), layout.split(rate, dtype)
    if A is None:
        step = _epsilon(key, step)
        left, right = key.square().neg_().unsqueeze(-1), step.unsqueeze(-2)

        def fill(block: int, positions: int | slice, out: Tensor) -> Tensor:
            return torch.mul(left[block, positions], right[block, positions], out=out).add_(1)

    else:
        rates, steps = finite_rates(A, dtype).mT.contiguous(), step.unsqueeze(-2)

        def fill(block: int, positions: int | slice, out: Tensor) -> Tensor:
            return torch.mul(rates, steps[block, positions], out=out).exp_()

    return _Lanes(key, layout.split(x, dtype) * step, layout.split(query, dtype), step, fill)


def _forward(layout: _Layout, operands: _Lanes, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output [blocks, L, lanes * B, D], the states at the chunks' starts [blocks, lanes * B, N, D], final state."""
    key, value, query, _, fill = operands
    output = torch.empty_like(value, memory_format=torch.contiguous_format)
    starts = value.new_empty(layout.blocks, value.shape[2], state.shape[2], state.shape[1])
    decay = torch.empty_like(starts[0])
    state = state.mT
    for block in range(layout.blocks):
        columns, rows = key[block].unsqueeze(-1).unbind(), value[block].unsqueeze(-2).unbind()
        queries, outputs = query[block].unsqueeze(-2).unbind(), output[block].unsqueeze(-2).unbind()
        _chunk_starts(layout, fill, block, columns, rows, state, starts[block])
        lanes = starts[block].clone()
        for i in range(layout.length):
            lanes.mul_(fill(block, i, decay)).addcmul_(columns[i], rows[i])
            torch.bmm(queries[i], lanes, out=outputs[i])
        state = lanes[-layout.batch :]
    return output, starts, state.mT.contiguous()


def _chunk_starts(
    layout: _Layout, fill: Callable[..., Tensor], block: int, columns: Sequence[Tensor], rows: Sequence[Tensor],
    state: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """Write the state at the start of each chunk of a block, whose first one starts with `state`."""
    starts = out.unflatten(0, (layout.lanes, layout.batch))
    starts[0] = state
    if layout.lanes == 1:
        return
    local, product, decay = torch.zeros_like(out), torch.ones_like(out), torch.empty_like(out)
    for i in range(layout.length):
        fill(block, i, decay)
        local.mul_(decay).addcmul_(columns[i], rows[i])
        product.mul_(decay)
    local, product = local.view_as(starts), product.view_as(starts)
    for lane in range(1, layout.lanes):
        torch.addcmul(local[lane - 1], product[lane - 1], starts[lane - 1], out=starts[lane])


def _backward(
    layout: _Layout, x: Tensor, rate: Tensor, key: Tensor, query: Tensor, A: Tensor | None, starts: Tensor,
    d_output: Tensor, d_final: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of x, rate, key, query, A (None without it) and the initial state."""
    dtype = d_final.dtype
    keys, values, queries, step, fill = _split(layout, x, rate, key, query, A, dtype)
    d_rows = layout.split(d_output, dtype)
    d_key, d_query, d_value = torch.empty_like(keys), torch.empty_like(keys), torch.empty_like(d_rows)
    d_step = torch.empty_like(step, memory_format=torch.contiguous_format)
    square, d_square = keys.square(), torch.empty_like(keys)  # of Longhorn
    rates = None if A is None else finite_rates(A, dtype).mT.contiguous()
    d_rates: Any = None if rates is None else torch.zeros_like(rates)
    d_state = d_final.mT
    decays = d_rows.new_empty(layout.length, keys.shape[2], keys.shape[3], d_rows.shape[3])
    states, d_states = decays.new_empty(layout.length + 1, *decays.shape[1:]), torch.empty_like(decays)
    for block in reversed(range(layout.blocks)):
        fill(block, slice(None), decays)
        _states(keys[block], values[block], decays, starts[block], states)
        d_query[block] = _over_channels(states[1:], d_rows[block])
        torch.mul(queries[block].unsqueeze(-1), d_rows[block].unsqueeze(-2), out=d_states)
        d_states[-1] += _chunk_ends(layout, decays, d_states, d_state)
        for i in reversed(range(1, layout.length)):
            d_states[i - 1].addcmul_(decays[i], d_states[i])
        d_state = decays[0, : layout.batch] * d_states[0, : layout.batch]
        d_key[block] = _over_channels(d_states, values[block])
        d_value[block] = _over_keys(d_states, keys[block])
        d_decays = d_states.mul_(states[:-1])
        if rates is None:
            d_square[block] = _over_channels(d_decays, step[block]).neg_()
            d_step[block] = _over_keys(d_decays, square[block]).neg_()
        else:
            d_exponents = d_decays.mul_(decays)
            torch.sum(torch.mul(d_exponents, rates, out=decays), dim=-2, out=d_step[block])
            d_rates.add_(d_exponents.mul_(step[block].unsqueeze(-2)).sum((0, 1)))
    d_step.addcmul_(d_value, layout.split(x, dtype))
    if A is None:
        # epsilon = beta / (1 + beta s) with s = kᵀk: its derivative by s is -epsilon², by beta 1 / (1 + beta s)²
        d_square -= (d_step * step.square()).sum(-1, keepdim=True)
        d_key.addcmul_(keys, d_square, value=2)
        d_step /= layout.split(rate, dtype).mul(square.sum(-1, keepdim=True)).add_(1).square_()
    return (
        layout.join(d_value * step, x.dtype),
        layout.join(d_step, rate.dtype),
        layout.join(d_key, key.dtype),
        layout.join(d_query, query.dtype),
        None if A is None else d_rates.mT.to(A.dtype),
        d_state.mT.contiguous(),
    )


def _states(key: Tensor, value: Tensor, decays: Tensor, start: Tensor, out: Tensor) -> None:
    """Write the states before each position of a block, and after the last one, [L + 1, lanes * B, N, D]."""
    out[0] = start
    columns, rows = key.unsqueeze(-1).unbind(), value.unsqueeze(-2).unbind()
    for i in range(len(columns)):
        torch.mul(out[i], decays[i], out=out[i + 1]).addcmul_(columns[i], rows[i])


def _chunk_ends(layout: _Layout, decays: Tensor, d_states: Tensor, d_state: Tensor) -> Tensor:
    """The gradient that reaches the end of each chunk of a block from the chunks after it [lanes * B, N, D]."""
    if layout.lanes == 1:
        return d_state
    local = d_states[-1].clone()
    for i in reversed(range(1, layout.length)):
        torch.addcmul(d_states[i - 1], decays[i], local, out=local)
    shape = (layout.lanes, layout.batch, *local.shape[1:])
    local, product = (local * decays[0]).view(shape), decays.prod(0).view(shape)
    ends = torch.empty_like(local)
    ends[-1] = d_state
    for lane in reversed(range(1, layout.lanes)):
        torch.addcmul(local[lane], product[lane], ends[lane], out=ends[lane - 1])
    return ends.flatten(0, 1)


def _over_channels(x: Tensor, weight: Tensor) -> Tensor:
    """Σ_d x[..., n, d] weight[..., d] as a row times a matrix: a CPU is slower at a matrix times a column."""
    return (weight.unsqueeze(-2) @ x.mT).squeeze(-2)


def _over_keys(x: Tensor, weight: Tensor) -> Tensor:
    """Σ_n x[..., n, d] weight[..., n]."""
    return (weight.unsqueeze(-2) @ x).squeeze(-2)
