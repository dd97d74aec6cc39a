"""The length of a run, its warm-up and its validations, in epochs, updates and tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from longseq.tasks import train
from longseq.tasks.config import UNITS
from longseq.tasks.image.module import ImageClassifier
from longseq.tasks.training.schedule import Epoch, RunLength
from longseq.tasks.training.words import complete

NULL = {"epochs": None, "updates": None, "tokens": None, "schedule": {}}
EPOCH = Epoch(updates=20, tokens_per_update=1000.0)


@pytest.mark.parametrize(
    ("keys", "updates", "warmup_epochs"),
    [
        ({"epochs": 3}, 60, 0.0),
        ({"epochs": 3, "schedule": {"warmup_epochs": 0.25}}, 60, 0.25),
        ({"updates": 47, "schedule": {"warmup_updates": 5}}, 47, 0.25),
        ({"tokens": 46_001, "schedule": {"warmup_tokens": 10_000}}, 47, 0.5),
        ({"updates": 30, "schedule": {"warmup_epochs": 1}}, 30, 1.0),
    ],
)
def test_lengths_become_updates(keys, updates, warmup_epochs):
    length = RunLength.from_recipe(NULL | keys)
    assert length.count_updates(EPOCH) == updates
    assert length.count_warmup_epochs(EPOCH) == warmup_epochs


@pytest.mark.parametrize(
    ("task", "word"),
    [
        ("task=image", "recipe.updates=9"),
        ("task=lm", "recipe.epochs=2"),
        ("task=probe", "recipe.tokens=1e4"),
        ("recipe=auto", "recipe.updates=1"),
    ],
)
def test_a_stated_length_replaces_that_of_the_recipe(task, word, compose_config):
    recipe = compose_config("train", "output=run", *complete("train", [task, word])).recipe
    stated = {unit for unit in UNITS if recipe[unit] is not None}
    assert {f"recipe.{unit}" for unit in stated} == {word.partition("=")[0]}


def test_a_warmup_that_would_outlast_the_run_is_shortened_to_a_tenth(caplog):
    length = RunLength.from_recipe(NULL | {"epochs": 1, "schedule": {"warmup_epochs": 5}})
    assert length.count_warmup_epochs(EPOCH) == 0.1
    assert "the warm-up takes 2 of its 20 updates" in caplog.text
    length = RunLength.from_recipe(NULL | {"updates": 1, "schedule": {"warmup_epochs": 5}})
    assert length.count_warmup_epochs(EPOCH) == 0


def interrupt_at(stop: int, monkeypatch: pytest.MonkeyPatch, config: Any) -> None:
    def interrupt(self: ImageClassifier, *arguments: Any) -> None:
        if self.global_step == stop:
            raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr(ImageClassifier, "on_train_batch_end", interrupt)
        with pytest.raises(InterruptedError):
            train.run(config)


@pytest.mark.slow
def test_a_limit_counts_batches_where_another_number_is_accumulated(tiny, tmp_path, monkeypatch):
    told = r"had 6 updates, and has 7; give trainer\.limit_train_batches=12$"
    words = ("recipe.epochs=2", "recipe.ema=null", "callbacks.checkpoint.every_n_train_steps=1")
    begun = tiny(*words, "+trainer.limit_train_batches=0.33", "trainer.log_every_n_steps=1")
    interrupt_at(8, monkeypatch, begun)
    words += ("trainer.accumulate_grad_batches=2", "trainer.log_every_n_steps=1", "resume=true")
    with pytest.raises(ValueError, match=told) as raised:
        train.run(tiny(*words, "+trainer.limit_train_batches=0.33"))
    assert "\n" not in str(raised.value)
    train.run(tiny(*words, "+trainer.limit_train_batches=12"))
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert (metrics["updates"], metrics["epochs"]) == (12, 2)
    # One file at a time: of two that one process writes within a second the names do not tell the order.
    files = [EventAccumulator(str(file)).Reload() for file in (tmp_path / "run").rglob("events.out.*")]
    rates = [event for held in files if "train/lr" in held.Tags()["scalars"] for event in held.Scalars("train/lr")]
    assert [event.step for event in rates] == list(range(8, 12)), "up to the end of the schedule"
