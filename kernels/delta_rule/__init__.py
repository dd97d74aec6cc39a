"""The delta rule with a read key, a write key and an optional decay."""

from torch import Tensor

from longseq.kernels.delta_rule.chunk import delta_rule_chunk
from longseq.kernels.delta_rule.reference import delta_rule_reference, delta_rule_step_torch
from longseq.kernels.operation import Recurrence, operation, step
from longseq.kernels.packing import Packing
from longseq.kernels.reading import Reverse

__all__ = ["delta_rule", "delta_rule_step"]

TRITON_WIDTH = 256  # rows and columns of a state

_RECURRENCE = Recurrence(
    {
        "q": "B T H K",
        "k": "B T H K",
        "v": "B T H V",
        "beta": "B T H",
        "write_key": "B T H K",
        "g": "B T H",
        "initial_state": "S H K V",
    },
    values="v",
    mixed=("beta", "g"),
    kind=lambda g, **_: "" if g is None else "gated",
    power_of_two=True,
)


@operation(
    _RECURRENCE.judge,
    triton="triton_delta",
    limits={"K V": TRITON_WIDTH},
    torch=delta_rule_chunk,
    reference=delta_rule_reference,
)
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    write_key: Tensor | None = None,
    g: Tensor | None = None,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    chunk_size: int = 64,
    reverse: Reverse = False,
    recompute: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Replace what a key reads from the state by a new value, at strength beta.

        S_t = e^{g_t} S_{t-1};   S_t += beta_t w_t (v_t - S_tᵀ k_t)ᵀ;   o_t = scale S_tᵀ q_t

    where the write key w_t is k_t unless `write_key` is given. The recurrence is stable for k = w of unit length and
    beta in [0, 2]; the operation does not normalise keys. Tokens with beta = 0 and g = 0 leave the state as it is.

    Shapes: q, k, write_key [B, T, H, K]; v, o [B, T, H, V]; beta, g [B, T, H] with g <= 0 (a log); states [B, H, K, V].

    Packing: `cu_seqlens` [N + 1] holds 0 and the end of each packed sequence; B is 1 and states are [N, H, K, V].

    Direction: with `reverse` sequences are read from their last token to their first. The initial state is then the one
    behind the last token, and the final state the one at the first token. With reverse="second_half" the second half of
    the rows of the batch is read backward, and the first half forward.

    Precision: arithmetic and state are float32, or float64 for float64 inputs; o has v's dtype.

    `chunk_size`, a power of two, changes speed and memory but not the result. With `recompute` the triton backend saves
    only its inputs for the backward pass, which begins with a second forward pass: 193 MiB instead of 513 at (8, 2048,
    16, 128) in bfloat16. Gradients are the same to the last bit; output and final state can differ in their last
    digits (by up to 2e-5 of their size on an H200). The other backends always save little.

    Returns (o, final state or None).

    Raises ValueError for inputs that do not fit and for a backend that cannot run them. The values of `cu_seqlens` are
    checked by the torch and reference backends. The triton backend checks them with LONGSEQ_CHECK_CU_SEQLENS=1 alone,
    because the check waits for the GPU.

    inf and NaN stay in their row and head, and in their packed sequence. There they reach all later tokens, and earlier
    ones of their chunk (see `longseq.kernels`).

    Source: Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", eq. 1 to 11;
    the decay is that of Yang et al. 2024, "Gated Delta Networks", eq. 10.
    """


@step(_RECURRENCE, torch=delta_rule_step_torch, held=("K",))
def delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    write_key: Tensor | None = None,
    g: Tensor | None = None,
    scale: float = 1.0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """One token of `delta_rule`: q, k, write_key [B, H, K]; v [B, H, V]; beta, g [B, H]; state [B, H, K, V].

    Returns o [B, H, V] in v's dtype and the next state, in the state's own dtype.

    Raises ValueError for tensors that do not fit and for a backend that cannot run them: the triton backend has no
    gradient.
    """
