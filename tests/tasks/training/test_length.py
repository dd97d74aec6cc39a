"""The length of a run, its warm-up and its validations, in epochs, updates and tokens."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from longseq.tasks import train
from longseq.tasks.config import UNITS
from longseq.tasks.data.loader import count_units
from longseq.tasks.image.module import ImageClassifier
from longseq.tasks.training.runs import differences
from longseq.tasks.training.schedule import Epoch, RunLength, check_epoch, fit_updates
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


@pytest.mark.parametrize("word", ["recipe.epochs=2", "recipe.updates=9", "recipe.tokens=1e4", "recipe.minutes=1"])
@pytest.mark.parametrize("task", ["task=image", "task=document", "task=lm", "task=probe", "recipe=auto"])
def test_a_stated_length_replaces_that_of_the_recipe(task, word, compose_config):
    recipe = compose_config("train", "output=run", *complete("train", [task, word])).recipe
    stated = {unit for unit in (*UNITS, "minutes") if recipe[unit] is not None}
    assert {f"recipe.{unit}" for unit in stated} == {word.partition("=")[0]}


@pytest.mark.parametrize(
    ("minutes", "length", "updates"),
    [
        (1, {"epochs": 1}, 46),
        (1, {"epochs": 1, "validate_every_updates": 10}, 40),
        (0.01, {"epochs": 1}, 1),
    ],
)
def test_the_updates_of_minutes_leave_time_for_validations(minutes, length, updates):
    assert fit_updates(minutes, 1.0, 4.0, RunLength(**length), EPOCH) == updates


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


@pytest.mark.slow
def test_a_run_shorter_than_its_interval_is_validated_at_its_end(compose_config, tiny_overrides, tmp_path):
    folder = tmp_path / "run"
    words = (*tiny_overrides, "recipe.epochs=1", "recipe.validate_every_epochs=5", f"output={folder}")
    train.run(compose_config("train", *words))
    assert (folder / "checkpoints" / "best.ckpt").is_file()


@pytest.mark.slow
def test_the_last_epoch_is_validated_whatever_the_interval(tiny, tmp_path, monkeypatch):
    words = ("recipe.epochs=3", "+trainer.limit_train_batches=6", "callbacks.checkpoint.every_n_train_steps=1")

    def validated(folder: str) -> list[int]:
        events = EventAccumulator(str(tmp_path / folder)).Reload().Scalars("val/top1")
        return sorted({event.step + 1 for event in events})

    train.run(tiny(*words, f"output={tmp_path / 'each'}"))
    train.run(tiny(*words, f"output={tmp_path / 'whole'}", "recipe.validate_every_epochs=2"))
    interrupt_at(14, monkeypatch, tiny(*words, "recipe.validate_every_epochs=2"))
    train.run(tiny(*words, "recipe.validate_every_epochs=2", "resume=true"))
    assert (validated("each"), validated("whole"), validated("run")) == ([6, 12, 18], [12, 18], [12, 18])
    for name, value in read(tmp_path / "each")["state_dict"].items():
        for folder in ("whole", "run"):
            assert torch.equal(read(tmp_path / folder)["state_dict"][name], value), name
    for folder in ("whole", "run"):
        metrics = json.loads((tmp_path / folder / "metrics.json").read_text())
        assert metrics["val/top1"] == EventAccumulator(str(tmp_path / folder)).Reload().Scalars("val/top1")[-1].value
        best = torch.load(tmp_path / folder / "checkpoints" / "best.ckpt", weights_only=True)
        assert best["global_step"] == 18, "the last epoch is the best one"


# Two epochs have 40 updates.
IN_UPDATES = (
    "recipe.epochs=null",
    "recipe.updates=27",
    "recipe.validate_every_updates=8",
    "trainer.accumulate_grad_batches=2",
    "callbacks.checkpoint.every_n_train_steps=1",
    "callbacks.samples.pictures=2",
)


def read(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "checkpoints" / "last.ckpt", map_location="cpu", weights_only=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, compose_config, tiny_overrides):
    """The folder of an uninterrupted run in updates."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train.run(compose_config("train", *tiny_overrides, *IN_UPDATES, f"output={folder}"))
    return folder


@pytest.mark.slow
def test_a_run_in_updates_validates_within_epochs_and_at_its_end(whole):
    metrics = json.loads((whole / "metrics.json").read_text())
    assert (metrics["updates"], metrics["epochs"]) == (27, 1.35)
    validated = EventAccumulator(str(whole)).Reload().Scalars("val/top1")
    assert [event.step + 1 for event in validated] == [8, 16, 24, 27]
    events = EventAccumulator(str(whole), size_guidance={"images": 0}).Reload()
    assert [event.step + 1 for event in events.Images("val/samples")] == [16, 27], "two pictures at equal distances"


