"""Models sharded by torch's `fully_shard`: methods beside `forward`, and first weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Method = TypeVar("Method", bound=Callable[..., Any])


def gathers_parameters(method: Method) -> Method:
    """Let a method of a sharded module gather its parameters, as a call of the module does.

    `fully_shard` hooks onto calls alone: within another method the parameters would be this process's shares. Such a
    method may give the parameters back when it ends: what calls it may use none of its own afterwards.
    """

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(type(self), "_get_fsdp_state"):
            return method(self, *args, **kwargs)
        from torch.distributed.fsdp import register_fsdp_forward_method

        # From now on this module finds the method that torch makes, and not this one.
        name = method.__name__
        setattr(self, name, MethodType(method, self))
        register_fsdp_forward_method(self, name)
        return getattr(self, name)(*args, **kwargs)

    return call  # type: ignore[return-value]


@contextmanager
def full_parameters(module: nn.Module, without: nn.Module | None = None) -> Iterator[None]:
    """Give sharded parameters of a module their whole shape inside; after it each process keeps its share of them.

    All processes then draw the same numbers from one seed, and those of a model that is not sharded. The parts of
    `without` stay as they are.
    """
    others = set() if without is None else set(without.modules())
    sharded: list[Any] = [
        (part, name, parameter)
        for part in module.modules()
        if part not in others
        for name, parameter in part._parameters.items()
        if is_sharded(parameter)
    ]
    for part, name, parameter in sharded:
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.to_local().device)
        part._parameters[name] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    try:
        yield
    finally:
        for part, name, parameter in sharded:
            whole, part._parameters[name] = part._parameters[name], parameter
            with torch.no_grad():
                parameter.to_local().copy_(_own_share(whole, parameter))


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is torch's DTensor, of which a process holds a part."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "device_mesh")


def _own_share(whole: Any, parameter: Any) -> Tensor:
    """What this process holds of a tensor that is laid out as a sharded parameter is."""
    from torch.distributed.tensor import distribute_tensor

    # Without a source nothing is sent: each process has the whole tensor.
    shares: Any = distribute_tensor(whole.detach(), parameter.device_mesh, parameter.placements, src_data_rank=None)
    return shares.to_local()
