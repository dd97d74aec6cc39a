"""The orthogonal recurrence in Triton: its two custom operations, their launches and the constants that those use.

All arithmetic and the state are float32, whatever the inputs. No sum depends on the order in which programs run: the
result is the same in every run.

For the backward pass the exact form keeps the state before every CHECKPOINT tokens, D M / CHECKPOINT numbers a token
and head. It finds the others again, in D M CHECKPOINT numbers of scratch memory for each program, of which there are as
many as SCRATCH has room for. Chunks of C tokens keep the states before them, H and a: D M / C + D + M numbers a token
and head. Their backward pass needs as much again while it runs, and up to 3 C + 6 M more.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from longseq.kernels.custom_op import custom_op
from longseq.kernels.devices import channels_adjacent
from longseq.kernels.orthogonal_recurrence.reference import has_unit_columns
from longseq.kernels.orthogonal_recurrence.triton_chunks import (
    advance_chunks,
    read_out,
    read_slots,
    relate_chunks,
)
from longseq.kernels.orthogonal_recurrence.triton_chunks_backward import (
    differentiate_directions,
    differentiate_gates,
    differentiate_slots,
    retreat_chunks,
)
from longseq.kernels.orthogonal_recurrence.triton_tokens import advance_tokens, retreat_tokens
from longseq.kernels.triton_launch import (
    Launch,
    block_width,
    cdiv,
    count_sequences,
    count_slots,
    next_power_of_2,
    sequence_of_slots,
    strides,
    use_measured,
)

# By the bytes of the precision and the side of a square that holds as many numbers as the state's block, rounded up.
# A thread of the exact form holds 16 to 64 numbers of it.
LAUNCHES: dict[tuple[int, int], dict[str, Launch]] = {
    (4, side): {
        "advance_tokens": Launch(0, 0, {16: 1, 32: 1, 64: 4, 128: 8}[side], 1),
        "retreat_tokens": Launch(0, 0, {16: 1, 32: 2, 64: 8, 128: 8}[side], 1),
        "advance_chunks": Launch(16 if side <= 64 else 32, 0, 4 if side <= 32 else 8, 1),
        "relate_chunks": Launch(0, 0, 4, 1),
        "read_slots": Launch(16, 0, 4, 1),
        "read_out": Launch(16, 0, 4, 1),
        "differentiate_slots": Launch(16, 0, 4, 1),
        "differentiate_directions": Launch(16, 0, 8, 1),
        "differentiate_gates": Launch(16, 0, 8, 1),
        "retreat_chunks": Launch(16 if side <= 64 else 32, 0, 4 if side <= 32 else 8, 1),
    }
    for side in (16, 32, 64, 128)
}
use_measured("orthogonal_recurrence", LAUNCHES)
CHECKPOINT = 32  # tokens
SCRATCH = 1 << 26  # numbers, of all programs of the exact form's backward pass


class _Form(NamedTuple):
    """What both passes derive from a call."""

    constants: dict[str, Any]  # compile-time arguments of every kernel
    launches: dict[str, Launch]
    chunk: int
    sequences: int
    slots: int  # chunks, or stretches of CHECKPOINT tokens, of all sequences, at most
    sequence_of: Tensor | None  # that packed chunks belong to

    @property
    def is_exact(self) -> bool:
        return self.chunk == 1

    def columns(self, kernel: str) -> int:
        """So many of the state's columns a kernel works on at a time: the table's, and in short chunks at least 64."""
        columns = max(self.launches[kernel].block, 64 if self.constants["BLOCK_C"] == 16 else 0)
        return min(columns, block_width(self.constants["M"]))

    def arguments(self, kernel: str, *unused: str, **more: Any) -> dict[str, Any]:
        """The keyword arguments of a kernel: `more`, the launch and the constants but for those that are not used."""
        constants = {name: value for name, value in self.constants.items() if name not in unused}
        return constants | more | self.launches[kernel].options


def _form(
    k: Tensor, v: Tensor, g: Tensor | None, threshold: Tensor | None, cu_seqlens: Tensor | None, objective: str,
    unit: bool, chunk_size: int,
) -> _Form:  # fmt: skip
    batch, tokens, _, width = v.shape
    columns = k.shape[3]
    chunk = min(chunk_size, tokens)
    constants: dict[str, Any] = {
        "D": width, "M": columns, "OBJECTIVE": objective, "UNIT": unit, "GATED": g is not None,
        "PACKED": cu_seqlens is not None,
    }  # fmt: skip
    block_d, block_m = next_power_of_2(width), next_power_of_2(columns)
    sequence_of = None
    if chunk == 1:
        slots = count_slots(batch, tokens, CHECKPOINT, cu_seqlens)
        constants |= {"SHRUNK": threshold is not None, "EVERY": CHECKPOINT, "BLOCK_D": block_d, "BLOCK_M": block_m}
    else:
        slots = count_slots(batch, tokens, chunk, cu_seqlens)
        sequence_of = sequence_of_slots(slots, chunk, tokens, cu_seqlens)
        constants |= {"CHUNK": chunk, "BLOCK_C": block_width(chunk), "BLOCK_D": block_width(width)}
    side = next(side for _, side in LAUNCHES if side * side >= block_d * block_m)
    sequences = count_sequences(batch, cu_seqlens)
    return _Form(constants, LAUNCHES[4, side], chunk, sequences, slots, sequence_of)


@custom_op("orthogonal_recurrence")
def orthogonal_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    g: Tensor | None,
    threshold: Tensor | None,
    initial_state: Tensor,
    cu_seqlens: Tensor | None,
    objective: str,
    unit: bool,
    scale: float,
    chunk_size: int,
    save: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns o [B, T, H, D] in v's dtype, the final state [B or segments, H, D, M] in float32, and if `save` what the
    backward pass needs, in the order of `_allocate`."""
    q, k, v = channels_adjacent(q), channels_adjacent(k), channels_adjacent(v)
    initial_state = initial_state.contiguous()
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    tokens, heads = v.shape[1:3]
    form = _form(k, v, g, threshold, cu_seqlens, objective, unit, chunk_size)
    output, final, kept = _allocate(form, k, v, save)
    with torch.cuda.device_of(q):  # Triton launches on the current device
        if form.is_exact:
            advance_tokens[(form.sequences * heads,)](
                q, k, v, gamma, g, threshold, initial_state, cu_seqlens, *kept, output, final, scale, tokens, heads,
                *strides(q), *strides(k), *strides(v), *strides(gamma), *strides(g), *strides(threshold),
                **form.arguments("advance_tokens", SAVE=save),
            )  # fmt: skip
        else:
            _run_chunks(form, q, k, v, gamma, g, initial_state, cu_seqlens, scale, output, final, kept)
    return output, final, kept if save else []


