"""Results of a benchmark: JSON rows with their circumstances, and a table of them in Markdown."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

DTYPES = ("bfloat16", "float16", "float32")
PACKAGES = ("torch", "triton", "timm", "flash-linear-attention", "mamba-ssm", "transformers")


def find_device(name: str) -> torch.device:
    """The device that a configuration asks for; auto is the first GPU, or the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name} is unknown: take auto, cpu or cuda")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise ValueError(f"device={name}: torch sees no GPU here, take auto or cpu")
        if (device.index or 0) >= count:
            raise ValueError(f"device={name}: torch sees {count} GPUs here, counted from 0")
    return device


def find_dtypes(names: Any) -> list[torch.dtype]:
    """The types that a configuration asks for."""
    check_list("dtypes", names, DTYPES)
    return [getattr(torch, name) for name in names]


def check_list(key: str, value: Any, known: Sequence[str] = ()) -> None:
    """Raise ValueError for a value that is no list, or one of nothing, or has a name that is not among the known."""
    if not isinstance(value, list) or not value:
        remedy = f", with names from {', '.join(known)}" if known else ""
        raise ValueError(f"{key}={value} is no list of anything: write {key}=[...]{remedy}")
    for name in value if known else ():
        if name not in known:
            raise ValueError(f"{key} has {name!r}: choose from {', '.join(known)}")


def is_emulated() -> bool:
    """Whether Triton's kernels run in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1" and not torch.cuda.is_available()


def make_result(
    what: str, rows: Sequence[Mapping[str, Any]], device: torch.device, notes: Sequence[str] = ()
) -> dict[str, Any]:
    """Rows with what they were measured on, by which command, and how to read them."""
    return {
        "what": what,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "device": _name_device(device),
        "versions": find_versions(),
        "date": datetime.date.today().isoformat(),
        "rows": list(rows),
        "notes": list(notes),
    }


def _name_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def find_versions() -> dict[str, str]:
    """Versions of what decides a speed, where it is installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def check_output(output: str) -> Path:
    """The file that rows are written to."""
    file = Path(output)
    if file.suffix != ".json":
        raise ValueError(f"output={output} is no name for JSON rows: give one that ends in .json")
    return file


def write_result(result: Mapping[str, Any], output: str) -> Path:
    """Write the rows as JSON and their table beside it, in Markdown."""
    file = check_output(output)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=2) + "\n")
    file.with_suffix(".md").write_text(to_markdown(result) + "\n")
    return file


def to_markdown(result: Mapping[str, Any]) -> str:
    """One result as a heading, its circumstances, its table and its notes. Lists stay in the rows."""
    columns = list(
        dict.fromkeys(key for row in result["rows"] for key, value in row.items() if not isinstance(value, list))
    )
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [
        f"## {result['what']}\n",
        f"`{result['command']}`\n",
        f"{result['device']}, {versions}, {result['date']}.\n",
        "| " + " | ".join(column.replace("_", " ") for column in columns) + " |",
        "|" + "---|" * len(columns),
    ]
    for row in result["rows"]:
        lines.append("| " + " | ".join(_cell(row.get(column)) for column in columns) + " |")
    lines.append("")
    lines += [f"- {note}" for note in result.get("notes", [])]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value).replace("|", "\\|")
