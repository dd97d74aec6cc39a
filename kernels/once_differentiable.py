"""Gradients that cannot be differentiated again, and say so."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


class _Refused(torch.autograd.Function):
    """Gradients, as they are; whoever differentiates them by what they hang on is told that this cannot be done."""

    @staticmethod
    def forward(ctx: Any, gradients: tuple[Tensor | None, ...], *_: Tensor | None) -> Any:
        return tuple(None if x is None else x.detach() for x in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "this operation has no second derivative: backend='reference' has one (backend='torch', for operations on "
            "each token alone)"
        )


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse to differentiate what the backward method of an autograd.Function returns.

    torch's decorator of this name does so only if a gradient that comes in is itself to be differentiated, and if all
    leaves are asked for. The gradient that comes from a sum is not: a penalty on gradients would then be left out
    without a word.
    """

    @wraps(backward)
    def differentiate(ctx: Any, *gradients: Any) -> Any:
        # The first condition alone is traced by torch.compile, which refuses second derivatives by itself.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return backward(ctx, *gradients)
        with torch.no_grad():
            results = backward(ctx, *gradients)
        return _Refused.apply(results if isinstance(results, tuple) else (results,), *gradients, *ctx.saved_tensors)

    return differentiate
