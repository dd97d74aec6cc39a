"""The length of a run, its warm-up and its validations, in epochs, updates and tokens."""

from __future__ import annotations

import json

import pytest

from longseq.tasks import train
from longseq.tasks.config import UNITS
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
    assert "takes 2 of 20 updates" in caplog.text
    length = RunLength.from_recipe(NULL | {"updates": 1, "schedule": {"warmup_epochs": 5}})
    assert length.count_warmup_epochs(EPOCH) == 0


@pytest.mark.slow
def test_lightnings_max_time_ends_a_run_with_its_test(tiny, tmp_path):
    train.run(tiny("recipe.epochs=100000", "+trainer.max_time=00:00:00:02"))
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert "test/top1" in metrics
    assert metrics["epochs"] < 1000
