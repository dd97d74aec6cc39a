"""Calls without rows or heads: they compute nothing, and return empty results that have gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longseq.kernels.recurrence import each

STATES = ("state", "initial_state")
FILL = 2  # rows or heads that stand in for none; even, because some calls read half of the rows each way


def is_empty(shape: torch.Size) -> bool:
    """True for a call without rows or heads, by the shape [B, T, H, ...] of its first tensor.

    A call without tokens is not empty: it returns its state.
    """
    return shape[0] == 0 or shape[2] == 0


def run_empty(run: Callable[..., Any], shape: torch.Size, **arguments: Any) -> tuple[Any, ...]:
    """Return what an operation returns for an empty call: run it with `FILL` rows or heads, and cut these away."""

    def fill(name: str, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return tuple([fill(name, part) for part in x]) if name in STATES and isinstance(x, tuple) else x
        sizes = [size or FILL for size in x.shape]
        if name not in STATES and x.shape[:2] == shape[:2]:
            sizes[1] = x.shape[1]  # tokens
        return x.detach() if list(x.shape) == sizes else x.new_ones(sizes)

    def empty(x: Tensor) -> Tensor:
        for dim in (0, 1, 2):
            x = x.narrow(dim, 0, 0) if shape[dim] == 0 else x
        return x

    def empty_state(x: Tensor) -> Tensor:
        x = x[:0] if shape[0] == 0 else x
        return x[:, :0] if shape[2] == 0 and x.dim() > 1 else x

    *outputs, state = run(**{name: fill(name, x) for name, x in arguments.items()})
    tensors = [x for value in arguments.values() for x in (value if isinstance(value, tuple) else (value,))]
    # All inputs have a gradient, of zeros: ranks that wait for each other's gradients must not miss one.
    none = sum([x.sum() * 0 for x in tensors if isinstance(x, Tensor) and x.requires_grad])
    outputs = [empty(x) if isinstance(none, int) else empty(x) + none.to(x.dtype) for x in outputs]
    return (*outputs, None if state is None else each(empty_state, state))
