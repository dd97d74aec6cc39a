"""The memory that a process has taken, and that a machine has."""

from __future__ import annotations

import sys

import torch


def peak_memory(device: torch.device) -> int | None:
    """The most bytes that tensors of this process have taken on its GPU; on a processor, that the process has taken.

    None on Windows without a GPU, where nothing tells it.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return None
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 2**10
