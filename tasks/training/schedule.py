"""The lengths of a run, its warm-up and its validation interval in epochs, updates or tokens, and its rates."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

from timm.optim import create_optimizer_v2, get_optimizer_class
from timm.scheduler import create_scheduler_v2
from timm.scheduler.multistep_lr import MultiStepLRScheduler
from timm.scheduler.scheduler import Scheduler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from longseq.tasks.config import UNITS

if TYPE_CHECKING:
    from longseq.tasks.training.recipe import Training

_log = logging.getLogger(__name__)

WARMUPS = tuple(f"warmup_{unit}" for unit in UNITS)

SHORTENED = 0.1  # the warm-up's share of a run, if the recipe's warm-up is longer than the run

DECAY = 0.2  # the share of a run, after its warm-up, in which a constant rate (wsd) falls, unless decay_epochs is given


class Epoch(NamedTuple):
    """The updates in an epoch of the data, and the tokens of an update (None for data without tokens).

    For a loader without a length, `counted` is False and `updates` is the length of the run.
    """

    updates: int
    tokens_per_update: float | None = None
    counted: bool = True


def count_epoch(trainer: Any, data: Any) -> Epoch | None:
    """The epoch of a data module under Lightning's Trainer; None for data that does not count its batches."""
    batches = getattr(data, "batches_per_epoch", None)
    if batches is None:
        return None
    limit, tokens = trainer.limit_train_batches, data.tokens_per_epoch  # the limit is a number of batches, or a part
    used = batches if limit is None else min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    whole, updates = (max(1, math.ceil(count / trainer.accumulate_grad_batches)) for count in (batches, used))
    return Epoch(updates, None if tokens is None else tokens / whole)


@dataclass(frozen=True)
class Span:
    """A number of epochs, updates or tokens, and the configuration key that gave it."""

    count: float
    unit: str
    key: str

    def in_updates(self, epoch: Epoch) -> float:
        """The span in updates. ValueError for tokens if the data has none."""
        if self.unit == "epochs":
            return self.count * epoch.updates
        if self.unit == "updates":
            return self.count
        if epoch.tokens_per_update is None:
            raise ValueError(f"{self.key}={self.count:g}: this data has no tokens to count")
        return self.count / epoch.tokens_per_update


@dataclass(frozen=True, kw_only=True)
class RunLength:
    """The length of a run, of its warm-up, and of the interval between validations, each in one unit.

    Give one of `epochs`, `updates` and `tokens` (of all devices), and at most one warm-up and one interval; otherwise
    ValueError. By default there is no warm-up, and a validation follows each epoch. Every run ends with a validation.
    """

    epochs: int | None = None
    updates: int | None = None
    tokens: float | None = None
    warmup_epochs: float | None = None
    warmup_updates: int | None = None
    warmup_tokens: float | None = None
    validate_every_epochs: int | None = None
    validate_every_updates: int | None = None
    validate_every_tokens: float | None = None

    def __post_init__(self) -> None:
        for prefix in ("", "warmup_", "validate_every_"):
            self._find(prefix)
        if self._find("") is None:
            raise ValueError("give the run a length: recipe.epochs, recipe.updates or recipe.tokens")

    @classmethod
    def from_recipe(cls, recipe: Mapping[str, Any]) -> RunLength:
        """The lengths in a recipe's keys."""
        warmup = {name: recipe["schedule"].get(name) for name in WARMUPS}
        own = {field.name: recipe.get(field.name) for field in fields(cls) if field.name not in WARMUPS}
        return cls(**own, **warmup)

    @property
    def warmup(self) -> Span | None:
        return self._find("warmup_")

    @property
    def validation(self) -> Span | None:
        """The interval between validations; None means an epoch."""
        return self._find("validate_every_")

    def count_updates(self, epoch: Epoch) -> int:
        """The updates of the run."""
        run = self._find("")
        assert run is not None
        return max(1, math.ceil(run.in_updates(epoch)))

    def count_warmup_epochs(self, epoch: Epoch) -> float:
        """The warm-up in epochs; shortened, with a warning, if it is not shorter than the run."""
        span, total = self.warmup, self.count_updates(epoch)
        if span is None:
            return 0.0
        if span.in_updates(epoch) < total:
            return span.count if span.unit == "epochs" else span.in_updates(epoch) / epoch.updates
        updates = int(SHORTENED * total)
        _log.warning("%s is at least as long as the run: it takes %d of %d updates", span.key, updates, total)
        return updates / epoch.updates

    def _find(self, prefix: str) -> Span | None:
        place = "recipe.schedule." if prefix == "warmup_" else "recipe."
        values = {unit: getattr(self, f"{prefix}{unit}") for unit in UNITS}
        spans = [Span(value, unit, f"{place}{prefix}{unit}") for unit, value in values.items() if value is not None]
        if len(spans) > 1:
            raise ValueError(f"{' and '.join(f'{span.key}={span.count:g}' for span in spans)}: give only one")
        return spans[0] if spans else None


