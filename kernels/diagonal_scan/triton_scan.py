"""Longhorn's and Mamba's scan in Triton: one launch forward, one backward, the state on chip in between.

    h_t = a_t ⊙ h_{t-1} + b_t;   o_t = h_t q_t

A program walks one sequence for BLOCK_D channels, with their states [BLOCK_D, BLOCK_N] in registers. Forward it stores
the state before every CHECKPOINT-th token. Backward it takes the blocks between them from the last to the first: it
computes a block's states again from the checkpoint, keeps them in registers, and runs the adjoint recurrence through
them, so that no [B, T, D, N] tensor exists at any time. Sums over all channels (the gradients of keys and queries) are
written once a program and added by torch, in a fixed order: the result is the same in every run. The checkpoints take
4 B T D N / CHECKPOINT bytes until the backward pass (157 MB at (128, 197, 384, 16)); gradient checkpointing of the
blocks frees them.

Tokens past the end of a sequence have rate 0, which leaves the state as it is in both recurrences.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longseq.kernels.devices import channels_adjacent

# The best of a sweep on an H200 at (512, 64, 384) and (128, 197, 384), N = 16: benchmarks/diagonal_scan_constants.json.
BLOCK_D = 16
CHECKPOINT = 4
FORWARD_UNROLL = 4
NUM_WARPS = 1
assert CHECKPOINT % FORWARD_UNROLL == 0, "a checkpoint is stored between two unrolled blocks"


@triton.jit
def _sequence(n, T, cu_seqlens, PACKED: tl.constexpr, REVERSE: tl.constexpr, CHECKPOINT: tl.constexpr):
    """The batch row, the token to read first, length and first checkpoint of sequence n."""
    if PACKED:
        # Reading the borders on the host to check them would wait for the device; held inside the tokens they can at
        # least touch no foreign memory.
        start = tl.minimum(tl.maximum(tl.load(cu_seqlens + n).to(tl.int64), 0), T)
        end = tl.minimum(tl.maximum(tl.load(cu_seqlens + n + 1).to(tl.int64), start), T)
        checkpoint = start // CHECKPOINT + n
        return n * 0, end - 1 if REVERSE else start, (end - start).to(tl.int32), checkpoint
    return n, n * 0 + T - 1 if REVERSE else n * 0, T, n * tl.cdiv(T, CHECKPOINT)


@triton.jit
def _inside(index, size, live):
    """The mask of a vector of one token: nothing of a token past the end."""
    return index < tl.where(live, size, 0)


@triton.jit
def _norm(norm, index, live, LONGHORN: tl.constexpr):
    """The squared norm of one token's key. Summed once by torch: here every program would sum it for every token."""
    if LONGHORN:
        return tl.load(norm + index, mask=live, other=0.0)
    return 0.0


@triton.jit
def _coefficients(x, rate, key, norm, A, LONGHORN: tl.constexpr):
    """The decay and the input of one token, [BLOCK_D, BLOCK_N] each; `norm` is the key's squared norm."""
    if LONGHORN:
        epsilon = rate / (1.0 + rate * norm)
        decay = 1.0 - epsilon[:, None] * (key * key)[None, :]
        inflow = (epsilon * x)[:, None] * key[None, :]
    else:
        decay = tl.exp(rate[:, None] * A)
        inflow = (rate * x)[:, None] * key[None, :]
    return decay, inflow


