"""The file formats of an export, and the name of a file in one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from torch import nn

from longseq.files import Kind, check_place
from longseq.tools.export import onnx_file, pt2_file, torchscript_file
from longseq.tools.export.spec import FileSpec

__all__ = ["FORMATS", "SUFFIXES", "FileFormat", "check_beside", "find_target", "kind_of", "register_format"]


class FileFormat(Protocol):
    """A file format: a module, or any object, with these two functions.

    `longseq export` replaces an existing file only if the format's function `is_own(path)`, where it has one, says that
    the format wrote it. With a function `find_beside(module, path)`, a format names the files that it makes beside it.
    If its function `takes_no_rows()` says so, the export also runs the file on a batch of no rows.

    A file takes the arguments of the module that it is written from, and gives its results. `example` holds arguments:
    tensors, and lists of tensors. The module returns a tensor, or a tensor and a list of tensors.
    """

    def write(self, module: nn.Module, example: tuple[Any, ...], path: Path, spec: FileSpec) -> Counter[str]:
        """Write a module; return how often the file uses each operator."""

    def open_file(self, path: Path) -> Callable[..., Any]:
        """The file as a function like the module, on the CPU; the export compares it with the module."""


_FORMATS: dict[str, Any] = {"onnx": onnx_file, "torchscript": torchscript_file, "pt2": pt2_file}
FORMATS: Mapping[str, FileFormat] = MappingProxyType(_FORMATS)

_SUFFIXES = {"onnx": ".onnx", "torchscript": ".pt", "pt2": ".pt2"}
SUFFIXES: Mapping[str, str] = MappingProxyType(_SUFFIXES)


def register_format(name: str, suffix: str, file_format: FileFormat) -> None:
    """Register a file format, which `longseq export format=NAME` and names that end in `suffix` then choose."""
    if name in _FORMATS or suffix in _SUFFIXES.values() or not suffix.startswith("."):
        raise ValueError(f"the format {name!r} with the suffix {suffix!r} is there already, or its suffix has no dot")
    _FORMATS[name], _SUFFIXES[name] = file_format, suffix


def kind_of(format: str) -> Kind:
    """The files of a format, which an export may replace."""
    return Kind(f"{format} file of `longseq export`", getattr(FORMATS[format], "is_own", lambda path: True))


def check_beside(model: nn.Module, target: Path, format: str) -> None:
    """Raise ValueError, in one line, where a file stands that the format makes beside `target`, and is not of it."""
    find_beside = getattr(FORMATS[format], "find_beside", None)
    taken = [path for path in find_beside(model, target) if path.exists()] if find_beside is not None else []
    if taken and not target.exists():
        raise ValueError(
            f"output={target}: its weights would replace {taken[0]}: give another name, or remove that file"
        )


def find_target(output: str | Path, format: str) -> Path:
    """The file to write.

    ValueError if its name has the ending of another format, or no file can come to stand there.
    """
    if format not in FORMATS:
        raise ValueError(f"format={format} is unknown: take one of {', '.join(FORMATS)}")
    target = Path(output)
    if target.is_dir():
        raise ValueError(
            f"output={output} is a folder: name a file in it, such as {target / ('model' + SUFFIXES[format])}"
        )
    for other, suffix in SUFFIXES.items():
        if other != format and target.suffix == suffix:
            raise ValueError(
                f"output={output} ends like a {other} file: take format={other} or a name in {SUFFIXES[format]}"
            )
    if target.suffix == ".ckpt":
        raise ValueError(f"output={output} ends like a checkpoint: take a name in {SUFFIXES[format]}")
    if target.exists() and not target.is_file():  # what is written is read again for the comparison
        raise ValueError(f"output={output} is a device or a pipe, and a file is needed: name a file")
    check_place(target, "output")
    return target
