"""Whether another part may do a module's work with its parameters, or the module must be called."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is of this very class, and nothing waits for it to be called.

    Adapters, quantisation, sharding and parametrisations make another class of it; observers, pruning, weight norm and
    offloading hook onto it.
    """
    return type(module) is kind and not is_hooked(module)


def is_hooked(module: nn.Module) -> bool:
    """Whether a call of a module does more than its class says."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in module.__dict__


def is_watched(module: nn.Module) -> bool:
    """Whether hooks look at what goes into a module or comes out of it; those of sharding only care for its weights."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(not _is_of_sharding(hook) for kind in hooks for hook in kind.values())


def _is_of_sharding(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")
