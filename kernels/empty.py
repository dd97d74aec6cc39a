"""Calls with zero rows or heads: they return empty results, which have gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longseq.kernels.recurrence import each

STATES = ("state", "initial_state")
FILL = 2  # rows or heads in place of zero; even, because some calls read half of the rows in each direction


def is_empty(shape: torch.Size) -> bool:
    """True for a call with zero rows or heads, by the shape [B, T, H, ...] of its first tensor.

    A call with zero tokens is not empty: it returns its state.
    """
    return shape[0] == 0 or shape[2] == 0


def run_empty(run: Callable[..., Any], shape: torch.Size, **arguments: Any) -> tuple[Any, ...]:
    """Run an operation with `FILL` rows or heads in place of zero, and cut its results to zero again."""
    weight = arguments.get("weight")
    # Weights of both directions read each row twice, and have a state for each reading.
    readings = 2 if isinstance(weight, Tensor) and weight.dim() == 3 else 1

    def fill(name: str, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return tuple([fill(name, part) for part in x]) if name in STATES and isinstance(x, tuple) else x
        if name in STATES:
            # Dimensions after rows and heads stay: the window of a convolution of one tap has no tokens.
            rows = [size or readings * FILL for size in x.shape[:1]]
            sizes = [*rows, *(size or FILL for size in x.shape[1:2]), *x.shape[2:]]
        else:
            sizes = [size or FILL for size in x.shape]
        if name not in STATES and x.shape[:2] == shape[:2]:
            sizes[1] = x.shape[1]  # the number of tokens stays
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
    # All inputs get a gradient of zeros: in distributed training, ranks wait for the gradient of every parameter.
    none = sum([x.sum() * 0 for x in tensors if isinstance(x, Tensor) and x.requires_grad])
    outputs = [empty(x) if isinstance(none, int) else empty(x) + none.to(x.dtype) for x in outputs]
    return (*outputs, None if state is None else each(empty_state, state))
