"""What every format writes into a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FileSpec:
    """Names of inputs and outputs in order, the open axes of each input by index, metadata, and the opset of ONNX.

    `operators`: of ONNX; standard, or as in `longseq.tools.export.operators` onnxruntime or opset27.
    `reads`: further arguments that a file must take as the model does, such as an empty batch or small images.
    """

    inputs: Mapping[str, Mapping[int, str]]
    outputs: Sequence[str]
    metadata: Mapping[str, Any]
    opset: int
    reads: Sequence[tuple[Any, ...]] = ()
    operators: str = "standard"
