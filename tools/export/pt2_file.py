"""pt2: the torch.export program, for torch without longseq, and the input of AOTInductor."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from longseq.tools.export.graph import call_nodes, capture, foreign_operators
from longseq.tools.export.metadata import EXTRA_FILE
from longseq.tools.export.spec import FileSpec

__all__ = ["open_file", "write"]


def write(module: nn.Module, example: Tensor, path: Path, spec: FileSpec) -> Counter[str]:
    """Write `module` to `path`; the metadata is the JSON of the extra file `longseq.json`.

    Returns how often the file uses each operator.
    """
    program = capture(module, example, spec.axes)
    foreign = foreign_operators(program)
    if foreign:
        raise RuntimeError(f"the program calls {', '.join(sorted(foreign))}, which other processes lack")
    torch.export.save(program, path, extra_files={EXTRA_FILE: json.dumps(dict(spec.metadata))})
    return Counter(str(node.target) for node in call_nodes(program))


def open_file(path: Path) -> Callable[[Tensor], Tensor]:
    """The file as a function of images, on the CPU."""
    module = torch.export.load(path).module()

    def call(images: Tensor) -> Tensor:
        with torch.no_grad():
            return module(images)

    return call
