"""Operations of torch.library that eager code calls without torch's dispatcher."""

import inspect
from collections.abc import Callable
from functools import wraps
from itertools import takewhile
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

Gradients = tuple[Tensor | None, ...]
Given = TypeVar("Given", Tensor, Tensor | None)
# The remedy in errors about a derivative that an operation does not have.
REMEDY = "backend='reference' has one (backend='torch', for operations on each token alone)"


def custom_op(name: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], "CustomOp"]:
    """Make an operation `longseq::name` of a function that changes none of its arguments.

    `fake` returns the shapes and types of the results, without values.
    """
    return lambda function: CustomOp(name, function, fake)


def results_like(*places: int) -> Callable[..., Any]:
    """A fake for `custom_op`: the results are like the arguments at these places, and contiguous."""

    def allocate(*args: Any) -> Any:
        found = tuple([empty_like(args[place]) for place in places])
        return found[0] if len(found) == 1 else found

    return allocate


def empty_like(tensor: Given) -> Given:
    """A contiguous tensor of the same shape and type; None for None."""
    return None if tensor is None else tensor.new_empty(tensor.shape)


def records_gradient(*tensors: Tensor | None) -> bool:
    """Whether a call with these tensors will have a backward pass."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


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


class CustomOp:
    """A function that torch.compile, torch.export, fake tensors and dispatch modes see as one operation.

    In eager code a call runs the function itself, with an autograd.Function for its gradient. torch's dispatcher takes
    longer for an operation written in Python than many kernels run, which would slow small models down. `registered` is
    the function for torch's dispatcher, if it is another one.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], fake: Callable[..., Any],
        registered: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.function = function
        self.registered = torch.library.custom_op(f"longseq::{name}", mutates_args=())(registered or function)
        self.registered.register_fake(fake)
        self.differentiable: Any = None

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

    def gradient(
        self, names: str, *, outputs: int = 0, fake: Callable[..., Any] | None = None
    ) -> Callable[[Callable[..., Any]], "CustomOp"]:
        """Make a function the gradient of this operation, and an operation `longseq::<name>_backward`.

        The function returns the gradients of the arguments in `names`, None for those that are not wanted. Its
        parameters are, in this order: tensors that this operation takes, by the same names; the last `outputs` results
        of this operation, or `kept`, if that is the list that it returns last; the gradients of its first results;
        other arguments of this operation, by the same names; and, if it can leave some out, `wanted`, a boolean for
        each of `names`. A single gradient is returned as it is. Where results are saved, gradients can be None, but for
        the first one. `fake` takes the same arguments and returns empty gradients, None where there is none; without
        it, the function takes all `names`, and what it returns is contiguous. Autograd converts gradients to the types
        of their tensors.
        """

        def register(function: Callable[..., Any]) -> CustomOp:
            ours, own = (list(inspect.signature(one).parameters) for one in (self.function, function))
            places = [ours.index(name) for name in names.split()]
            saved = [ours.index(name) for name in takewhile(ours.__contains__, own)]
            others = [ours.index(name) for name in own[len(saved) :] if name in ours]
            has_list, keeps, selects = "kept" in own, outputs > 0 or "kept" in own, "wanted" in own
            arrived = len(own) - len(saved) - len(others) - max(outputs, has_list) - selects

            allocate = fake or results_like(*[own.index(name) for name in names.split()])
            registered: Callable[..., Any] = function
            if len(places) > 1:
                registered, allocate = (_without_none(one, len(places), selects) for one in (function, allocate))
            backward = CustomOp(f"{self.name}_backward", function, allocate, registered)

            def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
                kept = output[-1] if has_list else output[-outputs:] if outputs else ()
                ctx.save_for_backward(*[inputs[i] for i in saved], *kept)
                ctx.others = [inputs[i] for i in others]
                ctx.is_kept = "save" not in ours or inputs[ours.index("save")]
                if keeps:
                    ctx.set_materialize_grads(False)
                    ctx.first = output[0].shape, output[0].dtype

            def differentiate(ctx: Any, *gradients: Tensor | None) -> Gradients:
                assert ctx.is_kept, "the forward pass ran without keeping what the backward pass needs"
                call: Any = ctx.saved_tensors
                if has_list:
                    call = *call[: len(saved)], list(call[len(saved) :])
                if gradients[0] is None:
                    shape, dtype = ctx.first
                    gradients = (call[0].new_zeros(shape, dtype=dtype), *gradients[1:])
                call = *call, *gradients[:arrived], *ctx.others
                wanted = [ctx.needs_input_grad[i] for i in places]
                found = backward(*call, wanted) if selects else backward(*call)
                every: list[Tensor | None] = [None] * len(ours)
                for place, want, gradient in zip(places, wanted, found if len(places) > 1 else (found,)):  # noqa: B905
                    every[place] = gradient if want else None
                return tuple(every)

            self.register_autograd(differentiate, setup_context=setup_context)
            return backward

        return register

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Call the operation; arguments by name must be in their order, as backends get them."""
        if named:
            args = (*args, *named.values())
        # Forward-mode derivatives have a level, also under torch.func.jvp. The level is -1 where there are none.
        if forward_ad._current_level >= 0:
            _refuse_tangents(args)
        # torch.compile traces only the first condition.
        if torch.compiler.is_compiling() or is_watched():
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


def _without_none(function: Callable[..., Gradients], count: int, selects: bool) -> Callable[..., Any]:
    """The function for torch's dispatcher, which knows no None: gradients that are not wanted are empty tensors."""

    @wraps(function)
    def differentiate(*args: Any) -> Any:
        pairs = zip(function(*args), args[-1] if selects else [True] * count, strict=True)
        return tuple(x if want and x is not None else args[0].new_empty(0) for x, want in pairs)

    signature = inspect.signature(function)
    results: Any = tuple.__class_getitem__((Tensor,) * count)
    differentiate.__signature__ = signature.replace(return_annotation=results)  # type: ignore[attr-defined]
    return differentiate


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
