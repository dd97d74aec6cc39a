"""Stand-in for a GPU that is absent: Triton compiles kernels for it, and records launches in place of running them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from longseq.kernels import devices, triton_launch

# The most bytes of shared memory of a program, by compute capability: CUDA C++ Programming Guide, table of technical
# specifications.
SHARED_MEMORY = {
    (8, 0): 163 * 1024,
    (8, 6): 99 * 1024,
    (8, 9): 99 * 1024,
    (9, 0): 227 * 1024,
    (10, 0): 227 * 1024,
    (12, 0): 99 * 1024,
}
HOPPER = (9, 0)

launched: list[str] = []


class Launcher:
    """Replaces the launcher that Triton builds with a C compiler."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.name = metadata.name

    def __call__(self, *args: Any) -> None:
        launched.append(self.name)


def activate(capability: tuple[int, int] = HOPPER) -> None:
    """Make Triton treat the tensors of any device as those of a GPU with this compute capability.

    Call it before the Triton modules of the operations are imported: at their import, tables of launches are adapted to
    the GPU.
    """
    number = 10 * capability[0] + capability[1]
    utils = SimpleNamespace(
        load_binary=lambda name, binary, shared, device: (object(), object(), 0, 0, 1024),
        get_device_properties=lambda device: {"max_shared_mem": SHARED_MEMORY[capability]},
    )
    driver.set_active(
        SimpleNamespace(
            launcher_cls=Launcher,
            utils=utils,
            get_current_target=lambda: GPUTarget("cuda", number, 32),
            get_current_device=lambda: number,  # Triton caches kernels by device
            get_current_stream=lambda device: 0,
        )
    )
    # A GPU that is present must not be asked for its properties.
    torch.cuda.is_available = lambda: False  # type: ignore[assignment]
    devices.SHARED_MEMORY = SHARED_MEMORY[capability]
    triton_launch.capability_here = lambda: list(capability)  # type: ignore[assignment]
