"""The length of a run in updates, its optimizer, and its learning-rate schedule, which is set after each update."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from inspect import signature
from typing import Any

from timm.optim import create_optimizer_v2, get_optimizer_class
from timm.scheduler.multistep_lr import MultiStepLRScheduler
from timm.scheduler.scheduler import Scheduler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from longseq.tasks.training.length import Epoch, RunLength
from longseq.tasks.training.recipe import Training, is_of_timm

_log = logging.getLogger(__name__)

# The part of a run, after its warm-up, in which a constant rate (wsd) falls unless decay_epochs gives another.
DECAY = 0.2


def set_length(trainer: Any, length: RunLength, epoch: Epoch) -> int:
    """Set the epochs and the validation interval of the Trainer; returns the last update of the run.

    Lightning counts whole epochs; the module ends a run within one.
    """
    last = length.count_updates(epoch)
    trainer.fit_loop.max_epochs = math.ceil(last / epoch.updates) if epoch.counted else -1
    validation = length.validation
    if validation is None or validation.unit == "epochs":
        # Of a loader without a length, each update may be an epoch.
        most = trainer.fit_loop.max_epochs if epoch.counted else last
        trainer.check_val_every_n_epoch, shortened = length.count_validation_epochs(most)
        if shortened:
            _log.warning(shortened)
    else:
        trainer.check_val_every_n_epoch = None
        updates = max(1, round(validation.in_updates(epoch)))
        trainer.val_check_interval = updates * trainer.accumulate_grad_batches
    return last


def count_updates(trainer: Any, recipe: Training, epoch: Epoch) -> int:
    """The updates of a run, whose length the recipe or the Trainer has."""
    if recipe.length is not None:
        return recipe.length.count_updates(epoch)
    epochs, steps = trainer.max_epochs, trainer.max_steps
    counts: list[int] = [epochs * epoch.updates] if epochs is not None and epochs >= 0 else []
    counts += [steps] if steps >= 0 else []
    if not counts:
        raise ValueError("a schedule needs an end: give max_epochs, max_steps or RunLength")
    return min(counts)


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
    """True if an update can be one kernel on a GPU, by an option of torch's optimizers that is left open."""
    given, cls = getattr(optimizer, "keywords", {}), getattr(optimizer, "func", None)
    if cls is create_optimizer_v2:
        cls = get_optimizer_class(given.get("opt", "sgd"), bind_defaults=False)
    takes = cls is not None and "fused" in signature(cls).parameters
    return takes and "fused" not in given and not given.get("foreach")


def build_schedule(recipe: Training, optimizer: Optimizer, epoch: Epoch, total: int) -> Any:
    """The schedule of a recipe for a run of `total` updates, or None.

    ValueError for spans in epochs where a loader has no length, and for a schedule of timm that counts epochs.
    """
    options, of_timm = getattr(recipe.schedule, "keywords", {}), is_of_timm(recipe.schedule)
    warmup = options.get("warmup_epochs") or 0
    if not warmup and recipe.length is not None:
        warmup, shortened = recipe.length.count_warmup_epochs(epoch)
        if shortened:
            _log.warning(shortened)
    in_epochs = recipe.length is not None and recipe.length.warmup is not None and recipe.length.warmup.unit == "epochs"
    uses_epochs = options.get("warmup_epochs") or in_epochs or options.get("sched") in ("step", "multistep")
    if not epoch.counted and uses_epochs:
        raise ValueError("the training loader has no length: give the schedule's spans in updates")
    lengths: dict[str, Any] = {"num_epochs": _whole(total / epoch.updates), "updates_per_epoch": epoch.updates}
    if warmup or recipe.length is not None:
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
    scheduler, _ = recipe.schedule(optimizer, **lengths, **({"step_on_epochs": False} if of_timm else {}))
    if isinstance(scheduler, Scheduler) and scheduler.t_in_epochs:
        raise ValueError(f"{type(scheduler).__name__} counts epochs: give it t_in_epochs=False")
    if isinstance(scheduler, LRScheduler):
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
    # Torch's know no rates by layer, nor do those of Lightning's search of a rate and of its averaging of weights. Some
    # compute a rate from the one before: each finds the rates that it has set itself.
    for group in scheduler.optimizer.param_groups:
        group["lr"] /= group.get("lr_scale", 1.0) or 1.0
    scheduler.step()
    _scale_by_layer(scheduler.optimizer)


def is_constant_rate(state: Mapping[str, Any]) -> bool:
    """Whether a schedule's state is that of timm's WSDLRScheduler."""
    return "decay_t" in state and "stable_fn" in state


def check_end(update: int, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """ValueError where a run with a constant rate gets another end after its rate has begun to fall.

    `saved` and `own` are states of WSDLRScheduler in the checkpoint, of `update`, and in this run.
    """
    then, now = (state["warmup_t"] + state["t_initial"] - state["decay_t"] for state in (saved, own))
    if then != now and update > min(then, now):
        raise ValueError(
            f"resume: another length needs a checkpoint from before update {math.ceil(min(then, now))}, where the rate "
            "begins to fall"
        )


def _scale_by_layer(optimizer: Optimizer) -> None:
    """Multiply the rates that a scheduler of torch has set by those of the layers (`layer_decay`)."""
    for group in optimizer.param_groups:
        group["lr"] *= group.get("lr_scale", 1.0)


def _whole(number: float) -> float:
    return int(number) if number == int(number) else number
