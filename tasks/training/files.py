"""Atomic writing of files: an interruption leaves the old file or the new one, never a part."""

import errno
import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO


def prepare_file(path: Path) -> None:
    """Make the folder of a file that is to be written. ValueError, in one line, where no file can come to stand."""
    if path.is_dir():
        raise ValueError(f"output={path} is a folder: name a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"output={path}: the folder cannot be made: {error.strerror}") from error
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"output={path}: {path.parent} is read-only, give output=FILE in another folder")


def write_text(path: Path, text: str) -> None:
    """Write the text to a file beside `path`, then rename that file to `path`."""
    partial = partial_path(path)
    partial.write_text(text)
    os.replace(partial, path)


class WholeCheckpoints(TorchCheckpointIO):
    """Writes each checkpoint beside its destination and renames it; Lightning would copy it from /tmp, which takes
    time.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        partial = partial_path(Path(path))
        try:
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
        except (OSError, RuntimeError) as error:
            if not _is_of_full_disk(error):
                raise
            partial.unlink()
            raise ValueError(
                f"{path}: the disk is full; a former checkpoint stays as it was, from which the same command with "
                "resume=true continues once there is room"
            ) from error
        os.replace(partial, path)


def _is_of_full_disk(error: BaseException | None) -> bool:
    """True if the disk is full; torch raises another error of its own while it handles the system's."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error is not None and error.errno in (errno.ENOSPC, errno.EDQUOT)


def partial_path(path: Path) -> Path:
    """The file beside `path` that is renamed to it once it is whole."""
    return path.with_name(f"{path.name}.partial")
