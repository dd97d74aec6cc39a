"""The Trainer of a run, its callbacks, and the search of a learning rate before it."""

import io
import sys
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stderr
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.tuner import Tuner
from omegaconf import DictConfig

from longseq.tasks.data.module import TaskData
from longseq.tasks.training import targets
from longseq.tasks.training.callbacks.kernels import KernelPreparation
from longseq.tasks.training.callbacks.stop import StopTogether
from longseq.tasks.training.callbacks.throughput import RunClock
from longseq.tasks.training.callbacks.weights import ExponentialMovingAverage
from longseq.tasks.training.configuration import Config, resolve
from longseq.tasks.training.distributed import FullyShardedStrategy
from longseq.tasks.training.logger import build_loggers
from longseq.tasks.training.module import TrainedModule
from longseq.tasks.training.recipe import device_count, effective_learning_rate
from longseq.tasks.training.system import WholeCheckpoints, write_text

TABLE = "learning_rates.csv"  # the learning-rate curve, in the run folder


def build_callbacks(config: DictConfig | Config, module: TrainedModule) -> list[Callback]:
    """The callbacks of every run and of the recipe, then those in `config.callbacks` that are not null.

    A callback that monitors a metric gets its direction from the metric of `module`, which must have it (ValueError).
    """
    config = resolve(config)
    callbacks: list[Callback] = [StopTogether(), RunClock(config["trainer"].get("max_time")), KernelPreparation()]
    if config["recipe"].get("ema") and module.has_gradients:
        callbacks.append(ExponentialMovingAverage(**config["recipe"]["ema"]))
    for name, options in config["callbacks"].items():
        if not options:
            continue
        place = f"callbacks.{name}"
        if "monitor" in options:
            better = module.higher_is_better(options["monitor"], f"{place}.monitor")
            options = {**options, "mode": "max" if better else "min"}
        callbacks.append(targets.build(options, targets.CALLBACKS, place))
    return callbacks


def build_trainer(
    config: DictConfig | Config, callbacks: list[Callback] | None = None, *, first_update: int | None = None
) -> Trainer:
    """The Trainer of `config.trainer` with the configured loggers; it writes below the folder `config.output`.

    In a resumed run, loggers continue after `first_update` updates.
    """
    config = resolve(config)
    # A validation before training only costs time.
    options = {"num_sanity_val_steps": 0, "enable_model_summary": False, **config["trainer"]}
    options.setdefault("enable_progress_bar", sys.stdout.isatty())
    plugins = [
        targets.build(node, targets.TRAINER_PLUGINS, f"trainer.plugins[{index}]")
        for index, node in enumerate(options.pop("plugins", None) or [])
    ]
    options["strategy"] = _build_strategy(config, options.get("strategy", "auto"))
    if isinstance(options.get("profiler"), Mapping):
        options["profiler"] = targets.build(options["profiler"], targets.PROFILERS, "trainer.profiler")
    trainer = Trainer(
        **options,
        use_distributed_sampler=False,  # our data modules divide samples among processes themselves, without padding
        # The module sets the number of epochs when the fit begins.
        max_epochs=-1,
        callbacks=callbacks or [],
        logger=build_loggers(config.get("logger"), first_update) or False,
        plugins=[WholeCheckpoints(), *plugins],
        default_root_dir=config.get("output"),
    )
    profiler: Any = trainer.profiler  # type: ignore[attr-defined]
    if options.get("profiler") is not None and profiler.filename is None:
        profiler.filename = "profile"  # otherwise the report goes to Lightning's log, which a run does not show
    return trainer


def _build_strategy(config: Config, strategy: Any) -> Any:
    """Lightning's strategy of `trainer.strategy`: a name, or a class with its options; `timeout` is in seconds."""
    if strategy == "fsdp":
        strategy = {targets.TARGET: FullyShardedStrategy.__name__}
    if not isinstance(strategy, Mapping):
        return strategy
    options = dict(strategy)
    if targets.find(options, targets.STRATEGIES, "trainer.strategy") is FullyShardedStrategy:
        if (config.get("recipe") or {}).get("ema"):
            raise ValueError("recipe.ema does not average sharded weights (trainer=fsdp)")
        options["devices"] = device_count(config)
    if options.get("timeout") is not None:
        options["timeout"] = timedelta(seconds=options["timeout"])
    return targets.build(options, targets.STRATEGIES, "trainer.strategy")


def find_learning_rate(
    config: Mapping[str, Any], module: TrainedModule, datamodule: TaskData, folder: Path
) -> tuple[float, float]:
    """Search the learning rate by Lightning's `Tuner.lr_find` (`recipe.learning_rate=find`).

    The rate rises from update to update (Smith 2015, arXiv:1506.01186); the result is the rate at which the smoothed
    loss falls most steeply. The search trains `module`, which the run must not use afterwards. The folder receives the
    curve in learning_rates.csv. ValueError if the loss never falls.

    Returns:
        The suggested rate of an update, and the value of `recipe.learning_rate` that gives it.
    """
    options = config["learning_rate_finder"]
    with tempfile.TemporaryDirectory() as place:  # for the weights, which the Tuner restores
        trainer = build_trainer({**config, "logger": None, "output": place})
        trainer.fit_loop.epoch_loop.max_steps = options["num_training"]
        trainer.check_val_every_n_epoch = options["num_training"] + 1  # more epochs than the search can have
        with redirect_stderr(io.StringIO()):  # the bar, which Lightning also shows without a terminal
            curve: Any = Tuner(trainer).lr_find(module, datamodule=datamodule, update_attr=False, **options)
    rates, losses = curve.results["lr"], curve.results["loss"]
    lines = [f"{rate:.6g},{loss:.6g}" for rate, loss in zip(rates, losses, strict=False)]
    write_text(folder / TABLE, "\n".join(["learning_rate,loss", *lines]) + "\n")
    found = curve.suggestion()
    if found is None:
        raise ValueError("recipe.learning_rate=find: the loss falls at no rate; give a number")
    scale = effective_learning_rate({**config, "recipe": {**config["recipe"], "learning_rate": 1.0}})
    return found, float(f"{found / scale:.3g}")
