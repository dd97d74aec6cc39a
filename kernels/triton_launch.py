"""What the launches of Triton kernels share: entries of their tables, block widths, strides, packed sequences."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from longseq.kernels.devices import ROOMY, longseq_shared_memory
from longseq.kernels.launch_file import file_of_launches, find_misfit, named_file, read_launches
from longseq.kernels.packing import find_once

# By the bytes of a number: as many as fill 128 bytes. Blocks of one width of rows are safe (see `Launch`).
ROW = {2: 64, 4: 32}
# As many launches are remembered, and calls that led to one of the delta rule's.
PREPARED = 1024
TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def launch_options(warps: int, **others: int | None) -> dict[str, Any]:
    """What Triton itself is told of any launch; the keyword arguments of all launches come from here.

    A product and the sum that takes it are one instruction with one rounding, as they were when the kernels were
    measured. Triton has done so by default, and will not from 3.10 on.
    """
    return {"num_warps": warps, **others, "enable_fp_fusion": True}


class Launch(NamedTuple):
    """How one kernel is launched: the width of a program's block, of the blocks that it loops over, and the rest.

    A launch can be wrong, and not only slow. Where operands of tensor cores have rows of 128 bytes and others in the
    same kernel of 64 or 32 (64 columns of float16 beside 32, or 32 of float32 beside 16), ptxas of CUDA 12.8, which
    Triton 3.4 to 3.6 bring, may add the high word of an operand's descriptor to a register with something else in it:
    wrong numbers, or illegal accesses to memory. `longseq benchmark tune` compares every candidate with float64.
    """

    block: int
    step: int
    warps: int
    stages: int
    registers: int | None = None  # at most, of a thread

    @property
    def options(self) -> dict[str, Any]:
        """What Triton itself is told."""
        return launch_options(self.warps, num_stages=self.stages, maxnreg=self.registers)

    def find_fault(self, kernel: str) -> str | None:
        """Why no kernel can be launched so; what else is wrong with it, its compilation shows."""
        return find_uneven(self, ("block", "step"), least=0) or find_uneven(self, ("warps",))


def find_uneven(launch: Any, names: tuple[str, ...], least: int = 1) -> str | None:
    """The first of these numbers of a launch that is no power of two, nor 0 where that is the least."""
    for name in names:
        number = getattr(launch, name)
        if number < least or number & (number - 1):
            return f"{name}={number}, which is no power of two"
    return None


class Prepared:
    """A kernel's launch whose arguments are known but for its first ones, the tensors.

    Triton looks through all arguments of each launch for what it compiled the kernel for, which takes the host longer
    than many a kernel runs. Of a launch that is prepared, types and alignment of the tensors are all that may change.
    Operations remember what they prepared by everything that the other arguments follow from.
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
            kernel = self.kernel[self.grid](*tensors, *self.numbers, **self.constants)
            if kernel is not None:  # neither emulated nor left out to be compiled ahead
                # A compiled kernel takes all arguments by their place.
                names = self.kernel.arg_names[len(tensors) + len(self.numbers) :]
                rest = (*self.numbers, *(self.constants[name] for name in names))
                self.compiled[key] = kernel[self.grid], rest


# For launches whose other arguments are worked out in each call: `find_launch(kernel, device, ...)(*tensors)`.
find_launch = lru_cache(PREPARED)(Prepared)


def fit_launches(op: str, launches: dict[tuple[int, int], dict[str, Any]]) -> None:
    """Change the table of an operation's launches, measured on an H200, for the GPU that is here.

    Where a program has less than half of the H200's shared memory (compute capabilities 8.6, 8.9 and 12.0: 99 KiB),
    walks have fewer stages, so that their tiles fit. What the file that the environment names holds for GPUs of this
    capability comes after that. The entries are a `Launch` or another NamedTuple with the method `find_fault`.

    Raises ValueError for a file that does not fit: measured on other kinds of GPU alone, or for other kernels.
    """
    if longseq_shared_memory("cuda", None) < ROOMY:
        for (_, width), table in launches.items():
            most = 2 if width <= 128 else 1
            for name, launch in table.items():
                if isinstance(launch, Launch):
                    table[name] = launch._replace(stages=min(launch.stages, most))
    file = file_of_launches()
    if file is None:
        return
    named, remedy = named_file(file)
    rows = read_launches(file, named, remedy)["launches"]
    here = capability_here()
    if all(row["capability"] != here for row in rows):
        measured = " and ".join(sorted({str(row["capability"]) for row in rows}))
        raise ValueError(
            f"{named} was measured on {f'GPUs of capability {measured}' if rows else 'no GPU'}, and this one has "
            f"{here}: unset it, or measure here with `longseq benchmark tune`"
        )
    for number, row in enumerate(rows):
        if row["op"] != op or row["capability"] != here:
            continue
        table, kernel = launches.get((row["bytes"], row["width"]), {}), row["kernel"]
        if kernel not in table:
            raise ValueError(
                f"{named} has {kernel} of {row['bytes']} bytes and width {row['width']}, which {op} does not launch: "
                f"measure again with `longseq benchmark tune`"
            )
        if fault := find_misfit(table[kernel], kernel, row["launch"]):
            raise ValueError(f"{named}, launches[{number}].launch{fault}: {remedy}")
        table[kernel] = type(table[kernel])(**row["launch"])


def capability_here() -> list[int] | None:
    """The compute capability of the current GPU; None where there is none."""
    return list(torch.cuda.get_device_capability()) if torch.cuda.is_available() else None


def cdiv(dividend: int, divisor: int) -> int:
    """The quotient, rounded up. Triton's own of this name and the next are functions for kernels, slow on the host."""
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    """The least power of two that is at least as large."""
    return 1 << max(number - 1, 0).bit_length()


def block_width(width: int, least: int = 16) -> int:
    """The narrowest block of so many columns that matrix products take, of at `least` so many."""
    return max(least, next_power_of_2(width))


def strides(tensor: Tensor | None) -> tuple[int, ...]:
    """Of batch, time and heads."""
    return (0, 0, 0) if tensor is None else tensor.stride()[:3]


def count_sequences(batch: int, cu_seqlens: Tensor | None) -> int:
    """Rows of the batch, or packed segments: a state for each."""
    return batch if cu_seqlens is None else cu_seqlens.shape[0] - 1


def count_slots(batch: int, tokens: int, chunk: int, cu_seqlens: Tensor | None) -> int:
    """Chunks of all sequences, at most.

    A packed segment's slots begin at start // chunk + its number: apart from those of the segment before it.
    """
    return batch * -(-tokens // chunk) if cu_seqlens is None else tokens // chunk + cu_seqlens.shape[0]


def sequence_of_slots(slots: int, chunk: int, tokens: int, cu_seqlens: Tensor | None) -> Tensor | None:
    """The packed segment that each of all slots belongs to, found without waiting for the device.

    For the borders of a `Packing` it is found once, for all operations that cut time so.
    """
    if cu_seqlens is None:
        return None
    borders = cu_seqlens

    def find() -> Tensor:
        numbers = torch.arange(slots, device=borders.device)
        first = borders[:-1].clamp(0, tokens) // chunk + numbers[: borders.shape[0] - 1]
        return (torch.searchsorted(first, numbers, right=True) - 1).clamp_min(0)

    return find_once(borders, ("sequence of slots", chunk), find)
