"""The cumulative softmax as its recurrence: the definition that every other form is compared with."""

import torch
from torch import Tensor
from torch.nn import functional

# In place of log 0. It is finite, because minus infinity has no gradient, and far below any logit.
NOTHING = -1e30


def cumulative_softmax_step_torch(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """`cumulative_softmax_step` in torch: differentiable, in the state's precision."""
    logit = x.to(state.dtype)
    # A difference of the two states would lose g to rounding where the token's share is small.
    return functional.logsigmoid(state - logit).to(x.dtype), torch.logaddexp(state, logit)


def empty_state(rows: int, dtype: torch.dtype, *, x: Tensor) -> Tensor:
    """The state before the first token [rows, H, M]."""
    return x.new_full((rows, *x.shape[2:]), NOTHING, dtype=dtype)
