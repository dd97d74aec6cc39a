"""Attention to a bounded number of slots, each a gated average of keys and of values."""

from typing import Any

from torch import Tensor

from longseq.kernels.operation import Recurrence, operation, step
from longseq.kernels.packing import Packing
from longseq.kernels.reading import Reverse
from longseq.kernels.slot_attention.chunk import slot_attention_chunk
from longseq.kernels.slot_attention.reference import ACTIVATIONS, slot_attention_step_torch

TRITON_WIDTH = 512  # of a state's rows and columns


def _check_activation(op: str, activation: str, **_: Any) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")


_RECURRENCE = Recurrence(
    {
        "q": "B T H K",
        "k": "B T H K",
        "v": "B T H V",
        "g": "B T H M",
        "write": "B T H M",
        "initial_state": {"keys": "S H M K", "values": "S H M V"},
    },
    values="v",
    mixed=("g",),
    check=_check_activation,
    kind=lambda write, **_: "" if write is None else "write",
    power_of_two=True,
)


@operation(
    _RECURRENCE.judge,
    triton="triton_slots",
    limits={"K V M": TRITON_WIDTH},
    torch=slot_attention_chunk,
    reference=_RECURRENCE.loop(slot_attention_step_torch),
)
def slot_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    write: Tensor | None = None,
    scale: float = 1.0,
    activation: str = "softmax",
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    chunk_size: int = 64,
    reverse: Reverse = False,
    backend: str = "auto",
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Read M slots of keys and values by softmax; write each token to every slot at its own strength.

        K~_t = Diag(e^{g_t}) K~_{t-1} + w_t k_tᵀ;   V~_t = Diag(e^{g_t}) V~_{t-1} + w_t v_tᵀ
        o_t = V~_tᵀ f(scale K~_t q_t)

    where the write strength w_t is 1 - e^{g_t} unless `write` is given, and f, the `activation`, is softmax over the
    slots or, for each slot alone, identity, silu, relu or relu_squared. A token with g = 0 leaves the state as it is;
    where `write` is given that must be 0 too.

    Shapes: q, k [B, T, H, K]; v, o [B, T, H, V]; g, write [B, T, H, M] with g <= 0 (a log; any magnitude is safe);
    states are pairs of K~ [B, H, M, K] and V~ [B, H, M, V].

    Packing, direction, precision, inf and NaN: see `longseq.kernels`.

    Returns (o, final state or None). `chunk_size` is a power of two.

    Source: Zhang et al. 2024, "Gated Slot Attention for Efficient Linear-Time Sequence Modeling", eq. 6; with `write`,
    Peng et al. 2022, "ABC: Attention with Bounded-memory Control", as eq. 3 of the former states it.
    """


@step(_RECURRENCE, torch=slot_attention_step_torch, held=("M",))
def slot_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    state: tuple[Tensor, Tensor],
    *,
    write: Tensor | None = None,
    scale: float = 1.0,
    activation: str = "softmax",
    backend: str = "auto",
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """One token of `slot_attention`: q, k [B, H, K]; v [B, H, V]; g, write [B, H, M]; state [B, H, M, K] and [..., V].

    Returns o [B, H, V] in v's dtype and the next state, in the state's own dtype.
    """
