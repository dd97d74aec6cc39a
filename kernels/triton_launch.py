"""Host code that the launches of Triton kernels share: tables of launches, block widths, strides, packed sequences."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from longseq.kernels.custom_op import Given, empty_like
from longseq.kernels.devices import ROOMY, longseq_shared_memory
from longseq.kernels.packing import find_once

# Columns that fill 128 bytes, by the bytes of a number. Blocks whose rows all have this width are safe (see `Launch`).
ROW = {2: 64, 4: 32}
# The size of each cache of prepared launches.
PREPARED = 1024
TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def launch_options(warps: int, **others: int | None) -> dict[str, Any]:
    """The keyword arguments that Triton itself reads; every launch takes them from here.

    A multiplication and the addition that follows it may be one instruction with one rounding: the kernels were
    measured so. It is Triton's default up to 3.9, and not from 3.10 on.
    """
    return {"num_warps": warps, **others, "enable_fp_fusion": True}


class Launch(NamedTuple):
    """How one kernel is launched: the widths of a program's block and of a step of its loop, and options of Triton.

    A wrong launch can give wrong numbers, not only a slow kernel. Example: one kernel has operands of tensor cores with
    rows of 128 bytes and others with rows of 64 or 32 bytes (64 columns of float16 beside 32, or 32 columns of float32
    beside 16). ptxas of CUDA 12.8, which Triton 3.4 to 3.6 bring, may then add the high word of an operand's descriptor
    to the wrong register: the kernel gives wrong numbers or accesses memory illegally. benchmarks/tune.py therefore
    compares every candidate with float64.
    """

    block: int
    step: int
    warps: int
    stages: int
    registers: int | None = None  # the limit for one thread

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that Triton itself reads."""
        return launch_options(self.warps, num_stages=self.stages, maxnreg=self.registers)


class Prepared:
    """A launch of a kernel whose arguments are all known except the first ones, the tensors.

    Triton inspects every argument of each launch to find the compiled kernel, which takes the host longer than many
    kernels run. A prepared launch inspects only what may change between its calls: the tensors' types and alignment.
    Operations cache their prepared launches by everything that determines the other arguments.
    """

    def __init__(
        self, kernel: Any, device: torch.device, programs: int, numbers: tuple[float, ...], **constants: Any
    ) -> None:
        self.kernel = kernel
        self.device = device
        self.grid = (programs, 1, 1)
        self.numbers = numbers
        self.constants = constants
        self.compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

    def __call__(self, *tensors: Tensor | None) -> None:
        index = self.device.index
        if index is None or index == torch.cuda.current_device():
            self._launch(tensors)
        else:
            with torch.cuda.device(index):  # Triton launches on the current device
                self._launch(tensors)

    def _launch(self, tensors: tuple[Tensor | None, ...]) -> None:
        key = tuple([None if x is None else (x.dtype, x.data_ptr() % 16 == 0) for x in tensors])
        found = self.compiled.get(key)
        if found is not None:
            launch, rest = found
            launch(*tensors, *rest)
        elif self.grid[0]:
            # A compiled kernel takes all arguments by position.
            names = self.kernel.arg_names[len(tensors) + len(self.numbers) :]
            rest = (*self.numbers, *[self.constants[name] for name in names])
            kernel = self.kernel[self.grid](*tensors, *self.numbers, **self.constants)
            if kernel is not None:  # None: emulated on the CPU, or only recorded to be compiled ahead
                self.compiled[key] = kernel[self.grid], rest


# For launches whose other arguments are computed in each call: `find_launch(kernel, device, ...)(*tensors)`.
find_launch = lru_cache(PREPARED)(Prepared)


def fit_launches(launches: dict[tuple[int, int], dict[str, Launch]]) -> None:
    """Adapt a table of launches, measured on an H200, to the current GPU.

    GPUs with less than half of the H200's shared memory (99 KiB: compute capabilities 8.6, 8.9 and 12.0) get fewer
    pipeline stages, so that the tiles fit.
    """
    if longseq_shared_memory("cuda", None) < ROOMY:
        for (_, width), table in launches.items():
            most = 2 if width <= 128 else 1
            for name, launch in table.items():
                table[name] = launch._replace(stages=min(launch.stages, most))


