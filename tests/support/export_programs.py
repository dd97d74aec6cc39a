"""One program of torch.export for the two formats that begin with it, and the runtimes that files need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnxruntime
import pytest
import torch
from packaging.version import Version
from torch import nn

from longseq.tools.export import formats, onnx_file, pt2_file
from longseq.tools.export.graph import capture
from longseq.tools.export.operators import FIRST_RUNTIME

# Formats that the extras of the tests can run, and those of engines that are no extra.
SUFFIXES = {name: formats.SUFFIXES[name] for name in ("onnx", "torchscript", "pt2")}
ENGINES = ("executorch", "openvino")


def share_program(patch: pytest.MonkeyPatch) -> None:
    """Let the formats onnx and pt2 of one model share the program, whose capture takes most of the time."""
    programs: list[torch.export.ExportedProgram] = []

    def capture_once(
        module: nn.Module, example: tuple[Any, ...], axes: Sequence[Mapping[int, str]]
    ) -> torch.export.ExportedProgram:
        if not programs:
            programs.append(capture(module, example, axes))
        return programs[0]

    for format in (onnx_file, pt2_file):
        patch.setattr(format, "capture", capture_once)


def need_operators(choice: str) -> None:
    """Skip a test if this onnxruntime does not have the operators that an export with operators=`choice` writes."""
    if Version(onnxruntime.__version__) < Version(FIRST_RUNTIME[choice]):
        pytest.skip(f"operators={choice} needs onnxruntime {FIRST_RUNTIME[choice]}")


def need_engine(name: str) -> str:
    """The suffix of an engine's files. Skip a test where the engine is not installed."""
    pytest.importorskip(name)
    return formats.SUFFIXES[name]
