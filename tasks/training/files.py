"""The files of a run, each written whole."""

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from longseq.files import replacing


def prepare_file(path: Path, key: str = "output") -> None:
    """Make the folder of a file that is to be written, and that `key` names.

    ValueError, in one line, where no file can come to stand.
    """
    if path.is_dir():
        raise ValueError(f"{key}={path} is a folder: name a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{key}={path}: the folder cannot be made: {error.strerror}") from error
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{key}={path}: {path.parent} is read-only, give {key}=FILE in another folder")


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
