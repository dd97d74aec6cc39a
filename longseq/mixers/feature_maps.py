"""Elementwise maps of queries and keys."""

from __future__ import annotations

from torch.nn import functional

FEATURE_MAPS = {
    "silu": functional.silu,
    "relu": functional.relu,
    "relu_squared": lambda x: functional.relu(x).square(),
    "identity": lambda x: x,
}
