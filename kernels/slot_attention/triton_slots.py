"""Slot attention as two passes of gated linear attention in Triton, as in chunk.py.

Write strengths, scores and the weights that the activation makes of the scores are float32, whatever the inputs' type.
"""

import torch
from torch import Tensor

from longseq.kernels.linear_attention.chunk import Inputs
from longseq.kernels.linear_attention.triton_linear import run_linear_attention
from longseq.kernels.precision import without_autocast
from longseq.kernels.reading import Reverse
from longseq.kernels.slot_attention.reference import ACTIVATIONS


def slot_attention_triton(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, write: Tensor | None, scale: float, activation: str,
    initial_state: tuple[Tensor, Tensor] | None, output_final_state: bool, cu_seqlens: Tensor | None, chunk_size: int,
    reverse: Reverse,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:  # fmt: skip
    """`slot_attention` in Triton kernels.

    `chunk_size` is ignored: the table of launches determines the length of chunks.
    """
    keys, values = (None, None) if initial_state is None else initial_state
    precise = v.dtype.itemsize > 2
    with without_autocast(q):
        if write is None:
            write = -torch.expm1(g.float())
        inputs = Inputs(q, k, write, None, g)
        scores, keys = run_linear_attention(
            inputs, keys, cu_seqlens, scale, reverse, precise=precise, transposed=True, output_dtype=torch.float32
        )
        inputs = Inputs(ACTIVATIONS[activation](scores), write, v, g, None)
        o, values = run_linear_attention(
            inputs, values, cu_seqlens, 1.0, reverse, precise=precise, output_dtype=v.dtype
        )
    return o, (keys, values) if output_final_state else None
