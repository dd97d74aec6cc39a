"""The task to which an option of a configuration group belongs."""

from __future__ import annotations

from pathlib import Path

import yaml

import longseq.conf

CONF = Path(longseq.conf.__file__).parent

# The task of options that say nothing of it by the defaults that they extend.
TASKS = {
    "lm": {"model": ("token",), "scale": ("1m", "10m", "30m", "110m", "340m", "1.3b", "2.7b"), "callbacks": ("lm",)},
    "document": {
        "model": ("document", "documents", "document_pair", "linear"),
        "scale": ("document", "documents"),
        "callbacks": ("document",),
    },
    "probe": {"data": ("state_tracking",), "scale": ("probe",), "callbacks": ("probe",)},
}


def task_of(group: str, option: str) -> str:
    for task, options in TASKS.items():
        if option in options.get(group, ()):
            return task
    path = CONF / group / f"{option}.yaml"
    first = ((yaml.safe_load(path.read_text()) or {}).get("defaults") or [""])[0] if path.is_file() else ""
    if str(first).startswith("base_"):
        return str(first).removeprefix("base_")
    return task_of(group, first) if group in ("data", "recipe") and first else "image"
