"""The Trainer of a run and its callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ProgressBar
from omegaconf import DictConfig

from longseq.tasks.training import targets
from longseq.tasks.training.callbacks.clock import RunClock
from longseq.tasks.training.callbacks.ema import ExponentialMovingAverage
from longseq.tasks.training.callbacks.run_log import RunLog
from longseq.tasks.training.callbacks.stop import StopTogether
from longseq.tasks.training.configuration import Config, resolve
from longseq.tasks.training.files import WholeCheckpoints
from longseq.tasks.training.logger import build_loggers
from longseq.tasks.training.module import TrainedModule
from longseq.tasks.training.recipe import device_count
from longseq.tasks.training.sharded import FullyShardedStrategy

# The names that Lightning's Trainer has for its profilers.
_PROFILERS = {"simple": "SimpleProfiler", "advanced": "AdvancedProfiler", "pytorch": "PyTorchProfiler"}

# The value of trainer.strategy that shards a model with torch's `fully_shard`.
FSDP = "fsdp"


def build_callbacks(config: DictConfig | Config, module: TrainedModule) -> list[Callback]:
    """The callbacks of `config.callbacks` that are not null, after those that every run or its recipe has.

    A callback that monitors a metric gets the direction from the metric of `module`. ValueError if the module has no
    such metric.
    """
    config = resolve(config)
    callbacks: list[Callback] = [StopTogether(), RunClock(), RunLog()]
    if config["recipe"].get("ema") and module.has_gradients:
        callbacks.append(ExponentialMovingAverage(**config["recipe"]["ema"]))
    for name, options in config["callbacks"].items():
        if not options:
            continue
        place = f"callbacks.{name}"
        if "monitor" in options:
            better = module.higher_is_better(options["monitor"], f"{place}.monitor")
            options = {**options, "mode": "max" if better else "min"}
            if targets.find(options, targets.CALLBACKS, place) is EarlyStopping:
                # Not every epoch has a validation.
                options = {"check_on_train_epoch_end": False, **options}
        callbacks.append(targets.build(options, targets.CALLBACKS, place))
    if config["trainer"].get("enable_progress_bar") is False:
        callbacks = [callback for callback in callbacks if not isinstance(callback, ProgressBar)]
    return callbacks


def build_trainer(
    config: DictConfig | Config,
    callbacks: list[Callback] | None = None,
    *,
    profile: str = "profile",
    first_update: int | None = None,
) -> Trainer:
    """The Trainer of `config.trainer` with the configured logger; it writes below the folder `config.output`.

    `profile` ends the name of a profiler's report if `trainer.profiler` has no `filename`. Loggers go on after
    `first_update` updates of an interrupted run.
    """
    config = resolve(config)
    # A validation before training only costs time.
    options = {"num_sanity_val_steps": 0, "enable_model_summary": False, **config["trainer"]}
    plugins = [
        targets.build(node, targets.TRAINER_PLUGINS, f"trainer.plugins[{index}]")
        for index, node in enumerate(options.pop("plugins", None) or [])
    ]
    options["strategy"] = _build_strategy(config, options.get("strategy", "auto"))
    options["profiler"] = _build_profiler(options.get("profiler"), profile)
    return Trainer(
        **options,
        # Our data modules divide samples among processes themselves, without padding; Lightning does it for one of the
        # user's. The module sets the number of epochs when the fit begins.
        use_distributed_sampler=targets.is_named((config.get("data") or {}).get("datamodule")),
        max_epochs=-1,
        callbacks=callbacks or [],
        logger=build_loggers(config.get("logger"), first_update) or False,
        plugins=[WholeCheckpoints(), *plugins],
        default_root_dir=config.get("output"),
    )


def _build_strategy(config: Config, strategy: Any) -> Any:
    """Lightning's strategy of `trainer.strategy`: a name, or a class with its options; `timeout` is in seconds."""
    if strategy == FSDP:
        strategy = {targets.TARGET: FullyShardedStrategy.__name__}
    if not isinstance(strategy, Mapping):
        return strategy
    options = dict(strategy)
    if targets.find(options, targets.STRATEGIES, "trainer.strategy") is FullyShardedStrategy:
        if (config.get("recipe") or {}).get("ema"):
            raise ValueError("recipe.ema averages whole weights, and trainer=fsdp shards them: set recipe.ema=null")
        options["devices"] = device_count(config)
    if options.get("timeout") is not None:
        options["timeout"] = timedelta(seconds=options["timeout"])
    return targets.build(options, targets.STRATEGIES, "trainer.strategy")


def _build_profiler(profiler: Any, filename: str) -> Any:
    """Lightning's profiler of `trainer.profiler`: a name, or a class with its options."""
    if isinstance(profiler, str) and profiler in _PROFILERS:
        profiler = {targets.TARGET: _PROFILERS[profiler]}
    if not isinstance(profiler, Mapping):
        return profiler
    built = targets.build(profiler, targets.PROFILERS, "trainer.profiler")
    if getattr(built, "filename", "") is None:  # then the report would go to Lightning's log, which a run does not show
        built.filename = filename
    return built
