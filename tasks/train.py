"""`longseq train`: compose, fit, test with the best checkpoint, report."""

import json
import logging
import os
import shlex
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from longseq.hub import CARD_FILE
from longseq.models import CHECKPOINT_CONFIG, check_continues, from_pretrained, kind_of, save_pretrained
from longseq.parameters import count_parameters
from longseq.plugins import plugin_of
from longseq.tasks import registry
from longseq.tasks.costs import costs_of
from longseq.tasks.data.module import Info, TaskData
from longseq.tasks.report import print_rows, quiet_libraries, shorten
from longseq.tasks.training import automatic, runs
from longseq.tasks.training.callbacks.stop import stoppable
from longseq.tasks.training.callbacks.throughput import RunClock, Throughput
from longseq.tasks.training.configuration import Config, command_word, flatten, refer, resolve, with_absolute_root
from longseq.tasks.training.logger import RunLogger, close_loggers, find_board, logged
from longseq.tasks.training.model import freeze
from longseq.tasks.training.module import TrainedModule
from longseq.tasks.training.recipe import Training, device_batch_size, device_count, effective_learning_rate
from longseq.tasks.training.runs import locked
from longseq.tasks.training.system import write_text
from longseq.tasks.training.trainer import TABLE, build_callbacks, build_trainer, find_learning_rate

_log = logging.getLogger(__name__)

SETTINGS = ("task", "data", "recipe", "model", "mixer", "scale", "seed")  # in TensorBoard's HPARAMS tab


class Parts(NamedTuple):
    """The data and the module of a training; the model is the module's `backbone`."""

    datamodule: TaskData
    module: TrainedModule


