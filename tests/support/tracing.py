"""torch's tracers and its ONNX exporter, without work that changes no result."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch


def leave_out_stack_traces() -> None:
    """Do not note for each node of a graph which lines made it; the one test about those lines asks for them again."""
    importlib.import_module("torch.fx.config").do_not_emit_stack_traces = True


def register_onnx_functions_once() -> None:
    """Build the exporter's table of functions once: it is the same in each export, and takes half a second to build.

    The table is looked for when the first model is exported, because its module is slow to import.
    """
    export = torch.onnx.export

    @functools.wraps(export)
    def export_with_kept_table(*args: Any, **kwargs: Any) -> Any:
        _keep_table()
        return export(*args, **kwargs)

    torch.onnx.export = export_with_kept_table


@functools.cache
def _keep_table() -> None:
    table = importlib.import_module("torch.onnx._internal.exporter._registration").ONNXRegistry
    table.from_torchlib = staticmethod(functools.cache(table.from_torchlib))


def find_operators_once() -> None:
    """Look through torch's table of compound operators once, not dozens of times for each program that is exported."""
    utils = importlib.import_module("torch._export.utils")
    utils._materialize_cpp_cia_ops = functools.cache(utils._materialize_cpp_cia_ops)


def find_no_gpu_once() -> None:
    """On a machine without a GPU, do not look for its driver again for each operation on tensors without values."""
    if not torch.cuda.is_available():
        torch.cuda._cached_device_count = 0
