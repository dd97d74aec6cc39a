"""Linear attention, plain or gated per head, per key channel or per value channel."""

from typing import Any

from torch import Tensor

from longseq.kernels.dispatch import is_exporting
from longseq.kernels.linear_attention.chunk import linear_attention_chunk
from longseq.kernels.linear_attention.reference import linear_attention_step_torch
from longseq.kernels.operation import Recurrence, operation, step
from longseq.kernels.packing import Packing
from longseq.kernels.reading import Reverse

TRITON_WIDTH = 512  # of a state's rows and columns


def _check(op: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, g_value: Tensor | None, **_: Any) -> None:
    if q.dim() == v.dim() > 2 and not is_exporting():
        groups, heads = q.shape[-2], v.shape[-2]
        if groups != heads and (0 in (groups, heads) or heads % groups):
            raise ValueError(f"{op}: q and k have {groups} heads, which do not divide the {heads} of v")
    if g is not None and g_value is not None:
        raise ValueError(f"{op}: g and g_value are both given, but one gate is the limit; leave one out")


def _kind(q: Tensor, v: Tensor, g: Tensor | None, g_value: Tensor | None, **_: Any) -> str:
    kind = "value" if g_value is not None else "" if g is None else "head" if g.dim() == 3 else "channel"
    if q.shape[2] == v.shape[2] or kind in ("channel", "value"):
        return kind
    return "grouped" if kind else "grouped_plain"


_RECURRENCE = Recurrence(
    {
        "q": "B T G K",
        "k": "B T G K",
        "v": "B T H V",
        "g": "B T H | B T H K",
        "g_value": "B T H V",
        "initial_state": "S H K V",
    },
    values="v",
    mixed=("g", "g_value"),
    check=_check,
    kind=_kind,
    power_of_two=True,
)


@operation(
    _RECURRENCE.judge,
    triton="triton_linear",
    limits={"K V": TRITON_WIDTH},
    torch=linear_attention_chunk,
    reference=_RECURRENCE.loop(linear_attention_step_torch),
)
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor | None = None,
    g_value: Tensor | None = None,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    chunk_size: int = 64,
    reverse: Reverse = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Accumulate outer products of keys and values in a decaying state.

        S_t = Diag(e^{g_t}) S_{t-1} Diag(e^{g_value_t}) + k_t v_tᵀ;   o_t = scale S_tᵀ q_t

    with at most one of the two gates. Tokens with k = 0 or v = 0, and gates of 0, leave the state as it is. No feature
    map and no normaliser are applied.

    Shapes: q, k [B, T, G, K], where G divides H, and H / G heads in a row share a query and a key; v, o [B, T, H, V]; g
    [B, T, H] (one decay per head) or [B, T, H, K] (one per key channel); g_value [B, T, H, V] (one per value channel);
    gates <= 0 (logs; any magnitude is safe); states [B, H, K, V].

    Packing, direction, precision, inf and NaN: see `longseq.kernels`. In the triton backend and half
    precision, gradients of gates per channel at the first seven tokens of a chunk of 64 are about 1 % off where those
    behind them in it are 1e4 times as large.

    Returns (o, final state or None). `chunk_size` is a power of two.

    Source: Katharopoulos et al. 2020, "Transformers are RNNs", eq. 9; gates per channel as in Yang et al. 2023, "Gated
    Linear Attention Transformers with Hardware-Efficient Training", eq. 3.
    """


@step(_RECURRENCE, torch=linear_attention_step_torch, held=("K",))
def linear_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    *,
    g: Tensor | None = None,
    g_value: Tensor | None = None,
    scale: float = 1.0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """One token of `linear_attention`: q, k [B, G, K]; v, g_value [B, H, V]; g [B, H] or [B, H, K]; state [B, H, K, V].

    Returns o [B, H, V] in v's dtype and the next state, in the state's own dtype.
    """
