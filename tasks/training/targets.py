"""What a configuration may name to be built: optimizers, callbacks, loggers, metrics and more, of these lists only.

A configuration is text from the command line or a file. So it must not call functions that are not listed here: the
names are complete ones, never modules or prefixes of names. A plug-in adds its own by `@register("callback")`.
Of models and data there is no list: they are any class that a declared plug-in defines (see `PLUGIN_CLASSES`).
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import Dataset

from longseq.files import check_above
from longseq.plugins import find_class
from longseq.tasks.training.options import Range, check_call, read_beside, signature_options

OPTIMIZERS = ["timm.optim.create_optimizer_v2", "longseq.tasks.training.muon.create_muon"]
SCHEDULES = ["timm.scheduler.create_scheduler_v2"]
CALLBACKS = [
    "longseq.tasks.training.callbacks.checkpoint.BestCheckpoint",
    "longseq.tasks.training.callbacks.checkpoint.LastCheckpoint",
    "longseq.tasks.training.callbacks.confusion.ConfusionMatrix",
    "longseq.tasks.training.callbacks.nonfinite.NonFiniteStop",
    "longseq.tasks.training.callbacks.progress.TrainingProgress",
    "longseq.tasks.training.callbacks.telemetry.Telemetry",
    "longseq.tasks.training.callbacks.throughput.Throughput",
    "longseq.tasks.training.callbacks.unreadable.UnreadableSamples",
    "lightning.pytorch.callbacks.DeviceStatsMonitor",
    "lightning.pytorch.callbacks.EarlyStopping",
    "lightning.pytorch.callbacks.LearningRateMonitor",
    "lightning.pytorch.callbacks.ModelSummary",
    "lightning.pytorch.callbacks.Timer",
]
LOGGERS = [
    "longseq.tasks.training.logger.RunLogger",
    "lightning.pytorch.loggers.CSVLogger",
    "lightning.pytorch.loggers.MLFlowLogger",
    "lightning.pytorch.loggers.TensorBoardLogger",
    "lightning.pytorch.loggers.WandbLogger",
]
STRATEGIES = [
    "lightning.pytorch.strategies.DDPStrategy",
    "longseq.tasks.training.sharded.FullyShardedStrategy",
]
PROFILERS = [
    "lightning.pytorch.profilers.AdvancedProfiler",
    "lightning.pytorch.profilers.PyTorchProfiler",
    "lightning.pytorch.profilers.SimpleProfiler",
]
# Where the processes of a run are told of each other, and what else Lightning calls a plug-in of its Trainer.
TRAINER_PLUGINS = [
    "lightning.pytorch.plugins.environments.KubeflowEnvironment",
    "lightning.pytorch.plugins.environments.LSFEnvironment",
    "lightning.pytorch.plugins.environments.LightningEnvironment",
    "lightning.pytorch.plugins.environments.MPIEnvironment",
    "lightning.pytorch.plugins.environments.SLURMEnvironment",
    "lightning.pytorch.plugins.environments.TorchElasticEnvironment",
]
# Metrics of one number. Those of several classes need their number, which the data tells.
METRICS = [
    f"torchmetrics.classification.{form}{name}"
    for form, names in {
        "Binary": ("Accuracy", "AUROC", "AveragePrecision", "CalibrationError", "CohenKappa", "F1Score", "FBetaScore"),
        "Multiclass": ("Accuracy", "AUROC", "AveragePrecision", "CalibrationError", "CohenKappa", "F1Score"),
        "Multilabel": ("Accuracy", "AUROC", "AveragePrecision", "CoverageError", "ExactMatch", "F1Score", "FBetaScore"),
    }.items()
    for name in names
]
METRICS += [
    f"torchmetrics.classification.{form}{name}"
    for form in ("Binary", "Multiclass", "Multilabel")
    for name in ("HammingDistance", "JaccardIndex", "MatthewsCorrCoef", "Precision", "Recall", "Specificity")
]
METRICS += [
    "torchmetrics.classification.MulticlassFBetaScore",
    "torchmetrics.classification.MultilabelRankingAveragePrecision",
    "torchmetrics.classification.MultilabelRankingLoss",
]

# Where a configuration names a class of a declared plug-in, and what the class must be derived from.
PLUGIN_CLASSES: Mapping[str, type] = {
    "model": nn.Module,
    "data.train_set": Dataset,
    "data.val_set": Dataset,
    "data.test_set": Dataset,
    "data.datamodule": LightningDataModule,
}

# Options of callbacks and loggers that are folders.
FOLDERS = ("dirpath", "folder", "save_dir")


@dataclass(frozen=True, kw_only=True)
class EarlyStoppingKeys:
    """The numbers among the options of Lightning's EarlyStopping; `monitor` is any validation metric."""

    patience: Annotated[int, Range(0)] = 3
    min_delta: Annotated[float, Range(0)] = 0.0


