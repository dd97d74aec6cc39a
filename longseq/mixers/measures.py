"""Measures of a scan that mixers report (see `Mixer.observe`)."""

from __future__ import annotations

from torch import Tensor


def mean_norm(memory: Tensor | None) -> Tensor:
    """The Frobenius norm of memories `[B, ..., K, V]`, or the norm of `[B, D]`, averaged over batch and heads.

    Scans that are watched have a memory.
    """
    assert memory is not None
    return memory.flatten(max(1, memory.ndim - 2)).norm(dim=-1).mean()


def token_mean(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean of `x [B, T, ...]` over the real tokens, which `mask [B, T]` marks."""
    return (x if mask is None else x[mask]).mean()


def saturation(gate: Tensor, mask: Tensor | None = None) -> Tensor:
    """Share of gate values `[B, T, ...]` in [0, 1] that are below 0.01 or above 0.99, over the real tokens."""
    return token_mean(((gate < 0.01) | (gate > 0.99)).float(), mask)