@orthogonal_recurrence.register_fake
def _(q, k, v, gamma, g, threshold, initial_state, cu_seqlens, objective, unit, scale, chunk_size, save):
    form = _form(k, v, g, threshold, cu_seqlens, objective, unit, chunk_size)
    output, final, kept = _allocate(form, k, v, save)
    return output, final, kept if save else []


def _allocate(form: _Form, k: Tensor, v: Tensor, save: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The output, the final state and what is kept, not yet written.

    Kept are states, and of chunks also H, a (not for TTT) and, with N, the reciprocal norms at their ends.
    """
    heads, width, columns = v.shape[2], v.shape[3], k.shape[3]

    def numbers(rows: int, *shape: int) -> Tensor:
        return v.new_empty((rows, heads, *shape), dtype=torch.float32)

    kept = [numbers(form.slots if save or not form.is_exact else 0, width, columns)]
    if not form.is_exact:
        answered = 0 if form.constants["OBJECTIVE"] == "ttt" else form.slots
        kept += [numbers(form.slots, form.chunk, width), numbers(answered, form.chunk, columns)]
        kept += [numbers(form.slots if form.constants["UNIT"] else 0, columns)]
    return v.new_empty(v.shape), numbers(form.sequences, width, columns), kept


def _run_chunks(
    form: _Form, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, g: Tensor | None, initial_state: Tensor,
    cu_seqlens: Tensor | None, scale: float, output: Tensor, final: Tensor, kept: list[Tensor],
) -> None:  # fmt: skip
    states, directions, answers, _ = kept
    tokens, heads, columns = *k.shape[1:3], k.shape[3]
    rows = form.slots * heads
    advance_chunks[(form.sequences * heads,)](
        k, v, gamma, g, initial_state, cu_seqlens, *kept, final, tokens, heads,
        *strides(k), *strides(v), *strides(gamma), *strides(g),
        **form.arguments("advance_chunks", STEP=form.columns("advance_chunks")),
    )  # fmt: skip
    weights, among, _ = _relate(form, g, cu_seqlens, directions, None, tokens)
    block = form.columns("read_slots")
    reads, kept_reads = _scratch(q, rows, form.chunk * columns), _scratch(q, rows, form.chunk * columns)
    read_slots[(rows * cdiv(columns, block),)](
        q, k, gamma, g, cu_seqlens, form.sequence_of, states, answers, weights, among, reads, kept_reads,
        scale, tokens, heads, *strides(q), *strides(k), *strides(gamma), *strides(g),
        **form.arguments("read_slots", BLOCK=block),
    )  # fmt: skip
    read_out[(rows,)](
        k, gamma, cu_seqlens, form.sequence_of, states, directions, answers, weights, reads, kept_reads, output,
        tokens, heads, *strides(k), *strides(gamma), **form.arguments("read_out", STEP=form.columns("read_out")),
    )  # fmt: skip


def _relate(
    form: _Form, g: Tensor | None, cu_seqlens: Tensor | None, directions: Tensor, d_output: Tensor | None, tokens: int
) -> list[Tensor]:
    """Matrices of tokens against tokens: W with gates, W ⊙ H Hᵀ with N, and W ⊙ dO Hᵀ with dO; empty without."""
    needed = g is not None, form.constants["UNIT"], d_output is not None
    slots, heads = directions.shape[:2]
    squares = [_scratch(directions, slots * heads * there, form.chunk * form.chunk) for there in needed]
    if any(needed):
        relate_chunks[(slots * heads,)](
            g, cu_seqlens, form.sequence_of, directions, d_output, *squares, tokens, heads,
            *strides(g), *strides(d_output),
            **form.arguments("relate_chunks", "M", "OBJECTIVE", BACKWARD=d_output is not None),
        )  # fmt: skip
    return squares


def _scratch(like: Tensor, rows: int, numbers: int) -> Tensor:
    return like.new_empty((rows, numbers), dtype=torch.float32)


@custom_op("orthogonal_recurrence_backward")
def orthogonal_recurrence_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    g: Tensor | None,
    threshold: Tensor | None,
    initial_state: Tensor,
    cu_seqlens: Tensor | None,
    final: Tensor,
    kept: list[Tensor],
    d_output: Tensor,
    d_final: Tensor | None,
    objective: str,
    unit: bool,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, gamma, g, threshold (empty if there is none) and of the initial state."""
    q, k, v, d_output = (channels_adjacent(x) for x in (q, k, v, d_output))
    initial_state = initial_state.contiguous()
    d_final = None if d_final is None else d_final.contiguous()
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    tokens, heads, width = v.shape[1:]
    columns = k.shape[3]
    form = _form(k, v, g, threshold, cu_seqlens, objective, unit, chunk_size)
    grads = _gradients_like(q, k, v, gamma, g, threshold, initial_state)
    with torch.cuda.device_of(q):
        if form.is_exact:
            numbers = CHECKPOINT * (width * columns + width + 2 * columns)
            programs = min(form.sequences * heads, max(SCRATCH // numbers, 1))
            retreat_tokens[(programs,)](
                q, k, v, gamma, g, threshold, initial_state, cu_seqlens, *kept, d_output, d_final,
                _scratch(q, programs, numbers), *grads, scale, tokens, heads, form.sequences,
                *strides(q), *strides(k), *strides(v), *strides(gamma), *strides(g), *strides(threshold),
                *strides(d_output), **form.arguments("retreat_tokens", HAS_FINAL=d_final is not None),
            )  # fmt: skip
        else:
            _differentiate_chunks(
                form, q, k, v, gamma, g, initial_state, cu_seqlens, scale, final, kept, d_output, d_final, grads
            )
    return grads


def _differentiate_chunks(
    form: _Form, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, g: Tensor | None, initial_state: Tensor,
    cu_seqlens: Tensor | None, scale: float, final: Tensor, kept: list[Tensor], d_output: Tensor,
    d_final: Tensor | None, grads: tuple[Tensor, ...],
) -> None:  # fmt: skip
    states, directions, answers, _ = kept
    d_q, d_k, d_v, d_gamma, d_g, _, d_initial = grads
    tokens, heads, width = v.shape[1:]
    columns, rows, unit, gated = k.shape[3], form.slots * heads, form.constants["UNIT"], g is not None
    squares = _relate(form, g, cu_seqlens, directions, d_output, tokens)
    d_directions, d_states, d_answers = (torch.empty_like(x) for x in (directions, states, answers))
    d_coefficients = _scratch(q, rows, form.chunk * columns)
    # What `differentiate_slots` leaves for the kernels after it.
    needed = True, unit, unit and gated, unit and gated, answers.numel() > 0 and gated
    parts = [_scratch(q, rows * there, form.chunk * columns) for there in needed]
    block = form.columns("differentiate_slots")
    blocks = cdiv(columns, block)
    parts.append(_scratch(q, rows * blocks, 2 * form.chunk))
    differentiate_slots[(rows * blocks,)](
        q, k, gamma, g, cu_seqlens, form.sequence_of, states, answers, d_output, *squares,
        d_q, d_coefficients, d_answers, d_states, *parts, scale, tokens, heads,
        *strides(q), *strides(k), *strides(gamma), *strides(g), *strides(d_output),
        **form.arguments("differentiate_slots", BLOCK=block),
    )  # fmt: skip
    differentiate_directions[(rows,)](
        k, gamma, cu_seqlens, form.sequence_of, states, directions, answers, d_output, squares[0], parts[0], parts[1],
        parts[-1], d_directions, tokens, heads, *strides(k), *strides(gamma), *strides(d_output),
        **form.arguments("differentiate_directions", BLOCK=block, STEP=form.columns("differentiate_directions")),
    )  # fmt: skip
    from_gates = _scratch(q, rows * gated, form.chunk)
    if gated:
        differentiate_gates[(rows,)](
            k, gamma, g, cu_seqlens, form.sequence_of, states, answers, *squares, *parts, from_gates, tokens, heads,
            *strides(k), *strides(gamma), *strides(g),
            **form.arguments("differentiate_gates", BLOCK=block, STEP=form.columns("differentiate_gates")),
        )  # fmt: skip
    retreat_chunks[(form.sequences * heads,)](
        k, v, gamma, g, initial_state, cu_seqlens, *kept, final, d_final,
        _scratch(q, form.sequences * heads, width * form.chunk), from_gates,
        d_coefficients, d_directions, d_states, d_answers, d_k, d_v, d_gamma, d_g, d_initial, tokens, heads,
        *strides(k), *strides(v), *strides(gamma), *strides(g),
        **form.arguments("retreat_chunks", STEP=form.columns("retreat_chunks"), HAS_FINAL=d_final is not None),
    )  # fmt: skip


@orthogonal_recurrence_backward.register_fake
def _(
    q, k, v, gamma, g, threshold, initial_state, cu_seqlens, final, kept, d_output, d_final, objective, unit, scale,
    chunk_size,
):  # fmt: skip
    return _gradients_like(q, k, v, gamma, g, threshold, initial_state)


def _gradients_like(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, g: Tensor | None, threshold: Tensor | None, initial_state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients not yet written: contiguous, that of the state in float32, those of absent inputs empty."""

    def like(x: Tensor | None) -> Tensor:
        return q.new_empty((0,)) if x is None else x.new_empty(x.shape)

    d_initial = initial_state.new_empty(initial_state.shape, dtype=torch.float32)
    return like(q), like(k), like(v), like(gamma), like(g), like(threshold), d_initial


def _setup_context(ctx, inputs, output):
    *tensors, ctx.objective, ctx.unit, ctx.scale, ctx.chunk_size, ctx.saved = inputs
    ctx.save_for_backward(*tensors, *output[1:2], *output[2])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, d_output, d_final, *_):
    *tensors, final = ctx.saved_tensors[:9]
    _, _, v, _, g, threshold, initial_state, _ = tensors
    assert ctx.saved, "the forward pass ran without keeping what the backward pass needs"
    if d_output is None:
        d_output = v.new_zeros(v.shape)
    d_q, d_k, d_v, d_gamma, d_g, d_threshold, d_initial = orthogonal_recurrence_backward(
        *tensors, final, list(ctx.saved_tensors[9:]), d_output, d_final, ctx.objective, ctx.unit, ctx.scale,
        ctx.chunk_size,
    )  # fmt: skip
    return (
        d_q,
        d_k,
        d_v,
        d_gamma,
        None if g is None else d_g,
        None if threshold is None else d_threshold,
        d_initial.to(initial_state.dtype),
        *(None,) * 6,
    )


orthogonal_recurrence.register_autograd(_differentiate, setup_context=_setup_context)


def orthogonal_recurrence_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    *,
    objective: str,
    g: Tensor | None,
    normalize: bool,
    threshold: Tensor | None,
    scale: float,
    initial_state: Tensor,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor | None]:
    """`orthogonal_recurrence` in Triton kernels."""
    tensors = (q, k, v, gamma, g, threshold, initial_state)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(k.device)
    unit = has_unit_columns(objective, normalize)
    o, final, _ = orthogonal_recurrence(
        q, k, v, gamma, g, threshold, initial_state, cu_seqlens, objective, unit, float(scale), chunk_size, save
    )
    return o, final if output_final_state else None
