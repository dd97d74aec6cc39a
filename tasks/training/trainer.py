"""The Trainer of a run and its callbacks."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig
from torch.nn.parallel import DistributedDataParallel

from longseq.tasks.training import targets
from longseq.tasks.training.callbacks.clock import RunClock
from longseq.tasks.training.callbacks.ema import ExponentialMovingAverage
from longseq.tasks.training.callbacks.progress import TrainingProgress
from longseq.tasks.training.callbacks.run_log import RunLog
from longseq.tasks.training.callbacks.stop import StopTogether
from longseq.tasks.training.configuration import Config, resolve
from longseq.tasks.training.files import WholeCheckpoints
from longseq.tasks.training.logger import build_loggers
from longseq.tasks.training.module import TrainedModule
from longseq.tasks.training.options import Range, check_value, refuse_unknown, signature_options, spell
from longseq.tasks.training.precision import refuse_half_weights
from longseq.tasks.training.processes import count_started_by_torchrun
from longseq.tasks.training.recipe import device_count
from longseq.tasks.training.sharded import FullyShardedStrategy

# Arguments of the Trainer that other keys replace, and the remedy. Keys of the recipe count updates, not batches of a
# device.
OWN_KEYS = {
    "max_epochs": "the recipe says it; give recipe.epochs",
    "max_steps": "the recipe says it; give recipe.updates",
    "check_val_every_n_epoch": "the recipe says it; give recipe.validate_every_epochs",
    "val_check_interval": "the recipe says it; give recipe.validate_every_updates",
    "callbacks": "callbacks are a group of their own; give +callbacks.NAME._target_=CLASS",
    "logger": "loggers are a group of their own; give logger=tensorboard, csv, wandb, mlflow or none",
    "default_root_dir": "the run folder has its own key; give output=FOLDER",
    "overfit_batches": "give trainer.limit_train_batches and trainer.limit_val_batches, for which data need no sampler",
    "use_distributed_sampler": "the data deal samples out to the processes themselves; leave it out",
}

# Parameters of DDPStrategy and of torch's module that Lightning passes by itself.
_OF_LIGHTNING = ("accelerator", "parallel_devices", "cluster_environment", "kwargs", "module", "device_ids")

# The names that Lightning's Trainer has for its profilers.
_PROFILERS = {"simple": "SimpleProfiler", "advanced": "AdvancedProfiler", "pytorch": "PyTorchProfiler"}

# How the processes of a strategy begin: each with the command. Others would take over objects of the first process,
# which cannot be sent to them, and would not end in order.
_STARTED = "popen"
_BEGIN_ANEW = "the processes of a run begin with its command, and are no copies of the first one"

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


def refuse_own_keys(trainer: Mapping[str, Any]) -> None:
    """Raise ValueError, with the remedy, for an argument of the Trainer that another key replaces, or half weights."""
    for key, remedy in OWN_KEYS.items():
        if key in trainer:
            raise ValueError(f"trainer.{key}={spell(trainer[key])}: {remedy}")
    refuse_half_weights(trainer.get("precision"), "trainer.precision")


def check_parts(trainer: Mapping[str, Any]) -> None:
    """Raise ValueError, in one line, if the strategy, the profiler or a plug-in does not take its options."""
    strategy = trainer.get("strategy")
    if isinstance(strategy, str):
        _check_strategy(strategy)
    if isinstance(strategy, Mapping):
        start = strategy.get("start_method") or _STARTED
        if start != _STARTED:
            raise ValueError(f"trainer.strategy.start_method={spell(start)}: {_BEGIN_ANEW}: leave it out")
        target = targets.find(strategy, targets.STRATEGIES, "trainer.strategy")
        targets.check_options(strategy, targets.STRATEGIES, "trainer.strategy", given=("devices",))
        if target is DDPStrategy:
            known = [*signature_options(DDPStrategy), *signature_options(DistributedDataParallel)]
            known = [name for name in known if name not in _OF_LIGHTNING]
            refuse_unknown((key for key in strategy if key != targets.TARGET), known, "trainer.strategy")
        check_value(Annotated[float | None, Range(above=0)], strategy.get("timeout"), "trainer.strategy.timeout")
    if isinstance(trainer.get("profiler"), Mapping):
        targets.check_options(trainer["profiler"], targets.PROFILERS, "trainer.profiler")
    plugins = trainer.get("plugins") or []
    if not isinstance(plugins, list):
        raise ValueError(f"trainer.plugins={spell(plugins)} must be a list, each with {targets.TARGET}")
    for index, options in enumerate(plugins):
        targets.check_options(options, targets.TRAINER_PLUGINS, f"trainer.plugins[{index}]")


def _check_strategy(name: str) -> None:
    if any(method in name for method in ("spawn", "fork", "notebook")):
        raise ValueError(f"trainer.strategy={name}: {_BEGIN_ANEW}: give ddp")
    known = ["auto", *StrategyRegistry.available_strategies()]
    if name not in known:
        raise ValueError(
            f"trainer.strategy={name} is unknown: give auto, ddp, {FSDP} or another of Lightning's strategies"
        )


def refuse_other_processes(config: Config) -> None:
    """ValueError, in one line, where torchrun has started more or fewer processes than the trainer would have.

    A trainer of one device would run alone in each of them, and all would write into one folder.
    """
    started, count = count_started_by_torchrun(), device_count(config)
    if started is not None and started != count:
        devices, nodes = config["trainer"].get("devices", 1), config["trainer"].get("num_nodes", 1)
        raise ValueError(
            f"torchrun has started {started} process(es), and trainer.devices={spell(devices)} with "
            f"trainer.num_nodes={nodes} are {count}: give trainer=ddp, or trainer=ddp_sim on CPUs, with these two as "
            "torchrun's --nproc-per-node and --nnodes, or start the command without torchrun"
        )


def refuse_sharded(config: Config) -> None:
    """ValueError, in one line, for what a run cannot have whose model is sharded over processes."""
    recipe = config.get("recipe") or {}
    if recipe.get("ema"):
        raise ValueError("recipe.ema averages whole weights, and trainer=fsdp shards them: set recipe.ema=null")


def refuse_absent_devices(trainer: Mapping[str, Any]) -> None:
    """ValueError, in one line, for GPUs that this machine does not have."""
    accelerator, devices = trainer.get("accelerator"), trainer.get("devices", 1)
    there = torch.cuda.device_count()
    if accelerator not in ("gpu", "cuda") or (not there and torch.backends.mps.is_available()):
        return
    if not there:
        raise ValueError(f"trainer.accelerator={accelerator}: torch sees no GPU here; give trainer=cpu")
    if isinstance(devices, int) and devices > there:
        raise ValueError(
            f"trainer.devices={devices}: torch sees {there} GPU(s) here; give trainer.devices={there}, or auto for all"
        )


def build_trainer(
    config: DictConfig | Config, callbacks: list[Callback] | None = None, *, profile: str = "profile"
) -> Trainer:
    """The Trainer of `config.trainer` with the configured logger; it writes below the folder `config.output`.

    `profile` ends the name of a profiler's report if `trainer.profiler` has no `filename`.
    """
    config = resolve(config)
    refuse_absent_devices(config["trainer"])
    loggers = build_loggers(config.get("logger"))
    refuse_own_keys(config["trainer"])
    # Our data modules divide samples among processes themselves, without padding; Lightning does it for one of the
    # user's. The module sets the number of epochs when the fit begins.
    foreign = targets.is_named((config.get("data") or {}).get("datamodule"))
    fixed: dict[str, Any] = {"use_distributed_sampler": foreign, "max_epochs": -1}
    # A validation before training only costs time.
    options = {"num_sanity_val_steps": 0, "enable_model_summary": False, **config["trainer"]}
    plugins = [
        targets.build(node, targets.TRAINER_PLUGINS, f"trainer.plugins[{index}]")
        for index, node in enumerate(options.pop("plugins", None) or [])
    ]
    try:
        options["strategy"] = _build_strategy(config, options.get("strategy", "auto"))
        options["profiler"] = _build_profiler(options.get("profiler"), profile)
        return Trainer(
            **options,
            **fixed,
            callbacks=callbacks or [],
            logger=loggers or False,
            plugins=[WholeCheckpoints(), *plugins],
            default_root_dir=config.get("output"),
        )
    except (TypeError, ValueError, ImportError, MisconfigurationException) as error:
        told = str(error).rstrip(".")
        raise ValueError(f"the trainer cannot be built: {told}; see trainer=..., or trainer=cpu") from error


def refuse_nameless_program(trainer: Trainer) -> None:
    """ValueError, in one line, where Lightning could not start the other processes of a run: it starts them by the name
    of the program's file or module, which a text in the command line or from a pipe does not have.
    """
    if trainer.num_devices < 2 or not isinstance(trainer.strategy.launcher, _SubprocessScriptLauncher):
        return
    if sys.modules["__main__"].__spec__ is None and not os.path.isfile(sys.argv[0]):
        raise ValueError(
            f"trainer.devices={trainer.num_devices} starts this program again for each device, and it has no file to "
            f"start ({sys.argv[0]!r} is none): put it into a FILE.py and run python FILE.py, or use the command longseq"
        )


def refuse_lonely_machine(trainer: Trainer) -> None:
    """ValueError, in one line, for a run on several machines that nothing connects: it would wait for them for ever."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if trainer.num_nodes > 1 and isinstance(environment, LightningEnvironment) and "MASTER_PORT" not in os.environ:
        raise ValueError(
            f"trainer.num_nodes={trainer.num_nodes}: nothing connects this process with those of other machines: start "
            "it by torchrun or srun, or set MASTER_ADDR, MASTER_PORT and NODE_RANK on each of them"
        )


def _build_strategy(config: Config, strategy: Any) -> Any:
    """Lightning's strategy of `trainer.strategy`: a name, or a class with its options; `timeout` is in seconds."""
    if strategy == FSDP:
        strategy = {targets.TARGET: FullyShardedStrategy.__name__}
    if not isinstance(strategy, Mapping):
        return strategy
    options = dict(strategy)
    if targets.find(options, targets.STRATEGIES, "trainer.strategy") is FullyShardedStrategy:
        refuse_sharded(config)
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
