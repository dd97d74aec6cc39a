"""Softmax attention over packed sequences, each of which attends to itself alone."""

from torch import Tensor

from longseq.kernels.dispatch import Backend, Call, register, select
from longseq.kernels.packed_attention import padded, varlen
from longseq.kernels.packing import Packing, pack_like


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | Packing,
    *,
    causal: bool = True,
    window: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """Softmax attention with scale 1/√D within each of N packed sequences: `[1, T, H, D]`.

    No form holds the scores of all pairs. `longseq.kernels.explain("packed_attention", device=..., dtype=...,
    packed=True, sizes={"D": ...})` says which one runs, and why others do not.

    Args:
        q: `[1, T, H, D]`.
        k, v: `[1, T, G, D]`, G a divisor of H; each of the G heads is read by H/G queries.
        cu_seqlens: `[N + 1]`, the borders of the sequences, or their `Packing`.
        causal: a token sees itself and earlier tokens; without `causal` it sees its whole sequence.
        window: a token sees itself and the `window` - 1 tokens before it; without `causal` also those after it.
        backend: varlen, torch's fused kernel over packed rows (`torch.nn.attention.varlen`): on CUDA in half precision.
            torch, `scaled_dot_product_attention` over padded rows of sequences of similar lengths, which it must know
            on the host (see `Packing`). auto takes the first that can run.

    Raises:
        ValueError: the backend that is named cannot run this call, with every reason.
    """
    packing = pack_like(cu_seqlens, q)
    assert packing is not None
    call = Call(q.device, q.dtype, packed=True, sizes={"T": packing.tokens, "D": q.shape[-1]})
    return select("packed_attention", backend, call)(q, k, v, packing, causal=causal, window=window)


register(
    "packed_attention",
    Backend("varlen", varlen.packed_attention, varlen.reasons),
    Backend("torch", padded.packed_attention),
    kind="torch",
)
