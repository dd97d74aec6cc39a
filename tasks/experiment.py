"""The keys of a training, and their check before anything is opened, downloaded, built or written."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

import timm.optim
from lightning.pytorch import Trainer
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2

from longseq import mixers
from longseq.mixers.pattern import options_by_name
from longseq.plugins import is_foreign
from longseq.tasks import registry
from longseq.tasks.command_keys import TrainKeys
from longseq.tasks.data.folders import refuse_pipe
from longseq.tasks.training import automatic, targets
from longseq.tasks.training.length import WARMUPS, RunLength
from longseq.tasks.training.logger import check_loggers
from longseq.tasks.training.model import check_depth
from longseq.tasks.training.options import (
    OneOf,
    Range,
    check_call,
    read,
    read_beside,
    read_part,
    refuse_unknown,
    signature_options,
    spell,
    takes_any,
)
from longseq.tasks.training.processes import refuse_many
from longseq.tasks.training.recipe import device_batch_size, device_count
from longseq.tasks.training.trainer import check_parts, refuse_mode, refuse_own_keys


@dataclass(frozen=True, kw_only=True)
class MixerKeys:
    """The keys of `mixer`: a name or a pattern of names, and the options of their constructors."""

    name: Any
    options: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class ScaleKeys:
    """The keys of `scale`."""

    name: str
    model: str
    embed_dim: Annotated[int | None, Range(1)] = None
    depth: Annotated[int | None, Range(1)] = None
    mixer: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AverageKeys:
    """The keys of `recipe.ema`."""

    decay: Annotated[float, Range(0, below=1)] = 0.9999
    warmup: bool = True


@dataclass(frozen=True, kw_only=True)
class OptimizerKeys:
    """Keys of `recipe.optimizer`; timm's `create_optimizer_v2` and the optimizer's class have more."""

    opt: Annotated[str, OneOf(timm.optim.list_optimizers)]
    weight_decay: Annotated[float, Range(0, below=1e30)] = 0.0
    layer_decay: Annotated[float | None, Range(above=0, most=1)] = None
    betas: Annotated[list[float], Range(0, below=1)] | None = None
    eps: Annotated[float | None, Range(above=0)] = None
    momentum: Annotated[float, Range(0, below=1)] = 0.9


@dataclass(frozen=True, kw_only=True)
class ScheduleKeys:
    """Keys of `recipe.schedule`; timm's `create_scheduler_v2` has more."""

    # Without plateau, which needs a metric: the schedule is stepped by updates only.
    sched: Literal["cosine", "tanh", "step", "multistep", "poly", "wsd"]
    min_lr: Annotated[float, Range(0)] = 0.0
    warmup_lr: Annotated[float, Range(0)] = 0.0
    warmup_epochs: Any = None  # `RunLength` checks this and the next two
    warmup_updates: Any = None
    warmup_tokens: Any = None
    decay_rate: Annotated[float, Range(0)] = 0.1
    decay_fn: Literal["1-sqrt", "linear", "cosine"] | None = None


# Options of `recipe.schedule` that timm reads for some schedules only.
_SCHEDULES_WITH = {"decay_rate": ("step", "multistep", "poly"), "decay_milestones": ("multistep",)}


@dataclass(frozen=True, kw_only=True)
class RecipeKeys:
    """The keys of `recipe` that every task has; `loss` and `augment` hold those of the task."""

    name: str
    epochs: Any = None  # `RunLength` checks this and the next five
    updates: Any = None
    tokens: Any = None
    validate_every_epochs: Any = None
    validate_every_updates: Any = None
    validate_every_tokens: Any = None
    batch_size: Annotated[int, Range(1)]
    learning_rate: Annotated[float, Range(0, below=1e30)]
    reference_batch_size: Annotated[int | None, Range(1)] = None
    optimizer: Mapping[str, Any]
    schedule: Mapping[str, Any]
    ema: AverageKeys | None = None
    gradient_clip: Annotated[float | None, Range(above=0)] = None
    freeze: Annotated[int, Range(1)] | Literal["embeddings", "body"] | None = None
    model: Mapping[str, Any] | None = None
    loss: Mapping[str, Any] | None = None
    augment: Mapping[str, Any] | None = None
    chosen: list[str] | None = None  # a run writes it