@dataclass(frozen=True, kw_only=True)
class TimerKeys:
    """The options of Lightning's Timer that its annotations leave open."""

    duration: str | Mapping[str, Annotated[int, Range(0)]] | None = None
    interval: Literal["step", "epoch"] = "step"


@dataclass(frozen=True, kw_only=True)
class ModelSummaryKeys:
    """The number among the options of Lightning's ModelSummary."""

    max_depth: Annotated[int, Range(-1)] = 1


@dataclass(frozen=True, kw_only=True)
class CSVLoggerKeys:
    """The options of Lightning's CSVLogger whose values its annotations leave open."""

    save_dir: str
    version: Annotated[int, Range(0)] | str | None = None
    flush_logs_every_n_steps: Annotated[int, Range(1)] = 100


@dataclass(frozen=True, kw_only=True)
class TensorBoardLoggerKeys:
    """The options of Lightning's TensorBoardLogger whose values its annotations leave open."""

    save_dir: str
    version: Annotated[int, Range(0)] | str | None = None


# Of Lightning's callbacks and loggers: options that are checked beyond their annotations.
NARROWED: Mapping[str, type] = {
    "EarlyStopping": EarlyStoppingKeys,
    "Timer": TimerKeys,
    "ModelSummary": ModelSummaryKeys,
    "CSVLogger": CSVLoggerKeys,
    "TensorBoardLogger": TensorBoardLoggerKeys,
}

_LISTS = {
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "callback": CALLBACKS,
    "logger": LOGGERS,
    "metric": METRICS,
    "strategy": STRATEGIES,
    "profiler": PROFILERS,
    "trainer_plugin": TRAINER_PLUGINS,
}
_REGISTERED: dict[str, Any] = {}

Target = TypeVar("Target", bound=Callable[..., Any])

TARGET, PARTIAL = "_target_", "_partial_"


def register(
    kind: Literal["optimizer", "schedule", "callback", "logger", "metric", "strategy", "profiler", "trainer_plugin"],
) -> Callable[[Target], Target]:
    """Register a class or function that configurations may then name, by its full name or its last part.

    An optimizer is called with (model, lr=...) and a schedule with (optimizer, num_epochs=..., updates_per_epoch=...),
    as timm's are; the others are called with their own options only. A metric is one of torchmetrics, called also with
    num_classes or num_labels if it takes them.
    """
    names = _LISTS[kind]

    def enter(target: Target) -> Target:
        name = f"{target.__module__}.{target.__qualname__}"
        if taken := [other for other in names if _short(other) == _short(name)]:
            raise ValueError(f"the {kind} {_short(name)} is there already, as {taken[0]}; choose another name")
        names.append(name)
        _REGISTERED[name] = target
        return target

    return enter


def build(node: Mapping[str, Any], allowed: Sequence[str], key: str) -> Any:
    """Call the function that `node` names, one of `allowed`, with the other keys of `node`.

    With `_partial_: true`, a partial is returned in place of the result. ValueError for another name, and for a name
    inside the options.
    """
    function = find(node, allowed, key)
    options = {name: value for name, value in node.items() if name not in (TARGET, PARTIAL)}
    for place, _ in find_targets(options, key):
        raise ValueError(f"{place}.{TARGET}: nothing is built from a name here; give a plain value")
    if node.get(PARTIAL, False):
        return functools.partial(function, **options)
    try:
        return function(**options)
    except (TypeError, MisconfigurationException) as error:
        raise ValueError(f"{key}: {_short(node[TARGET])} does not take these options: {error}") from error


def check(config: Mapping[str, Any]) -> None:
    """Raise ValueError, in one line, if a configuration names something unlisted to build, or at another place."""
    for place, target in find_targets(config):
        if place in PLUGIN_CLASSES:
            find_class(target, PLUGIN_CLASSES[place], f"{place}.{TARGET}")
            continue
        allowed = _allowed_at(place)
        if allowed is None:
            raise ValueError(f"{place}.{TARGET}={target}: nothing is built from a name here; give a plain value")
        _named(target, allowed, place)


