"""The torch.export program of a model, from which the onnx and pt2 formats are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map, tree_structure, tree_unflatten


def capture(
    module: nn.Module,
    example: tuple[Any, ...],
    axes: Sequence[Mapping[int, str]],
    largest: Mapping[str, int] = MappingProxyType({}),
) -> torch.export.ExportedProgram:
    """Trace `module` with the named axes symbolic; torch.export raises an error for an axis that the model fixes.

    `example` holds the arguments; `axes` names the open axes of its tensors, in order; `largest` bounds axes by name.
    The reset removes guards of an earlier trace, which would turn an open axis of this one into a constant. Gradients
    are off, because scans cannot be traced with them. The arguments are copied: for a view, torch.export would also
    compare the size of its base, which later arguments do not have.
    """
    torch._dynamo.reset()
    example = tree_map(torch.clone, example)
    sizes: Any = torch.export.Dim.DYNAMIC
    dims = [{axis: sizes(max=largest.get(name)) for axis, name in open_axes.items()} for open_axes in axes]
    shapes = arrange(dims, example)
    with torch.no_grad():
        program = torch.export.export(module, example, dynamic_shapes=shapes)
    for graph_module in program.graph_module.modules():
        if isinstance(graph_module, torch.fx.GraphModule):
            for node in graph_module.graph.nodes:
                node.meta.pop("stack_trace", None)  # it has source lines and paths of this machine
    return program


def arrange(values: Sequence[Any], example: tuple[Any, ...]) -> Any:
    """The values as `example` arranges its tensors: some by themselves, some in lists."""
    return tree_unflatten(values, tree_structure(example))
