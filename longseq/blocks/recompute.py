"""Activation checkpointing of a part of a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from longseq.kernels.dispatch import is_exporting

RECOMPUTE = ("none", "mixer", "block")


def check_recompute(recompute: str) -> None:
    """Raise ValueError unless it is one of `RECOMPUTE`.

    none keeps everything that a gradient needs. mixer keeps the matrix products. It recomputes the cheap operations
    between the projections of mixers, and the products of the gated MLPs of language models. block keeps the inputs of
    blocks, and recomputes the blocks.
    """
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute={recompute!r} is not one of {', '.join(RECOMPUTE)}")


def checkpoint_if(enabled: bool, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function`, with activation checkpointing if `enabled`: the backward pass calls it again.

    The second call stops once it has computed the last tensor that the gradient needs. It uses the same random numbers
    as the first, because an adapter inside can have dropout.
    """
    if not enabled or not torch.is_grad_enabled() or is_exporting():
        return function(*args, **kwargs)
    return checkpoint(function, *args, use_reentrant=False, **kwargs)
