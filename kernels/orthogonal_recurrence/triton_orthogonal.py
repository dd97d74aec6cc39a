"""The orthogonal recurrence in Triton: its two custom operations, their launches and the constants of these.

The state is float32, whatever the inputs, and so is the arithmetic of the exact form. No sum depends on the order in
which programs run: the result is the same in every run.

For the backward pass, the exact form saves the state before every CHECKPOINT tokens, D M / CHECKPOINT numbers for each
token and head. The backward pass computes the other states again, in D M CHECKPOINT numbers of scratch memory for each
program; there are as many programs as SCRATCH has room for. Chunks of C tokens save the states before each chunk and
after the last one (float16 for half precision inputs with N), and H or a: D M / C + D or M numbers for each token and
head. Their backward pass needs 2 D M / C + 2 D + 3 M more while it runs; for short
chunks, M in place of 3 M.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from longseq.kernels.custom_op import custom_op
from longseq.kernels.devices import channels_adjacent, longseq_shared_memory
from longseq.kernels.orthogonal_recurrence.reference import has_unit_columns
from longseq.kernels.orthogonal_recurrence.triton_chunks import advance_chunks, read_out
from longseq.kernels.orthogonal_recurrence.triton_chunks_backward import (
    differentiate_inputs,
    differentiate_outputs,
    retreat_chunks,
)
from longseq.kernels.orthogonal_recurrence.triton_tokens import advance_tokens, retreat_tokens
from longseq.kernels.reading import Reverse, number_of
from longseq.kernels.triton_launch import (
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

# By the bytes of the products' type and by the side of a square with as many numbers as the block of the state, rounded
# up. In the exact form, which is float32 whatever the inputs, a thread holds 16 to 64 numbers of the state. "short"
# chunks have up to SHORT tokens. The launches of chunks in half precision were measured on an H200 for a side of 64;
# the others are those that spill the fewest registers among the launches that were compiled.
_EXACT = {
    side: {
        "advance_tokens": Launch(0, 0, {16: 1, 32: 1, 64: 4, 128: 8}[side], 1),
        "retreat_tokens": Launch(0, 0, {16: 1, 32: 2, 64: 8, 128: 8}[side], 1),
    }
    for side in (16, 32, 64, 128)
}
_CHUNKS = {
    side: {
        "advance_chunks": Launch(64, 0, 4 if side <= 64 else 8, 3),
        "advance_chunks_short": Launch(64, 0, 4 if side <= 64 else 8, 3),
        "read_out": Launch(64, 0, 4, 1) if side <= 64 else Launch(32, 0, 8, 1),
        "read_out_short": Launch(64, 0, 2 if side <= 64 else 4, 1),
        "differentiate_outputs": Launch(64, 0, 4, 1) if side <= 64 else Launch(32, 0, 8, 1),
        "differentiate_outputs_short": Launch(64, 0, 2 if side <= 64 else 4, 1),
        "retreat_chunks": Launch(64, 0, 4 if side <= 64 else 8, 2),
        "retreat_chunks_short": Launch(64, 0, 4, 3) if side <= 64 else Launch(64, 0, 8, 2),
        "differentiate_inputs": Launch(64, 0, 4, 1),
        "differentiate_inputs_short": Launch(64, 0, 4, 1),
    }
    for side in (16, 32, 64, 128)
}
# Products of float32 inputs need more registers.
_SINGLES = {
    side: {
        name: launch._replace(stages=min(launch.stages, 2 if side <= 64 else 1)) for name, launch in launches.items()
    }
    | {"read_out": Launch(32, 0, 8, 1), "differentiate_outputs": Launch(32, 0, 8, 1)}
    | {"read_out_short": Launch(64, 0, 4, 1), "differentiate_outputs_short": Launch(64, 0, 4, 1)}
    for side, launches in _CHUNKS.items()
}
# Bytes of shared memory for a side of 128; compute capability 8.0 has 163 KiB.
TWO_STAGES = 177 * 1024  # of `retreat_chunks`
WIDE_INPUTS = 192 * 1024  # of `differentiate_inputs` in float32
# The same for a side of 64. Triton 3.8 takes up to 16 KiB more here than other versions.
SINGLE_STAGES = 114 * 1024  # of `retreat_chunks` in float32 with two stages
LAUNCHES: dict[tuple[int, int], dict[str, Launch]] = {
    (size, side): launches if size == 2 else _EXACT[side] | launches
    for size, table in ((2, _CHUNKS), (4, _SINGLES))
    for side, launches in table.items()
}
if longseq_shared_memory("cuda", None) < TWO_STAGES:
    LAUNCHES[2, 128]["retreat_chunks"] = LAUNCHES[2, 128]["retreat_chunks"]._replace(stages=1)
if longseq_shared_memory("cuda", None) < WIDE_INPUTS:
    LAUNCHES[4, 128]["differentiate_inputs"] = LAUNCHES[4, 128]["differentiate_inputs"]._replace(block=32)
if longseq_shared_memory("cuda", None) < SINGLE_STAGES:
    LAUNCHES[4, 64]["retreat_chunks"] = LAUNCHES[4, 64]["retreat_chunks"]._replace(stages=1)
fit_launches(LAUNCHES)
CHECKPOINT = 32  # tokens
SHORT = 16  # tokens of a chunk
WIDTH = 64  # the least block of tokens, channels or slots: rows of operands as wide as tensor cores load
SCRATCH = 1 << 26  # the numbers of all programs of the exact form's backward pass together


class _Form(NamedTuple):
    """What both passes derive from the arguments of a call."""

    constants: dict[str, Any]  # the compile-time arguments of every kernel
    launches: dict[str, Launch]
    chunk: int
    sequences: int
    slots: int  # an upper bound of the number of chunks, or of stretches of CHECKPOINT tokens, of all sequences
    sequence_of: Tensor | None  # the sequence of each packed chunk

    @property
    def is_exact(self) -> bool:
        return self.chunk == 1

    @property
    def is_by_slot(self) -> bool:
        """True if slots are independent of each other."""
        return self.constants["OBJECTIVE"] in ("encode", "similarity")

    def block(self, kernel: str) -> int:
        """The number of slots that the kernel takes at a time."""
        return min(self.launch(kernel).block, block_width(self.constants["M"], WIDTH))

    def arguments(self, kernel: str, **more: Any) -> dict[str, Any]:
        """The keyword arguments of a kernel: `more`, the launch and the constants."""
        unused = {"advance_chunks": "PRECISION", "retreat_chunks": "PRECISION"}.get(kernel, "DTYPE")
        constants = {name: value for name, value in self.constants.items() if self.is_exact or name != unused}
        return constants | more | self.launch(kernel).options

    def launch(self, kernel: str) -> Launch:
        return self.launches[kernel + ("_short" if 1 < self.chunk <= SHORT else "")]


def _form(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, threshold: Tensor | None, cu_seqlens: Tensor | None,
    objective: str, unit: bool, chunk_size: int, reverse: int,
) -> _Form:  # fmt: skip
    batch, tokens, _, width = v.shape
    columns = k.shape[3]
    chunk = min(chunk_size, tokens)
    constants: dict[str, Any] = {
        "D": width, "M": columns, "OBJECTIVE": objective, "UNIT": unit, "GATED": g is not None,
        "PACKED": cu_seqlens is not None, "REVERSE": reverse,
    }  # fmt: skip
    block_d, block_m = next_power_of_2(width), next_power_of_2(columns)
    sequence_of = None
    precision = torch.float32
    if chunk == 1:
        slots = count_slots(batch, tokens, CHECKPOINT, cu_seqlens)
        constants |= {"SHRUNK": threshold is not None, "EVERY": CHECKPOINT, "BLOCK_D": block_d, "BLOCK_M": block_m}
    else:
        slots = count_slots(batch, tokens, chunk, cu_seqlens)
        sequence_of = sequence_of_slots(slots, chunk, tokens, cu_seqlens)
        precision = _precision(q, k, v, unit)
        constants |= {
            "DTYPE": TRITON_DTYPES[precision], "PRECISION": "tf32x3" if precision == torch.float32 else "tf32",
            "CHUNK": chunk, "BLOCK_C": SHORT if chunk <= SHORT else WIDTH, "BLOCK_D": block_width(width, WIDTH),
        }  # fmt: skip
    side = next(side for _, side in LAUNCHES if side * side >= block_d * block_m)
    sequences = count_sequences(batch, cu_seqlens)
    return _Form(constants, LAUNCHES[precision.itemsize, side], chunk, sequences, slots, sequence_of)


def _precision(q: Tensor, k: Tensor, v: Tensor, unit: bool) -> torch.dtype:
    """The type of the products in loops over time: that of q, k and v if they agree, else float32.

    Float16 is used with unit slots only: it has too little range for slots that grow.
    """
    same = q.dtype == k.dtype == v.dtype
    # Triton's interpreter, which runs on a CPU, multiplies matrices of bfloat16 as integers.
    roomy = unit if v.dtype == torch.float16 else v.dtype == torch.bfloat16 and v.device.type != "cpu"
    return v.dtype if same and roomy else torch.float32


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
    reverse: int,
    save: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns o [B, T, H, D] in v's type, the final state, and if `save` what the backward pass needs.

    The final state is [B or segments, H, D, M] in float32; the list has the order of `_allocate`.
    """
    q, k, v = channels_adjacent(q), channels_adjacent(k), channels_adjacent(v)
    initial_state = initial_state.contiguous()
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    tokens, heads = v.shape[1:3]
    form = _form(q, k, v, g, threshold, cu_seqlens, objective, unit, chunk_size, reverse)
    output, final, kept = _allocate(form, k, v, save)
    if form.is_exact:
        find_launch(
            advance_tokens, q.device, form.sequences * heads,
            (scale, tokens, heads,
             *strides(q), *strides(k), *strides(v), *strides(gamma), *strides(g), *strides(threshold)),
            **form.arguments("advance_tokens", SAVE=save),
        )(q, k, v, gamma, g, threshold, initial_state, cu_seqlens, *kept, output, final)  # fmt: skip
    else:
        _run_chunks(form, q, k, v, gamma, g, initial_state, cu_seqlens, scale, save, output, final, kept)
    return output, final, kept if save else []


