"""The specification of an exported file, for every format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["AXES", "FileSpec"]

# Names of the axes of [batch, channels, height, width] that a file may leave open.
AXES = {0: "batch", 2: "height", 3: "width"}


@dataclass(frozen=True)
class FileSpec:
    """The open axes of the input by index, the output's name, the metadata, and ONNX's opset."""

    axes: Mapping[int, str]
    output_name: str
    metadata: Mapping[str, Any]
    opset: int