def set_length(trainer: Any, length: RunLength, epoch: Epoch) -> int:
    """Set the epochs and the validation interval of the Trainer; returns the last update of the run.

    Lightning counts whole epochs; the module ends a run within one.
    """
    last = length.count_updates(epoch)
    trainer.fit_loop.max_epochs = math.ceil(last / epoch.updates) if epoch.counted else -1
    validation = length.validation
    if validation is None or validation.unit == "epochs":
        # For a loader without a length, each update may be an epoch.
        most = trainer.fit_loop.max_epochs if epoch.counted else last
        trainer.check_val_every_n_epoch = 1 if validation is None else min(int(validation.count), most)
    else:
        trainer.check_val_every_n_epoch = None
        updates = max(1, round(validation.in_updates(epoch)))
        trainer.val_check_interval = updates * trainer.accumulate_grad_batches
    return last


def count_updates(trainer: Any, recipe: Training, epoch: Epoch) -> int:
    """The updates of a run, by the length of the recipe or else of the Trainer."""
    if recipe.length is not None:
        return recipe.length.count_updates(epoch)
    epochs = -1 if trainer.max_epochs is None else trainer.max_epochs
    return min(count for count in (epochs * epoch.updates, trainer.max_steps) if count >= 0)


def epoch_of_loader(trainer: Any, recipe: Training | None) -> Epoch:
    """The epoch of the loader that the Trainer has made."""
    batches = trainer.num_training_batches
    if not math.isinf(batches):
        return Epoch(max(1, math.ceil(batches / trainer.accumulate_grad_batches)))
    length = recipe.length if recipe else None
    updates = length.updates if length is not None else trainer.max_steps
    if updates is None or updates <= 0:
        raise ValueError("the training loader has no length: give RunLength(updates=...) or max_steps")
    return Epoch(updates, counted=False)


def can_fuse(optimizer: Any) -> bool:
    """True if an optimizer of timm or torch can update in one kernel on a GPU, and its options leave this open."""
    given, cls = getattr(optimizer, "keywords", {}), getattr(optimizer, "func", None)
    if cls is create_optimizer_v2:
        cls = get_optimizer_class(given.get("opt", "sgd"), bind_defaults=False)
    takes = cls is not None and "fused" in signature(cls).parameters
    return takes and "fused" not in given and not given.get("foreach")


def scale_rates(optimizer: Optimizer, scales: Mapping[int, float]) -> None:
    """Move the parameters that `scales` has by `id` into groups with a multiple of the learning rate."""
    if not scales:
        return
    groups = []
    for group in optimizer.param_groups:
        own = [scales.get(id(parameter), 1.0) for parameter in group["params"]]
        for scale in dict.fromkeys(own):
            chosen = [one for one, its in zip(group["params"], own, strict=True) if its == scale]
            groups.append({**group, "params": chosen, "lr_scale": scale * group.get("lr_scale", 1.0)})
    optimizer.param_groups[:] = groups


