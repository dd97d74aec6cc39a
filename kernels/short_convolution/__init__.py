"""The short causal convolution in front of a recurrent mixer."""

from typing import Any

from torch import Tensor

from longseq.kernels.checks import check_tensors
from longseq.kernels.dispatch import Call, is_exporting
from longseq.kernels.operation import Recurrence, operation, step
from longseq.kernels.packing import Packing
from longseq.kernels.precision import call_dtype, is_mixed
from longseq.kernels.reading import Reverse, check_own_parameters, check_reverse
from longseq.kernels.short_convolution.chunk import short_convolution_chunk
from longseq.kernels.short_convolution.reference import short_convolution_reference, short_convolution_step_torch


def judge_convolution(
    op: str, x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None,
    mask: Tensor | None, reverse: Reverse, layout: str = "B T D",
) -> Call:  # fmt: skip
    """Check the tensors of a convolution, of x in this layout, and describe the call.

    A weight of three dimensions holds the weights of both directions.
    """
    if mask is not None and cu_seqlens is not None:
        raise ValueError(f"{op}: mask and cu_seqlens are both given; packed sequences have no padding")
    own = weight.dim() == 3
    tensors = {
        "x": (x, layout),
        "weight": (weight, "P D W" if own else "D W"),
        "bias": (bias, "P D" if own else "D"),
        "initial_state": (initial_state, "2B D W-1" if own else "S D W-1"),
    }
    sizes = check_tensors(op, tensors, cu_seqlens, mask=mask)
    if own:
        check_own_parameters(op, "weight", weight, reverse)
    check_reverse(op, reverse, 2 if own else sizes["B"], cu_seqlens)
    dtype, mixed = call_dtype(x, initial_state), is_mixed(x, weight)
    return Call(x.device, dtype, cu_seqlens is not None, is_exporting(), sizes, reverse=reverse, mixed=mixed)


def _check_activation(op: str, activation: str | None, **_: Any) -> None:
    if activation not in (None, "silu"):
        raise ValueError(f"{op}: activation is {activation!r}, but must be None or 'silu'")


def _judge(op: str, activation: str | None, output_final_state: bool, **tensors: Any) -> Call:
    _check_activation(op, activation)
    return judge_convolution(op, **tensors)


@operation(_judge, triton="triton_convolution", torch=short_convolution_chunk, reference=short_convolution_reference)
def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    mask: Tensor | None = None,
    reverse: Reverse = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Convolve each channel over the last W tokens, the current one included.

        y_t = activation(bias + Σ_j weight[:, j] ⊙ x_{t-W+1+j}),   j = 0 ... W-1

    Inputs before the first token come from the initial state, zero if there is none. The state is the last W-1 inputs,
    oldest first.

    Shapes: x, y [B, T, D]; weight [D, W]; bias [D]; states [B, D, W-1]; `activation` None or "silu". `mask` [B, T] bool
    is True at real tokens: the others are passed over as if they were not there, and their output is zero.

    Packing, direction, precision, inf and NaN: see `longseq.kernels`. With reverse="second_half", weight [2, D, W] and
    bias [2, D], all rows of x are read forward with the first weight and backward with the second; y and the states
    then have 2 B rows.

    Returns (y, final state or None).

    Source: the convolution of Fu et al. 2022, "Hungry Hungry Hippos", and of Gu and Dao 2023, "Mamba", section 3.4.
    """


_ONE_WAY = Recurrence(
    {"x": "B T D", "weight": "D W", "bias": "D", "initial_state": "S D W-1"}, values="x", check=_check_activation
)


@step(_ONE_WAY, torch=short_convolution_step_torch, held=("W",))
def short_convolution_step(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """One token of `short_convolution`: x [B, D]; weight [D, W]; bias [D]; state [B, D, W-1].

    Returns y [B, D] in x's dtype and the next state, in the state's own dtype.
    """
