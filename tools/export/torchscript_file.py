"""TorchScript: traced and frozen, for torch (Python or C++) without longseq."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from longseq.tools.export.metadata import EXTRA_FILE
from longseq.tools.export.spec import FileSpec


def write(module: nn.Module, example: tuple[Any, ...], path: Path, spec: FileSpec) -> None:
    """Write `module` to `path`; the metadata is the JSON of the extra file `longseq.json`."""
    with torch.no_grad():  # strict=True refuses lists of tensors as results
        traced = torch.jit.freeze(torch.jit.trace(module, example, check_trace=False, strict=False))
    torch.jit.save(traced, str(path), _extra_files={EXTRA_FILE: json.dumps(dict(spec.metadata))})


def open_file(path: Path) -> Callable[..., Any]:
    """The file as a function of the module's arguments, on the CPU."""
    return torch.no_grad()(torch.jit.load(str(path), map_location="cpu").forward)