@dataclass(frozen=True, kw_only=True)
class TrainerKeys:
    """Keys of `trainer`; Lightning's Trainer has more."""

    accelerator: str = "auto"
    devices: Annotated[int, Range(-1)] | str | Annotated[list[int], Range(0)] = 1
    num_nodes: Annotated[int, Range(1)] = 1
    accumulate_grad_batches: Annotated[int, Range(1)] = 1
    gradient_clip_val: Annotated[float | None, Range(0)] = None
    log_every_n_steps: Annotated[int | None, Range(1)] = None
    limit_train_batches: Annotated[int | float | None, Range(above=0)] = None
    limit_val_batches: Annotated[int | float | None, Range(0)] = None
    limit_test_batches: Annotated[int | float | None, Range(above=0)] = None  # every run ends with a test
    num_sanity_val_steps: Annotated[int | None, Range(-1)] = None
    min_epochs: Annotated[int | None, Range(0)] = None
    min_steps: Annotated[int | None, Range(0)] = None
    max_time: str | Mapping[str, Annotated[int, Range(0)]] | None = None


def check_experiment(config: Mapping[str, Any], keys: type[TrainKeys] = TrainKeys) -> None:
    """Raise ValueError, in one line, for a key of a resolved configuration that nothing reads, or an impossible value.

    `keys` are those of the command. Each task checks the keys of its own dataclasses (see `TaskKeys`).
    """
    if isinstance(config.get("task"), Mapping) and "name" in config["task"]:
        registry.of(config)  # before the check of callbacks: a task may register its own
    targets.check(config)
    _refuse_names(config.get("recipe"))
    read(keys, config)
    parts = registry.of(config)
    task = parts.config
    read(task.group, config["task"], "task")
    config = with_any_choice(config)
    task.check(config)
    read(task.data, config["data"], "data")
    _refuse_pipes(config["data"])
    refuse_many(config["data"].get("num_workers"), "data.num_workers")
    _check_recipe(config["recipe"], task)
    scale = read(ScaleKeys, config["scale"], "scale")
    check_depth(config)
    _check_mixer(read(MixerKeys, config["mixer"], "mixer"), scale)
    check_trainer(config["trainer"])
    for name, options in config["callbacks"].items():
        if options is not None:
            refuse_mode(options, f"callbacks.{name}")
            given = ("mode",) if isinstance(options, Mapping) and "monitor" in options else ()
            targets.check_options(options, targets.CALLBACKS, f"callbacks.{name}", given=given)
    _check_validation(config)
    check_loggers(config.get("logger"))
    device_batch_size(config)
    parts.model.check(config)


def _refuse_pipes(data: Mapping[str, Any]) -> None:
    """ValueError, in one line, for a `data.root` that is a pipe, before a path to it is made that leads nowhere.

    What a plug-in's class does with its root is its own.
    """
    roots = [] if targets.TARGET in data else data.get("root")
    for root in [roots] if isinstance(roots, str) else roots or []:
        refuse_pipe(root, f"data.root={root}")


def choose(config: Mapping[str, Any], info: Any | None) -> tuple[dict[str, Any], str | None]:
    """The configuration with the values that its task chooses where the recipe says `auto`, and why it chooses them.

    `info` is that of the data; without it, the values are possible ones. ValueError, in one line, if the task chooses
    none.
    """
    if not automatic.is_automatic(config):
        return dict(config), None
    parts = device_count(config) * config["trainer"].get("accumulate_grad_batches", 1)
    choice = registry.of(config).config.choose(config, info, parts)
    return automatic.settle(config, choice), choice.reason


