"""Checks whether hooks, adapters or quantisation change a call of a module."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def is_replaceable(module: nn.Module, kind: type[nn.Module]) -> bool:
    """True if a fused kernel may replace this module: it is plain, and was not subclassed.

    Adapters, quantisation, sharding and parametrisations change a module's class.
    """
    return type(module) is kind and is_plain(module)


def is_plain(module: nn.Module) -> bool:
    """True if the module has no hooks, and no weights that are subclasses of tensors.

    Observers, pruning, weight norm and offloading register hooks. torchao's quantised weights are such subclasses.
    """
    weights = module.parameters(recurse=False)
    return not is_hooked(module) and not any(map(is_traceable_wrapper_subclass, weights))


def is_hooked(module: nn.Module) -> bool:
    """True if the module has hooks, or a `forward` of its own instead of its class's."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in module.__dict__


def has_observers(module: nn.Module) -> bool:
    """True if a call reads or changes inputs and outputs: hooks other than `fully_shard`'s, or a `forward` of its own.

    The hooks of `fully_shard` gather and release weights only.
    """
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    observed = any(not _is_of_sharding(hook) for kind in hooks for hook in kind.values())
    return observed or "forward" in module.__dict__


def step_by_call(module: nn.Module, x: Tensor, state: Any) -> tuple[Tensor, Any]:
    """Read one token `x [B, D]` as a sequence of one: hooks run in calls of a module, and not in its method `step`."""
    y, state = module(x.unsqueeze(1), state)
    return y.squeeze(1), state


def _is_of_sharding(hook: object) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")
