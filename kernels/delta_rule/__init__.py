"""The delta rule: a transition of the state that is diagonal plus rank one."""

from typing import Any

from torch import Tensor

from longseq.kernels.delta_rule.chunk import delta_rule_chunk
from longseq.kernels.delta_rule.reference import delta_rule_step_torch
from longseq.kernels.dispatch import Call
from longseq.kernels.operation import Recurrence, operation, step
from longseq.kernels.packing import Packing
from longseq.kernels.reading import Reverse

TRITON_WIDTH = 256  # rows and columns of a state
TRITON_CHANNELS = 128  # rows, for calls of the kind "channels"


def _check(op: str, beta: Tensor | None, write_key: Tensor | None, **_: Any) -> None:
    if beta is None and write_key is None:
        raise ValueError(f"{op}: beta or write_key must be given")


def _kind(v: Tensor, g: Tensor | None, value_key: Tensor | None, read_before_decay: bool, **_: Any) -> str:
    if value_key is not None or (g is not None and (read_before_decay or g.dim() == v.dim())):
        return "channels"
    return "" if g is None else "gated"


def _triton_reasons(call: Call) -> list[str]:
    if call.kind == "channels" and call.sizes.get("K", 0) > TRITON_CHANNELS:
        return [f"it takes up to {TRITON_CHANNELS} key channels with decays of their own, value keys or early reads"]
    return []


_RECURRENCE = Recurrence(
    {
        "q": "B T H K",
        "k": "B T H K",
        "v": "B T H V",
        "beta": "B T H",
        "write_key": "B T H K",
        "value_key": "B T H K",
        "g": "B T H | B T H K",
        "initial_state": "S H K V",
    },
    values="v",
    mixed=("beta", "g"),
    check=_check,
    kind=_kind,
    power_of_two=True,
)


@operation(
    _RECURRENCE.judge,
    triton="triton_delta",
    limits={"K V": TRITON_WIDTH},
    reasons=_triton_reasons,
    torch=delta_rule_chunk,
    reference=_RECURRENCE.loop(delta_rule_step_torch),
)
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    *,
    write_key: Tensor | None = None,
    value_key: Tensor | None = None,
    g: Tensor | None = None,
    read_before_decay: bool = False,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    chunk_size: int = 64,
    reverse: Reverse = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Replace what a key reads from the state by a new value, at strength beta.

        S̄ = Diag(e^{g_t}) S_{t-1};   S_t = S̄ + beta_t w_t (v_t - S̄ᵀ k_t)ᵀ;   o_t = scale S_tᵀ q_t

    where the write key w_t is k_t unless `write_key` is given, and beta_t is 1 unless `beta` is. With `value_key` the
    value has a key a_t of its own: S_t = S̄ - beta_t w_t (S̄ᵀ k_t)ᵀ + a_t v_tᵀ. With `read_before_decay` k_t reads
    S_{t-1} in place of S̄. The recurrence is stable for k = w of unit length and beta in [0, 2] (in
    [0, 1 + e^g] if reads are before the decay); the operation does not normalise keys. Tokens with beta = 0, or a write
    key of 0, value key 0 and g = 0 leave the state as it is.

    Shapes: q, k, write_key, value_key [B, T, H, K]; v, o [B, T, H, V]; beta [B, T, H]; g [B, T, H], or [B, T, H, K] for
    a decay of each key channel, with g <= 0 (a log); states [B, H, K, V].

    Packing, direction, precision, inf and NaN: see `longseq.kernels`.

    Returns (o, final state or None). `chunk_size` is a power of two.

    Source: Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", eq. 1 to 11;
    decay per head: Yang et al. 2024, "Gated Delta Networks", eq. 10; per key channel: Kimi Team 2025, "Kimi Linear";
    the value key and the read before the decay: Peng et al. 2025, "RWKV-7".
    """


@step(_RECURRENCE, torch=delta_rule_step_torch, held=("K",))
def delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    beta: Tensor | None = None,
    *,
    write_key: Tensor | None = None,
    value_key: Tensor | None = None,
    g: Tensor | None = None,
    read_before_decay: bool = False,
    scale: float = 1.0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """One token of `delta_rule`: q, k, write_key, value_key [B, H, K]; v [B, H, V]; beta [B, H]; g [B, H] or
    [B, H, K]; state [B, H, K, V].

    Returns o [B, H, V] in v's dtype and the next state, in the state's own dtype.
    """
