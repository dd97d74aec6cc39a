"""Backward methods that refuse to be differentiated again."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

# The remedy in errors about a derivative that an operation does not have.
REMEDY = "backend='reference' has one (backend='torch', for operations on each token alone)"


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make the backward method of an autograd.Function raise RuntimeError under `create_graph=True`.

    torch's decorator of this name raises later, when the gradients are differentiated, and only if the incoming
    gradient requires a gradient itself. The gradient of `loss.sum()` does not. A penalty on gradients would then be
    zero without an error.
    """

    @wraps(backward)
    def differentiate(ctx: Any, *gradients: Any) -> Any:
        # torch.compile, which refuses second derivatives by itself, traces only this line.
        if torch.compiler.is_compiling():
            return backward(ctx, *gradients)
        if torch.is_grad_enabled():
            raise RuntimeError(f"create_graph=True: this operation has no second derivative; {REMEDY}")
        return backward(ctx, *gradients)

    return differentiate
