"""The file formats of an export."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from torch import nn

from longseq.tools.export import executorch_file, onnx_file, openvino_file, pt2_file, torchscript_file
from longseq.tools.export.spec import FileSpec


class FileFormat(Protocol):
    """A file format: a module, or any object, with these two functions.

    A file takes the arguments of the module that it is written from, and gives its results. `example` holds arguments:
    tensors, and lists of tensors. The module returns a tensor, or a tensor and a list of tensors.
    """

    def write(self, module: nn.Module, example: tuple[Any, ...], path: Path, spec: FileSpec) -> Any:
        """Write a module to `path`; files that belong to it go into the same folder.

        Returns a mapping of metadata in addition to those of `spec`, or None.
        """

    def open_file(self, path: Path) -> Callable[..., Any]:
        """The file as a function like the module, on the CPU: for the export's comparison, and as a checkpoint."""


_FORMATS: dict[str, Any] = {
    "onnx": onnx_file,
    "torchscript": torchscript_file,
    "pt2": pt2_file,
    "executorch": executorch_file,
    "openvino": openvino_file,
}
FORMATS: Mapping[str, FileFormat] = MappingProxyType(_FORMATS)

_SUFFIXES = {"onnx": ".onnx", "torchscript": ".pt", "pt2": ".pt2", "executorch": ".pte", "openvino": ".xml"}
SUFFIXES: Mapping[str, str] = MappingProxyType(_SUFFIXES)


def register_format(name: str, suffix: str, file_format: FileFormat) -> None:
    """Register a file format, which `longseq export format=NAME` and names that end in `suffix` then choose."""
    if name in _FORMATS or suffix in _SUFFIXES.values():
        raise ValueError(f"the export format {name!r} or its suffix {suffix!r} is taken")
    _FORMATS[name], _SUFFIXES[name] = file_format, suffix
