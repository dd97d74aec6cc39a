"""pt2: the torch.export program, for torch without longseq, and the input of AOTInductor."""

from __future__ import annotations

import inspect
import io
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
from torch.utils._pytree import tree_leaves
from torch.utils._sympy.value_ranges import ValueRanges

from longseq.tools.export.graph import call_nodes, capture, foreign_operators
from longseq.tools.export.metadata import EXTRA_FILE, holds_metadata
from longseq.tools.export.spec import FileSpec

__all__ = ["is_own", "open_file", "takes_no_rows", "write"]


def write(module: nn.Module, example: tuple[Any, ...], path: Path, spec: FileSpec) -> Counter[str]:
    """Write `module` to `path`; the metadata is the JSON of the extra file `longseq.json`.

    Returns how often the file uses each operator.
    """
    program = capture(module, example, list(spec.inputs.values()))
    _open_sizes(program, module, spec.reads)
    foreign = foreign_operators(program)
    if foreign:
        raise RuntimeError(f"the program calls {', '.join(sorted(foreign))}, which other processes lack")
    # In memory first: given a name or an open file, torch ends the whole process where the disk is full.
    content = io.BytesIO()
    torch.export.save(program, content, extra_files={EXTRA_FILE: json.dumps(dict(spec.metadata))})
    path.write_bytes(content.getbuffer())
    return Counter(str(node.target) for node in call_nodes(program))


def _open_sizes(program: Any, module: nn.Module, reads: Sequence[tuple[Any, ...]]) -> None:
    """Remove what a program demands of its sizes and `reads`, arguments that the model takes, do not have.

    Torch demands that sizes are alike in the traced call and in later ones where it chooses how a tensor lies in memory
    and whether an axis has one entry. That leaves the operators right: for no rows, one row and one patch, they compute
    the same. The export compares the file with the model on these arguments, because such a demand may also come from a
    branch of the model. Demands that `reads` meet stay, as that of a model for whole patches.
    """
    signature = inspect.signature(module.forward)
    inputs = [signature.bind(*arguments).arguments for arguments in reads]
    program._guards_code = [
        demand
        for demand in getattr(program, "_guards_code", [])  # torch 2.9 has none
        if all(_is_met(demand, sizes) for sizes in inputs)
    ]
    names, ranges = set(program.graph_signature.user_inputs), program.range_constraints
    traced = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder" and node.name in names]
    for arguments in reads:
        for tensor, symbolic in zip(tree_leaves(arguments), traced, strict=True):
            for size, axis in zip(tensor.shape, symbolic.shape, strict=True):
                known = ranges.get(axis.node.expr) if isinstance(axis, torch.SymInt) else None
                if known is not None and size < known.lower:
                    ranges[axis.node.expr] = ValueRanges(size, known.upper)


def _is_met(demand: str, inputs: dict[str, Any]) -> bool:
    """Whether the arguments have the sizes of a demand: code of torch, such as L['images'].size()[2] >= 32."""
    try:
        return bool(eval(demand, {**SYMPY_INTERP, "L": inputs}))
    except ZeroDivisionError:  # a remainder of a size that is 0
        return False


def is_own(path: Path) -> bool:
    """True for a file of `write`."""
    return holds_metadata(path)


def takes_no_rows() -> bool:
    """Whether a file reads a batch of no rows."""
    return True


def open_file(path: Path) -> Callable[..., Any]:
    """The file as a function of the module's arguments, on the CPU."""
    module = torch.export.load(path).module()

    def call(*arguments: Any) -> Any:
        with torch.no_grad():
            return module(*arguments)

    return call
