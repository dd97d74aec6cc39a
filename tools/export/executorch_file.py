"""ExecuTorch: a program for phones and other devices, whose CPU computes it with XNNPACK."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from longseq.tools.export.graph import capture
from longseq.tools.export.spec import FileSpec

# A program plans its memory for these sizes of open axes. ExecuTorch 1.5 bounds batches of convolutions by 15.
LARGEST = {"batch": 8, "length": 1024}


def write(module: nn.Module, example: tuple[Any, ...], path: Path, spec: FileSpec) -> dict[str, Any]:
    """Write `module` to `path`, for at most `LARGEST` rows and tokens; returns these as metadata.

    The program itself holds no metadata: they are in FILE.json.
    """
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    axes = list(spec.inputs.values())
    program = capture(module, example, axes, LARGEST)
    config = EdgeCompileConfig(_check_ir_validity=False)  # the check of ExecuTorch 1.5 fixes open sizes
    lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()], compile_config=config)
    path.write_bytes(lowered.to_executorch().buffer)
    names = {name for open_axes in axes for name in open_axes.values()}
    return {"largest": {name: size for name, size in LARGEST.items() if name in names}}


def open_file(path: Path) -> Callable[..., Any]:
    """The file as a function of tensors and lists of tensors, run by ExecuTorch on the CPU, in parts of a batch."""
    try:
        from executorch.runtime import Runtime
    except ModuleNotFoundError as error:
        raise ImportError("pte files need executorch: pip install executorch") from error

    method = Runtime.get().load_program(path).load_method("forward")
    assert method is not None

    def call(*arguments: Any) -> Any:
        parts = zip(*(tensor.contiguous().split(LARGEST["batch"]) for tensor in tree_leaves(arguments)), strict=True)
        results = [method.execute(part) for part in parts]
        first, *others = map(torch.cat, zip(*results, strict=True))
        return (first, others) if others else first

    return call
