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
from longseq.tasks.training.schedule import WARMUPS, RunLength

ADAMW = partial(create_optimizer_v2, opt="adamw", weight_decay=0.05)
COSINE = partial(create_scheduler_v2, sched="cosine", step_on_epochs=False)


@dataclass(frozen=True, kw_only=True)
class Training:
    """Everything that a `TrainedModule` needs for training except its model and its loss.

    Attributes:
        learning_rate: the highest rate.
        length: of the run, its warm-up and its validation interval; None leaves them to the Trainer and the schedule.
        optimizer: called as `optimizer(model, lr=...)`, as a partial of `timm.optim.create_optimizer_v2`; else AdamW.
        schedule: called as `schedule(optimizer, num_epochs=..., warmup_epochs=..., updates_per_epoch=...)`, such as a
            partial of `timm.scheduler.create_scheduler_v2`; by default a cosine to zero. It is stepped after each
            update. Give a warm-up here or in `length`.
        seed: of the random draws.
        compile_mode: compiles the training pass (see `torch.compile`); the first step then takes about a minute.
        hyperparameters: numbers, strings, lists and dictionaries for the checkpoint.
    """

    learning_rate: float
    length: RunLength | None = None
    optimizer: Callable[..., torch.optim.Optimizer] = ADAMW
    schedule: Callable[..., tuple[Any, int]] = COSINE
    seed: int = 0
    compile_mode: str | None = None
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        warmup = None if self.length is None else self.length.warmup
        if warmup is not None and warmup.count and getattr(self.schedule, "keywords", {}).get("warmup_epochs"):
            raise ValueError("the schedule and the length both have a warm-up: give one of them")

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


def device_count(config: Mapping[str, Any]) -> int:
    """The processes of a run: devices x nodes; `auto` and -1 mean the devices of this machine."""
    trainer = config["trainer"]
    devices = trainer.get("devices", 1)
    if devices in ("auto", -1):
        devices = 1 if trainer.get("accelerator") == "cpu" else max(1, torch.cuda.device_count())
    count = devices if isinstance(devices, int) else len(devices)
    return count * int(trainer.get("num_nodes", 1))


def device_batch_size(config: Mapping[str, Any]) -> int:
    """The batch of one device in one forward pass. ValueError if the effective batch is not divisible."""
    effective = config["recipe"]["batch_size"]
    parts = device_count(config) * config["trainer"].get("accumulate_grad_batches", 1)
    if effective < parts or effective % parts:
        raise ValueError(f"recipe.batch_size={effective} does not divide over {parts} = devices x accumulated batches")
    return effective // parts


def effective_learning_rate(config: Mapping[str, Any]) -> float:
    """The recipe's learning rate, scaled linearly from its reference batch size to the actual one."""
    recipe = config["recipe"]
    reference = recipe.get("reference_batch_size")
    return recipe["learning_rate"] * (recipe["batch_size"] / reference if reference else 1.0)
