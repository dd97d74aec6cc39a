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


def read_launches(file: Path) -> dict[str, Any]:
    """What a file of launches holds. Raises ValueError for a file that is none."""
    remedy = f"write one with `longseq benchmark tune output={file}`, or unset {LAUNCHES_VARIABLE}"
    try:
        held = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{LAUNCHES_VARIABLE}={file} cannot be read ({error}): {remedy}") from None
    if not isinstance(held, dict) or not isinstance(held.get("launches"), list) or "capability" not in held:
        raise ValueError(f"{LAUNCHES_VARIABLE}={file} holds no launches with their capability: {remedy}")
    return held
