"""The files of a run, each written whole."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from longseq.files import Kind, check_name, check_place, check_replaced, replacing
from longseq.hub import CONFIG_FILE, INDEX_FILE
from longseq.tokenizer_files import SETTINGS_FILE, TOKENIZER_FILE

# Files of a folder of save_pretrained that no command overwrites, beside checkpoints and weights.
_OF_MODELS = (CONFIG_FILE, INDEX_FILE, TOKENIZER_FILE, SETTINGS_FILE)


def prepare_file(path: Path, kind: Kind, key: str = "output", *, reads: Iterable[str | Path | None] = ()) -> None:
    """Make the folder of a file that is to be written, and that `key` names.

    ValueError, in one line, where no file can come to stand, or where a file stands that the command may not replace:
    one of another kind, of a model, or one that the command `reads`.
    """
    check_file(path, kind, key, reads=reads)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{key}={path}: the folder cannot be made: {error.strerror}") from error


def check_file(path: Path, kind: Kind, key: str = "output", *, reads: Iterable[str | Path | None] = ()) -> None:
    """Raise the errors of `prepare_file`, and make no folder."""
    check_name(path, key)
    if path.is_dir():
        raise ValueError(f"{key}={path} is a folder: name a file")
    if path.is_file():
        of_model = path.name in _OF_MODELS and (path.parent / CONFIG_FILE).is_file()
        if of_model or path.suffix in (".ckpt", ".safetensors"):
            raise ValueError(f"{key}={path} is a file of a model, which it would replace: give another name")
    check_replaced(path, key, kind, reads=reads)
    check_place(path, key)


def prepare_folder(path: Path, key: str, *, apart_from: Path) -> None:
    """Check that files can be written below a folder, which `key` names and which may not exist yet.

    ValueError, in one line, where they cannot, and where a later command would read them with what is in `apart_from`.
    """
    if path.resolve().is_relative_to(apart_from.resolve()):
        raise ValueError(
            f"{key}={path} lies in {apart_from}, with which its pictures would be read: name a folder apart"
        )
    check_place(path, key, is_folder=True)


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
