"""Linear attention, plain or gated per head, per key channel or per value channel."""

from typing import Any

from torch import Tensor

from longseq.kernels.checks import check_chunk_size, check_tensors
from longseq.kernels.devices import triton_reasons, width_reasons
from longseq.kernels.dispatch import (
    Backend,
    Call,
    is_exporting,
    loop_reasons,
    register,
    select,
    unpacking_reasons,
)
from longseq.kernels.linear_attention.chunk import linear_attention_chunk
from longseq.kernels.linear_attention.reference import linear_attention_reference, linear_attention_step_torch
from longseq.kernels.precision import call_dtype, is_mixed
from longseq.kernels.reading import Reverse, check_reverse
from longseq.kernels.steps import register_steps, select_step

__all__ = ["linear_attention", "linear_attention_step"]

TRITON_WIDTH = 512  # of a state's rows and columns


def _triton_reasons(call: Call) -> list[str]:
    return triton_reasons(call) + width_reasons(call, TRITON_WIDTH, "K", "V")


# Imported in the call, because importing this package must not import Triton; an import statement, because
# torch.compile follows one.
def _linear_attention_triton(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    from longseq.kernels.linear_attention.triton_linear import linear_attention_triton

    return linear_attention_triton(*args, **kwargs)


register(
    "linear_attention",
    Backend("triton", _linear_attention_triton, _triton_reasons),
    Backend("torch", linear_attention_chunk, unpacking_reasons),
    Backend("reference", linear_attention_reference, loop_reasons),
)


def _linear_attention_step_triton(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    from longseq.kernels.linear_attention.triton_step import linear_attention_step_triton

    return linear_attention_step_triton(*args, **kwargs)


register_steps("linear_attention", linear_attention_step_torch, _linear_attention_step_triton, "K")


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
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    reverse: Reverse = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Accumulate outer products of keys and values in a decaying state.

        S_t = Diag(e^{g_t}) S_{t-1} Diag(e^{g_value_t}) + k_t v_tᵀ;   o_t = scale S_tᵀ q_t

    with at most one of the two gates. Tokens with k = 0 or v = 0, and gates of 0, leave the state as it is. No feature
    map and no normaliser are applied.

    Shapes: q, k [B, T, H, K]; v, o [B, T, H, V]; g [B, T, H] (one decay per head) or [B, T, H, K] (one per key
    channel); g_value [B, T, H, V] (one per value channel); gates <= 0 (logs; any magnitude is safe); states [B, H, K,
    V]. With `cu_seqlens` [N + 1] (0, the end of each packed segment) B is 1 and states are [N, H, K, V]. With `reverse`
    sequences are read from their last token to their first: the initial state is the one behind the last token and the
    final state that at the first. With reverse="second_half" the second half of the rows of the batch is read so, and
    the first half forward. Arithmetic and state are float32, or float64 for float64 inputs; o has v's dtype.
    `chunk_size`, a power of two, changes speed and memory but not the result. Returns (o, final state or None).

    Raises ValueError for inputs that do not fit, for both gates at once and for a backend that cannot run them. The
    values of `cu_seqlens` are checked by the torch and reference backends; the triton backend does not wait to read
    them.

    Source: Katharopoulos et al. 2020, "Transformers are RNNs", eq. 9; gates per channel as in Yang et al. 2023, "Gated
    Linear Attention Transformers with Hardware-Efficient Training", eq. 3.
    """
    check_chunk_size("linear_attention", chunk_size, power_of_two=True)
    if g is not None and g_value is not None:
        raise ValueError("linear_attention: g and g_value are both given, but one gate is the limit; leave one out")
    sizes = check_tensors(
        "linear_attention",
        {
            "q": (q, "B T H K"),
            "k": (k, "B T H K"),
            "v": (v, "B T H V"),
            "g": (g, "B T H" if g is not None and g.dim() == 3 else "B T H K"),
            "g_value": (g_value, "B T H V"),
            "initial_state": (initial_state, "S H K V"),
        },
        cu_seqlens,
    )
    check_reverse("linear_attention", reverse, sizes["B"], cu_seqlens)
    dtype = call_dtype(v, q, k, g, g_value, initial_state)
    mixed = is_mixed(v, g, g_value)
    kind = "value" if g_value is not None else "" if g is None else "head" if g.dim() == 3 else "channel"
    packed = cu_seqlens is not None
    call = Call(q.device, dtype, packed, is_exporting(), sizes, reverse=reverse, mixed=mixed, kind=kind)
    run = select("linear_attention", backend, call)
    return run(
        q,
        k,
        v,
        g=g,
        g_value=g_value,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
        reverse=reverse,
    )


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
    """One token of `linear_attention`: q, k [B, H, K]; v, g_value [B, H, V]; g [B, H] or [B, H, K]; state [B, H, K, V].

    Returns o [B, H, V] in v's dtype and the next state, in the state's own dtype.

    Raises ValueError for tensors that do not fit and for a backend that cannot run them: the triton backend has no
    gradient.
    """
    run = select_step(
        "linear_attention",
        backend,
        {
            "q": (q, "B H K"),
            "k": (k, "B H K"),
            "v": (v, "B H V"),
            "g": (g, "B H" if g is not None and g.dim() == 2 else "B H K"),
            "g_value": (g_value, "B H V"),
            "state": (state, "B H K V"),
        },
    )
    return run(q, k, v, state, g=g, g_value=g_value, scale=scale)
