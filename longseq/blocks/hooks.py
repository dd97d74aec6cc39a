"""Checks whether hooks, adapters or quantisation change a call of a module."""

import functools
from typing import Any

from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from longseq.state import map_state


def is_replaceable(module: nn.Module, kind: type[nn.Module]) -> bool:
    """True if a fused kernel may replace this module: plain, and of exactly this class, which adapters change."""
    return type(module) is kind and is_plain(module)


def is_plain(module: nn.Module) -> bool:
    """True if the module has no hooks (observers, pruning, offloading) and no quantised weights."""
    weights = module.parameters(recurse=False)
    return not is_hooked(module) and not any(map(is_traceable_wrapper_subclass, weights))


def is_hooked(module: nn.Module) -> bool:
    """True if the module has hooks, or a `forward` of its own instead of its class's."""
    return any(_hooks(module)) or "forward" in module.__dict__


def has_observers(module: nn.Module) -> bool:
    """True if hooks or a `forward` of its own may read or change a call's inputs and outputs.

    The hooks of `fully_shard` only gather and release weights, and do not count.
    """
    observed = any(not _is_of_sharding(hook) for kind in _hooks(module) for hook in kind.values())
    return observed or "forward" in module.__dict__


def step_by_call(module: nn.Module, x: Any, state: Any) -> tuple[Any, Any]:
    """Read one token `x [B, D]` as a sequence of one, because hooks run in calls of a module and not in `step`."""
    y, state = module(map_state(lambda each: each.unsqueeze(1), x), state)
    return map_state(lambda each: each.squeeze(1), y), state


def _hooks(module: nn.Module) -> tuple[Any, ...]:
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def _is_of_sharding(hook: object) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")
