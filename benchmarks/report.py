"""Results of a benchmark: JSON rows with their circumstances, and a Markdown table of them."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from longseq.tasks.circumstances import describe, find_circumstances


def add_common_arguments(parser: argparse.ArgumentParser, *, seconds: float, output: str) -> None:
    """Add the arguments that every benchmark has."""
    parser.add_argument("--device", type=find_device, default="auto", help="cpu or cuda; auto: the GPU if there is one")
    parser.add_argument("--seconds", type=float, default=seconds, help="time for measuring each figure")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmark", output), help="JSON file of the rows")


def find_device(name: str) -> torch.device:
    """The device of this name; "auto" is the first GPU, or the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def is_emulated() -> bool:
    """True if Triton's kernels run in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1" and not torch.cuda.is_available()


def make_result(
    what: str, rows: Sequence[Mapping[str, Any]], device: torch.device, notes: Sequence[str] = ()
) -> dict[str, Any]:
    """Rows with their hardware, the command, and notes for their reader."""
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    command = re.sub(r" --(output|cache)[= ]\S+", "", command)  # places on this machine
    return {
        "what": what,
        "command": command,
        "kind": "speed",
        "rows": add_circumstances(rows, device),
        "notes": list(notes),
    }


def add_circumstances(rows: Sequence[Mapping[str, Any]], device: torch.device) -> list[dict[str, Any]]:
    """The rows, each with `measured`: the commit, the date, the hardware and the versions of this process."""
    measured = find_circumstances(device)
    if device.type == "cpu":
        measured["threads"] = torch.get_num_threads()
    return [{**row, "measured": measured} for row in rows]


def write_result(result: Mapping[str, Any], file: Path) -> None:
    """Write the rows as JSON and their table next to it, in Markdown."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    file.with_suffix(".md").write_text(to_markdown(result) + "\n", encoding="utf-8")


def to_markdown(result: Mapping[str, Any]) -> str:
    """One result as a heading, its command, its table, its circumstances and its notes, without columns of lists.

    A cell that is a mapping has the value of each seed; the table shows their mean and standard deviation.
    """
    rows = result["rows"]
    columns = [
        column
        for column in dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, list))
        if column != "measured"
    ]
    surroundings = describe_circumstances(rows)
    several = len(surroundings) > 1
    heading = [*(column.replace("_", " ") for column in columns), *(["measured"] if several else [])]
    lines = [f"## {result['what']}\n", f"`{result['command']}`\n"]
    if surroundings and not several:
        lines.append(f"Measured on {next(iter(surroundings))}.\n")
    lines += ["| " + " | ".join(heading) + " |", "|" + "---|" * len(heading)]
    for row in rows:
        cells = [format_cell(row.get(column)) for column in columns]
        lines.append("| " + " | ".join([*cells, *([surroundings[_describe(row)]] if several else [])]) + " |")
    lines.append("")
    if several:
        lines += [f"- Measured {letter}: {text}." for text, letter in surroundings.items()]
    lines += [f"- {note}" for note in result.get("notes", [])]
    return "\n".join(lines)


def describe_circumstances(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The different circumstances of the rows in words, each with a letter."""
    texts = dict.fromkeys(_describe(row) for row in rows if row.get("measured"))
    return {text: chr(ord("a") + number) for number, text in enumerate(texts)}


def _describe(row: Mapping[str, Any]) -> str:
    return describe(row["measured"]) if row.get("measured") else ""


def format_cell(value: Any) -> str:
    """A cell of a Markdown table."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        each = ", ".join(str(one) for one in value.values())
        return each if len(value) == 1 else f"{format_mean(value)} ({each})"
    return str(value).replace("|", "\\|")


def format_mean(values: Mapping[str, float]) -> str:
    """The mean over the seeds, with the standard deviation of several."""
    numbers = list(values.values())
    spread = f" ± {statistics.stdev(numbers):.3f}" if len(numbers) > 1 else ""
    return f"{statistics.fmean(numbers):.3f}{spread}"
