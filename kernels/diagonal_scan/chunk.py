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
from longseq.kernels.diagonal_scan.reference import finite_rates, scan_each_way
from longseq.kernels.dispatch import is_exporting
from longseq.kernels.once_differentiable import once_differentiable
from longseq.kernels.precision import without_autocast
from longseq.kernels.reading import Reverse
from longseq.kernels.recurrence import Sequences, run_padded, run_recurrence

# How many numbers one step should work on: enough to hide the cost of a launch, few enough to stay in a cache.
_NUMBERS_PER_STEP = {"cpu": 2**15, "cuda": 2**22}

# (block, positions, out): write the decays [positions, lanes, N, D] of a block into `out`
FillDecay = Callable[[int, int | slice, Tensor], Tensor]


def longhorn_scan_chunk(
    x: Tensor,
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
    reverse: Reverse,
) -> tuple[Tensor, Tensor | None]:
    """`longhorn_scan` in two levels; saves its inputs and the states at the chunks' starts for the backward.

    What no wanted gradient needs is neither saved nor computed.
    """

    def core(sequences: Sequences, state: Tensor) -> tuple[Tensor, Tensor]:
        if not is_exporting():
            return _LonghornScan.apply(*sequences, state, chunk_size)
        x, q, k, beta = (sequence.to(state.dtype) for sequence in sequences)
        epsilon = _epsilon(k, beta)
        loop = _scripted if torch.jit.is_tracing() else _exported
        return loop(k, epsilon * x, q, epsilon, None, state)

    return run_recurrence(
        core,
        (x, q, k, beta),
        initial_state,
        (x.shape[2], k.shape[2]),
        output_dtype=x.dtype,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        unpack=run_padded,
        reverse=reverse,
    )


def selective_scan_chunk(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
    reverse: Reverse,
) -> tuple[Tensor, Tensor | None]:
    """`selective_scan` in two levels; saves its inputs and the states at the chunks' starts for the backward.

    What no wanted gradient needs is neither saved nor computed.
    """
    if A.dim() == 3 and not is_exporting():
        return scan_each_way(
            selective_scan_chunk, x, delta, A, B, C, initial_state,
            output_final_state=output_final_state, cu_seqlens=None, chunk_size=chunk_size,
        )  # fmt: skip

    def core(sequences: Sequences, state: Tensor) -> tuple[Tensor, Tensor]:
        x, delta, B, C = sequences
        if not is_exporting():
            return _SelectiveScan.apply(x, delta, A, B, C, state, chunk_size)
        x, delta, B, C = (tensor.to(state.dtype) for tensor in sequences)
        loop = _scripted if torch.jit.is_tracing() else _exported
        rate = finite_rates(A, state.dtype).mT
        if A.dim() == 3:  # one scan of all rows, each half of which has its own rate
            rate = rate.unsqueeze(1).expand(-1, x.shape[0] // 2, -1, -1).flatten(0, 1)
        return loop(B, delta * x, C, delta, rate, state)

    return run_recurrence(
        core,
        (x, delta, B, C),
        initial_state,
        A.shape[-2:],
        output_dtype=x.dtype,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        unpack=run_padded,
        reverse=reverse,
    )


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


class _LonghornWanted(NamedTuple):
    """Whether each input of Longhorn needs its gradient."""

    x: bool
    q: bool
    k: bool
    beta: bool
    state: bool


class _LonghornScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, q, k, beta, state, chunk_size):
        layout = _Layout.choose(x, state, chunk_size)
        key, value, query, fill, _ = _longhorn_lanes(layout, x, q, k, beta, state.dtype)
        output, starts, final = _forward(layout, fill, key, value, query, state)
        wanted = _LonghornWanted(*ctx.needs_input_grad[:5])
        needs_states = wanted.q or wanted.k or wanted.beta
        needs_query = wanted.x or wanted.k or wanted.beta or wanted.state
        ctx.save_for_backward(
            x if needs_states else None, q if needs_query else None, k, beta, starts if needs_states else None
        )
        ctx.layout, ctx.dtypes = layout, (x.dtype, q.dtype)
        # No view: torch.compile of torch 2.11 loses the gradient of a first output that is one.
        return layout.join(output, output.dtype).clone(), final

    @staticmethod
    @once_differentiable
    def backward(ctx, d_output, d_final):
        wanted = _LonghornWanted(*ctx.needs_input_grad[:5])
        with without_autocast(d_final):
            grads = _longhorn_backward(wanted, ctx.layout, ctx.saved_tensors, ctx.dtypes, d_output, d_final)
        return *grads, None


