"""Activation checkpointing of a part of a layer."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from longseq.kernels.dispatch import is_exporting

# none keeps everything that a gradient needs. mixer recomputes the cheap operations between the projections of mixers
# and the products of gated MLPs. block keeps only the inputs of blocks.
RECOMPUTE = ("none", "mixer", "block")


def checkpoint_if(enabled: bool, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function`, with activation checkpointing if `enabled`: the backward pass calls it again.

    The second call ends with the last tensor that the gradient needs, and draws the same random numbers (adapters may
    have dropout).
    """
    if not enabled or not torch.is_grad_enabled() or is_exporting():
        return function(*args, **kwargs)
    return checkpoint(function, *args, use_reentrant=False, **kwargs)
