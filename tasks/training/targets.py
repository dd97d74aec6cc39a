"""What a configuration may build by `_target_`: optimizers, callbacks, loggers, metrics and parts of the Trainer.

A configuration is text from a command line or a checkpoint. It may name classes and functions of the modules below by
their last name, and what a plug-in registers or defines; nothing else is imported or called.
"""

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from longseq import plugins

Target = TypeVar("Target", bound=Callable[..., Any])

OPTIMIZERS, SCHEDULES, CALLBACKS, LOGGERS = "optimizer", "schedule", "callback", "logger"
METRICS, STRATEGIES, PROFILERS, TRAINER_PLUGINS = "metric", "strategy", "profiler", "trainer_plugin"

_OURS = "longseq.tasks.training"
# The modules whose public classes and functions a configuration may name, by kind.
_MODULES: Mapping[str, tuple[str, ...]] = {
    OPTIMIZERS: ("timm.optim", f"{_OURS}.muon"),
    SCHEDULES: ("timm.scheduler",),
    CALLBACKS: (
        *(f"{_OURS}.callbacks.{name}" for name in ("checkpoint", "throughput", "weights")),
        "lightning.pytorch.callbacks",
    ),
    LOGGERS: (f"{_OURS}.logger", "lightning.pytorch.loggers"),
    METRICS: ("torchmetrics.classification",),
    STRATEGIES: (f"{_OURS}.distributed", "lightning.pytorch.strategies"),
    PROFILERS: ("lightning.pytorch.profilers",),
    TRAINER_PLUGINS: ("lightning.pytorch.plugins.environments",),
}
_REGISTERED: dict[tuple[str, str], Any] = {}

TARGET, PARTIAL = "_target_", "_partial_"


def register(
    kind: Literal["optimizer", "schedule", "callback", "logger", "metric", "strategy", "profiler", "trainer_plugin"],
) -> Callable[[Target], Target]:
    """Register a class or function that configurations may then name by its last name.

    As in timm, an optimizer is called with (model, lr=...) and a schedule with (optimizer, num_epochs=...,
    updates_per_epoch=...); others with their options. A metric also gets num_classes or num_labels if it takes them.
    """

    def enter(target: Target) -> Target:
        _REGISTERED[kind, target.__name__] = target
        return target

    return enter


def build(node: Mapping[str, Any], kind: str, key: str) -> Any:
    """Call the target of `node` with its other keys; with `_partial_: true`, return a partial instead."""
    function = find(node, kind, key)
    options = {name: value for name, value in node.items() if name not in (TARGET, PARTIAL)}
    return functools.partial(function, **options) if node.get(PARTIAL) else function(**options)


def find(node: Mapping[str, Any], kind: str, key: str) -> Callable[..., Any]:
    """The class or function that `node` names. ValueError if there is none of this kind."""
    target = node.get(TARGET) if isinstance(node, Mapping) else None
    name = str(target).rpartition(".")[2]
    found = _REGISTERED.get((kind, name))
    if found is None and any(str(target).startswith(f"{plugin}.") for plugin in plugins.loaded()):
        found = plugins.find_class(target, object, f"{key}.{TARGET}")
    for module in _MODULES[kind] if found is None and not name.startswith("_") else ():
        if target in (name, f"{module}.{name}"):
            found = found or getattr(importlib.import_module(module), name, None)
    if not callable(found) or target is None:
        raise ValueError(f"{key}.{TARGET}={target} is no {kind} of {', '.join(_MODULES[kind])} or a plug-in")
    return found
