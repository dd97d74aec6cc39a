"""The outcome of an export, and its summary for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from longseq.tools.export.parity import Comparison


@dataclass(frozen=True)
class ExportReport:
    """The written file and its comparison with the model.

    `unit`: an item of a batch: image, token or document. `beside`: files that `path` needs in its folder. `size`: the
    bytes of all files. Latencies are medians of one call at batch size 1 on this CPU. `shrunk`: what float16 or int8
    changed, after the comparison and the latencies were measured.
    """

    path: Path
    beside: Sequence[Path]
    format: str
    unit: str
    seconds: float
    size: int
    comparisons: Sequence[Comparison]
    metadata: Mapping[str, Any]
    model_ms: float | None = None
    file_ms: float | None = None
    shrunk: str | None = None

    def print(self) -> None:
        """Print the comparison as a table and the facts about the file below it."""
        console = Console(soft_wrap=True, highlight=False, markup=False)
        table = Table(title=Text(f"{self.path.name} against the model"), title_justify="left")
        for heading in (f"{self.unit}s", "max |difference|", "allowed", "model's rounding", "same top-1"):
            table.add_column(heading, justify="right")
        for row in self.comparisons:
            shape = " x ".join(str(size) for size in row.shape)
            table.add_row(shape, f"{row.difference:.1e}", f"{row.limit:.1e}", f"{row.rounding:.1e}", f"{row.top1:.0%}")
        console.print(table)
        if self.model_ms is not None and self.file_ms is not None:
            console.print(f"one {self.unit}: model {self.model_ms:.1f} ms, file {self.file_ms:.1f} ms")
        size = f"{self.size / 2**20:.1f} MiB"
        console.print(f"{self.format}: {self.path} ({size}, written and checked in {self.seconds:.0f} s)")
        if self.shrunk is not None:
            console.print(self.shrunk)
        if (nodes := self.metadata.get("operators")) is not None:
            named = ", ".join(f"{count} {name}" for name, count in nodes.items()) or "none"
            domain, runtime = self.metadata["operators_domain"], self.metadata["onnxruntime"]
            console.print(f"operators of {domain}: {named}; for onnxruntime {runtime} or later")
        if "preparation" in self.metadata:
            prepare, source = self.metadata["preparation"], self.metadata["source"]
            console.print(f"warning: the file needs texts that are prepared as data.source={source} does: {prepare}")
        for path in self.beside:
            console.print(f"its weights: {path}; keep it in the folder of {self.path.name}")
