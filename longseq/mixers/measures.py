"""Measures of a scan that mixers report (see `Mixer.observe`)."""

from __future__ import annotations

from torch import Tensor


def mean_norm(memory: Tensor | None) -> Tensor:
    """The Frobenius norm of memories `[B, ..., K, V]`, or the norm of `[B, D]`, averaged over batch and heads."""
    assert memory is not None  # watched scans have a memory
    return memory.flatten(max(1, memory.ndim - 2)).norm(dim=-1).mean()


def saturation(gate: Tensor, mask: Tensor | None = None) -> Tensor:
    """Share of gate values `[B, T, ...]` below 0.01 or above 0.99, over the real tokens."""
    gate = gate if mask is None else gate[mask]
    return ((gate < 0.01) | (gate > 0.99)).float().mean()
