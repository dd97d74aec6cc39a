"""The keys of every command, each declared once: type, range, default and a line of help.

Hydra composes a configuration from the defaults here (see `longseq.conf.store_defaults`), the files in conf and the
command line; `read` checks the result. `longseq VERB --help` and the reference page are made from the same classes.
`longseq.tasks.TASK.config` has the keys of one task, `longseq.tasks.commands` the keys of the other commands.
"""

import difflib
import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    create_model,
    model_serializer,
)

T = TypeVar("T", bound="Keys")

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
UNITS = ("epochs", "updates", "tokens")  # the units of the length of a run
# What a threshold is chosen by (see `longseq.tasks.training.metrics.choose_threshold`).
Criterion = Literal["f1", "balanced_accuracy"]


class Keys(BaseModel):
    """A section of a configuration: unknown keys are errors, and values cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())

    def to_dict(self) -> dict[str, Any]:
        """The keys as dictionaries and lists, as in a YAML file."""
        plain: dict[str, Any] = _lists(self.model_dump())
        return plain


def _lists(value: Any) -> Any:
    """`value` with lists in place of tuples."""
    if isinstance(value, dict):
        return {name: _lists(one) for name, one in value.items()}
    return [_lists(one) for one in value] if isinstance(value, list | tuple) else value


class OpenKeys(Keys):
    """A section that passes other keys through to a class or function.

    `to_dict` has only the keys that were given.
    """

    model_config = ConfigDict(extra="allow")

    @model_serializer(mode="wrap")
    def _given(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if key in self.model_fields_set}


def key(default: Any, text: str, **limits: Any) -> Any:
    """A key with its default (`...`: required), its line of help, and pydantic's limits such as `ge=1`."""
    return Field(default, description=text, **limits)


def read(cls: type[T], values: Any, place: str = "") -> T:
    """Check a dictionary, with the dotted key `place`, against a class of keys.

    ValueError for an unknown or missing key, and for a value of the wrong type or out of range.
    """
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise ValueError(describe_error(error, cls, values, place)) from None


