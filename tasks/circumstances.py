"""The circumstances of a measurement: commit, date, processor, GPU and versions."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "triton", "timm", "lightning", "flash-linear-attention", "mamba-ssm", "transformers")
COMMIT_VARIABLE = "GIT_COMMIT"  # for sources without git: the commit, as `git log -1 --format='%h %cI'` prints it


def find_circumstances(device: torch.device) -> dict[str, Any]:
    """Commit, date, processor, GPU (of a CUDA device) and versions. `commit` is None if it is unknown."""
    found: dict[str, Any] = {
        "commit": find_commit(),
        "date": datetime.date.today().isoformat(),
        "processor": f"{name_processor()}, {os.cpu_count()} cores",
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found | {"versions": find_versions()}


def find_commit() -> str | None:
    """The commit of these sources and its time; "+" follows the hash if files differ from the commit."""
    if told := os.environ.get(COMMIT_VARIABLE):
        return told
    here = Path(__file__).resolve()
    # A file that git does not track belongs to another repository: an installed package inside a project.
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    told = _git(here.parent, "log", "-1", "--format=%h %cI")
    changed = _git(here.parent, "status", "--porcelain", "--untracked-files=no")
    return told.replace(" ", "+ ", 1) if told and changed else told


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def name_processor() -> str:
    """The processor's model, if the system reports it."""
    file = Path("/proc/cpuinfo")
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        if line.startswith("model name"):
            return " ".join(line.split(":", 1)[1].split())
    return platform.processor() or platform.machine()


def find_versions() -> dict[str, str]:
    """The installed versions of the packages that affect speed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def describe(measured: Mapping[str, Any]) -> str:
    """One line with the results of `find_circumstances`."""
    versions = ", ".join(f"{name} {version}" for name, version in measured["versions"].items())
    parts = [measured.get("gpu"), measured.get("processor") or "a processor whose model was not recorded"]
    if (threads := measured.get("threads")) is not None:
        parts.append("1 thread" if threads == 1 else f"{threads} threads")
    if "recorded" in measured:  # measurements from before commits were recorded
        commit = f"recorded in commit {measured['recorded'].split()[0]}"
    else:
        commit = f"commit {(measured['commit'] or 'unknown').split()[0]}"
    return "; ".join([*filter(None, parts), versions, commit, measured["date"]])
