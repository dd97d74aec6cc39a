"""The rates of timm's schedules in a run of updates, and the Trainer's minimum length beside the recipe's."""

from __future__ import annotations

import logging
import math
from functools import partial

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping
from timm.scheduler import create_scheduler_v2
from torch import nn

from longseq.tasks.training.length import Epoch, RunLength
from longseq.tasks.training.module import TrainedModule
from longseq.tasks.training.recipe import Training

EPOCH, EPOCHS = 5, 4
LAST = EPOCH * EPOCHS
SILENT = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


class Plain(TrainedModule):
    """Trains one weight on nothing."""

    def __init__(self, training):
        super().__init__(nn.Linear(1, 1, bias=False), training)

    def training_step(self, batch, batch_idx):
        self.log("constant", 1.0)
        return self.backbone.weight.sum()


def plain_sgd(model, lr):
    return torch.optim.SGD(model.parameters(), lr=lr)


def make(length, **options):
    schedule = partial(create_scheduler_v2, warmup_lr=0.0, step_on_epochs=False, **options)
    return Plain(Training(learning_rate=1.0, optimizer=plain_sgd, schedule=schedule, length=length))


def configure(length, **options):
    module = make(length, **options)
    module._known_epoch = Epoch(EPOCH)
    module.trainer = Trainer(accelerator="cpu", max_epochs=EPOCHS, **SILENT)
    return module.configure_optimizers()


def read_rates(configured):
    """The rate of each update, and after these the one with which the schedule ends."""
    scheduler, rates = configured["lr_scheduler"]["scheduler"], []
    for update in range(LAST + 1):
        scheduler.step_update(update)
        rates.append(configured["optimizer"].param_groups[0]["lr"])
    return rates


@pytest.mark.slow
@pytest.mark.parametrize("sched", ["cosine", "poly", "wsd"])
@pytest.mark.parametrize("warmup", [{}, {"warmup_updates": 3}, {"warmup_epochs": 1}, {"warmup_epochs": 0.4}])
def test_a_schedule_that_begins_after_its_warmup_ends_with_the_run(sched, warmup):
    length = RunLength(epochs=EPOCHS, **warmup)
    rates = read_rates(configure(length, sched=sched, min_lr=0.01, warmup_prefix=True))
    risen = round(length.count_warmup_epochs(Epoch(EPOCH))[0] * EPOCH)
    assert rates[risen] == 1.0
    assert max(rates[:risen], default=0.0) < 1.0
    assert rates[LAST] == pytest.approx(0.01)
    assert rates[LAST - 1] > 0.011
    if sched == "cosine":
        part = (LAST - 1 - risen) / (LAST - risen)
        assert rates[LAST - 1] == pytest.approx(0.01 + 0.99 / 2 * (1 + math.cos(math.pi * part)))
    if sched == "wsd":
        assert rates == read_rates(configure(length, sched=sched, min_lr=0.01, warmup_prefix=False))


@pytest.mark.slow
@pytest.mark.parametrize("sched", ["cosine", "wsd"])
def test_it_does_so_where_the_trainer_has_the_length(sched):
    rates = read_rates(configure(None, sched=sched, min_lr=0.01, warmup_epochs=1, warmup_prefix=True))
    assert max(rates[:EPOCH]) < rates[EPOCH] == 1.0
    assert rates[LAST] == pytest.approx(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "falls"),
    [
        ({"sched": "step", "decay_epochs": 1}, [5, 10, 15, 20]),
        ({"sched": "multistep", "decay_milestones": [1, 3]}, [5, 15]),
        ({"sched": "multistep", "decay_milestones": [0.5, 3]}, [3, 15]),
    ],
)
def test_a_rate_falls_with_the_first_update_of_an_epoch(options, falls):
    configured = configure(RunLength(epochs=EPOCHS), **options)
    rates = read_rates(configured)
    assert [update for update in range(1, LAST + 1) if rates[update] < rates[update - 1]] == falls


@pytest.mark.slow
def test_the_milestones_of_an_earlier_checkpoint_stay_as_they_were():
    configured = configure(RunLength(epochs=EPOCHS), sched="multistep", decay_milestones=[1, 3])
    scheduler = configured["lr_scheduler"]["scheduler"]
    scheduler.load_state_dict({**scheduler.state_dict(), "decay_t": [5, 15]})
    rates = read_rates(configured)
    assert [update for update in range(1, LAST + 1) if rates[update] < rates[update - 1]] == [4, 14]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"cycle_limit": 2, "cycle_decay": 0.5}, "recipe.schedule.cycle_limit=2 and recipe.schedule.cycle_decay=0.5:"),
        ({"cycle_mul": 2.0}, "no effect of recipe.schedule.cycle_mul=2.0: a run ends with the first cycle"),
        ({"cooldown_epochs": 2}, "is as long as the recipe says; leave out: ~recipe.schedule.cooldown_epochs"),
        ({"cycle_limit": 1, "cooldown_epochs": 0}, None),
    ],
)
def test_options_that_would_lengthen_a_run_are_told(options, told, caplog):
    with caplog.at_level(logging.WARNING, "longseq"):
        configured = configure(RunLength(epochs=EPOCHS), sched="cosine", **options)
    assert len(caplog.messages) == (told is not None)
    assert told is None or told in caplog.messages[0]
    assert read_rates(configured)[:LAST] == read_rates(configure(RunLength(epochs=EPOCHS), sched="cosine"))[:LAST]


def fit(length, *callbacks, **options):
    """The updates of a run."""
    trainer = Trainer(accelerator="cpu", callbacks=list(callbacks), max_epochs=-1, **options, **SILENT)
    trainer.fit(make(length, sched="constant"), torch.utils.data.DataLoader(torch.zeros(EPOCH, 1)))
    return trainer.global_step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"min_epochs": 3}, r"^trainer\.min_epochs=3 is longer than the run \(recipe\.updates=7\): give at most 1, or"),
        ({"min_epochs": 2}, r"^trainer\.min_epochs=2 is longer than the run"),
        ({"min_steps": 12}, r"^trainer\.min_steps=12 is longer than the run \(recipe\.updates=7\): give at most 7, or"),
    ],
)
def test_a_minimum_beyond_the_run_is_refused(options, told):
    with pytest.raises(ValueError, match=told) as raised:
        fit(RunLength(updates=7), **options)
    assert "\n" not in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("updates", "options"),
    [(7, {"min_epochs": 1}), (7, {"min_steps": 7}), (10, {"min_epochs": 2}), (3, {"min_steps": 2}), (3, {})],
)
def test_a_run_with_a_minimum_ends_where_the_recipe_says(updates, options):
    assert fit(RunLength(updates=updates), **options) == updates


@pytest.mark.slow
@pytest.mark.parametrize(("options", "updates"), [({}, 10), ({"min_epochs": 3}, 15), ({"min_steps": 11}, 11)])
def test_early_stopping_waits_for_the_minimum(options, updates):
    stopping = EarlyStopping("constant", patience=1, check_on_train_epoch_end=True)
    assert fit(RunLength(epochs=EPOCHS), stopping, **options) == updates