def read_part(cls: type[Keys], values: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Check some keys of a section, without those that are missing. ValueError as for `read`."""
    if unread := [name for name in values if name not in cls.model_fields]:
        raise ValueError(unknown_key(unread[0], list(cls.model_fields), place))
    fields: Any = {name: (field.annotation, field) for name, field in cls.model_fields.items() if name in values}
    return read(create_model("Part", __base__=Keys, **fields), values, place).model_dump(exclude_unset=True)


def describe_error(error: ValidationError, cls: type[BaseModel], values: Any, place: str = "") -> str:
    """The first wrong key of a validation in one line: the key, its value, and what is allowed."""
    wrong = error.errors(include_url=False, include_context=False)
    first = next((one for one in wrong if one["type"] == "extra_forbidden"), wrong[0])
    path = _find_path(first["loc"], values)
    name = ".".join(filter(None, [place, *map(str, path)]))
    if first["type"] == "extra_forbidden":
        section = functools.reduce(operator.getitem, path[:-1], values)
        known = list(cls.model_fields) if len(path) == 1 else [other for other in section if other != path[-1]]
        return unknown_key(str(path[-1]), known, name.rpartition(".")[0])
    if first["type"] == "missing":
        return f"{'.'.join(filter(None, [name, str(first['loc'][-1])]))} is missing"
    allowed = [one["msg"] for one in wrong if _find_path(one["loc"], values) == path]
    reason = " or ".join(dict.fromkeys(text.removeprefix("Value error, ") for text in allowed))
    if first["type"] == "value_error":  # by a check of several keys
        return f"{name}: {reason}" if name else reason
    return f"{name}={spell(first['input'])}: {reason[0].lower()}{reason[1:]}"


def _find_path(loc: Sequence[Any], values: Any) -> list[Any]:
    """The keys in the location of an error, which also contains the names of types."""
    path = []
    for part in loc:
        if (isinstance(values, Mapping) and part in values) or (isinstance(values, list) and isinstance(part, int)):
            path.append(part)
            values = values[part]
    return path


def unknown_key(name: str, known: Sequence[str], place: str = "") -> str:
    """The message that the key `name` does not exist below `place`, with the nearest one that does."""
    whole = f"{place}.{name}" if place else name
    near = nearest(name, known)
    if near is not None:
        return f"{whole} is unknown: did you mean {f'{place}.{near}' if place else near}?"
    return f"{whole} is unknown" + (f": the keys are {', '.join(known)}" if known else "")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The name in `known` that is most like `name`, or None if none is."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def spell(value: Any) -> str:
    """A value as it is written on the command line, cut after 100 characters."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else " ".join(str(value).split())
    return text if len(text) <= 100 else f"{text[:100]}..."


def defaults(cls: type[Keys]) -> dict[str, Any]:
    """The defaults of a section as a dictionary for Hydra, with `???` for required keys."""
    found = {}
    for name, field in cls.model_fields.items():
        value = "???" if field.is_required() else field.get_default(call_default_factory=True)
        found[name] = _lists(value.model_dump() if isinstance(value, BaseModel) else value)
    return found


class Mixer(Keys):
    """The keys of `mixer`."""

    name: str | list[Any] = key(..., "a mixer, or a pattern of them such as deltanet+attention")
    options: dict[str, Any] | None = key(None, "arguments of the mixer's constructor")


class Scale(Keys):
    """The keys of `scale`."""

    name: str = key(..., "the name in tables")
    model: str = key(..., "the size in the name of an image model")
    embed_dim: Count | None = key(None, "the width of the model")
    depth: Count | None = key(None, "the number of blocks")
    mixer: dict[str, Annotated[int | float, Field(gt=0)]] = key({}, "values of mixer options that are null")


class Ema(Keys):
    """The keys of `recipe.ema`."""

    decay: Share = key(0.9999, "the share of the average that an update keeps")
    warmup: bool = key(True, "begin with a smaller decay")


class Optimizer(OpenKeys):
    """The keys of `recipe.optimizer`; timm's `create_optimizer_v2` and the optimizer's class have more."""

    opt: str = key("adamw", "a name of timm.optim.list_optimizers()")
    weight_decay: NotNegative | None = key(0.0, "the weight decay")
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = key(None, "the rate of a layer over the next one's")
    betas: list[Share] | None = key(None, "the decays of the moments")
    eps: Positive | None = key(None, "added to the root of the second moment")
    momentum: Share = key(0.9, "of SGD and similar optimizers")


class Schedule(OpenKeys):
    """The keys of `recipe.schedule`; timm's `create_scheduler_v2` has more."""

    sched: Literal["cosine", "tanh", "step", "multistep", "poly", "wsd"] = key("cosine", "the shape of the schedule")
    min_lr: NotNegative = key(0.0, "the last learning rate")
    warmup_lr: NotNegative = key(0.0, "the first learning rate of the warm-up")
    warmup_epochs: NotNegative | None = key(None, "the length of the warm-up in epochs")
    warmup_updates: Annotated[int, Field(ge=0)] | None = key(None, "or in updates")
    warmup_tokens: NotNegative | None = key(None, "or in tokens")
    step_on_epochs: Literal[False] = key(False, "the learning rate is set after each update")


class Recipe(Keys):
    """The keys of `recipe` that every task has; a task declares the classes of `loss`, `augment` and `model`."""

    name: str = key(..., "the name in tables")
    epochs: Count | None = key(None, "the length of the run in epochs")
    updates: Count | None = key(None, "or in updates")
    tokens: Annotated[float, Field(ge=1)] | None = key(None, "or in tokens, over all devices")
    validate_every_epochs: Count | None = key(None, "the interval between validations; all null: one epoch")
    validate_every_updates: Count | None = key(None, "or in updates")
    validate_every_tokens: Annotated[float, Field(ge=1)] | None = key(None, "or in tokens")
    batch_size: Count = key(..., "the samples (or tokens) of an update, over all devices and accumulated batches")
    learning_rate: NotNegative = key(..., "the highest learning rate; find: search it before the run")
    reference_batch_size: Count | None = key(None, "scale the rate linearly from this batch size; null: do not scale")
    optimizer: Optimizer = key(..., "timm's create_optimizer_v2, create_muon, or a registered function")
    schedule: Schedule = key(..., "timm's create_scheduler_v2, or a registered function")
    ema: Ema | None = key(None, "average the weights and measure the average; null: no average")
    gradient_clip: Positive | None = key(None, "the largest norm of a gradient")
    freeze: Count | Literal["embeddings", "body"] | None = key(
        None, "do not train the embeddings and the first N blocks; or only the embeddings; or all but the head"
    )
    model: None = key(None, "options of the model that belong to the recipe")
    loss: None = key(None, "options of the loss")
    augment: None = key(None, "random transforms of the samples")
    chosen: list[str] | None = key(None, "written by a run: the keys that it chose itself")


class TrainerKeys(OpenKeys):
    """The keys of `trainer`: the arguments of Lightning's Trainer."""

    accelerator: str = key("auto", "auto, cpu, gpu, ...")
    devices: Annotated[int, Field(ge=-1)] | Literal["auto"] | list[int] = key(1, "their number, their indices, or auto")
    num_nodes: Count = key(1, "the number of machines")
    precision: Any = key("32-true", "32-true, bf16-mixed, 16-mixed or 64-true")
    accumulate_grad_batches: Count = key(1, "the batches of an update on each device")
    # The recipe has these, in updates: with another end or interval, its schedule and its best checkpoint would differ.
    max_steps: None = key(None, "see recipe.updates")
    val_check_interval: None = key(None, "see recipe.validate_every_updates")
    check_val_every_n_epoch: None = key(None, "see recipe.validate_every_epochs")


class Finder(Keys):
    """The keys of `learning_rate_finder`."""

    min_lr: Positive = key(1e-6, "the first learning rate")
    max_lr: Positive = key(1.0, "the last one; the search ends where the loss diverges")
    num_training: Annotated[int, Field(ge=20)] = key(100, "the updates of the search")


class TaskGroup(Keys):
    """The keys of `task` that every task has."""

    name: str = key(..., "the task")
    metric: str = key(..., "the validation metric that chooses the best checkpoint")
    unit: str = key("samples", "what the samples are called")


class ClassifierGroup(TaskGroup):
    """The keys of `task` of a classifier."""

    metrics: dict[str, Any] = key({}, "more metrics: {auroc: true}, or {NAME: {_target_: ..., OPTION: VALUE}}")
    threshold: Criterion | Share | list[Annotated[float, Field(ge=0, le=1)]] | None = key(
        None, "of two classes or several labels: a number, or what the best one on validation is chosen by"
    )


class Command(Keys):
    """The keys that every command has."""

    plugins: list[str] = key([], "modules of your own that register mixers, tasks, data and more")


class Train(Command):
    """The keys of `longseq train`."""

    task: TaskGroup = key(..., "the task")
    data: Keys = key(..., "the samples")
    recipe: Recipe = key(..., "length, batch, optimizer, schedule and augmentation")
    model: Keys = key(..., "the model around the mixer")
    mixer: Mixer = key(..., "the sequence mixer in place of attention")
    scale: Scale = key(..., "width and depth")
    trainer: TrainerKeys = key(..., "devices and precision")
    callbacks: dict[str, dict[str, Any] | None] = key({}, "Lightning callbacks by name; null leaves one out")
    logger: dict[str, Any] | None = key(None, "TensorBoard and others")
    seed: int = key(0, "the seed of the weights, of the order of samples, and of their augmentation", ge=0, lt=2**32)
    init: str | None = key(None, "a checkpoint, FOLDER or hf-hub:OWNER/NAME: the first weights, and their model")
    learning_rate_finder: Finder = key(Finder(), "of recipe.learning_rate=find")
    resume: bool | str = key(False, "true: continue the newest unfinished run of this configuration; or a checkpoint")
    optimized_metric: str | None = key("${task.metric}", "the metric that a run returns to a sweep (-m)")
    compile: str | None = key(None, "torch.compile of training steps: default, reduce-overhead, max-autotune")
    matmul_precision: Literal["highest", "high", "medium"] = key(
        "highest", "of float32 matrix products on GPUs; high (TF32) also rounds inside the recurrences"
    )
    output: str = key("${hydra:runtime.output_dir}", "the run folder")


@dataclass(frozen=True)
class TaskKeys:
    """The classes of the keys that a task reads: of `data`, `model`, `task`, `recipe.loss` and the like.

    A class of None means that the task has no such keys.
    """

    data: type[Keys]
    model: Any = OpenKeys
    group: type[TaskGroup] = TaskGroup
    loss: type[Keys] | None = None
    augment: type[Keys] | None = None
    recipe_model: type[Keys] | None = None

    def check(self, config: Mapping[str, Any]) -> None:
        """Raise ValueError if keys contradict each other such that a number would be wrong."""

    def choose(self, config: Mapping[str, Any], info: Any | None, parts: int) -> dict[str, Any]:
        """The values of the dotted keys that may say `auto`, for data with this info.

        `info` is None before the data is open. An effective batch divides over `parts`. ValueError without choices.
        """
        raise ValueError(f"the recipe says auto, and task={config['task']['name']} chooses no values: give numbers")

    def experiment(self, command: type[Train] = Train) -> type[Train]:
        """The keys of a command that trains this task."""
        parts = {"loss": self.loss, "augment": self.augment, "model": self.recipe_model}
        own: Any = {name: (cls | None, Field(None)) for name, cls in parts.items() if cls is not None}
        recipe = create_model("Recipe", __base__=Recipe, **own)
        sections: Any = {"task": self.group, "data": self.data, "model": self.model, "recipe": recipe}
        made: type[Train] = create_model(
            command.__name__, __base__=command, **{name: (cls, Field(...)) for name, cls in sections.items()}
        )
        return made