class _SelectiveWanted(NamedTuple):
    """Whether each input of Mamba's scan needs its gradient."""

    x: bool
    delta: bool
    A: bool
    B: bool
    C: bool
    state: bool


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, delta, A, B, C, state, chunk_size):
        layout = _Layout.choose(x, state, chunk_size)
        key, value, query, fill, _ = _selective_lanes(layout, x, delta, A, B, C, state.dtype)
        output, starts, final = _forward(layout, fill, key, value, query, state)
        wanted = _SelectiveWanted(*ctx.needs_input_grad[:6])
        needs_states = wanted.delta or wanted.A or wanted.C
        ctx.save_for_backward(
            x if needs_states or wanted.B else None,
            delta,
            A,
            B if needs_states or wanted.x else None,
            C if any(wanted[:4]) or wanted.state else None,
            starts if needs_states else None,
        )
        ctx.layout, ctx.dtypes = layout, (x.dtype, B.dtype, C.dtype)
        # No view: torch.compile of torch 2.11 loses the gradient of a first output that is one.
        return layout.join(output, output.dtype).clone(), final

    @staticmethod
    @once_differentiable
    def backward(ctx, d_output, d_final):
        wanted = _SelectiveWanted(*ctx.needs_input_grad[:6])
        with without_autocast(d_final):
            grads = _selective_backward(wanted, ctx.layout, ctx.saved_tensors, ctx.dtypes, d_output, d_final)
        return *grads, None


@dataclass(frozen=True)
class _Layout:
    """Time cut into blocks of `lanes` chunks of `length` tokens each."""

    batch: int
    tokens: int
    length: int
    lanes: int
    blocks: int

    @classmethod
    def choose(cls, x: Tensor, state: Tensor, chunk_size: int | None) -> "_Layout":
        """Chunks of about √T tokens; as many lanes as a step of this device can use."""
        batch, tokens, _ = x.shape
        length = min(tokens, balanced_chunk_size(tokens) if chunk_size is None else chunk_size)
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


def _longhorn_lanes(layout: _Layout, x: Any, q: Any, k: Tensor, beta: Tensor, dtype: torch.dtype):
    """Key, value, query and decays of Longhorn, and epsilon, in lanes; None for the value and query of no x and q."""
    key = layout.split(k, dtype)
    epsilon = _epsilon(key, layout.split(beta, dtype))
    left, right = key.square().neg_().unsqueeze(-1), epsilon.unsqueeze(-2)
    value = None if x is None else layout.split(x, dtype) * epsilon

    def fill(block: int, positions: int | slice, out: Tensor) -> Tensor:
        return torch.mul(left[block, positions], right[block, positions], out=out).add_(1)

    return key, value, None if q is None else layout.split(q, dtype), fill, epsilon


def _selective_lanes(layout: _Layout, x: Any, delta: Tensor, A: Tensor, B: Any, C: Any, dtype: torch.dtype):
    """Key, value, query and decays of Mamba, and delta, in lanes; None for the first three of no B, x and C."""
    delta = layout.split(delta, dtype)
    left, right = finite_rates(A, dtype).mT.contiguous(), delta.unsqueeze(-2)
    key, query = (None if x is None else layout.split(x, dtype) for x in (B, C))

    def fill(block: int, positions: int | slice, out: Tensor) -> Tensor:
        return torch.mul(left, right[block, positions], out=out).exp_()

    return key, None if x is None else layout.split(x, dtype) * delta, query, fill, delta


def _forward(
    layout: _Layout, fill: FillDecay, key: Tensor, value: Tensor, query: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [blocks, L, lanes * B, D], the states at the chunks' starts [blocks, lanes * B, N, D], final state."""
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
    layout: _Layout,
    fill: FillDecay,
    block: int,
    columns: Sequence[Tensor],
    rows: Sequence[Tensor],
    state: Tensor,
    out: Tensor,
) -> None:
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


class _Wanted(NamedTuple):
    """Whether the gradients of these are needed, in lanes."""

    key: bool
    value: bool
    query: bool
    decays: bool
    state: bool


def _backward(
    wanted: _Wanted,
    layout: _Layout,
    fill: FillDecay,
    key: Any,
    value: Any,
    query: Any,
    starts: Any,
    d_output: Tensor,
    d_final: Tensor,
    collect: Callable[[int, Tensor, Tensor], None],
) -> tuple[Any, ...]:
    """Run through the blocks backward; give `collect` each block's decays and their gradients [L, lanes * B, N, D].

    Returns the gradients of key, value and query, in lanes, and of the initial state; None for those that are not
    wanted.
    """
    d_output = layout.split(d_output, d_final.dtype)
    rows = query if key is None else key
    d_key, d_query = (torch.empty_like(rows) if wants else None for wants in (wanted.key, wanted.query))
    d_value = torch.empty_like(d_output) if wanted.value else None
    d_state = d_final.mT
    decays = d_output.new_empty(layout.length, rows.shape[2], rows.shape[3], d_output.shape[3])
    needs_states = wanted.query or wanted.decays
    needs_d_states = wanted.key or wanted.value or wanted.decays or wanted.state
    states: Any = decays.new_empty(layout.length + 1, *decays.shape[1:]) if needs_states else None
    d_states = torch.empty_like(decays) if needs_d_states else None
    for block in reversed(range(layout.blocks)):
        fill(block, slice(None), decays)
        if states is not None:
            _states(key[block], value[block], decays, starts[block], states)
        if d_query is not None:
            d_query[block] = _over_channels(states[1:], d_output[block])
        if d_states is None:
            continue
        torch.mul(query[block].unsqueeze(-1), d_output[block].unsqueeze(-2), out=d_states)
        d_states[-1] += _chunk_ends(layout, decays, d_states, d_state)
        for i in reversed(range(1, layout.length)):
            d_states[i - 1].addcmul_(decays[i], d_states[i])
        d_state = decays[0, : layout.batch] * d_states[0, : layout.batch]
        if d_key is not None:
            d_key[block] = _over_channels(d_states, value[block])
        if d_value is not None:
            d_value[block] = _over_keys(d_states, key[block])
        if wanted.decays:
            collect(block, decays, d_states.mul_(states[:-1]))
    return d_key, d_value, d_query, d_state.mT.contiguous() if wanted.state else None


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


