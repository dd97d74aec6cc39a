"""pt2: the torch.export program, for torch without longseq, and the input of AOTInductor."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
from torch.utils._pytree import tree_leaves
from torch.utils._sympy.value_ranges import ValueRanges

from longseq.tools.export.graph import capture
from longseq.tools.export.metadata import EXTRA_FILE
from longseq.tools.export.spec import FileSpec


def write(module: nn.Module, example: tuple[Any, ...], path: Path, spec: FileSpec) -> None:
    """Write `module` to `path`; the metadata is the JSON of the extra file `longseq.json`."""
    program = capture(module, example, list(spec.inputs.values()))
    _open_sizes(program, module, spec.reads)
    torch.export.save(program, path, extra_files={EXTRA_FILE: json.dumps(dict(spec.metadata))})


def _open_sizes(program: torch.export.ExportedProgram, module: nn.Module, reads: Sequence[tuple[Any, ...]]) -> None:
    """Let the program take the arguments `reads`, which the model takes: remove guards that they do not meet.

    torch guards sizes where it chooses how a tensor lies in memory and whether an axis has one entry. The operators are
    right without these guards, and the export compares the file with the model on these arguments. Guards that `reads`
    meet stay, such as the check of a model for whole patches.
    """
    signature = inspect.signature(module.forward)
    inputs = [signature.bind(*arguments).arguments for arguments in reads]
    program._guards_code = [
        guard
        for guard in getattr(program, "_guards_code", [])  # torch 2.9 has none
        if all(_is_met(guard, sizes) for sizes in inputs)
    ]
    names, ranges = set(program.graph_signature.user_inputs), program.range_constraints
    traced = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder" and node.name in names]
    for arguments in reads:
        for tensor, symbolic in zip(tree_leaves(arguments), traced, strict=True):
            for size, axis in zip(tensor.shape, symbolic.shape, strict=True):
                known = ranges.get(axis.node.expr) if isinstance(axis, torch.SymInt) else None
                if known is not None and size < known.lower:
                    ranges[axis.node.expr] = ValueRanges(size, known.upper)


def _is_met(guard: str, inputs: dict[str, Any]) -> bool:
    """Whether the arguments meet a guard: code of torch, such as L['images'].size()[2] >= 32."""
    try:
        return bool(eval(guard, {**SYMPY_INTERP, "L": inputs}))
    except ZeroDivisionError:  # a remainder of a size that is 0
        return False


def open_file(path: Path) -> Callable[..., Any]:
    """The file as a function of the module's arguments, on the CPU."""
    return torch.no_grad()(torch.export.load(path).module())
