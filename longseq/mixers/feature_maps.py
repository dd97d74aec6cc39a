"""Elementwise maps of queries and keys."""

from __future__ import annotations

from torch.nn import functional

FEATURE_MAPS = {
    "silu": functional.silu,
    "relu": functional.relu,
    "relu_squared": lambda x: functional.relu(x).square(),
    "identity": lambda x: x,
}


def check_feature_map(name: str) -> None:
    """Raise ValueError for a name that is not in `FEATURE_MAPS`."""
    if name not in FEATURE_MAPS:
        raise ValueError(f"feature_map {name!r} is not one of {', '.join(FEATURE_MAPS)}")