def _longhorn_backward(
    wanted: _LonghornWanted,
    layout: _Layout,
    saved: tuple[Any, ...],
    dtypes: tuple[torch.dtype, torch.dtype],
    d_output: Tensor,
    d_final: Tensor,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, q, k, beta and the initial state; None for those that are not wanted.

    What was not saved is None. `dtypes` are those of x and q.
    """
    x, q, k, beta, starts = saved
    dtype = d_final.dtype
    key, value, query, fill, epsilon = _longhorn_lanes(layout, x, q, k, beta, dtype)
    square, wants_epsilon = key.square(), wanted.k or wanted.beta
    d_square = torch.empty_like(key) if wanted.k else None
    d_epsilon: Any = torch.empty_like(epsilon) if wants_epsilon else None

    def collect(block: int, decays: Tensor, d_decays: Tensor) -> None:
        if d_square is not None:
            d_square[block] = _over_channels(d_decays, epsilon[block]).neg_()
        d_epsilon[block] = _over_keys(d_decays, square[block]).neg_()

    d_key, d_value, d_query, d_state = _backward(
        _Wanted(wanted.k, wanted.x or wants_epsilon, wanted.q, wants_epsilon, wanted.state),
        *(layout, fill, key, value, query, starts, d_output, d_final, collect),
    )
    if d_epsilon is not None:
        d_epsilon.addcmul_(d_value, layout.split(x, dtype))
    if d_square is not None:
        # epsilon = beta / (1 + beta s) with s = kᵀk: its derivative by s is -epsilon², by beta 1 / (1 + beta s)²
        d_square -= (d_epsilon * epsilon.square()).sum(-1, keepdim=True)
        d_key.addcmul_(key, d_square, value=2)
    if wanted.beta:
        d_beta = d_epsilon / layout.split(beta, dtype).mul(square.sum(-1, keepdim=True)).add_(1).square_()
    return (
        layout.join(d_value * epsilon, dtypes[0]) if wanted.x else None,
        layout.join(d_query, dtypes[1]) if wanted.q else None,
        layout.join(d_key, k.dtype) if wanted.k else None,
        layout.join(d_beta, beta.dtype) if wanted.beta else None,
        d_state,
    )


def _selective_backward(
    wanted: _SelectiveWanted,
    layout: _Layout,
    saved: tuple[Any, ...],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    d_output: Tensor,
    d_final: Tensor,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, delta, A, B, C and the initial state; None for those that are not wanted.

    What was not saved is None. `dtypes` are those of x, B and C.
    """
    x, delta, A, B, C, starts = saved
    dtype = d_final.dtype
    key, value, query, fill, step = _selective_lanes(layout, x, delta, A, B, C, dtype)
    rate = finite_rates(A, dtype).mT.contiguous()
    d_step = torch.empty_like(step, memory_format=torch.contiguous_format) if wanted.delta else None
    d_rate = torch.zeros_like(rate) if wanted.A else None

    def collect(block: int, decays: Tensor, d_decays: Tensor) -> None:
        d_exponents = d_decays.mul_(decays)
        if d_step is not None:
            torch.sum(torch.mul(d_exponents, rate, out=decays), dim=-2, out=d_step[block])
        if d_rate is not None:
            d_rate.add_(d_exponents.mul_(step[block].unsqueeze(-2)).sum((0, 1)))

    d_key, d_value, d_query, d_state = _backward(
        _Wanted(wanted.B, wanted.x or wanted.delta, wanted.C, wanted.delta or wanted.A, wanted.state),
        *(layout, fill, key, value, query, starts, d_output, d_final, collect),
    )
    if d_step is not None:
        d_step.addcmul_(d_value, layout.split(x, dtype))
    return (
        layout.join(d_value * step, dtypes[0]) if wanted.x else None,
        None if d_step is None else layout.join(d_step, delta.dtype),
        None if d_rate is None else d_rate.mT.to(A.dtype),
        layout.join(d_key, dtypes[1]) if wanted.B else None,
        layout.join(d_query, dtypes[2]) if wanted.C else None,
        d_state,
    )