@quiet_libraries()
def run(cfg: DictConfig) -> float | None:
    """Train as configured and return the value of `optimized_metric`, for sweeps.

    The run folder `cfg.output` receives config.yaml, checkpoints/ and TensorBoard events. At the end it also receives
    metrics.json and model/, the best model for `longseq.from_pretrained` and timm.
    """
    config = registry.read_experiment(resolve(cfg))
    if config["data"].get("decode") == "gpu":
        # By default CUDA streams share 8 queues, so the decoding thread waits for whole steps.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    folder = Path(config["output"])
    done = runs.finished(folder)
    if config["resume"] is True and done is not None:
        runs.checkpoint_to_resume(config)  # refuses another configuration
        _print(f"this run is finished: {shorten(folder)}; without resume=true, and with another output, it trains anew")
        return done.get(config["optimized_metric"])
    # Lightning counts the processes of each machine from 0.
    ranks = (os.environ.get(name) or "0" for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK", "NODE_RANK"))
    try:
        if any(rank != "0" for rank in ranks):
            return _train(config, folder)
        with locked(folder), logged(folder):
            return _train(config, folder)
    finally:
        runs.own_folder.cache_clear()  # the next command in this process has its own


def _train(config: dict[str, Any], folder: Path) -> float | None:
    checkpoint = runs.checkpoint_to_resume(config)
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision(config["matmul_precision"])
    if checkpoint is not None:
        config = automatic.as_chosen_before(config, runs.saved_config(checkpoint) or {})
    config, datamodule, reason = registry.open_data(config)
    config = with_absolute_root(config)  # so that `evaluate` finds the data from any working folder
    if reason is not None:
        _print(reason)
    if automatic.searches(config):
        config = _search(config, datamodule, folder)
    if checkpoint is not None:
        runs.check_data(checkpoint, datamodule.info)
    module = _build_module(config, datamodule, initialized=checkpoint is None)
    _check_direction(config["optimized_metric"], module)
    first_update = runs.contents_of(checkpoint)["global_step"] if checkpoint else 0
    trainer = build_trainer(config, build_callbacks(config, module), first_update=first_update)
    datamodule.trainer = trainer  # as Lightning does later: it determines the batches of an epoch
    if checkpoint is not None:
        check_continues(module.backbone, runs.contents_of(checkpoint).get(CHECKPOINT_CONFIG))
    _save_config(config, folder)
    _announce(config, datamodule.info, module, checkpoint, events=find_board(trainer.loggers) is not None)
    device = trainer.strategy.root_device
    try:
        with stoppable(trainer):
            for logger in trainer.loggers:
                if not isinstance(logger, RunLogger):  # TensorBoard gets the keys at the end, with the results
                    logger.log_hyperparams(dict(flatten(config)))
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()  # a sweep trains several models in this process
            trainer.fit(module, datamodule=datamodule, ckpt_path=checkpoint, weights_only=True)
            clock = next(one for one in trainer.callbacks if isinstance(one, RunClock))  # type: ignore[attr-defined]
            # Before the test, which loads the state of the best checkpoint.
            facts, seconds = _run_facts(trainer, module), clock.time_elapsed("train")
            metrics = _test(trainer, module, datamodule) | facts
            metrics["seconds"] = round(seconds + clock.time_elapsed("test"), 1)
        _record(trainer, config, module, metrics, datamodule.info)
    finally:
        close_loggers(trainer.loggers)
    return metrics.get(config["optimized_metric"])


def build(config: DictConfig | Config, *, initialized: bool = True) -> Parts:
    """The data module, set up, and the module with a new model, which starts from `config.init` if `initialized`."""
    config, datamodule, _ = registry.open_data(registry.read_experiment(resolve(config)))
    return Parts(datamodule, _build_module(automatic.with_any_rate(config), datamodule, initialized))


def _build_module(config: Config, datamodule: TaskData, initialized: bool) -> TrainedModule:
    task, config = registry.of(config), dict(config)
    options = dict(config["model"])
    if not initialized and "pretrained" in options:
        options["pretrained"] = False
    model = task.model.build({**config, "model": options}, datamodule.info)
    if initialized and config["init"] is not None:
        task.model.start(model, config, datamodule.info)
    freeze(model, config["recipe"].get("freeze"))
    # The plug-ins that the command declares, or that define the data, the model or the training steps.
    parts = [type(datamodule), *datamodule.registered_parts, task.module, *map(type, model.modules())]
    config["plugins"] = sorted({*(config.get("plugins") or []), *filter(None, map(plugin_of, parts))})
    training = Training.from_config(config, datamodule.info)
    return task.module.from_config(config, model, datamodule.info, training)


def _search(config: Config, datamodule: TaskData, folder: Path) -> dict[str, Any]:
    """The configuration with the learning rate that a search finds for its model and data."""
    trial = automatic.with_any_rate(config)
    module = _build_module(trial, datamodule, initialized=True)
    assert module.recipe is not None
    module.recipe = replace(module.recipe, length=None)
    rate, value = find_learning_rate(trial, module, datamodule, folder)
    _print(
        f"learning rate {rate:.3g} found (the loss falls most steeply there): recipe.learning_rate={value:g}; the "
        f"curve is in {shorten(folder / TABLE)}"
    )
    return automatic.with_rate(config, value)


def _check_direction(metric: str | None, module: TrainedModule) -> None:
    """ValueError if the sweeper's direction would choose the worst value of the metric."""
    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return
    sweeper: Any = HydraConfig.get().sweeper
    searched, better = sweeper.get("direction"), module.directions().get(str(metric))
    wanted = "maximize" if better else "minimize"
    if searched is not None and better is not None and getattr(searched, "name", searched) != wanted:
        raise ValueError(f"hydra.sweeper.direction must be {wanted} for optimized_metric={metric}")


def _test(trainer: Trainer, module: TrainedModule, datamodule: TaskData) -> dict[str, Any]:
    """Test with the best checkpoint, or in a fast_dev_run, which writes none, with the last weights."""
    best = _best_checkpoint(trainer)
    validated = {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("val/")}
    (tested,) = trainer.test(module, datamodule=datamodule, ckpt_path=best, verbose=False, weights_only=True)
    if best is not None:
        validated = getattr(trainer.checkpoint_callback, "best_metrics", None) or validated
    return validated | {key: float(value) for key, value in tested.items()}


def _best_checkpoint(trainer: Trainer) -> str | None:
    return getattr(trainer.checkpoint_callback, "best_model_path", None) or None


def _run_facts(trainer: Trainer, module: TrainedModule) -> dict[str, Any]:
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    info, device = data.info.to_dict(), trainer.strategy.root_device
    facts: dict[str, Any] = {
        "epochs": module.epochs_trained,
        "updates": trainer.global_step,
        **costs_of(module.backbone, info.get("window", info.get("longest"))),
    }
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, Throughput):
            rates = callback.rates(callback.run)
            facts |= {name: round(value, 2 if name == "data_wait_ms" else 1) for name, value in rates.items()}
    if device.type == "cuda":
        facts["gpu_memory_gib"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 2)
    return facts


