"""TorchScript: traced and frozen, for torch (Python or C++) without longseq."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from longseq.tools.export.metadata import EXTRA_FILE, holds_metadata
from longseq.tools.export.spec import FileSpec

__all__ = ["is_own", "open_file", "takes_no_rows", "write"]

# The version of an archive's operators: torch's writer puts it below .data from version 6 on.
VERSIONS = ("version", ".data/version")
# The records that torch's writer adds to an archive by itself.
OF_THE_WRITER = (*VERSIONS, "byteorder", ".data/serialization_id")


def write(module: nn.Module, example: tuple[Any, ...], path: Path, spec: FileSpec) -> Counter[str]:
    """Write `module` to `path`; the metadata is the JSON of the extra file `longseq.json`.

    Returns how often the file uses each operator.
    """
    with torch.no_grad():  # strict=True refuses lists of tensors as results
        traced = torch.jit.freeze(torch.jit.trace(module, example, check_trace=False, strict=False))
    foreign = {kind for kind in _kinds(traced.inlined_graph) if not kind.startswith(("aten::", "prim::"))}
    if foreign:
        raise RuntimeError(f"the trace calls {', '.join(sorted(foreign))}, which other processes lack")
    # In memory first: given a name, torch ends the whole process where the disk is full.
    content = traced.save_to_buffer(_extra_files={EXTRA_FILE: json.dumps(dict(spec.metadata))})
    with path.open("wb") as file:
        _write_without_source_lines(content, file)
    del content
    written = torch.jit.load(str(path)).inlined_graph  # loading removes some of what was traced
    return Counter(kind for kind in _kinds(written) if kind != "prim::Constant")


class _Destination:
    """A file for torch's writer, which an error would end with the whole process: it is kept in `error`."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, content: memoryview) -> int:
        if self.error is None:
            try:
                self.file.write(content)
            except OSError as error:
                self.error = error
        return len(content)


def _write_without_source_lines(archive: bytes, file: BinaryIO) -> None:
    """Copy an archive to a file without the records of source lines, which have paths of this machine."""
    records, destination = torch._C.PyTorchFileReader(io.BytesIO(archive)), _Destination(file)
    names = records.get_all_records()
    writer = torch._C.PyTorchFileWriter(destination)  # type: ignore[call-overload]
    # Of an older version, torch would give some operators their older meaning.
    writer.set_min_version(next(int(records.get_record(name)) for name in VERSIONS if name in names))
    for name in names:
        if name not in OF_THE_WRITER and not name.endswith(".debug_pkl"):
            record = records.get_record(name)
            writer.write_record(name, record, len(record))
    writer.write_end_of_file()
    if destination.error is not None:
        raise destination.error


def _kinds(block: Any) -> list[str]:
    """The operators of a graph and of its blocks (loops and branches)."""
    kinds = []
    for node in block.nodes():
        kinds.append("^" + node.pyname() if node.kind() == "prim::PythonOp" else node.kind())
        for inner in node.blocks():
            kinds.extend(_kinds(inner))
    return kinds


def is_own(path: Path) -> bool:
    """True for a file of `write`."""
    return holds_metadata(path)


def takes_no_rows() -> bool:
    """Whether a file reads a batch of no rows."""
    return True


def open_file(path: Path) -> Callable[..., Any]:
    """The file as a function of the module's arguments, on the CPU."""
    module = torch.jit.load(str(path), map_location="cpu")

    def call(*arguments: Any) -> Any:
        with torch.no_grad():
            return module(*arguments)

    return call
