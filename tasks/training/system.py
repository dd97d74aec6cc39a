"""Files that are written whole, processor cores, data workers, and the memory of a process."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from longseq.files import replacing


def write_text(path: Path, text: str) -> None:
    """Write the text to a temporary file and rename it to `path`."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


class WholeCheckpoints(TorchCheckpointIO):
    """Writes a checkpoint to a temporary file next to its destination and renames it; Lightning copies from /tmp."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with replacing(Path(path)) as partial:
            torch.save(checkpoint, partial)


def usable_cores() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prepare_data_worker(index: int) -> None:
    """Give a data worker its own process group, so that signals to the run reach only the trainer."""
    os.setpgid(0, 0)


def peak_memory(device: torch.device) -> int | None:
    """Peak bytes of tensors on the GPU, or of the whole process on a CPU; None on Windows without a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return None
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 2**10