@rank_zero_only
def _save_config(config: dict[str, Any], folder: Path) -> None:
    """Save the configuration such that it repeats the run in any folder: paths below the run folder follow `output`."""
    folder.mkdir(parents=True, exist_ok=True)
    own: dict[str, Any] = {key: config[key] for key in ("callbacks", "logger") if key in config}
    record = {**config, **refer(own, str(config["output"]))}
    write_text(folder / runs.CONFIG_FILE, OmegaConf.to_yaml(OmegaConf.create(record)))


@rank_zero_only
def _announce(
    config: dict[str, Any], info: Info, module: TrainedModule, checkpoint: Path | None, *, events: bool
) -> None:
    recipe = config["recipe"]
    batch, devices = device_batch_size(config), device_count(config)
    accumulate = config["trainer"].get("accumulate_grad_batches", 1)
    # A fitted model, such as the linear one, has no parameters yet.
    parameters = f" ({count_parameters(module.backbone) / 1e6:.2f}M parameters)" if module.has_gradients else ""
    sizes = "".join(f", {count} {split}" for split, count in info.sizes.items() if count is not None)
    _print(f"{config['model']['label']}{parameters} on {config['data']['name']}: {info.describe()}{sizes}")
    if module.has_gradients:
        _print(
            f"effective batch {recipe['batch_size']} = {batch} per device x {devices} device(s) "
            f"x {accumulate} accumulated; effective learning rate {effective_learning_rate(config):.3g}"
        )
    if checkpoint is not None:
        _print(f"continuing from {shorten(checkpoint)}")
    elif config["resume"]:
        _print("nothing to resume: no run of this configuration; starting anew")
    shown = f"   ({_tensorboard(Path(config['output']))})" if events else ""
    _print(f"writing to {shorten(config['output'])}{shown}")


@rank_zero_only
def _record(
    trainer: Trainer, config: dict[str, Any], module: TrainedModule, metrics: dict[str, Any], info: Info
) -> None:
    """Log the test metrics, write the model and metrics.json, and print the closing table."""
    folder, report = Path(config["output"]), registry.of(config).report
    for logger in trainer.loggers:
        if isinstance(logger, RunLogger):
            tested = {name: value for name, value in metrics.items() if name.startswith("test/")}
            settings = dict(flatten({name: config[name] for name in SETTINGS}))
            logger.log_hyperparams(settings, tested, trainer.global_step)
    written = metrics | {"higher_is_better": module.directions()} | report.extras(module, info, "test")
    asked_for = [config["task"]["metric"].rpartition("/")[2], *(config["task"].get("metrics") or {})]
    headline = [f"test/{name}" for name in (*report.headline, *asked_for) if name in module.test_metrics]
    rows = [(key, f"{metrics[key]:.4f}") for key in dict.fromkeys(headline) if key in metrics]
    facts = [f"{metrics['seconds']:.0f} s"]
    for unit in dict.fromkeys((config["task"]["unit"], "tokens")):
        if f"{unit}_per_second" in metrics:
            facts.append(f"{metrics[f'{unit}_per_second']:.0f} {unit}/s")
    if "gpu_memory_gib" in metrics:
        facts.append(f"{metrics['gpu_memory_gib']} GiB of GPU memory")
    rows.append(("time", ", ".join(facts)))
    best = _best_checkpoint(trainer)
    if best:
        if kind_of(module.backbone) is not None:
            target = folder / runs.MODEL_FOLDER
            (target / CARD_FILE).unlink(missing_ok=True)
            rows.append(("model", shorten(save_pretrained(from_pretrained(best), target, metrics=written))))
        best = shorten(best)
        rows.append(("checkpoint", best))
        if find_board(trainer.loggers) is not None:
            rows.append(("TensorBoard", _tensorboard(folder)))
        words = command_word("checkpoint", best)
        if config.get("plugins"):
            words += f" {command_word('plugins', list(config['plugins']))}"
        rows += zip(chain(["next"], repeat("")), report.next_commands(words), strict=False)
    if not trainer.fast_dev_run:  # type: ignore[attr-defined]
        # The last file: with it, the run is finished for resume=true.
        write_text(folder / runs.METRICS_FILE, json.dumps(written, indent=2) + "\n")
    print_rows(rows)
    for row in rows:
        _log.info("  ".join(filter(None, row)))
    if (closing := report.closing(module, info)) is not None:
        _print(closing)


def _tensorboard(folder: Path) -> str:
    return f"tensorboard --logdir {shlex.quote(shorten(folder.parent))}"


@rank_zero_only
def _print(line: str) -> None:
    print(line, flush=True)
    _log.info(line.strip())
