"""Traces of torch.fx and TorchScript: modules that these keep whole, and whether one is made now."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

Forward = TypeVar("Forward", bound=Callable[..., Any])


def whole_in_traces(forward: Forward) -> Forward:
    """Decorate a module's `forward` that reads types and sizes of tensors, which a symbolic trace does not have.

    The trace then has one call of the module, as if it were listed among the tracer's leaf modules.
    """

    @functools.wraps(forward)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # In a subclass with another `forward`, this one is only a part of the call.
        if args and isinstance(args[0], torch.fx.Proxy) and type(self).forward is call:
            tracer: Any = args[0].tracer
            return tracer.create_proxy("call_module", tracer.path_of_module(self), args, kwargs)
        return forward(self, *args, **kwargs)

    return call  # type: ignore[return-value]


def makes_trace() -> bool:
    """True inside `torch.jit.trace`, which does not record Python's branches and checks.

    False in torch's older ONNX exporter, which cannot export interpolation with antialiasing, and fixes the batch where
    a dimension is unflattened.
    """
    return torch.jit.is_tracing() and not torch.onnx.is_in_onnx_export()
