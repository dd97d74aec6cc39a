"""Whether another part may do a module's work with its parameters, or the module must be called."""

from __future__ import annotations

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
