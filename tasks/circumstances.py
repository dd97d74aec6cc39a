"""The machine: the device of a command, and the circumstances of a measurement."""

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


def choose_device(name: str) -> torch.device:
    """The device of a name; `auto` is the first GPU, or the CPU without one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def find_circumstances(device: torch.device) -> dict[str, Any]:
    """Commit (None if unknown), date, processor, GPU (of a CUDA device) and versions of Python and of PACKAGES."""
    found: dict[str, Any] = {
        "commit": find_commit(),
        "date": datetime.date.today().isoformat(),
        "processor": f"{_processor()}, {os.cpu_count()} cores",
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {**found, "versions": versions}


def find_commit() -> str | None:
    """The commit of these sources and its time; "+" follows the hash if files differ from the commit."""
    here = Path(__file__).resolve()
    # An untracked file is part of an installed package inside another repository.
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    commit = _git(here.parent, "log", "-1", "--format=%h %cI")
    changed = _git(here.parent, "status", "--porcelain", "--untracked-files=no")
    return commit.replace(" ", "+ ", 1) if commit and changed else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        if line.startswith("model name"):
            return " ".join(line.split(":", 1)[1].split())
    return platform.processor() or platform.machine()


def describe(measured: Mapping[str, Any]) -> str:
    """The results of `find_circumstances` in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in measured["versions"].items())
    parts = [measured.get("gpu"), measured["processor"]]
    if (threads := measured.get("threads")) is not None:
        parts.append("1 thread" if threads == 1 else f"{threads} threads")
    commit = f"commit {(measured['commit'] or 'unknown').split()[0]}"
    return "; ".join([*filter(None, parts), versions, commit, measured["date"]])
