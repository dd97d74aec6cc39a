"""Operations of torch.library that eager code calls without torch's dispatcher."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from longseq.kernels.once_differentiable import REMEDY, once_differentiable


def custom_op(name: str) -> Callable[[Callable[..., Any]], "CustomOp"]:
    """Make an operation `longseq::name` of a function that changes none of its arguments."""
    return lambda function: CustomOp(name, function)


class CustomOp:
    """A function that torch.compile, torch.export, fake tensors and dispatch modes see as one operation.

    In eager code a call runs the function itself, with an autograd.Function for its gradient. torch's dispatcher takes
    longer for an operation written in Python than many kernels run, which would slow small models down.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self.function = function
        self.registered = torch.library.custom_op(f"longseq::{name}", mutates_args=())(function)
        self.differentiable: Any = None
        # Operations that return or take lists of tensors have no fall-back for torch.func.vmap.
        self.has_lists = "Tensor[]" in str(self.registered._opoverload._schema)

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """Register the function that returns the shapes and types of the results, without values."""
        self.registered.register_fake(fake)
        return fake

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., Any]) -> None:
        """Register the gradient, as `torch.library.register_autograd` takes it. The gradient has no gradient itself."""
        self.registered.register_autograd(backward, setup_context=setup_context)

        # Without the method setup_context: with it, torch inspects the signature in every call.
        def forward(ctx: Any, *args: Any) -> Any:
            output = self.function(*args)
            setup_context(ctx, args, output)
            return output

        methods = {"forward": staticmethod(forward), "backward": staticmethod(once_differentiable(backward))}
        self.differentiable = type(self.name, (torch.autograd.Function,), methods)

    def __call__(self, *args: Any) -> Any:
        # Forward-mode derivatives have a level, also under torch.func.jvp. The level is -1 where there are none.
        if forward_ad._current_level >= 0:
            _refuse_tangents(args)
        # torch.compile traces only the first condition.
        if torch.compiler.is_compiling() or is_watched():
            if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
                _refuse_functional_gradients(args)
                if self.has_lists:
                    _refuse_batches()
            return self.registered(*args)
        differentiated = False
        for x in args:
            if isinstance(x, Tensor):
                if not is_exactly_tensor(x):
                    return self.registered(*args)
                differentiated = differentiated or x.requires_grad
        if differentiated and torch.is_grad_enabled():
            # An operation without a gradient raises its error in the backward pass.
            return self.registered(*args) if self.differentiable is None else self.differentiable.apply(*args)
        return self.function(*args)


def refuse_transforms() -> None:
    """Raise RuntimeError under the transforms of torch.func, for a torch form with a backward pass of its own.

    torch refuses its autograd.Function there, too, in words for the authors of such functions.
    """
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "torch.func.vmap, grad, jvp and their like do not pass through this operation, whose backward pass is its "
            "own: give backend='reference', which they transform"
        )


def _refuse_batches() -> None:
    """Raise RuntimeError under torch.func.vmap; torch's own error addresses authors of operations."""
    if torch._C._functorch.TransformType.Vmap in _active_transforms():
        raise RuntimeError(
            "torch.func.vmap does not pass through the kernels of this operation: give backend='reference', which it "
            "transforms, or add its dimension to the batch"
        )


def _active_transforms() -> set[Any]:
    return {transform.key() for transform in torch._C._functorch.get_interpreter_stack()}


def _refuse_tangents(args: tuple[Any, ...]) -> None:
    """Raise RuntimeError for tensors with a forward-mode derivative, which torch would drop in silence.

    Under torch.compile it is not known which tensors have one: all calls are refused.
    """
    if torch.compiler.is_compiling() or any(
        forward_ad.unpack_dual(x).tangent is not None for x in args if isinstance(x, Tensor)
    ):
        raise RuntimeError(
            f"torch.func.jvp, jacfwd and dual tensors: this operation has no forward-mode derivative; {REMEDY}"
        )


def _refuse_functional_gradients(args: tuple[Any, ...]) -> None:
    """Raise RuntimeError under torch.func.grad and its like; torch's own error addresses authors of operations."""
    if not torch.is_grad_enabled() or not any(isinstance(x, Tensor) and x.requires_grad for x in args):
        return
    if torch._C._functorch.TransformType.Grad in _active_transforms():
        raise RuntimeError(
            "torch.func.grad, vjp, jacrev and hessian do not pass through this operation, as torch.autograd.grad does; "
            f"{REMEDY}"
        )


def is_exactly_tensor(tensor: Tensor) -> bool:
    """True for a plain tensor or parameter, False for a subclass such as a fake tensor."""
    return type(tensor) is Tensor or type(tensor) is nn.Parameter


def is_watched() -> bool:
    """True where a dispatch mode, a functional transform or a profiler must see each operation."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._autograd._profiler_enabled()
    )