@triton.jit
def _forward(
    x, rate, key, query, norm, A, initial, cu_seqlens, output, final, checkpoints,
    T, D, N, x_row, x_token, rate_row, rate_token, key_row, key_token, query_row, query_token,
    HAS_INITIAL: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr, LONGHORN: tl.constexpr,
    SAVE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, CHECKPOINT: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(D, BLOCK_D)
    n = (tl.program_id(0) // blocks).to(tl.int64)
    d = (tl.program_id(0) % blocks) * BLOCK_D + tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_N)
    STEP: tl.constexpr = -1 if REVERSE else 1
    row, start, length, checkpoint = _sequence(n, T, cu_seqlens, PACKED, REVERSE, CHECKPOINT)
    own = (d < D)[:, None] & (e < N)[None, :]
    cell = d[:, None] * N + e[None, :]

    h = tl.zeros((BLOCK_D, BLOCK_N), tl.float32)
    if HAS_INITIAL:
        h = tl.load(initial + n * D * N + cell, mask=own, other=0.0).to(tl.float32)
    rates = A
    if not LONGHORN:
        rates = tl.load(A + cell, mask=own, other=0.0).to(tl.float32)

    for first in range(0, length, UNROLL):
        if SAVE:
            if first % CHECKPOINT == 0:
                tl.store(checkpoints + (checkpoint + first // CHECKPOINT) * D * N + cell, h, mask=own)
        # All loads of a block come before its stores, so that they are in flight together.
        loaded = ()
        for i in tl.static_range(UNROLL):
            t = start + STEP * (first + i)
            live = length > first + i
            x_t = tl.load(x + row * x_row + t * x_token + d, mask=_inside(d, D, live), other=0.0).to(tl.float32)
            rate_t = tl.load(rate + row * rate_row + t * rate_token + d, mask=_inside(d, D, live), other=0.0)
            key_t = tl.load(key + row * key_row + t * key_token + e, mask=_inside(e, N, live), other=0.0).to(tl.float32)
            query_t = tl.load(query + row * query_row + t * query_token + e, mask=_inside(e, N, live), other=0.0)
            norm_t = _norm(norm, row * T + t, live, LONGHORN)
            loaded = loaded + ((x_t, rate_t.to(tl.float32), key_t, query_t.to(tl.float32), norm_t),)
        for i in tl.static_range(UNROLL):
            t = start + STEP * (first + i)
            x_t, rate_t, key_t, query_t, norm_t = loaded[i]
            decay, inflow = _coefficients(x_t, rate_t, key_t, norm_t, rates, LONGHORN)
            h = decay * h + inflow
            o_t = tl.sum(h * query_t[None, :], 1)
            tl.store(output + (row * T + t) * D + d, o_t, mask=_inside(d, D, length > first + i))
    tl.store(final + n * D * N + cell, h, mask=own)


@triton.jit
def _backward(
    x, rate, key, query, norm, A, cu_seqlens, checkpoints, d_output, d_final,
    d_x, d_rate, d_key, d_query, d_A, d_initial,
    T, D, N, tokens, x_row, x_token, rate_row, rate_token, key_row, key_token, query_row, query_token,
    HAS_FINAL: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr, LONGHORN: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, CHECKPOINT: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(D, BLOCK_D)
    n = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    d = block * BLOCK_D + tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_N)
    STEP: tl.constexpr = -1 if REVERSE else 1
    row, start, length, checkpoint = _sequence(n, T, cu_seqlens, PACKED, REVERSE, CHECKPOINT)
    own = (d < D)[:, None] & (e < N)[None, :]
    cell = d[:, None] * N + e[None, :]
    # Gradients of keys and queries are partial sums over this block's channels: [blocks, tokens, N].
    partial = (block.to(tl.int64) * tokens + row * T) * N

    dh = tl.zeros((BLOCK_D, BLOCK_N), tl.float32)
    if HAS_FINAL:
        dh = tl.load(d_final + n * D * N + cell, mask=own, other=0.0).to(tl.float32)
    rates = A
    d_rates = dh * 0.0
    if not LONGHORN:
        rates = tl.load(A + cell, mask=own, other=0.0).to(tl.float32)

    last = tl.cdiv(length, CHECKPOINT) - 1
    for back in range(0, last + 1):
        first = (last - back) * CHECKPOINT
        h = tl.load(checkpoints + (checkpoint + last - back) * D * N + cell, mask=own, other=0.0)
        before = ()
        for i in tl.static_range(CHECKPOINT):
            t = start + STEP * (first + i)
            live = length > first + i
            x_t = tl.load(x + row * x_row + t * x_token + d, mask=_inside(d, D, live), other=0.0).to(tl.float32)
            rate_t = tl.load(rate + row * rate_row + t * rate_token + d, mask=_inside(d, D, live), other=0.0).to(
                tl.float32
            )
            key_t = tl.load(key + row * key_row + t * key_token + e, mask=_inside(e, N, live), other=0.0).to(tl.float32)
            norm_t = _norm(norm, row * T + t, live, LONGHORN)
            decay, inflow = _coefficients(x_t, rate_t, key_t, norm_t, rates, LONGHORN)
            before = before + (h,)
            h = decay * h + inflow
        for s in tl.static_range(CHECKPOINT):
            t = start + STEP * (first + (CHECKPOINT - 1 - s))
            live = length > first + (CHECKPOINT - 1 - s)
            channel = _inside(d, D, live)
            entry = _inside(e, N, live)
            x_t = tl.load(x + row * x_row + t * x_token + d, mask=channel, other=0.0).to(tl.float32)
            rate_t = tl.load(rate + row * rate_row + t * rate_token + d, mask=channel, other=0.0).to(tl.float32)
            key_t = tl.load(key + row * key_row + t * key_token + e, mask=entry, other=0.0).to(tl.float32)
            query_t = tl.load(query + row * query_row + t * query_token + e, mask=entry, other=0.0).to(tl.float32)
            do_t = tl.load(d_output + (row * T + t) * D + d, mask=channel, other=0.0).to(tl.float32)
            norm_t = _norm(norm, row * T + t, live, LONGHORN)
            decay, inflow = _coefficients(x_t, rate_t, key_t, norm_t, rates, LONGHORN)
            h_before = before[CHECKPOINT - 1 - s]
            dh += do_t[:, None] * query_t[None, :]
            dquery_t = tl.sum(do_t[:, None] * (decay * h_before + inflow), 0)
            ddecay = dh * h_before
            along_key = tl.sum(dh * key_t[None, :], 1)
            if LONGHORN:
                strength = 1.0 / (1.0 + rate_t * norm_t)
                epsilon = rate_t * strength
                depsilon = x_t * along_key - tl.sum(ddecay * (key_t * key_t)[None, :], 1)
                drate_t = depsilon * strength * strength
                dx_t = epsilon * along_key
                # The key acts through the input, through the decay's square, and through epsilon's norm.
                dkey_t = tl.sum(
                    (epsilon * x_t)[:, None] * dh
                    - 2.0 * (epsilon[:, None] * ddecay + (depsilon * epsilon * epsilon)[:, None]) * key_t[None, :],
                    0,
                )
            else:
                dexponent = ddecay * decay
                drate_t = tl.sum(dexponent * rates, 1) + x_t * along_key
                dx_t = rate_t * along_key
                dkey_t = tl.sum((rate_t * x_t)[:, None] * dh, 0)
                d_rates += dexponent * rate_t[:, None]
            dh = dh * decay
            tl.store(d_x + (row * T + t) * D + d, dx_t, mask=channel)
            tl.store(d_rate + (row * T + t) * D + d, drate_t, mask=channel)
            tl.store(d_key + partial + t * N + e, dkey_t, mask=entry)
            tl.store(d_query + partial + t * N + e, dquery_t, mask=entry)
    tl.store(d_initial + n * D * N + cell, dh, mask=own)
    if not LONGHORN:
        tl.store(d_A + n * D * N + cell, d_rates, mask=own)


@torch.library.custom_op("longseq::diagonal_scan", mutates_args=())
def diagonal_scan(
    x: Tensor,
    rate: Tensor,
    key: Tensor,
    query: Tensor,
    A: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    reverse: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Scan; without `A` the rate is Longhorn's beta, with it Mamba's delta.

    x, rate [B, T, D]; key, query [B, T, N]; A [D, N]; states [B or segments, D, N]. Returns o [B, T, D] in x's dtype,
    the final state, and the checkpoints that the backward pass needs (empty unless `save`).
    """
    x, rate, key, query = (channels_adjacent(tensor) for tensor in (x, rate, key, query))
    length, channels, entries = x.shape[1], x.shape[2], key.shape[2]
    output, final, checkpoints = _allocate(x, key, cu_seqlens, save)
    A = None if A is None else A.contiguous()
    initial_state = None if initial_state is None else initial_state.contiguous()
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    if final.numel():
        with torch.cuda.device_of(x):  # Triton launches on the current device
            _forward[(final.shape[0] * triton.cdiv(channels, BLOCK_D),)](
                x, rate, key, query, _squared_norm(key, A), A, initial_state, cu_seqlens, output, final, checkpoints,
                length, channels, entries, *_strides(x, rate, key, query),
                HAS_INITIAL=initial_state is not None, PACKED=cu_seqlens is not None, REVERSE=reverse,
                LONGHORN=A is None, SAVE=save,
                BLOCK_D=BLOCK_D, BLOCK_N=triton.next_power_of_2(entries), CHECKPOINT=CHECKPOINT, UNROLL=FORWARD_UNROLL,
                num_warps=NUM_WARPS,
            )  # fmt: skip
    return output, final, checkpoints


@diagonal_scan.register_fake
def _(x, rate, key, query, A, initial_state, cu_seqlens, reverse, save):
    return _allocate(x, key, cu_seqlens, save)


@torch.library.custom_op("longseq::diagonal_scan_backward", mutates_args=())
def diagonal_scan_backward(
    x: Tensor,
    rate: Tensor,
    key: Tensor,
    query: Tensor,
    A: Tensor | None,
    cu_seqlens: Tensor | None,
    checkpoints: Tensor,
    d_output: Tensor,
    d_final: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, rate, key, query, A (empty without A) and the initial state (in float32)."""
    x, rate, key, query = (channels_adjacent(tensor) for tensor in (x, rate, key, query))
    batch, length, channels = x.shape
    entries = key.shape[2]
    blocks = triton.cdiv(channels, BLOCK_D)
    d_output = d_output.contiguous()
    d_final = None if d_final is None else d_final.contiguous()
    A = None if A is None else A.contiguous()
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    d_x, d_rate = torch.empty(x.shape, dtype=x.dtype, device=x.device), x.new_empty(rate.shape, dtype=rate.dtype)
    d_key, d_query = x.new_empty((2, blocks, batch, length, entries), dtype=torch.float32)
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    d_initial = x.new_empty((sequences, channels, entries), dtype=torch.float32)
    d_A = x.new_empty((0 if A is None else sequences, channels, entries), dtype=torch.float32)
    if d_initial.numel():
        with torch.cuda.device_of(x):
            _backward[(sequences * blocks,)](
                x, rate, key, query, _squared_norm(key, A), A, cu_seqlens, checkpoints, d_output, d_final,
                d_x, d_rate, d_key, d_query, d_A, d_initial,
                length, channels, entries, batch * length, *_strides(x, rate, key, query),
                HAS_FINAL=d_final is not None, PACKED=cu_seqlens is not None, REVERSE=reverse, LONGHORN=A is None,
                BLOCK_D=BLOCK_D, BLOCK_N=triton.next_power_of_2(entries), CHECKPOINT=CHECKPOINT,
                num_warps=NUM_WARPS,
            )  # fmt: skip
    d_key, d_query = d_key.sum(0).to(key.dtype), d_query.sum(0).to(query.dtype)
    return d_x, d_rate, d_key, d_query, d_A.sum(0) if A is not None else d_A, d_initial


@diagonal_scan_backward.register_fake
def _(x, rate, key, query, A, cu_seqlens, checkpoints, d_output, d_final, reverse):
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = x.new_empty((sequences, x.shape[2], key.shape[2]), dtype=torch.float32)
    d_A = x.new_empty((0, *state.shape[1:]) if A is None else A.shape, dtype=torch.float32)
    return (*(tensor.new_empty(tensor.shape) for tensor in (x, rate, key, query)), d_A, state)


def _setup_context(ctx, inputs, output):
    x, rate, key, query, A, initial_state, cu_seqlens, ctx.reverse, ctx.saved = inputs
    ctx.save_for_backward(x, rate, key, query, A, cu_seqlens, output[2])
    ctx.initial_dtype = None if initial_state is None else initial_state.dtype
    ctx.set_materialize_grads(False)


def _differentiate(ctx, d_output, d_final, d_checkpoints):
    x, rate, key, query, A, cu_seqlens, checkpoints = ctx.saved_tensors
    assert ctx.saved, "the forward pass ran without saving checkpoints"
    if d_output is None:
        d_output = torch.zeros_like(x)
    d_x, d_rate, d_key, d_query, d_A, d_initial = diagonal_scan_backward(
        x, rate, key, query, A, cu_seqlens, checkpoints, d_output, d_final, ctx.reverse
    )
    return (
        d_x,
        d_rate,
        d_key,
        d_query,
        None if A is None else d_A.to(A.dtype),
        None if ctx.initial_dtype is None else d_initial.to(ctx.initial_dtype),
        None,
        None,
        None,
    )


diagonal_scan.register_autograd(_differentiate, setup_context=_setup_context)


def _allocate(x: Tensor, key: Tensor, cu_seqlens: Tensor | None, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the final state and the checkpoints, not yet written."""
    batch, length, channels = x.shape
    if cu_seqlens is None:
        sequences = batch
        blocks = batch * -(-length // CHECKPOINT)
    else:
        sequences = cu_seqlens.shape[0] - 1
        # A segment's blocks begin at start // CHECKPOINT + its number: apart from those of the segment before it.
        blocks = length // CHECKPOINT + sequences + 1
    state = (channels, key.shape[2])
    return (
        x.new_empty(x.shape),
        x.new_empty((sequences, *state), dtype=torch.float32),
        x.new_empty((blocks if save else 0, *state), dtype=torch.float32),
    )


def _squared_norm(key: Tensor, A: Tensor | None) -> Tensor | None:
    """Longhorn's kᵀk, [B, T] in float32. Mamba has no use for it."""
    return torch.linalg.vector_norm(key, dim=-1, dtype=torch.float32).square() if A is None else None


def _strides(*tensors: Tensor) -> list[int]:
    return [tensor.stride(dim) for tensor in tensors for dim in (0, 1)]


def longhorn_scan_triton(
    x: Tensor,
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
    reverse: bool,
) -> tuple[Tensor, Tensor | None]:
    """`longhorn_scan` as one kernel. `chunk_size` has no meaning here: the state never leaves the chip."""
    save = _needs_gradient(x, q, k, beta, initial_state)
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(x.device)
    o, final, _ = diagonal_scan(x, beta, k, q, None, initial_state, cu_seqlens, reverse, save)
    return o, final if output_final_state else None


def selective_scan_triton(
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
    reverse: bool,
) -> tuple[Tensor, Tensor | None]:
    """`selective_scan` as one kernel. `chunk_size` has no meaning here: the state never leaves the chip."""
    save = _needs_gradient(x, delta, A, B, C, initial_state)
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(x.device)
    o, final, _ = diagonal_scan(x, delta, B, C, A, initial_state, cu_seqlens, reverse, save)
    return o, final if output_final_state else None


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
