"""The outcome of an export, and its summary for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from longseq.tools.export.parity import Comparison

__all__ = ["ExportReport"]


@dataclass(frozen=True)
class ExportReport:
    """The written file and its comparison with the model; latencies are medians of one call at batch 1 on this CPU.

    `unit` is what a batch holds: image or token. `beside` are files that `path` needs in its folder, and `size` the
    bytes of all. `tolerance` is the one that was asked for.
    """

    path: Path
    beside: Sequence[Path]
    format: str
    unit: str
    seconds: float
    size: int
    nodes: Counter[str]
    comparisons: Sequence[Comparison]
    metadata: Mapping[str, Any]
    tolerance: float
    model_ms: float | None = None
    file_ms: float | None = None

    def print(self, console: Console | None = None) -> None:
        """Print the comparison as a table and the facts about the file below it."""
        console = console or Console()
        table = Table(title=f"{self.path.name} against the model", title_justify="left")
        for heading in (f"{self.unit}s", "max |difference|", "allowed", "model's rounding", "same top-1"):
            table.add_column(heading, justify="right")
        for row in self.comparisons:
            shape = " x ".join(str(size) for size in row.shape)
            table.add_row(shape, f"{row.difference:.1e}", f"{row.limit:.1e}", f"{row.rounding:.1e}", f"{row.top1:.0%}")
        console.print(table)
        if floors := [row.limit for row in self.comparisons if row.is_floor]:
            difference = max(row.difference for row in self.comparisons)
            console.print(
                f"tolerance={self.tolerance:g} is less than float32 keeps of this model: allowed are three times its "
                f"own rounding, {max(floors):.1e}, and the largest difference is {difference:.1e}",
                highlight=False,
                soft_wrap=True,
            )
        if self.model_ms is not None and self.file_ms is not None:
            console.print(f"one {self.unit}: model {self.model_ms:.1f} ms, file {self.file_ms:.1f} ms")
        console.print(
            f"{self.format}: {self.path} ({self.size / 2**20:.1f} MiB, {sum(self.nodes.values())} nodes, "
            f"written and checked in {self.seconds:.0f} s)",
            highlight=False,
            soft_wrap=True,
        )
        if "preparation" in self.metadata:
            console.print(
                f"warning: texts must be prepared as data.source={self.metadata['source']} does before they are given "
                f"to the file: {self.metadata['preparation']}",
                highlight=False,
                soft_wrap=True,
            )
        for path in self.beside:
            console.print(
                f"its weights: {path}; keep it in the folder of {self.path.name}", highlight=False, soft_wrap=True
            )
