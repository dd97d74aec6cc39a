"""How a model is trained: the value `Training`, and its form in a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2

from longseq.tasks.training import targets
from longseq.tasks.training.length import WARMUPS, RunLength

ADAMW = partial(create_optimizer_v2, opt="adamw", weight_decay=0.05)
COSINE = partial(create_scheduler_v2, sched="cosine", step_on_epochs=False)


@dataclass(frozen=True, kw_only=True)
class Training:
    """Everything that a `TrainedModule` needs for training beside its model and its loss.

    `length` is the length of the run, of its warm-up and of the interval between validations; None leaves these to the
    Trainer and the schedule. `optimizer(model, lr=...)` and `schedule(optimizer, num_epochs=..., warmup_epochs=...,
    updates_per_epoch=...)` are partials, such as those of `timm.optim.create_optimizer_v2` and
    `timm.scheduler.create_scheduler_v2`: by default AdamW and a cosine to zero, without a warm-up unless `length` has
    one. The rate is set after each update: timm's schedules take `step_on_epochs=False` here where it is not given, and
    a scheduler of torch is stepped by updates, too. A warm-up stands in `length` or as `warmup_epochs` in the partial
    of the schedule, not in both. `compile_mode` compiles the training pass (see `torch.compile`); the first step then
    takes about a minute. `hyperparameters` are numbers, strings, lists and dictionaries for the checkpoint (see
    `longseq.tasks.training.checkpoint`).
    """

    learning_rate: float
    length: RunLength | None = None
    optimizer: Callable[..., torch.optim.Optimizer] = ADAMW
    schedule: Callable[..., tuple[Any, int]] = COSINE
    seed: int = 0
    compile_mode: str | None = None
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """ValueError, in one line, for a schedule in epochs, and for a warm-up in two places."""
        options = getattr(self.schedule, "keywords", {})
        if is_of_timm(self.schedule) and options.get("step_on_epochs", False) is not False:
            raise ValueError(
                f"Training(schedule=...) has step_on_epochs={options['step_on_epochs']}: it must be False, since the "
                "learning rate is set after each update; leave it out"
            )
        if is_of_timm(self.schedule) and options.get("sched") == "plateau":
            raise ValueError(
                "Training(schedule=...) has sched=plateau, which reads a metric after each epoch, and the learning "
                "rate is set after each update: give another, such as cosine or wsd"
            )
        warmup = None if self.length is None else self.length.warmup
        if warmup is not None and warmup.count and options.get("warmup_epochs"):
            raise ValueError(
                f"the schedule's warmup_epochs={options['warmup_epochs']} and the length's "
                f"warmup_{warmup.unit}={warmup.count:g} are two warm-ups: give one of them"
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], info: Any) -> Training:
        """The training that a configuration describes, for the data of `info`; its checkpoints contain both."""
        recipe = config["recipe"]
        schedule = {name: value for name, value in recipe["schedule"].items() if name not in WARMUPS}
        return cls(
            optimizer=targets.build(recipe["optimizer"], targets.OPTIMIZERS, "recipe.optimizer"),
            schedule=targets.build(schedule, targets.SCHEDULES, "recipe.schedule"),
            learning_rate=effective_learning_rate(config),
            length=RunLength.from_recipe(recipe),
            seed=config["seed"],
            compile_mode=config.get("compile"),
            hyperparameters={"config": dict(config), "data": info.to_dict()},
        )


def is_of_timm(schedule: Any) -> bool:
    """Whether a schedule is timm's `create_scheduler_v2`, or a partial of it."""
    return getattr(schedule, "func", schedule) is create_scheduler_v2


def device_count(config: Mapping[str, Any]) -> int:
    """The processes of a run: devices x nodes; `auto` and -1 mean the devices of this machine.

    ValueError, in one line, if there are none.
    """
    trainer = config["trainer"]
    devices = trainer.get("devices", 1)
    if devices in ("auto", -1, "-1"):
        cpu = trainer.get("accelerator") == "cpu"
        devices = 1 if cpu or not torch.cuda.is_available() else torch.cuda.device_count()
    elif isinstance(devices, str):
        # as in Lightning: "2" is a number of devices, "0,2" and "2," are their indices
        devices = int(devices) if devices.isdigit() else len([part for part in devices.strip("[]").split(",") if part])
    elif not isinstance(devices, int):
        devices = len(devices)
    if devices < 1:
        raise ValueError(f"trainer.devices={trainer['devices']} is no device: give at least 1, or auto for all")
    return int(devices) * int(trainer.get("num_nodes", 1))


def device_batch_size(config: Mapping[str, Any]) -> int:
    """The batch of one device in one forward pass. ValueError if the effective batch is not divisible."""
    effective = config["recipe"]["batch_size"]
    devices = device_count(config)
    accumulate = config["trainer"].get("accumulate_grad_batches", 1)
    parts = devices * accumulate
    if effective < parts or effective % parts:
        nearest = max(parts, round(effective / parts) * parts)
        raise ValueError(
            f"recipe.batch_size={effective} does not divide over {devices} device(s) x {accumulate} accumulated "
            f"batch(es): effective batch = per-device batch x devices x trainer.accumulate_grad_batches; "
            f"set recipe.batch_size={nearest}"
        )
    return effective // parts


def effective_learning_rate(config: Mapping[str, Any]) -> float:
    """The recipe's learning rate, scaled linearly from its reference batch size to the actual one."""
    recipe = config["recipe"]
    reference = recipe.get("reference_batch_size")
    return recipe["learning_rate"] * (recipe["batch_size"] / reference if reference else 1.0)
