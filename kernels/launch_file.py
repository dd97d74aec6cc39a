"""The file of launches that `longseq benchmark tune` writes, and that LONGSEQ_LAUNCHES names for the Triton kernels.

{"launches": [{"op": "delta_rule", "capability": [9, 0], "bytes": 2, "width": 64, "kernel": "prepare",
               "launch": {"block": 64, "step": 0, "warps": 4, "stages": 1, "registers": null}, "run": 0}, ...],
 "rows": [{"op": "delta_rule", "capability": [9, 0], ..., "milliseconds": {...}, "kept": true, "run": 0}, ...],
 "runs": [{"gpu": ..., "command": ..., "versions": {...}, "date": ...}, ...]}

A row is about one kernel on one family of GPUs: `op` names the table by the folder of kernels that it stands in,
`capability` the family (null: Triton's interpreter), and `launch` has the fields of the table's entries. Kernels take
the launches of the GPU that is here and pass over the others. "rows" are the candidates that were measured. "runs" are
those of `tune` that wrote to the file, each with its circumstances; `run` is the number of the row's, from 0. While a
candidate is tried it stands under "trying": of one that takes the process with it, it is what is left.
"""

import json
import os
from pathlib import Path
from typing import Any, get_type_hints

LAUNCHES_VARIABLE = "LONGSEQ_LAUNCHES"


def file_of_launches() -> Path | None:
    """The file that the environment names."""
    name = os.environ.get(LAUNCHES_VARIABLE)
    return Path(name) if name else None


# What a row of the file holds.
_ROW = {"op": str, "capability": list | None, "bytes": int, "width": int, "kernel": str, "launch": dict, "run": int}


def named_file(file: Path) -> tuple[str, str]:
    """The file of the environment as errors name it, and what to do about it."""
    remedy = f"write one with `longseq benchmark tune output=NEW.json`, or unset {LAUNCHES_VARIABLE}"
    return f"{LAUNCHES_VARIABLE}={file}", remedy


def read_launches(file: Path, name: str, remedy: str) -> dict[str, Any]:
    """What a file of launches holds. Raises ValueError, with that name and remedy, for a file that is none."""
    try:
        held = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} cannot be read ({error}): {remedy}") from None
    for part in ("launches", "rows", "runs"):
        if not isinstance(held, dict) or not isinstance(held.get(part), list):
            raise ValueError(f"{name} holds no {part}: {remedy}")
    rows = [(f"{part}[{number}]", row) for part in ("launches", "rows") for number, row in enumerate(held[part])]
    if "trying" in held:
        rows.append(("trying", held["trying"]))
    for place, row in rows:
        if fault := _find_fault(row, len(held["runs"])):
            raise ValueError(f"{name}, {place}{fault}: {remedy}")
    return held


def is_about_launches(error: Exception) -> bool:
    """Whether an error is that a file of launches, which the environment names, does not fit."""
    return isinstance(error, ValueError) and str(error).startswith(f"{LAUNCHES_VARIABLE}=")


def find_misfit(entry: Any, kernel: str, launch: dict[str, Any]) -> str | None:
    """Why a launch cannot take the place of a kernel's entry in a table, if it cannot."""
    kinds = get_type_hints(type(entry))
    for name in launch:
        if name not in kinds:
            return f" has {name!r}, which no such launch has"
    if fault := _find_wrong({**entry._field_defaults, **launch}, kinds):
        return fault
    fault = type(entry)(**launch).find_fault(kernel)
    return fault and f" has {fault}"


def _find_fault(row: Any, runs: int) -> str | None:
    """What is wrong with a row of the file, if anything is."""
    if not isinstance(row, dict):
        return f" is {row!r}, but must be an object"
    if fault := _find_wrong(row, _ROW):
        return fault
    capability = row["capability"]
    if capability is not None and (len(capability) != 2 or not all(isinstance(x, int) for x in capability)):
        return f" has 'capability': {capability!r}"
    if not 0 <= row["run"] < runs:
        return f" has 'run': {row['run']}, and there are {runs}"
    fault = _find_wrong(row["launch"], dict.fromkeys(row["launch"], int | None))
    return fault and f".launch{fault}"


def _find_wrong(held: dict[str, Any], kinds: dict[str, Any]) -> str | None:
    """The first name that is missing, or that holds something else."""
    for name, kind in kinds.items():
        if name not in held:
            return f" has no {name!r}"
        if not isinstance(held[name], kind):
            return f" has {name!r}: {held[name]!r}"
    return None
