"""The cumulative softmax as its recurrence: the definition that every other form is compared with."""

import torch
from torch import Tensor
from torch.nn import functional

from longseq.kernels.reading import Reverse
from longseq.kernels.recurrence import Sequences, run_recurrence, run_segments

# In place of log 0. It is finite, because minus infinity has no gradient, and far below any logit.
NOTHING = -1e30


def cumulative_softmax_step_torch(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """`cumulative_softmax_step` in torch: differentiable, in the state's precision."""
    logit = x.to(state.dtype)
    # A difference of the two states would lose g to rounding where the token's share is small.
    return functional.logsigmoid(state - logit).to(x.dtype), torch.logaddexp(state, logit)


def cumulative_softmax_reference(
    x: Tensor, *, initial_state: Tensor | None, output_final_state: bool, cu_seqlens: Tensor | None, reverse: Reverse
) -> tuple[Tensor, Tensor | None]:
    """`cumulative_softmax`, one token at a time."""

    def recurrence(sequences: Sequences, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        # A token's logits lie side by side: of strided numbers, torch rounds functions otherwise on some processors.
        for logit in sequences[0].transpose(0, 1).contiguous().unbind(0):
            g, state = cumulative_softmax_step_torch(logit, state)
            outputs.append(g)
        return torch.stack(outputs, dim=1), state

    return run_recurrence(
        recurrence,
        (x,),
        initial_state,
        lambda rows, dtype: empty_state(x, rows, dtype),
        output_dtype=x.dtype,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        unpack=run_segments,
        reverse=reverse,
    )


def empty_state(x: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """The state before the first token [rows, H, M]."""
    return x.new_full((rows, *x.shape[2:]), NOTHING, dtype=dtype)
