"""Run a part of a layer again in the backward pass instead of keeping what its gradient needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from longseq.kernels.dispatch import is_exporting


def run_again(wanted: bool, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function`; if that is wanted, keep its arguments alone, and call it again for its gradient.

    The second call ends with the last tensor that the gradient needs. `function` draws no random numbers.
    """
    if not wanted or not torch.is_grad_enabled() or is_exporting():
        return function(*args, **kwargs)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
