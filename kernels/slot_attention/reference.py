"""Slot attention as its recurrence: the definition that every other form is compared with."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: torch.softmax(x, -1),
    "identity": lambda x: x,
    "silu": functional.silu,
    "relu": torch.relu,
    "relu_squared": lambda x: torch.relu(x).square(),
}


def slot_attention_step_torch(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: tuple[Tensor, Tensor], *, write: Tensor | None = None,
    scale: float = 1.0, activation: str = "softmax",
) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
    """`slot_attention_step` in torch: differentiable, in the state's precision."""
    keys, values = state
    q, k, value, g = (x.to(keys.dtype) for x in (q, k, v, g))
    decay = g.exp()[..., None]
    strength = (-torch.expm1(g) if write is None else write.to(keys.dtype))[..., None]  # [B, H, M, 1]
    keys = decay * keys + strength * k[..., None, :]
    values = decay * values + strength * value[..., None, :]
    weights = ACTIVATIONS[activation](scale * (keys * q[..., None, :]).sum(-1))  # [B, H, M]
    o = (values * weights[..., None]).sum(-2)
    return o.to(v.dtype), (keys, values)
