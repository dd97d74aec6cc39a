"""The file of launches that `longseq benchmark tune` writes, and that LONGSEQ_LAUNCHES names for the Triton kernels.

{"launches": [{"op": "delta_rule", "capability": [9, 0], "bytes": 2, "width": 64, "kernel": "prepare",
               "launch": {"block": 64, "step": 0, "warps": 4, "stages": 1, "registers": null}, "run": 0}, ...],
 "rows": [{"op": "delta_rule", "capability": [9, 0], ..., "milliseconds": {...}, "kept": true, "run": 0}, ...],
 "runs": [{"gpu": ..., "command": ..., "versions": {...}, "date": ...}, ...]}

An entry of "launches" is about one kernel on one family of GPUs: `op` is the folder of the kernel's table, `capability`
the family (null: Triton's interpreter), and `launch` has the fields of the table's entries. Kernels take the launches
of the present GPU and ignore the others. "rows" are the candidates that were measured. "runs" are the runs of `tune`
that wrote to the file, each with its circumstances; the `run` of a row is the number of its run, from 0. A candidate is
under "trying" while it is tried, so that the file still names it if it ends the process.
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


# The fields of a row of the file, and their types.
_ROW = {"op": str, "capability": list | None, "bytes": int, "width": int, "kernel": str, "launch": dict, "run": int}


def named_file(file: Path) -> tuple[str, str]:
    """The name of the environment's file in errors, and the remedy that errors state."""
    remedy = f"write one with `longseq benchmark tune output=NEW.json`, or unset {LAUNCHES_VARIABLE}"
    return f"{LAUNCHES_VARIABLE}={file}", remedy


def read_launches(file: Path, name: str, remedy: str) -> dict[str, Any]:
    """The contents of a file of launches. Raises ValueError with `name` and `remedy` for a file of another format."""
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
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
    """Whether an error states that the file of launches named by the environment does not fit."""
    return isinstance(error, ValueError) and str(error).startswith(f"{LAUNCHES_VARIABLE}=")


def find_misfit(entry: Any, kernel: str, launch: dict[str, Any]) -> str | None:
    """The reason why a launch cannot replace a kernel's entry in a table; None if it can."""
    kinds = get_type_hints(type(entry))
    for name in launch:
        if name not in kinds:
            return f" has {name!r}, which no such launch has"
    if fault := _find_wrong({**entry._field_defaults, **launch}, kinds):
        return fault
    fault = type(entry)(**launch).find_fault(kernel)
    return fault and f" has {fault}"


def _find_fault(row: Any, runs: int) -> str | None:
    """The fault of a row of the file; None if there is none."""
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
    """The first name of `kinds` that is missing or has a value of another type, as the end of an error."""
    for name, kind in kinds.items():
        if name not in held:
            return f" has no {name!r}"
        if not isinstance(held[name], kind):
            return f" has {name!r}: {held[name]!r}"
    return None
