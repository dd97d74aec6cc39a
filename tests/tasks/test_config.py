"""The keys of a configuration: types, ranges, nearest names, and the classes that a configuration may build."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from lightning.pytorch.callbacks import EarlyStopping

from longseq.tasks import train
from longseq.tasks.config import Keys, key, read
from longseq.tasks.registry import read_experiment
from longseq.tasks.training import targets
from longseq.tasks.training.configuration import resolve


@pytest.fixture
def config(compose_config, tmp_path) -> dict[str, Any]:
    return resolve(compose_config("train", "trainer=cpu", f"output={tmp_path / 'run'}"))


def changed(config: dict[str, Any], place: str, value: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    *path, last = place.split(".")
    inner = config
    for name in path:
        inner = inner.setdefault(name, {}) or {}
    inner[last] = value
    return config


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("recipe.learning_rate", "1e-3", "recipe.learning_rate=1e-3: input should be a valid number"),
        ("recipe.updates", 3, "recipe.epochs=20 and recipe.updates=3: give only one"),
        ("recipe.augment.scale", [0, 1], "recipe.augment.scale.0=0: input should be greater than 0"),
        ("data.class_weights", [1, -1], "data.class_weights"),
        ("trainer.accumulate_grad_batches", 3, "does not divide"),
        ("trainer.max_steps", 5, "trainer.max_steps=5: input should be None"),
        ("sed", 1, "sed is unknown: did you mean seed?"),
    ],
)
def test_a_wrong_value_names_its_key(config, place, value, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        read_experiment(changed(config, place, value))


def test_defaults_are_those_of_the_keys(config):
    checked = read_experiment(config)
    assert checked["data"]["val_fraction"] == 0.1
    assert checked["recipe"]["augment"]["erasing"] == {"prob": 0.0, "mode": "pixel", "count": 1}
    assert read_experiment(checked) == checked


def test_a_section_of_ones_own():
    class Own(Keys):
        size: int = key(3, "the size", ge=1)

    assert read(Own, {}).size == 3
    with pytest.raises(ValueError, match=r"own\.sise is unknown: did you mean own\.size\?"):
        read(Own, {"sise": 3}, "own")


PLACES = ("callbacks.mine", "recipe.schedule", "logger.mine", "trainer.strategy", "model", "data.train_set")


@pytest.mark.parametrize("place", PLACES)
def test_nothing_is_called_that_is_of_no_listed_module(config, place, tmp_path):
    made = tmp_path / "made"
    node = {"_target_": "os.mkdir", "path": str(made)}
    if place == "model":
        node |= {"name": "mine", "label": "mine"}
    if place == "data.train_set":
        config = changed(config, "data.source", "own")
    with pytest.raises((ValueError, TypeError)):
        train.run(changed(config, place, node))
    assert not made.exists()


@pytest.mark.parametrize("name", ["EarlyStopping", "lightning.pytorch.callbacks.EarlyStopping"])
def test_a_callback_is_named_by_its_last_word_or_in_full(name):
    node = {"_target_": name, "monitor": "val/top1", "patience": 3}
    assert isinstance(targets.build(node, targets.CALLBACKS, "callbacks.stop"), EarlyStopping)
