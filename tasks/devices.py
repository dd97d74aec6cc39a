"""The device that a command runs on."""

from __future__ import annotations

import torch


def choose_device(name: str) -> torch.device:
    """The device of a name; `auto` is the first GPU, or the CPU without one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)
