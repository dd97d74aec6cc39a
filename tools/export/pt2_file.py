"""pt2: the torch.export program, for torch without longseq, and the input of AOTInductor."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from longseq.tools.export.graph import call_nodes, capture, foreign_operators
from longseq.tools.export.metadata import EXTRA_FILE, holds_metadata
from longseq.tools.export.spec import FileSpec

__all__ = ["is_own", "open_file", "write"]


def write(module: nn.Module, example: tuple[Any, ...], path: Path, spec: FileSpec) -> Counter[str]:
    """Write `module` to `path`; the metadata is the JSON of the extra file `longseq.json`.

    Returns how often the file uses each operator.
    """
    program = capture(module, example, list(spec.inputs.values()))
    foreign = foreign_operators(program)
    if foreign:
        raise RuntimeError(f"the program calls {', '.join(sorted(foreign))}, which other processes lack")
    # In memory first: given a name or an open file, torch ends the whole process where the disk is full.
    content = io.BytesIO()
    torch.export.save(program, content, extra_files={EXTRA_FILE: json.dumps(dict(spec.metadata))})
    path.write_bytes(content.getbuffer())
    return Counter(str(node.target) for node in call_nodes(program))


def is_own(path: Path) -> bool:
    """True for a file of `write`."""
    return holds_metadata(path)


def open_file(path: Path) -> Callable[..., Any]:
    """The file as a function of the module's arguments, on the CPU."""
    module = torch.export.load(path).module()

    def call(*arguments: Any) -> Any:
        with torch.no_grad():
            return module(*arguments)

    return call
