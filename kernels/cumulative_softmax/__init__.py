"""The cumulative softmax: the log decay, at each token, of a running average under a softmax."""

from torch import Tensor

from longseq.kernels.cumulative_softmax.chunk import cumulative_softmax_torch
from longseq.kernels.cumulative_softmax.reference import cumulative_softmax_step_torch, empty_state
from longseq.kernels.operation import Recurrence, operation, step
from longseq.kernels.packing import Packing
from longseq.kernels.reading import Reverse

_RECURRENCE = Recurrence({"x": "B T H M", "initial_state": "S H M"}, values="x")


def _step(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    # A token's logits lie side by side: of strided numbers, torch rounds functions otherwise on some processors.
    return cumulative_softmax_step_torch(x.contiguous(), state)


@operation(_RECURRENCE.judge, torch=cumulative_softmax_torch, reference=_RECURRENCE.loop(_step, first=empty_state))
def cumulative_softmax(
    x: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    reverse: Reverse = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Log of the share that the earlier tokens keep when a token joins a softmax over all tokens so far.

        z_t = log(e^{z_{t-1}} + e^{x_t});   g_t = z_{t-1} - z_t

    The token itself has the share w_t = 1 - e^{g_t} = e^{x_t - z_t}, so that S_t = e^{g_t} S_{t-1} + w_t v_t is the
    average of the values so far under softmax(x_1, ..., x_t). Any magnitude of x is safe. The state before any token is
    z = -1e30, in place of log 0: the first token gets the share 1. A later token with x = -1e30 leaves the state as it
    is.

    Shapes: x, g [B, T, H, M]; states z [B, H, M].

    Packing, direction, precision, inf and NaN: see `longseq.kernels`.

    Returns (g, final state or None).

    Source: the write strengths of Peng et al. 2022, "ABC: Attention with Bounded-memory Control", for causal attention.
    """


@step(_RECURRENCE, torch=cumulative_softmax_step_torch)
def cumulative_softmax_step(x: Tensor, state: Tensor, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """One token of `cumulative_softmax`: x and state [B, H, M].

    Returns g [B, H, M] in x's dtype and the next state, in the state's own dtype.
    """
