"""TorchScript: traced and frozen, for torch (Python or C++) without longseq."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from longseq.tools.export.metadata import EXTRA_FILE, holds_metadata
from longseq.tools.export.spec import FileSpec

__all__ = ["is_own", "open_file", "write"]


def write(module: nn.Module, example: tuple[Any, ...], path: Path, spec: FileSpec) -> Counter[str]:
    """Write `module` to `path`; the metadata is the JSON of the extra file `longseq.json`.

    Returns how often the file uses each operator.
    """
    with torch.no_grad():  # strict=True refuses lists of tensors as results
        traced = torch.jit.freeze(torch.jit.trace(module, example, check_trace=False, strict=False))
    foreign = {kind for kind in _kinds(traced.inlined_graph) if not kind.startswith(("aten::", "prim::"))}
    if foreign:
        raise RuntimeError(f"the trace calls {', '.join(sorted(foreign))}, which other processes lack")
    with path.open("wb") as file:  # given a name, torch ends the whole process where the disk is full
        torch.jit.save(traced, file, _extra_files={EXTRA_FILE: json.dumps(dict(spec.metadata))})
    written = torch.jit.load(str(path)).inlined_graph  # loading removes some of what was traced
    return Counter(kind for kind in _kinds(written) if kind != "prim::Constant")


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


def open_file(path: Path) -> Callable[..., Any]:
    """The file as a function of the module's arguments, on the CPU."""
    module = torch.jit.load(str(path), map_location="cpu")

    def call(*arguments: Any) -> Any:
        with torch.no_grad():
            return module(*arguments)

    return call
