"""The Trainer of a run and its callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig

from longseq.tasks.training import targets
from longseq.tasks.training.callbacks.clock import RunClock
from longseq.tasks.training.callbacks.ema import ExponentialMovingAverage
from longseq.tasks.training.callbacks.progress import TrainingProgress
from longseq.tasks.training.callbacks.stop import StopTogether
from longseq.tasks.training.configuration import Config, resolve
from longseq.tasks.training.files import WholeCheckpoints
from longseq.tasks.training.module import TrainedModule
from longseq.tasks.training.recipe import device_count
from longseq.tasks.training.sharded import FullyShardedStrategy

# Arguments of the Trainer that keys of the recipe replace; these count updates, not batches of a device.
RECIPE_KEYS = {
    "max_epochs": "recipe.epochs",
    "max_steps": "recipe.updates",
    "check_val_every_n_epoch": "recipe.validate_every_epochs",
    "val_check_interval": "recipe.validate_every_updates",
}

# The value of trainer.strategy that shards a model with torch's `fully_shard`.
FSDP = "fsdp"


def build_callbacks(config: DictConfig | Config, module: TrainedModule) -> list[Callback]:
    """The callbacks of `config.callbacks` that are not null, after those that every run or its recipe has.

    A callback that monitors a metric gets the direction from the metric of `module`. ValueError if the module has no
    such metric.
    """
    config = resolve(config)
    callbacks: list[Callback] = [StopTogether(), RunClock()]
    if config["recipe"].get("ema") and module.has_gradients:
        callbacks.append(ExponentialMovingAverage(**config["recipe"]["ema"]))
    callbacks += [
        targets.build(_with_direction(options, module, f"callbacks.{name}"), targets.CALLBACKS, f"callbacks.{name}")
        for name, options in config["callbacks"].items()
        if options
    ]
    if config["trainer"].get("enable_progress_bar") is False:
        callbacks = [callback for callback in callbacks if not isinstance(callback, ProgressBar)]
    return callbacks


def refuse_mode(options: Any, place: str) -> None:
    """Raise ValueError if a callback's options give the direction of the metric, which the metric itself defines."""
    if isinstance(options, Mapping) and "monitor" in options and "mode" in options:
        raise ValueError(f"{place}.mode={options['mode']}: the metric tells its direction; leave the key out")


def _with_direction(options: Mapping[str, Any], module: TrainedModule, place: str) -> Mapping[str, Any]:
    if not isinstance(options, Mapping) or "monitor" not in options:
        if targets.find(options, targets.CALLBACKS, place) is TrainingProgress and "metric" in options:
            module.higher_is_better(options["metric"], f"{place}.metric")
        return options
    refuse_mode(options, place)
    better = module.higher_is_better(options["monitor"], f"{place}.monitor")
    return {**options, "mode": "max" if better else "min"}


def refuse_recipe_keys(trainer: Mapping[str, Any]) -> None:
    """Raise ValueError, with the remedy, for an argument of Lightning's Trainer that a key of the recipe replaces."""
    for key, remedy in RECIPE_KEYS.items():
        if key in trainer:
            raise ValueError(f"trainer.{key}={trainer[key]}: the recipe says it; give {remedy}")


def refuse_sharded(config: Config) -> None:
    """ValueError, in one line, for what a run cannot have whose model is sharded over processes."""
    recipe = config.get("recipe") or {}
    if recipe.get("ema"):
        raise ValueError("recipe.ema averages whole weights, and trainer=fsdp shards them: set recipe.ema=null")


def build_trainer(config: DictConfig | Config, callbacks: list[Callback] | None = None) -> Trainer:
    """The Trainer of `config.trainer` with the configured logger; it writes below `config.output`."""
    config = resolve(config)
    logger = targets.build(config["logger"], targets.LOGGERS, "logger") if config.get("logger") else False
    refuse_recipe_keys(config["trainer"])
    # The data module divides samples among processes itself, without padding. A validation before training only costs
    # time.
    fixed: dict[str, Any] = {"use_distributed_sampler": False, "num_sanity_val_steps": 0, "enable_model_summary": False}
    fixed["max_epochs"] = -1  # the module sets it when the fit begins
    options = dict(config["trainer"])
    if options.get("strategy") == FSDP:
        refuse_sharded(config)
        options["strategy"] = FullyShardedStrategy(device_count(config))
    try:
        return Trainer(
            **options,
            **fixed,
            callbacks=callbacks or [],
            logger=logger,
            plugins=[WholeCheckpoints()],
            default_root_dir=config.get("output"),
        )
    except (TypeError, ValueError, MisconfigurationException) as error:
        raise ValueError(f"the trainer cannot be built: {error}; see trainer=..., or trainer=cpu") from error