def capability_here() -> list[int] | None:
    """The compute capability of the current GPU; None where there is none."""
    return list(torch.cuda.get_device_capability()) if torch.cuda.is_available() else None


def cdiv(dividend: int, divisor: int) -> int:
    """The quotient, rounded up. This function and the next replace `triton`'s, which are slow on the host."""
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not less than `number`."""
    return 1 << max(number - 1, 0).bit_length()


def block_width(width: int, least: int = 16) -> int:
    """The width of a block for `width` columns: a power of two, and at least `least`, which matrix products require."""
    return max(least, next_power_of_2(width))


def strides(tensor: Tensor | None) -> tuple[int, ...]:
    """The strides of batch, time and heads; zeros for None."""
    return (0, 0, 0) if tensor is None else tensor.stride()[:3]


def evenly(x: Given) -> Given:
    """x [B, T, H, ...] with adjacent heads and channels and one stride between tokens, also from row to row.

    It is x itself or a copy; None for None.
    """
    if x is not None and not x.is_contiguous():
        rows = x.flatten(0, 1).flatten(1)
        x = (rows if rows.stride(1) == 1 else rows.contiguous()).view(x.shape)
    return x


def steps(*tensors: Tensor | None) -> tuple[int, ...]:
    """The strides between tokens, for tensors of `evenly`; 0 for None."""
    return tuple([0 if x is None else x.stride(1 if x.shape[1] > 1 else 0) for x in tensors])


def allocate_parts(parts: int, like: Given) -> Given:
    """A buffer for a gradient; with several parts, which programs write and `add_up` sums, each is in float32."""
    if like is None or parts == 1:
        return empty_like(like)
    return like.new_empty((parts, *like.shape), dtype=torch.float32)


def add_up(parts: Given, like: Tensor | None) -> Given:
    """The sum of the parts in the type of `like`."""
    if parts is None or like is None or parts.dim() == like.dim():
        return parts
    if len(parts) == 2:  # one launch, which rounds the sum itself
        return torch.add(*parts, out=like.new_empty(like.shape))
    return parts.sum(0).to(like.dtype)


def borders_on(device: torch.device, cu_seqlens: Tensor | None) -> Tensor | None:
    """The borders of packed sequences as kernels read them."""
    return None if cu_seqlens is None else cu_seqlens.to(device).contiguous()


def count_sequences(batch: int, cu_seqlens: Tensor | None) -> int:
    """The number of sequences, each with its own state: rows of the batch, or packed segments."""
    return batch if cu_seqlens is None else cu_seqlens.shape[0] - 1


def count_slots(batch: int, tokens: int, chunk: int, cu_seqlens: Tensor | None) -> int:
    """An upper bound of the number of chunks of all sequences.

    The slots of a packed segment begin at `start // chunk + its number`, so that no two segments share a slot.
    """
    return batch * -(-tokens // chunk) if cu_seqlens is None else tokens // chunk + cu_seqlens.shape[0]


def sequence_of_slots(slots: int, chunk: int, tokens: int, cu_seqlens: Tensor | None) -> Tensor | None:
    """The packed segment of each slot, found without waiting for the device; None for sequences that are not packed.

    The result is cached by the borders of a `Packing`, for all operations that use chunks of this length.
    """
    if cu_seqlens is None:
        return None
    borders = cu_seqlens

    def find() -> Tensor:
        numbers = torch.arange(slots, device=borders.device)
        first = borders[:-1].clamp(0, tokens) // chunk + numbers[: borders.shape[0] - 1]
        return (torch.searchsorted(first, numbers, right=True) - 1).clamp_min(0)

    return find_once(borders, ("sequence of slots", chunk), find)


def longest_first(cu_seqlens: Tensor) -> Tensor:
    """The numbers of packed segments, the longest first; cached like `sequence_of_slots`."""
    return find_once(cu_seqlens, "longest first", lambda: cu_seqlens.diff().argsort(descending=True, stable=True))
