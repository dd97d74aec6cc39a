"""OpenVINO: a graph in FILE.xml with its weights in FILE.bin, for Intel's processors and others."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from longseq.tools.export import onnx_file
from longseq.tools.export.spec import FileSpec


def write(module: nn.Module, example: tuple[Any, ...], path: Path, spec: FileSpec) -> None:
    """Write `module` to `path` from its ONNX file; the metadata is the JSON `longseq` in the graph's `rt_info`."""
    import openvino

    with TemporaryDirectory() as folder:
        source = Path(folder, "model.onnx")
        onnx_file.write(module, example, source, replace(spec, operators="standard"))
        model = openvino.Core().read_model(source)
        model.set_rt_info(json.dumps(dict(spec.metadata)), "longseq")
        openvino.save_model(model, path, compress_to_fp16=False)


def open_file(path: Path) -> Callable[..., Any]:
    """The file as a function of tensors and lists of tensors, run by OpenVINO on the CPU.

    It chooses the number of threads: with one, OpenVINO 2026.4 loses errors and gives the results of an earlier call.
    """
    try:
        import openvino
    except ModuleNotFoundError as error:
        raise ImportError("OpenVINO files need openvino: pip install openvino") from error

    compiled = openvino.compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def call(*arguments: Any) -> Any:
        results = compiled([tensor.numpy() for tensor in tree_leaves(arguments)])
        first, *others = [torch.from_numpy(result) for result in results.values()]
        return (first, others) if others else first

    return call
