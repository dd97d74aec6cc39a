"""The length of a run, its warm-up and its validations, in epochs, updates and tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
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
        ("recipe=auto", "recipe.minutes=1"),
    ],
)
def test_a_stated_length_replaces_that_of_the_recipe(task, word, compose_config):
    recipe = compose_config("train", "output=run", *complete("train", [task, word])).recipe
    stated = {unit for unit in (*UNITS, "minutes") if recipe[unit] is not None}
    assert {f"recipe.{unit}" for unit in stated} == {word.partition("=")[0]}


@pytest.mark.slow
def test_a_run_of_minutes_is_that_of_its_updates_and_is_resumed(tmp_path, command, tiny_overrides):
    words = ("train", *(word for word in tiny_overrides if "epochs" not in word), "recipe.ema=null", "logger=none")
    words += ("recipe.schedule.warmup_epochs=0", "callbacks.telemetry=null", "data.num_workers=0")
    first = command(tmp_path, *words, "recipe.minutes=0.005", "output=minutes")
    assert first.returncode == 0, first.stderr
    assert "recipe.minutes=0.005: " in first.stdout
    checkpoint = tmp_path / "minutes" / "checkpoints" / "last.ckpt"
    planned = torch.load(checkpoint, weights_only=True)
    recipe = planned["hyper_parameters"]["config"]["recipe"]
    assert recipe["updates"] == planned["global_step"]
    same = command(tmp_path, *words, f"recipe.updates={recipe['updates']}", "output=updates")
    assert same.returncode == 0, same.stderr
    stated = torch.load(tmp_path / "updates" / "checkpoints" / "last.ckpt", weights_only=True)
    assert all(torch.equal(value, planned["state_dict"][name]) for name, value in stated["state_dict"].items())
    (tmp_path / "minutes" / "metrics.json").unlink()
    resumed = command(tmp_path, *words, "recipe.minutes=0.005", "output=minutes", "resume=true")
    assert resumed.returncode == 0, resumed.stderr
    assert "continuing from" in resumed.stdout
    assert "recipe.minutes=" not in resumed.stdout
    assert torch.load(checkpoint, weights_only=True)["global_step"] == recipe["updates"]
    # Two processes agree on the number; otherwise they would wait for each other.
    two = command(tmp_path, *words, "recipe.minutes=0.005", "trainer.devices=2", "+trainer.strategy=ddp", "output=two")
    assert two.returncode == 0, two.stderr
    assert "x 2 device(s)" in two.stdout


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
