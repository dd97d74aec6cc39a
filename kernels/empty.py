"""Calls with zero rows: they return empty results, which have gradients."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from longseq.kernels.recurrence import each

FILL = 2  # rows in place of zero; even, because some calls read half of the rows in each direction


def run_empty(run: Callable[..., Any], **arguments: Any) -> tuple[Any, ...]:
    """Run an operation with `FILL` rows in place of zero, and cut its results to zero again."""
    weight = arguments.get("weight")
    # Weights of both directions read each row twice, and have a state for each reading.
    readings = 2 if isinstance(weight, Tensor) and weight.dim() == 3 else 1

    def fill(x: Any, rows: int = FILL) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.detach() if x.shape[0] else x.new_ones((rows, *x.shape[1:]))

    filled = {name: fill(x) for name, x in arguments.items()}
    if filled["initial_state"] is not None:
        filled["initial_state"] = each(lambda x: fill(x, readings * FILL), arguments["initial_state"])
    *outputs, state = run(**filled)
    tensors = [x for value in arguments.values() for x in (value if isinstance(value, tuple) else (value,))]
    # All inputs get a gradient of zeros: in distributed training, ranks wait for the gradient of every parameter.
    none = sum([x.sum() * 0 for x in tensors if isinstance(x, Tensor) and x.requires_grad])
    outputs = [x[:0] if isinstance(none, int) else x[:0] + none.to(x.dtype) for x in outputs]
    return (*outputs, None if state is None else each(lambda x: x[:0], state))
