"""Files that are whole at every moment, whatever interrupts their writing."""

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO


def write_text(path: Path, text: str) -> None:
    """Write beside `path`, then take its place."""
    partial = _partial(path)
    partial.write_text(text)
    os.replace(partial, path)


class WholeCheckpoints(TorchCheckpointIO):
    """Writes each checkpoint beside its place; Lightning's own way copies from /tmp, maybe another file system."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        partial = _partial(Path(path))
        torch.save(checkpoint, partial)
        os.replace(partial, path)


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")
