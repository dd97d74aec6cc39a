"""The file of launches that `longseq benchmark tune` writes, and that LONGSEQ_LAUNCHES names for the Triton kernels.

{"gpu": ..., "capability": [9, 0], "versions": {...}, "date": ..., "command": ..., "rows": [...],
 "launches": [{"op": "delta_rule", "bytes": 2, "width": 64, "kernel": "prepare",
               "launch": {"block": 64, "step": 0, "warps": 4, "stages": 1, "registers": null}, ...}, ...]}
"""

import json
import os
from pathlib import Path
from typing import Any

LAUNCHES_VARIABLE = "LONGSEQ_LAUNCHES"


def file_of_launches() -> Path | None:
    """The file that the environment names."""
    name = os.environ.get(LAUNCHES_VARIABLE)
    return Path(name) if name else None


# What a row of the file holds, and its launch.
_ROW = {"op": str, "bytes": int, "width": int, "kernel": str, "launch": dict}
_LAUNCH = {"block": int, "step": int, "warps": int, "stages": int}
_OPTIONAL = {"registers": int | None}


def read_launches(file: Path) -> dict[str, Any]:
    """What a file of launches holds. Raises ValueError for a file that is none."""
    remedy = f"write one with `longseq benchmark tune output={file}`, or unset {LAUNCHES_VARIABLE}"
    try:
        held = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{LAUNCHES_VARIABLE}={file} cannot be read ({error}): {remedy}") from None
    if not isinstance(held, dict) or not isinstance(held.get("launches"), list) or "capability" not in held:
        raise ValueError(f"{LAUNCHES_VARIABLE}={file} holds no launches with their capability: {remedy}")
    for number, row in enumerate(held["launches"]):
        if fault := _find_fault(row):
            raise ValueError(f"{LAUNCHES_VARIABLE}={file}, launches[{number}]{fault}: {remedy}")
    return held


def is_about_launches(error: Exception) -> bool:
    """Whether an error is that a file of launches, which the environment names, does not fit."""
    return isinstance(error, ValueError) and str(error).startswith(f"{LAUNCHES_VARIABLE}=")


def _find_fault(row: Any) -> str | None:
    """What is wrong with a row of the file, if anything is."""
    if not isinstance(row, dict):
        return f" is {row!r}, but must be an object"
    if fault := _find_wrong(row, _ROW):
        return fault
    launch = row["launch"]
    for name in launch:
        if name not in _LAUNCH | _OPTIONAL:
            return f".launch has {name!r}, which no launch has"
    fault = _find_wrong(launch, {**_LAUNCH, **{name: kind for name, kind in _OPTIONAL.items() if name in launch}})
    return fault and f".launch{fault}"


def _find_wrong(held: dict[str, Any], kinds: dict[str, Any]) -> str | None:
    """The first name that is missing, or that holds something else."""
    for name, kind in kinds.items():
        if name not in held:
            return f" has no {name!r}"
        if not isinstance(held[name], kind):
            return f" has {name!r}: {held[name]!r}"
    return None
