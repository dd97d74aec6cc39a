"""Models sharded by torch's `fully_shard`: methods other than `forward`, and initial weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Method = TypeVar("Method", bound=Callable[..., Any])
Module = TypeVar("Module", bound=nn.Module)


def gathers_parameters(method: Method) -> Method:
    """Decorate a method of a module that may be sharded: like a call, the method then works on whole parameters.

    `fully_shard` gathers parameters in calls of a module only. They may be sharded again when the method ends, so its
    caller must not use them.
    """

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(type(self), "_get_fsdp_state"):
            return method(self, *args, **kwargs)
        from torch.distributed.fsdp import register_fsdp_forward_method

        # Later calls use torch's wrapper, which becomes an attribute of this module.
        name = method.__name__
        setattr(self, name, MethodType(method, self))
        register_fsdp_forward_method(self, name)
        return getattr(self, name)(*args, **kwargs)

    return call  # type: ignore[return-value]


def unsharded_class(module: Module) -> type[Module]:
    """The original class of a module; `fully_shard` replaces it by a subclass."""
    own = type(module)
    return own.__mro__[2] if hasattr(own, "_get_fsdp_state") else own


@contextmanager
def full_parameters(module: nn.Module, without: nn.Module | None = None) -> Iterator[None]:
    """Give the sharded parameters of a module their whole shape inside the context; each process then keeps its shard.

    Inside, one seed draws the same numbers in all processes as for a model that is not sharded. The parts of `without`
    stay sharded.
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


def has_shards(module: nn.Module) -> bool:
    """True for a module with sharded parameters."""
    return any(is_sharded(parameter) for parameter in module.parameters())


def is_sharded(tensor: Any) -> bool:
    """True for torch's DTensor, of which each process holds a shard."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "device_mesh")


def own_part(tensor: Any) -> Tensor:
    """The part of a tensor on this process; the tensor can be sharded or not."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def _own_share(whole: Any, parameter: Any) -> Tensor:
    """Return this process's shard of `whole`, in the layout of the sharded `parameter`."""
    from torch.distributed.tensor import distribute_tensor

    # Without a source rank nothing is sent: each process has the whole tensor.
    shares: Any = distribute_tensor(whole.detach(), parameter.device_mesh, parameter.placements, src_data_rank=None)
    return shares.to_local()
