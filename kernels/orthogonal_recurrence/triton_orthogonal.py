"""The orthogonal recurrence in Triton: its two custom operations, their launches and the constants of these.

The state is float32, whatever the inputs, and so is the arithmetic of the exact form. No sum depends on the order in
which programs run: the result is the same in every run.

For the backward pass, the exact form saves the state before every CHECKPOINT tokens, D M / CHECKPOINT numbers for each
token and head. The backward pass computes the other states again, in D M CHECKPOINT numbers of scratch memory for each
program; there are as many programs as SCRATCH has room for. Chunks of C tokens, for TTT, save the states before each
chunk and H: D M / C + D numbers for each token and head. Their backward pass needs 2 D M / C + 3 D + M more while it
runs.
"""

from typing import Any

import torch
from torch import Tensor

from longseq.kernels.custom_op import Gradients, custom_op, empty_like, records_gradient
from longseq.kernels.devices import contiguous, longseq_shared_memory
from longseq.kernels.orthogonal_recurrence.chunk import Inputs
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
    borders_on,
    count_sequences,
    count_slots,
    evenly,
    find_launch,
    fit_launches,
    next_power_of_2,
    sequence_of_slots,
    steps,
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


class _Call:
    """What both passes derive from the arguments of a call, and the launches of their kernels."""

    def __init__(
        self, inputs: Inputs, initial: Tensor, cu_seqlens: Tensor | None, objective: str, unit: bool, scale: float,
        chunk_size: int, reverse: int,
    ) -> None:  # fmt: skip
        self.inputs, self.initial, self.cu_seqlens, self.scale = inputs, initial, cu_seqlens, scale
        q, k, v, *_ = inputs
        batch, self.tokens, self.heads, self.width = v.shape
        self.columns, self.chunk = k.shape[3], min(chunk_size, self.tokens)
        self.sequences, self.is_exact = count_sequences(batch, cu_seqlens), self.chunk == 1
        length = CHECKPOINT if self.is_exact else self.chunk
        # An upper bound of the number of chunks, or of stretches of CHECKPOINT tokens, of all sequences.
        self.slots = count_slots(batch, self.tokens, length, cu_seqlens)
        # The compile-time arguments of every kernel.
        self.constants: dict[str, Any] = {"D": self.width, "M": self.columns, "REVERSE": reverse}
        self.dtype = torch.float32  # of the products in loops over time
        block_d, block_m = next_power_of_2(self.width), next_power_of_2(self.columns)
        if self.is_exact:
            self.constants |= {"OBJECTIVE": objective, "UNIT": unit, "EVERY": length}
            self.constants |= {"BLOCK_D": block_d, "BLOCK_M": block_m}
        else:
            self.sequence_of = sequence_of_slots(self.slots, length, self.tokens, cu_seqlens)
            # Float16 has too little range for slots that grow. Triton's interpreter, which runs on a CPU, multiplies
            # matrices of bfloat16 as integers.
            if all(x.dtype == torch.bfloat16 for x in (q, k, v)) and v.device.type != "cpu":
                self.dtype = torch.bfloat16
            self.constants |= {"CHUNK": length, "BLOCK_C": SHORT if length <= SHORT else WIDTH}
            self.constants |= {"BLOCK_D": block_width(self.width, WIDTH)}
        side = next(side for _, side in LAUNCHES if side * side >= block_d * block_m)
        self.launches = LAUNCHES[self.dtype.itemsize, side]

    def allocate(self, save: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Empty tensors for the output, the final state and what the kernels store: states, and of chunks also H."""
        v, width, columns = self.inputs.v, self.width, self.columns

        def numbers(rows: int, *shape: int) -> Tensor:
            return v.new_empty((rows, self.heads, *shape), dtype=torch.float32)

        output, final = v.new_empty(v.shape), numbers(self.sequences, width, columns)
        if self.is_exact:
            return output, final, [numbers(self.slots if save else 0, width, columns)]
        return output, final, [numbers(self.slots, columns, width), numbers(self.slots, self.chunk * width)]

    def _find(self, kernel: Any) -> Launch:
        return self.launches[kernel.__name__ + ("_short" if 1 < self.chunk <= SHORT else "")]

    def _launch(self, kernel: Any, programs: int, numbers: tuple[float, ...], **constants: Any) -> Any:
        constants |= self.constants | self._find(kernel).options
        return find_launch(kernel, self.inputs.v.device, programs, numbers, **constants)

    def _walk_chunks(self, kernel: Any, stages: int | None) -> Any:
        """A launch for programs that loop over time with all slots of a head."""
        numbers = (self.tokens, self.heads, *steps(*self.inputs[1:]))
        constants = {"BLOCK": block_width(self.columns, WIDTH), "DTYPE": TRITON_DTYPES[self.dtype]}
        return self._launch(kernel, self.sequences * self.heads, numbers, STAGES=stages, **constants)

    def _over_chunks(self, kernel: Any, numbers: tuple[float, ...], *tensors: Tensor | None) -> Any:
        """A launch for a program for each chunk of each head, which takes a block of slots at a time."""
        numbers = (*numbers, self.tokens, self.heads, *steps(*tensors))
        block = min(self._find(kernel).block, block_width(self.columns, WIDTH))
        precision = "tf32x3" if self.dtype == torch.float32 else "tf32"
        return self._launch(kernel, self.slots * self.heads, numbers, BLOCK=block, PRECISION=precision)

    def _scratch(self, rows: int, numbers: int) -> Tensor:
        return self.inputs.q.new_empty((rows, numbers), dtype=torch.float32)

    def advance_tokens(self, kept: list[Tensor], output: Tensor, final: Tensor, save: bool) -> None:
        numbers = (self.scale, self.tokens, self.heads, *steps(*self.inputs))
        self._launch(advance_tokens, self.sequences * self.heads, numbers, SAVE=save)(
            *self.inputs, self.initial, self.cu_seqlens, *kept, output, final
        )

    def advance_chunks(self, kept: list[Tensor], output: Tensor, final: Tensor, save: bool) -> None:
        q, k, v, gamma, g = self.inputs
        self._walk_chunks(advance_chunks, self._find(advance_chunks).stages)(
            k, v, gamma, g, self.initial, self.cu_seqlens, *kept, final
        )
        self._over_chunks(read_out, (self.scale,), q, k, gamma, g)(
            q, k, gamma, g, self.cu_seqlens, self.sequence_of, *kept, output
        )

    def retreat_tokens(self, kept: list[Tensor], d_output: Tensor, d_final: Tensor | None, grads: Gradients) -> None:
        room = CHECKPOINT * (self.width * self.columns + self.width + 2 * self.columns)
        programs = min(self.sequences * self.heads, max(SCRATCH // room, 1))
        numbers = (self.scale, self.tokens, self.heads, self.sequences, *steps(*self.inputs, d_output))
        self._launch(retreat_tokens, programs, numbers)(
            *(*self.inputs, self.initial, self.cu_seqlens, *kept, d_output, d_final),
            *(self._scratch(programs, room), *grads),
        )

    def differentiate_chunks(
        self, kept: list[Tensor], d_output: Tensor, d_final: Tensor | None, grads: Gradients
    ) -> None:
        q, k, v, gamma, g = self.inputs
        d_q, d_k, d_v, d_gamma, d_g, d_initial = grads
        width, columns, chunk, rows = self.width, self.columns, self.chunk, self.slots * self.heads
        d_coefficients, d_h = self._scratch(rows, columns * chunk), self._scratch(rows, width * chunk)
        d_states, d_after = (self._scratch(rows, width * columns) for _ in range(2))
        d_errors, d_values = (self._scratch(rows, width * chunk) for _ in range(2))
        from_gates = self._scratch(rows * (g is not None), chunk)
        places = self.cu_seqlens, self.sequence_of
        self._over_chunks(differentiate_outputs, (self.scale,), q, k, gamma, g, d_output)(
            q, k, gamma, g, *places, *kept, d_output, d_q, d_coefficients, d_h, d_states, from_gates
        )
        # Shared memory has no room for loads ahead, or only for those of products.
        is_wide = block_width(columns, WIDTH) * self.constants["BLOCK_D"] > WIDTH * WIDTH
        self._walk_chunks(retreat_chunks, 1 if is_wide else None)(
            k, v, gamma, g, self.cu_seqlens, *kept, d_final, d_h, d_states, d_after, d_errors, d_values, d_initial
        )
        self._over_chunks(differentiate_inputs, (), k, gamma, g)(
            k, gamma, g, *places, *kept, d_coefficients, d_after, d_errors, d_values, from_gates, d_k, d_v, d_gamma, d_g
        )


def _allocate_results(*arguments: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    q, k, v, gamma, g, *others, save = arguments
    output, final, kept = _Call(Inputs(q, k, v, gamma, g), *others).allocate(save)
    return output, final, kept if save else []


@custom_op("orthogonal_recurrence", _allocate_results)
def orthogonal_recurrence(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, g: Tensor | None, initial_state: Tensor,
    cu_seqlens: Tensor | None, objective: str, unit: bool, scale: float, chunk_size: int, reverse: int, save: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """Returns o [B, T, H, D] in v's type, the final state, and if `save` what the backward pass needs.

    The final state is [B or segments, H, D, M] in float32; the list has the order of `_Call.allocate`.
    """
    inputs, initial = Inputs._make(evenly(x) for x in (q, k, v, gamma, g)), initial_state.contiguous()
    call = _Call(inputs, initial, cu_seqlens, objective, unit, scale, chunk_size, reverse)
    output, final, kept = call.allocate(save)
    advance = call.advance_tokens if call.is_exact else call.advance_chunks
    advance(kept, output, final, save)
    return output, final, kept if save else []


def _allocate_gradients(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, g: Tensor | None, initial_state: Tensor, *_: Any
) -> Gradients:
    d_initial = initial_state.new_empty(initial_state.shape, dtype=torch.float32)
    return *[empty_like(x) for x in (q, k, v, gamma, g)], d_initial


@orthogonal_recurrence.gradient("q k v gamma g initial_state", fake=_allocate_gradients)
def orthogonal_recurrence_backward(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, g: Tensor | None, initial_state: Tensor,
    cu_seqlens: Tensor | None, kept: list[Tensor], d_output: Tensor, d_final: Tensor | None, objective: str, unit: bool,
    scale: float, chunk_size: int, reverse: int,
) -> Gradients:  # fmt: skip
    """The gradients of all inputs; that of the initial state in float32."""
    inputs, initial = Inputs._make(evenly(x) for x in (q, k, v, gamma, g)), initial_state.contiguous()
    call = _Call(inputs, initial, cu_seqlens, objective, unit, scale, chunk_size, reverse)
    grads = _allocate_gradients(*inputs, initial)
    differentiate = call.retreat_tokens if call.is_exact else call.differentiate_chunks
    differentiate(kept, evenly(d_output), contiguous(d_final), grads)
    return grads


def orthogonal_recurrence_triton(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, *, objective: str, g: Tensor | None, normalize: bool,
    scale: float, initial_state: Tensor, output_final_state: bool, cu_seqlens: Tensor | None,
    chunk_size: int, reverse: Reverse,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`orthogonal_recurrence` in Triton kernels."""
    tensors, unit = (q, k, v, gamma, g, initial_state), has_unit_columns(objective, normalize)
    options = objective, unit, float(scale), chunk_size, number_of(reverse), records_gradient(*tensors)
    o, final, _ = orthogonal_recurrence(*tensors, borders_on(k.device, cu_seqlens), *options)
    return o, final if output_final_state else None
