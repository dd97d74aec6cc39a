"""Results of a benchmark: JSON rows with their circumstances, and a Markdown table of them."""

from __future__ import annotations

import json
import os
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from longseq.files import Kind, check_place, check_replaced, json_keys, replacing
from longseq.tasks.circumstances import describe, find_circumstances
from longseq.tasks.training.options import Length

ROWS = Kind("rows of a benchmark", lambda path: {"what", "command", "rows"} <= json_keys(path))

# The type of a benchmark's key `dtypes`.
Dtypes = Annotated[list[Literal["bfloat16", "float16", "float32"]], Length(1)]


def find_device(name: str) -> torch.device:
    """The device of a configuration; "auto" is the first GPU, or the CPU."""
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


def check_names(key: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raise ValueError for a name of the list `key` that is not in `known`."""
    for name in names:
        if name not in known:
            raise ValueError(f"{key} has {name!r}: choose from {', '.join(known)}")


def is_emulated() -> bool:
    """True if Triton's kernels run in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1" and not torch.cuda.is_available()


def make_result(
    what: str, rows: Sequence[Mapping[str, Any]], device: torch.device, notes: Sequence[str] = ()
) -> dict[str, Any]:
    """Rows with their hardware, the command, and notes for their reader."""
    return {
        "what": what,
        "command": command_line(),
        "kind": "speed",
        "rows": add_circumstances(rows, device),
        "notes": list(notes),
    }


def command_line() -> str:
    """The command of this process as its reader would give it: without the folders of its script and its output."""
    script = Path(sys.argv[0]).name
    program = "longseq" if script == "__main__.py" else script  # python -m longseq
    return shlex.join([program, *[word for word in sys.argv[1:] if not word.startswith("output=")]])


def add_circumstances(rows: Sequence[Mapping[str, Any]], device: torch.device) -> list[dict[str, Any]]:
    """The rows, each with `measured`: the commit, the date, the hardware and the versions of this process."""
    measured = find_circumstances(device)
    if device.type == "cpu":
        measured["threads"] = torch.get_num_threads()
    return [{**row, "measured": measured} for row in rows]


def check_output(output: str, kind: Kind | None = ROWS) -> Path:
    """The file for the rows. ValueError, in one line, where it cannot come to stand, or would replace another kind.

    `kind` is None for a command that extends the file and checks its content itself. A table beside the file is
    replaced together with rows; without them, it is not known whose table it is.
    """
    file = Path(output)
    if file.suffix != ".json":
        raise ValueError(f"output={output} is no name for JSON rows: give one that ends in .json")
    for one in (file, _table_beside(file)):
        if one.is_dir():
            raise ValueError(f"output={output}: {one} is a folder: give another name")
    if kind is not None:
        check_replaced(file, "output", kind)
    table = _table_beside(file)
    if kind is ROWS and table.is_file() and not file.is_file():
        raise ValueError(f"output={output}: its table would replace {table}: give another name, or remove that file")
    check_place(file, "output")
    return file


def write_result(result: Mapping[str, Any], output: str) -> Path:
    """Write the rows as JSON and their table beside it, in Markdown."""
    file = Path(output)
    file.parent.mkdir(parents=True, exist_ok=True)
    for path, text in ((file, json.dumps(result, indent=2)), (_table_beside(file), to_markdown(result))):
        with replacing(path) as partial:
            partial.write_text(text + "\n", encoding="utf-8")
    return file


def _table_beside(file: Path) -> Path:
    return file.with_suffix(".md")


def to_markdown(result: Mapping[str, Any]) -> str:
    """One result as a heading, its command, its table, its circumstances and its notes. Lists are left out of the
    table.

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
