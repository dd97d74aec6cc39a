"""Variational linear attention in Triton: the parts of the chunk form, each with its own kernels and gradient.

Half precision inputs go to float32 first, so that what lies between the parts (k̂, α̂, o before its division) and the
gradients that parts add up are rounded once, at the end. The precision of the products is that of o, v's dtype: for
bfloat16 the delta rule multiplies float16 numbers if its keys have length 1, and least squares TF32 ones where nothing
adds up from chunk to chunk. Of a float16 result that would lose more than rounding it does.
"""

import torch
from torch import Tensor

from longseq.kernels.delta_rule.triton_delta import delta_rule_triton
from longseq.kernels.precision import without_autocast
from longseq.kernels.recursive_least_squares.triton_least_squares import recursive_least_squares_triton
from longseq.kernels.variational_linear_attention.reference import VariationalState
from longseq.kernels.variational_linear_attention.triton_normalizer import divide_by_keys
from longseq.kernels.variational_linear_attention.triton_unit import unit


def variational_linear_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor | None,
    *,
    count: Tensor,
    lambda0: float,
    refresh_period: int | None,
    refresh: float,
    eps: float,
    normalize_key: bool,
    normalize_alpha: bool,
    normalizer: bool,
    initial_state: VariationalState | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, VariationalState | None]:
    """`variational_linear_attention` in Triton kernels. `chunk_size` has no meaning here."""
    z = None if initial_state is None else initial_state[2]
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(k.device)
    bfloat16 = v.dtype == torch.bfloat16
    with without_autocast(k):
        query, key, value = q.float(), k.float(), v.float()
        read = unit(key) if normalize_key else key
        alpha, inverse = recursive_least_squares_triton(
            read,
            torch.zeros_like(k) if u is None else u,
            count=count,
            lambda0=lambda0,
            refresh_period=None if u is None else refresh_period,
            refresh=refresh,
            initial_state=None if initial_state is None else (initial_state[1], initial_state[3]),
            output_final_state=True,
            cu_seqlens=cu_seqlens,
            chunk_size=chunk_size,
            precision="tf32" if bfloat16 else "tf32x3",
        )
        o, memory = delta_rule_triton(
            query,
            read,
            value,
            torch.ones_like(read[..., 0]),
            write_key=unit(alpha) if normalize_alpha else alpha,
            g=None,
            scale=1.0,
            initial_state=None if initial_state is None else initial_state[0],
            output_final_state=True,
            cu_seqlens=cu_seqlens,
            chunk_size=chunk_size,
            reverse=False,
            recompute=False,
            half=bfloat16 and normalize_key and normalize_alpha,
        )
        assert inverse is not None
        assert memory is not None
        # without the division for the last z alone
        divided = o if normalizer else torch.zeros_like(o)
        quotient, sums, *_ = divide_by_keys(divided, query, key, z, cu_seqlens, float(eps), v.dtype)
        o = quotient if normalizer else o.to(v.dtype)
    return o, (memory, inverse[0], sums, inverse[1]) if output_final_state else None