def with_any_choice(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with possible values in place of those that are chosen or found when the data is open.

    ValueError, in one line, for a stated value that a choice depends on and that is impossible.
    """
    recipe = config["recipe"]
    if not automatic.is_open(config):
        return dict(config)
    stated = {key: value for key, value in recipe.items() if value not in (automatic.AUTO, automatic.FIND)}
    for cls in (RecipeKeys, RunLength):
        own = [entry.name for entry in fields(cls)]
        read_part(cls, {key: value for key, value in stated.items() if key in own}, "recipe")
    read(ScaleKeys, config["scale"], "scale")
    check_trainer(config["trainer"])
    return automatic.with_rate(choose(config, None)[0])


def check_trainer(trainer: Mapping[str, Any]) -> None:
    """Raise ValueError, in one line, for a key of `trainer` that Lightning's Trainer does not have."""
    targets.check({"trainer": trainer})
    refuse_own_keys(trainer)
    keys = read_beside(TrainerKeys, Trainer, trainer, "trainer")
    if keys.accelerator == "cpu" and isinstance(keys.devices, int):
        refuse_many(keys.devices, "trainer.devices")
    check_parts(trainer)


def _check_validation(config: Mapping[str, Any]) -> None:
    """ValueError if callbacks choose by validations, and the Trainer or the recipe leaves them out."""
    trainer, every = config["trainer"], config["recipe"].get("validate_every_epochs")
    for name, options in config["callbacks"].items():
        if options and options.get("check_on_train_epoch_end") and isinstance(every, int) and every > 1:
            raise ValueError(
                f"callbacks.{name}.check_on_train_epoch_end=true looks for a validation after each epoch, and "
                f"recipe.validate_every_epochs={every} has fewer: leave one of the two out"
            )
    if trainer.get("limit_val_batches") != 0 or trainer.get("fast_dev_run"):
        return
    chosen = [name for name, options in config["callbacks"].items() if options and options.get("monitor")]
    if chosen:
        told = " ".join(f"callbacks.{name}=null" for name in chosen)
        raise ValueError(
            f"trainer.limit_val_batches=0 leaves out the validations that callbacks.{chosen[0]} chooses by: give at "
            f"least 1, or {told} too, and the last weights are tested"
        )


def _refuse_names(recipe: Any) -> None:
    """ValueError for the name of an optimizer or a schedule in place of its options."""
    for key, inner in (("optimizer", "opt"), ("schedule", "sched")):
        if isinstance(recipe, Mapping) and isinstance(name := recipe.get(key), str):
            raise ValueError(f"recipe.{key}={name} must be a dictionary: give recipe.{key}.{inner}={name}")


def _check_recipe(recipe: Mapping[str, Any], task: Any) -> None:
    read(RecipeKeys, recipe, "recipe")
    RunLength.from_recipe(recipe)
    for key in ("loss", "augment"):
        cls, values = getattr(task, key), recipe.get(key)
        if cls is not None:
            read(cls, values, f"recipe.{key}")
        elif values is not None:
            raise ValueError(f"recipe.{key} is read by no part of this task: leave it out with ~recipe.{key}")
    _check_schedule(recipe["schedule"])
    _check_optimizer(recipe["optimizer"])


def _check_schedule(node: Mapping[str, Any]) -> None:
    function, place = targets.find(node, targets.SCHEDULES, "recipe.schedule"), "recipe.schedule"
    options, given = _without_target(node), ("optimizer", "num_epochs", "updates_per_epoch")
    if function is create_scheduler_v2:
        if options.get("step_on_epochs", True) is not False:  # before its type, of which true is a value, too
            raise ValueError(f"{place}.step_on_epochs must be false: the learning rate is set after each update")
        read_beside(ScheduleKeys, function, options, place, given=given)
        for key, schedules in _SCHEDULES_WITH.items():
            if key in options and options["sched"] not in schedules:
                raise ValueError(
                    f"{place}.{key} has no effect with {place}.sched={options['sched']}: leave it out, or give one of "
                    f"{', '.join(schedules)}"
                )
        decay = options.get("decay_epochs")
        if options["sched"] == "wsd" and decay is not None and not 0 < decay < 1:
            raise ValueError(
                f"{place}.decay_epochs={decay}: give the part of the run in which the rate falls, above 0 and below 1"
            )
    else:
        rest = {key: value for key, value in options.items() if key not in WARMUPS}
        if not takes_any(function):
            owner = f"{place}.{targets.TARGET}={node[targets.TARGET]}"
            _refuse_left_over(rest, signature_options(function), signature_options(create_scheduler_v2), place, owner)
        check_call(function, rest, place, given=(*_first(function), *given, *WARMUPS))


def _check_optimizer(node: Mapping[str, Any]) -> None:
    """Check the options of timm's factory and of the optimizer's class: some classes have no betas, others no eps."""
    function, place = targets.find(node, targets.OPTIMIZERS, "recipe.optimizer"), "recipe.optimizer"
    options = _without_target(node)
    ranges = {entry.name for entry in fields(OptimizerKeys)}
    if function is not create_optimizer_v2:
        if not takes_any(function):
            owner = f"{place}.{targets.TARGET}={node[targets.TARGET]}"
            _refuse_left_over(options, signature_options(function), ranges, place, owner)
        check_call(function, options, place, given=(*_first(function), "lr"))
        return
    name = read(OptimizerKeys, {key: value for key, value in options.items() if key in ranges}, place).opt
    try:
        own_class: Any = timm.optim.get_optimizer_class(name, bind_defaults=False)
    except AssertionError as error:  # of a library for GPUs
        raise ValueError(f"{place}.opt={name}: {error}; give another one, such as {place}.opt=adamw") from None
    common, own = signature_options(create_optimizer_v2), signature_options(own_class)
    known = [key for key in {**common, **own} if key not in ("model_or_params", "params", "lr", "kwargs")]
    _refuse_left_over(options, known, ("betas", "eps"), place, f"{place}.opt={name}")
    refuse_unknown(options, known, place)
    _check_betas(options.get("betas"), own.get("betas"), f"{place}.betas", f"{place}.opt={name}")
    rest = {key: value for key, value in options.items() if key not in ranges}
    check_call(create_optimizer_v2, {key: rest[key] for key in rest if key in common}, place, given=_first(function))
    check_call(own_class, {key: rest[key] for key in rest if key not in common}, place, given=_first(own_class))


def _refuse_left_over(
    options: Mapping[str, Any], taken: Collection[str], of_recipes: Collection[str], place: str, owner: str
) -> None:
    """ValueError if recipes write keys that `owner` does not take; the message names what leaves each out.

    The user has not typed such keys, so that "unknown" would not tell what to do.
    """
    left = [f"{place}.{key}" for key in options if key in of_recipes and key not in taken]
    if left:
        # Hydra's ~ removes no key that is null, so such a key gets a value first.
        words = [f"{key}=0 ~{key}" if options[key.rpartition(".")[2]] is None else f"~{key}" for key in left]
        others = " ".join(words[1:])
        told = f"leave it out with {words[0]}{others and f', and likewise {others}'}"
        raise ValueError(f"{left[0]} is no option of {owner}: {told}")


def _check_betas(betas: Any, default: Any, place: str, owner: str) -> None:
    """ValueError unless there are as many betas as the optimizer's default has, which no optimizer checks well."""
    if betas is not None and isinstance(default, tuple) and len(betas) != len(default):
        example = f"{place}=[{','.join(map(str, default))}]"
        raise ValueError(
            f"{place}={spell(betas)} has {len(betas)} number(s), and {owner} needs {len(default)}: give {example}"
        )


def _check_mixer(mixer: MixerKeys, scale: ScaleKeys) -> None:
    for name in options_by_name(mixer.name, None):
        mixers.get(name)  # a name that is misspelt, before the options that stand below it
    chosen = options_by_name(mixer.name, mixer.options)
    for name, options in chosen.items():
        place = f"mixer.options.{name}" if len(chosen) > 1 else "mixer.options"
        least = None if is_foreign(mixers.get(name)) else 0
        in_turn = [key for key in mixers.get(name).options_in_turn if isinstance(options.get(key), list | tuple)]
        for key in in_turn:
            for value in options[key]:
                check_call(mixers.get(name), {key: value}, place, given=("d_model",), least=least)
        single = {key: value for key, value in options.items() if key not in in_turn}
        check_call(mixers.get(name), single, place, given=("d_model",), least=least)
    for key, value in scale.mixer.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise ValueError(f"scale.mixer.{key}={value} must be a number above 0")


def _first(function: Any) -> tuple[str, ...]:
    """The first parameter of a function: the model for an optimizer, the optimizer for a schedule."""
    return tuple(list(signature_options(function))[:1])


def _without_target(node: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key not in (targets.TARGET, targets.PARTIAL)}
