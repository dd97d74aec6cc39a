"""Gradients that cannot be differentiated again, and say so."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

# What to do for a derivative that an operation does not have.
REMEDY = "backend='reference' has one (backend='torch', for operations on each token alone)"


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Let the backward method of an autograd.Function refuse `create_graph=True`.

    torch's decorator of this name refuses later, when the gradients are differentiated, and only where a gradient that
    came in was itself to be differentiated. That of a sum is not: a penalty on gradients would be left out without a
    word, and so it would by the tensors that the method does not keep.
    """

    @wraps(backward)
    def differentiate(ctx: Any, *gradients: Any) -> Any:
        # The first condition alone is traced by torch.compile, which refuses second derivatives by itself.
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            raise RuntimeError(f"create_graph=True: this operation has no second derivative; {REMEDY}")
        return backward(ctx, *gradients)

    return differentiate
