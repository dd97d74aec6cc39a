"""The files of a run, each written whole."""

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from longseq.files import replacing


def write_text(path: Path, text: str) -> None:
    """Write the text to a file beside `path`, then rename that file to `path`."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


class WholeCheckpoints(TorchCheckpointIO):
    """Writes each checkpoint beside its destination and renames it; Lightning would copy it from /tmp, which takes
    time.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with replacing(Path(path)) as partial:
            torch.save(checkpoint, partial)
