"""The cumulative softmax as its recurrence: the definition that every other form is compared with."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from longseq.kernels.recurrence import run_tokens

# In place of log 0. It is finite, because minus infinity has no gradient, and far below any logit.
NOTHING = -1e30


def cumulative_softmax_step_torch(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """`cumulative_softmax_step` in torch: differentiable, in the state's precision."""
    logit = x.to(state.dtype)
    # A difference of the two states would lose g to rounding where the token's share is small.
    return functional.logsigmoid(state - logit).to(x.dtype), torch.logaddexp(state, logit)


def cumulative_softmax_reference(x: Tensor, **call: Any) -> tuple[Tensor, Tensor | None]:
    """`cumulative_softmax`, one token at a time; `call` is for `run_recurrence`."""

    def step(token: list[Any], state: Tensor) -> tuple[Tensor, Tensor]:
        # A token's logits lie side by side: of strided numbers, torch rounds functions otherwise on some processors.
        return cumulative_softmax_step_torch(token[0].contiguous(), state)

    return run_tokens(step, (x,), state_shape=partial(empty_state, x), output_dtype=x.dtype, **call)


def empty_state(x: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """The state before the first token [rows, H, M]."""
    return x.new_full((rows, *x.shape[2:]), NOTHING, dtype=dtype)