def is_named(node: Any) -> bool:
    """True if a node of `PLUGIN_CLASSES` names a class."""
    return isinstance(node, Mapping) and node.get(TARGET) is not None


def build_own(node: Mapping[str, Any], key: str, told: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """An object of the plug-in's class that `node` names at the place `key`, with the other keys of `node`.

    `told` are arguments that the program knows: the class gets those that it takes and `node` does not give.
    ValueError, in one line, for another class, and for options that it does not take; errors of its constructor are its
    own.
    """
    cls: Any = find_class(node[TARGET], PLUGIN_CLASSES[key], f"{key}.{TARGET}")
    options = {name: value for name, value in node.items() if name != TARGET}
    for place, _ in find_targets(options, key):
        raise ValueError(f"{place}.{TARGET}: nothing is built from a name here; give a plain value")
    arguments = {name: value for name, value in told.items() if name in signature_options(cls)} | options
    return cls(**check_call(cls, arguments, key))


def check_options(node: Mapping[str, Any], allowed: Sequence[str], key: str, *, given: Sequence[str] = ()) -> None:
    """Raise ValueError, in one line, if the function that `node` names does not accept its other keys; nothing is
    called.

    `given` names arguments that the program passes itself.
    """
    function = find(node, allowed, key)
    options = {name: node[name] for name in node if name not in (TARGET, PARTIAL)}
    narrowed = NARROWED.get(_short(node[TARGET])) if function.__module__.startswith("lightning.") else None
    if narrowed is None:
        check_call(function, options, key, given=given)
    else:
        read_beside(narrowed, function, options, key, given=given)
    for name in FOLDERS:
        path = options.get(name)
        if isinstance(path, str) and path:
            check_above(Path(path), f"{key}.{name}", is_folder=True)


def find(node: Mapping[str, Any], allowed: Sequence[str], key: str) -> Callable[..., Any]:
    """The function that `node` names, one of `allowed`. ValueError, in one line, for another name or none."""
    if not isinstance(node, Mapping) or TARGET not in node:
        raise ValueError(f"{key} names nothing to build: give {key}.{TARGET}, one of {', '.join(map(_short, allowed))}")
    return _named(node[TARGET], allowed, key)


def find_targets(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Every place of a configuration that names something to build, and the name."""
    if isinstance(value, Mapping):
        if TARGET in value:
            yield place, value[TARGET]
        for key, inner in value.items():
            yield from find_targets(inner, f"{place}.{key}" if place else str(key))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from find_targets(inner, f"{place}[{index}]")


def _allowed_at(place: str) -> Sequence[str] | None:
    group, _, rest = place.partition(".")
    if group in ("callbacks", "logger") and rest and not set(rest) & set(".["):
        return CALLBACKS if group == "callbacks" else LOGGERS
    if re.fullmatch(r"trainer\.plugins\[\d+\]", place):
        return TRAINER_PLUGINS
    if place.startswith("task.metrics.") and not set(place.removeprefix("task.metrics.")) & set(".["):
        return METRICS
    return {
        "recipe.optimizer": OPTIMIZERS,
        "recipe.schedule": SCHEDULES,
        "logger": LOGGERS,
        "trainer.strategy": STRATEGIES,
        "trainer.profiler": PROFILERS,
    }.get(place)


def _named(target: Any, allowed: Sequence[str], place: str) -> Any:
    whole = next((name for name in allowed if target in (name, _short(name))), None)
    if whole is None:
        raise ValueError(
            f"{place}.{TARGET}={target} is not called: it must be one of {', '.join(map(_short, allowed))}"
            f"{_how_to_register(allowed)}"
        )
    if whole in _REGISTERED:
        return _REGISTERED[whole]
    module, _, name = whole.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _how_to_register(allowed: Sequence[str]) -> str:
    """What makes an own class one of a list, if that list takes them."""
    kinds = [kind for kind, names in _LISTS.items() if names is allowed]
    told = ", or a class that a module of plugins=[MODULE] registers by targets.register({!r})"
    return told.format(kinds[0]) if kinds else ""


def _short(name: Any) -> str:
    return str(name).rpartition(".")[2]
