"""torch's tracers and its ONNX exporter, without work that changes no result."""

from __future__ import annotations

import functools
import importlib
import typing
from types import SimpleNamespace
from typing import Any
from unittest import mock

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


def differentiate_without_threads() -> None:
    """On a machine without a GPU, start torch's autograd before a test pretends that there is one.

    It starts once, with a thread for each GPU that torch counts then; with such threads, no fork can differentiate.
    """
    if not torch.cuda.is_available():
        torch.ones((), requires_grad=True).backward()


def read_programs_faster() -> None:
    """Look up once what torch looks up for each part of each node of a file that it reads, a third of the time.

    These are the types of the fields of its classes, and SymPy's names, which an expression for a size may contain. The
    modules are looked for when the first file is read, because they are slow to import.
    """
    load = torch.export.load

    @functools.wraps(load)
    def load_with_kept_names(*args: Any, **kwargs: Any) -> Any:
        _keep_names()
        return load(*args, **kwargs)

    torch.export.load = load_with_kept_names


@functools.cache
def _keep_names() -> None:
    hints: dict[Any, dict[str, Any]] = {}

    def find_hints_once(cls: Any, **names: Any) -> dict[str, Any]:
        if cls not in hints:
            hints[cls] = typing.get_type_hints(cls, **names)
        return hints[cls]

    classes = importlib.import_module("torch._export.serde.serialize")
    classes.typing = SimpleNamespace(**{**vars(typing), "get_type_hints": find_hints_once})  # type: ignore[attr-defined]

    sympy = importlib.import_module("sympy.parsing.sympy_parser")
    parse, names = sympy.parse_expr, {}
    with mock.patch.object(sympy, "eval_expr", lambda code, local, every: names.update(every)):
        parse("0")
    sympy.parse_expr = lambda *args, **kwargs: parse(*args, **{"global_dict": dict(names), **kwargs})