@pytest.mark.slow
@pytest.mark.parametrize("stop", [7, 8, 17])
def test_a_run_in_updates_continues_bitwise(stop, whole, tiny, tmp_path, monkeypatch):
    """Interrupted before a validation, after its update, and after it."""
    interrupt_at(stop, monkeypatch, tiny(*IN_UPDATES))
    train.run(tiny(*IN_UPDATES, "resume=true"))
    one, other = read(whole), read(tmp_path / "run")
    assert one["global_step"] == other["global_step"] == 27
    for name, value in one["state_dict"].items():
        assert torch.equal(value, other["state_dict"][name]), name
    metrics = [json.loads((folder / "metrics.json").read_text()) for folder in (whole, tmp_path / "run")]
    assert all(metrics[0][key] == metrics[1][key] for key in ("val/top1", "val/loss", "test/top1", "test/loss"))
    validated = EventAccumulator(str(tmp_path / "run")).Reload().Scalars("val/top1")
    assert sorted({event.step + 1 for event in validated}) == [8, 16, 24, 27]


def interrupt_at(stop: int, monkeypatch: pytest.MonkeyPatch, config: Any) -> None:
    def interrupt(self: ImageClassifier, *arguments: Any) -> None:
        if self.global_step == stop:
            raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr(ImageClassifier, "on_train_batch_end", interrupt)
        with pytest.raises(InterruptedError):
            train.run(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "told", "adapted", "updates"),
    [
        (7, r"limit_train_batches: 7 there, 7 here", 14, 14),
        (0.33, r"had 6 updates, and has 7; give trainer\.limit_train_batches=12$", 12, 12),
    ],
)
def test_a_limit_counts_batches_where_another_number_is_accumulated(
    limit, told, adapted, updates, tiny, tmp_path, monkeypatch
):
    words = ("recipe.epochs=2", "recipe.ema=null", "callbacks.checkpoint.every_n_train_steps=1")
    begun = tiny(*words, f"+trainer.limit_train_batches={limit}", "trainer.log_every_n_steps=1")
    interrupt_at(8, monkeypatch, begun)
    words += ("trainer.accumulate_grad_batches=2", "trainer.log_every_n_steps=1", "resume=true")
    with pytest.raises(ValueError, match=told) as raised:
        train.run(tiny(*words, f"+trainer.limit_train_batches={limit}"))
    assert "\n" not in str(raised.value)
    train.run(tiny(*words, f"+trainer.limit_train_batches={adapted}"))
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert (metrics["updates"], metrics["epochs"]) == (updates, 2)
    # One file at a time: of two that one process writes within a second the names do not tell the order.
    files = [EventAccumulator(str(file)).Reload() for file in (tmp_path / "run").rglob("events.out.*")]
    rates = [event for held in files if "train/lr" in held.Tags()["scalars"] for event in held.Scalars("train/lr")]
    assert [event.step for event in rates] == list(range(8, updates)), "up to the end of the schedule"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("then", "now", "alike"),
    [
        ((1, 7), (1, 7), True),
        ((1, 7), (1, 14), False),
        ((1, 7), (2, 14), True),
        ((1, 7), (2, 13), False),  # the last update of an epoch would have half of its samples
        ((2, 14), (1, 7), True),
        ((2, 3), (1, 2), True),
        ((2, 3), (4, 6), True),
        ((1, 0.5), (2, 0.5), True),
        ((1, 0.5), (2, 14), True),  # when the data are open, their updates are counted
        ((1, 0.5), (1, 14), False),
        ((1, None), (2, None), True),
        ((1, None), (2, 14), False),
    ],
)
def test_a_run_goes_on_with_the_limit_that_has_its_updates(then, now, alike):
    saved, wanted = (
        {"output": "run", "recipe": {}, "trainer": {"accumulate_grad_batches": parts, "limit_train_batches": limit}}
        for parts, limit in (then, now)
    )
    found = [key for key, _, _ in differences(saved, wanted)]
    assert found == ([] if alike else ["trainer.limit_train_batches"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "accumulate", "limit", "told"),
    [
        ({"accumulate_grad_batches": 1, "limit_train_batches": 0.5}, 2, 0.5, None),
        ({"accumulate_grad_batches": 1}, 2, 1.0, None),
        ({"accumulate_grad_batches": 2, "limit_train_batches": 0.33}, 2, 0.33, None),
        ({"accumulate_grad_batches": 1, "limit_train_batches": 70}, 2, 140, None),
        ({"accumulate_grad_batches": 4, "limit_train_batches": 0.33}, 2, 13, None),
        ({}, 2, 0.33, r"had 20 updates, and has 7; give .*=40$"),
    ],
)
def test_an_epoch_of_a_resumed_run_keeps_its_updates(saved, accumulate, limit, told):
    trainer = SimpleNamespace(accumulate_grad_batches=accumulate, limit_train_batches=limit)
    data = SimpleNamespace(batches_per_epoch=20 * accumulate)
    with nullcontext() if told is None else pytest.raises(ValueError, match=told):
        check_epoch(saved, trainer, data)
    check_epoch(saved, trainer, SimpleNamespace(batches_per_epoch=None))


class PackedBatch(NamedTuple):
    """Rows in which documents lie one behind the other, padded at the end."""

    tokens: Tensor
    lengths: list[list[int]]

    @property
    def units(self) -> int:
        return sum(map(sum, self.lengths))


def test_a_batch_tells_its_units():
    packed = PackedBatch(torch.zeros(2, 16), [[5, 9], [16]])
    assert count_units(packed) == count_units((packed, torch.zeros(2, 16))) == 30
    assert count_units((torch.zeros(7, 3), torch.zeros(7))) == 7