def build_schedule(recipe: Training, optimizer: Optimizer, epoch: Epoch, total: int) -> Any:
    """The schedule of a recipe for a run of `total` updates, or None.

    ValueError for spans in epochs where a loader has no length, and for a schedule of timm that counts epochs.
    """
    options, length = getattr(recipe.schedule, "keywords", {}), recipe.length
    of_timm = getattr(recipe.schedule, "func", recipe.schedule) is create_scheduler_v2
    warmup = options.get("warmup_epochs") or (0 if length is None else length.count_warmup_epochs(epoch))
    in_epochs = length is not None and length.warmup is not None and length.warmup.unit == "epochs"
    uses_epochs = options.get("warmup_epochs") or in_epochs or options.get("sched") in ("step", "multistep")
    if not epoch.counted and uses_epochs:
        raise ValueError("the training loader has no length: give the schedule's spans in updates")
    epochs = total / epoch.updates
    whole = int(epochs) if epochs == int(epochs) else epochs
    lengths: dict[str, Any] = {"num_epochs": whole, "updates_per_epoch": epoch.updates}
    if warmup or length is not None:
        lengths["warmup_epochs"] = warmup
    if options.get("sched") == "wsd":
        # timm refuses a decay that is longer than what the warm-up leaves. In epochs, rounding can make it so.
        updates = min(round(warmup * epoch.updates), total - 1)
        decay = max(1, round((options.get("decay_epochs") or DECAY) * (total - updates)))
        lengths = {"num_epochs": total, "updates_per_epoch": 1, "warmup_epochs": updates, "decay_epochs": decay}
    if of_timm and options.get("warmup_prefix"):  # the schedule begins after its warm-up, and ends with the run too
        left = lengths["num_epochs"] - lengths.get("warmup_epochs", 0)
        lengths["num_epochs"] = max(left, 1 / lengths["updates_per_epoch"])
    # timm's default is a step after each epoch.
    unsaid = of_timm and "step_on_epochs" not in options
    scheduler, _ = recipe.schedule(optimizer, **lengths, **({"step_on_epochs": False} if unsaid else {}))
    if isinstance(scheduler, Scheduler) and scheduler.t_in_epochs:
        raise ValueError(f"{type(scheduler).__name__} counts epochs, and rates are set after each update")
    if scheduler is None or isinstance(scheduler, LRScheduler):
        _scale_by_layer(optimizer)
    if of_timm and isinstance(scheduler, MultiStepLRScheduler):
        # timm lets the rate fall at the last index before a milestone, which is an update here.
        scheduler.decay_t = [milestone + 1 for milestone in scheduler.decay_t]
    return scheduler


def step_schedule(scheduler: Any, update: int) -> None:
    """Set the rates for the update after the first `update` ones."""
    if not isinstance(scheduler, LRScheduler):
        scheduler.step_update(update)  # timm's
        return
    # Schedulers of torch and Lightning ignore `layer_decay`, and some compute a rate from the one that they set before.
    for group in scheduler.optimizer.param_groups:
        group["lr"] /= group.get("lr_scale", 1.0) or 1.0
    scheduler.step()
    _scale_by_layer(scheduler.optimizer)


def is_constant_rate(state: Mapping[str, Any]) -> bool:
    """True if a schedule's state is from timm's WSDLRScheduler."""
    return "decay_t" in state and "stable_fn" in state


def check_end(update: int, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """ValueError if a run with a constant rate gets another end after its rate has begun to fall.

    `saved` and `own` are states of WSDLRScheduler in the checkpoint, of `update`, and in this run.
    """
    then, now = (state["warmup_t"] + state["t_initial"] - state["decay_t"] for state in (saved, own))
    if then != now and update > min(then, now):
        update = math.ceil(min(then, now))
        raise ValueError(f"resume: another length needs a checkpoint from before update {update}, where the rate falls")


def _scale_by_layer(optimizer: Optimizer) -> None:
    """Scale rates, constant ones or those that a scheduler of torch has set, by layer (`layer_decay`)."""
    for group in optimizer.param_groups:
        group["lr"] *= group.get("lr_scale", 1.0)
