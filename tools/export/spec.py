"""The specification of an exported file, for every format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["AXES", "FileSpec"]

# Names of the axes of [batch, channels, height, width] that a file may leave open.
AXES = {0: "batch", 2: "height", 3: "width"}


@dataclass(frozen=True)
class FileSpec:
    """The names of inputs and outputs in order, the inputs' open axes by index, the metadata, and ONNX's opset.

    `reads` holds further arguments of sizes that the file must take, as the model does: no rows, smallest images.
    """

    inputs: Mapping[str, Mapping[int, str]]
    outputs: Sequence[str]
    metadata: Mapping[str, Any]
    opset: int
    reads: Sequence[tuple[Any, ...]] = ()