@orthogonal_recurrence.register_fake
def _(q, k, v, gamma, g, threshold, initial_state, cu_seqlens, objective, unit, scale, chunk_size, reverse, save):
    form = _form(q, k, v, g, threshold, cu_seqlens, objective, unit, chunk_size, reverse)
    output, final, kept = _allocate(form, k, v, save)
    return output, final, kept if save else []


def _allocate(form: _Form, k: Tensor, v: Tensor, save: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Empty tensors for the output, the final state and what is saved.

    Saved are states. Chunks also save H or a (not for "similarity"), the reciprocal norms after each chunk (with N),
    and φᵀ U of each slot (not for TTT).
    """
    heads, width, columns = v.shape[2], v.shape[3], k.shape[3]

    def numbers(rows: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return v.new_empty((rows, heads, *shape), dtype=dtype)

    final = numbers(form.sequences, width, columns)
    if form.is_exact:
        return v.new_empty(v.shape), final, [numbers(form.slots if save else 0, width, columns)]
    objective, saved = form.constants["OBJECTIVE"], form.slots * save
    # Float16 has range enough for slots of unit length, and bits enough for the part orthogonal to them.
    unit = form.constants["UNIT"] and form.constants["PRECISION"] == "tf32"
    kept = [numbers(form.slots + form.sequences * save, columns, width, dtype=torch.float16 if unit else torch.float32)]
    found = 0 if objective == "similarity" else form.slots
    kept.append(numbers(found, form.chunk * (columns if objective == "encode" else width)))
    kept += [numbers(saved * there, columns) for there in (form.constants["UNIT"], objective != "ttt")]
    return v.new_empty(v.shape), final, kept


def _run_chunks(
    form: _Form, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, g: Tensor | None, initial_state: Tensor,
    cu_seqlens: Tensor | None, scale: float, save: bool, output: Tensor, final: Tensor, kept: list[Tensor],
) -> None:  # fmt: skip
    states, found, _, _ = kept
    tokens, heads = k.shape[1:3]
    blocks, block = _slot_blocks(form, "advance_chunks")
    find_launch(
        advance_chunks, k.device, form.sequences * heads * blocks,
        (tokens, heads, form.slots, *strides(k), *strides(v), *strides(gamma), *strides(g)),
        **form.arguments("advance_chunks", BLOCK=block, SAVE=save, STAGES=form.launch("advance_chunks").stages),
    )(k, v, gamma, g, initial_state, cu_seqlens, *kept, final)  # fmt: skip
    find_launch(
        read_out, q.device, form.slots * heads,
        (scale, tokens, heads, *strides(q), *strides(k), *strides(v), *strides(gamma), *strides(g)),
        **form.arguments("read_out", BLOCK=form.block("read_out")),
    )(q, k, v, gamma, g, cu_seqlens, form.sequence_of, states, found, output)  # fmt: skip


def _slot_blocks(form: _Form, kernel: str) -> tuple[int, int]:
    """The programs of a head in a loop over time, and the slots of each: all slots if they depend on each other."""
    columns = form.constants["M"]
    block = form.block(kernel) if form.is_by_slot else block_width(columns, WIDTH)
    return cdiv(columns, block), block


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
    kept: list[Tensor],
    d_output: Tensor,
    d_final: Tensor | None,
    objective: str,
    unit: bool,
    scale: float,
    chunk_size: int,
    reverse: int,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, gamma, g, threshold and the initial state, empty for those not wanted.

    `wanted` has the same order; absent inputs are not wanted.
    """
    q, k, v, d_output = (channels_adjacent(x) for x in (q, k, v, d_output))
    initial_state = initial_state.contiguous()
    d_final = None if d_final is None else d_final.contiguous()
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    tokens, heads, width = v.shape[1:]
    columns = k.shape[3]
    form = _form(q, k, v, g, threshold, cu_seqlens, objective, unit, chunk_size, reverse)
    grads = _gradients_like(q, k, v, gamma, g, threshold, initial_state, wanted)
    where_wanted = [grad if want else None for grad, want in zip(grads, wanted, strict=True)]
    if form.is_exact:
        numbers = CHECKPOINT * (width * columns + width + 2 * columns)
        programs = min(form.sequences * heads, max(SCRATCH // numbers, 1))
        find_launch(
            retreat_tokens, q.device, programs,
            (scale, tokens, heads, form.sequences, *strides(q), *strides(k), *strides(v), *strides(gamma), *strides(g),
             *strides(threshold), *strides(d_output)),
            **form.arguments("retreat_tokens", HAS_FINAL=d_final is not None),
        )(
            q, k, v, gamma, g, threshold, initial_state, cu_seqlens, *kept, d_output, d_final,
            _scratch(q, programs, numbers), *where_wanted,
        )  # fmt: skip
    else:
        _differentiate_chunks(
            form, q, k, v, gamma, g, initial_state, cu_seqlens, scale, kept, d_output, d_final, where_wanted
        )
    return grads


def _differentiate_chunks(
    form: _Form, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, g: Tensor | None, initial_state: Tensor,
    cu_seqlens: Tensor | None, scale: float, kept: list[Tensor], d_output: Tensor, d_final: Tensor | None,
    grads: list[Tensor | None],
) -> None:  # fmt: skip
    states, found, _, _ = kept
    d_q, d_k, d_v, d_gamma, d_g, _, d_initial = grads
    of_inputs = [d_k, d_v, d_gamma, d_g]
    retreats = any(x is not None for x in (*of_inputs, d_initial))
    tokens, heads, width = v.shape[1:]
    columns, rows, gated = k.shape[3], form.slots * heads, g is not None

    d_coefficients, d_directions = _scratch(q, rows, columns * form.chunk), _scratch(q, rows, width * form.chunk)
    d_states, d_after = (_scratch(q, rows, width * columns) for _ in range(2))
    d_found = torch.empty_like(found)
    d_values = _scratch(q, rows * (form.constants["OBJECTIVE"] == "ttt"), width * form.chunk)
    from_gates = _scratch(q, rows * gated, form.chunk)
    apart, removes = form.chunk > SHORT, form.constants["OBJECTIVE"] != "ttt"
    d_gone = _scratch(q, rows * (apart and removes), columns * form.chunk)
    d_squared = _scratch(q, rows * (apart and form.constants["UNIT"]), columns * form.chunk)
    launches = [(True, False), (False, True)] if apart and removes else [(True, removes)]
    if not retreats:
        launches = launches[:1]  # which finds the gradient of q
    for reads, writes in launches:
        find_launch(
            differentiate_outputs, q.device, rows,
            (scale, tokens, heads,
             *strides(q), *strides(k), *strides(v), *strides(gamma), *strides(g), *strides(d_output)),
            **form.arguments(
                "differentiate_outputs", BLOCK=form.block("differentiate_outputs"), READS=reads, WRITES=writes
            ),
        )(
            q, k, v, gamma, g, cu_seqlens, form.sequence_of, states, found, d_output, d_q, d_coefficients, d_directions,
            d_states, d_gone, d_squared, from_gates,
        )  # fmt: skip
    if not retreats:
        return
    blocks, block = _slot_blocks(form, "retreat_chunks")
    stages: int | None = form.launch("retreat_chunks").stages
    is_wide = block * form.constants["BLOCK_D"] > WIDTH * WIDTH
    if form.constants["OBJECTIVE"] == "ttt":
        stages = 1 if is_wide else None  # what shared memory has room for: no loads ahead, or only those of products
    elif is_wide:
        stages = None
    find_launch(
        retreat_chunks, k.device, form.sequences * heads * blocks,
        (tokens, heads, form.slots, *strides(k), *strides(v), *strides(gamma), *strides(g)),
        **form.arguments("retreat_chunks", BLOCK=block, HAS_FINAL=d_final is not None, STAGES=stages),
    )(
        k, v, gamma, g, initial_state, cu_seqlens, *kept, d_final, d_directions, d_states, d_after, d_found, d_values,
        d_initial,
    )  # fmt: skip
    if all(x is None for x in of_inputs):
        return
    find_launch(
        differentiate_inputs, k.device, rows, (tokens, heads, *strides(k), *strides(v), *strides(gamma), *strides(g)),
        **form.arguments("differentiate_inputs", BLOCK=form.block("differentiate_inputs")),
    )(
        k, v, gamma, g, cu_seqlens, form.sequence_of, states, found, d_coefficients, d_directions, d_after, d_found,
        d_values, from_gates, *of_inputs,
    )  # fmt: skip


@orthogonal_recurrence_backward.register_fake
def _(
    q, k, v, gamma, g, threshold, initial_state, cu_seqlens, kept, d_output, d_final, objective, unit, scale,
    chunk_size, reverse, wanted,
):  # fmt: skip
    return _gradients_like(q, k, v, gamma, g, threshold, initial_state, wanted)


def _gradients_like(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, g: Tensor | None, threshold: Tensor | None, initial_state: Tensor,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Buffers for the gradients: contiguous; that of the state in float32, those not wanted empty."""

    def like(x: Tensor | None, number: int) -> Tensor:
        return x.new_empty(x.shape) if x is not None and wanted[number] else q.new_empty((0,))

    d_initial = initial_state.new_empty(initial_state.shape if wanted[6] else (0,), dtype=torch.float32)
    return like(q, 0), like(k, 1), like(v, 2), like(gamma, 3), like(g, 4), like(threshold, 5), d_initial


def _setup_context(ctx, inputs, output):
    tensors, (*ctx.options, ctx.saved) = inputs[:8], inputs[8:]
    ctx.save_for_backward(*tensors, *output[2])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, d_output, d_final, *_):
    saved = ctx.saved_tensors  # read once: under activation checkpointing, saved tensors can be read only once
    tensors, kept = saved[:8], saved[8:]
    _, _, v, *_, initial_state, _ = tensors
    assert ctx.saved, "the forward pass ran without keeping what the backward pass needs"
    if d_output is None:
        d_output = v.new_zeros(v.shape)
    needed = ctx.needs_input_grad[:7]
    *grads, d_initial = orthogonal_recurrence_backward(
        *tensors, list(kept), d_output, d_final, *ctx.options, list(needed)
    )
    grads = [*grads, d_initial.to(initial_state.dtype)]
    return *(grad if need else None for grad, need in zip(grads, needed, strict=True)), *(None,) * 7


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
    reverse: Reverse,
) -> tuple[Tensor, Tensor | None]:
    """`orthogonal_recurrence` in Triton kernels."""
    tensors = (q, k, v, gamma, g, threshold, initial_state)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(k.device)
    unit = has_unit_columns(objective, normalize)
    options = objective, unit, float(scale), chunk_size, number_of(reverse), save
    o, final, _ = orthogonal_recurrence(q, k, v, gamma, g, threshold, initial_state, cu_seqlens, *options)
    return o, final if output_final_state else None
