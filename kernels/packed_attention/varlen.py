"""Attention over packed rows by torch's fused kernels, which skip pairs of tokens of different sequences."""

from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from longseq.kernels.dispatch import Call
from longseq.kernels.packing import Packing

CAPABILITY = (8, 0)  # the least compute capability for flash attention
WIDEST = 256  # the most channels of a head


def packed_attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing, *, causal: bool, window: int | None) -> Tensor:
    """See `longseq.kernels.packed_attention`."""
    from torch.nn.attention.varlen import varlen_attn

    if packing.tokens == 0:
        return q + (k.sum() + v.sum())  # no tokens: all inputs still get a gradient
    past = -1 if window is None else window - 1
    options: dict[str, Any] = {"window_size": (past, 0 if causal else past)}
    if q.shape[2] != k.shape[2]:
        if "enable_gqa" in _options():
            options["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    borders, most = packing.borders, packing.max_seqlen
    o: Any = varlen_attn(q.squeeze(0), k.squeeze(0), v.squeeze(0), borders, borders, most, most, **options)
    return o.unsqueeze(0)


def reasons(call: Call) -> list[str]:
    """The reasons against this form."""
    found = []
    if "window_size" not in _options():
        found.append(f"torch {torch.__version__} has no varlen_attn with windows (torch 2.11 has)")
    if call.device.type != "cuda":
        found.append(f"torch's varlen_attn runs on CUDA, not on {call.device.type}")
    elif torch.cuda.is_available() and torch.cuda.get_device_capability(call.device) < CAPABILITY:
        found.append("flash attention needs a GPU of compute capability 8.0")
    if call.dtype not in (torch.float16, torch.bfloat16):
        found.append(f"it takes float16 and bfloat16, not {call.dtype}")
    width = call.sizes.get("D", 8)
    if width % 8 or width > WIDEST:
        found.append(f"it takes heads of up to {WIDEST} channels, a multiple of 8, not of {width}")
    return found


@cache
def _options() -> frozenset[str]:
    """Names of the options of torch's function, none where there is no such function."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(signature(varlen_attn).parameters)
