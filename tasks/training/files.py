"""Atomic writing of files: an interruption leaves the old file or the new one, never a part."""

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO


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
    partial = partial_path(path)
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


class WholeCheckpoints(TorchCheckpointIO):
    """Writes each checkpoint beside its destination and renames it; Lightning would copy it from /tmp, which takes
    time.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        partial = partial_path(Path(path))
        torch.save(checkpoint, partial)
        os.replace(partial, path)


def partial_path(path: Path) -> Path:
    """The file beside `path` that is renamed to it once it is whole."""
    return path.with_name(f"{path.name}.partial")
