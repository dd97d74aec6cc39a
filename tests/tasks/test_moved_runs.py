"""Runs that continue in another folder, on other data, or after an interruption."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from longseq.tasks import train
from longseq.tasks.image.module import ImageClassifier

EPOCHS = 5


def interrupted(run: Callable[[], Any], at: int) -> None:
    """Let a run of images fail in the first step after update `at`, as a machine that breaks down."""
    step = ImageClassifier.training_step

    def fail(self: ImageClassifier, *batch: Any) -> Any:
        if self.trainer.global_step == at:
            raise RuntimeError("the machine breaks down")
        return step(self, *batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ImageClassifier, "training_step", fail)
        with pytest.raises(RuntimeError, match="breaks down"):
            run()


def read(folder: Path, name: str) -> dict[str, Any]:
    return torch.load(folder / "checkpoints" / name, weights_only=True)


@pytest.mark.slow
def test_a_run_in_another_folder_keeps_its_best_checkpoint(tiny, tmp_path):
    # A rate so high that the loss soon grows, so that the best epoch is an early one.
    words = (f"recipe.epochs={EPOCHS}", "recipe.learning_rate=0.3", "recipe.schedule.min_lr=0.3", "recipe.ema=null")
    words += ("recipe.schedule.warmup_epochs=4", "task.metric=loss", "seed=1")
    words += ("recipe.augment.mixing={cutmix: 1.0, prob: 0.5}",)
    train.run(tiny(*words, f"output={tmp_path / 'whole'}"))
    whole, best = json.loads((tmp_path / "whole" / "metrics.json").read_text()), read(tmp_path / "whole", "best.ckpt")
    last = read(tmp_path / "whole", "last.ckpt")["global_step"]
    assert best["epoch"] < EPOCHS - 1, "the best epoch is before the interruption"
    interrupted(lambda: train.run(tiny(*words, f"output={tmp_path / 'begun'}")), last * (EPOCHS - 1) // EPOCHS + 1)
    shutil.copytree(tmp_path / "begun", tmp_path / "moved")
    shutil.rmtree(tmp_path / "begun")
    train.run(tiny(*words, f"output={tmp_path / 'moved'}", "resume=true"))
    measured = {key: value for key, value in whole.items() if key.startswith(("val/", "test/"))}
    found = json.loads((tmp_path / "moved" / "metrics.json").read_text())
    assert read(tmp_path / "moved", "best.ckpt")["global_step"] == best["global_step"]
    assert {key: found[key] for key in measured} == measured


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The points of each curve that TensorBoard shows."""
    board = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    tags = [tag for tag in board.Tags()["scalars"] if tag.startswith(("train/loss", "val/", "test/"))]
    return {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in tags}


@pytest.mark.slow
def test_a_killed_run_has_the_rows_up_to_its_checkpoint(tiny, tmp_path):
    words = ("recipe.epochs=1", "logger=[tensorboard,csv]", "trainer.log_every_n_steps=1", "data.num_workers=0")
    words += ("callbacks.checkpoint.every_n_train_steps=5",)
    train.run(tiny(*words, f"output={tmp_path / 'whole'}"))
    step = ImageClassifier.training_step

    def copy(self: ImageClassifier, *batch: Any) -> Any:
        if self.trainer.global_step == 12:  # what a kill leaves
            shutil.copytree(tmp_path / "run", tmp_path / "killed", ignore=shutil.ignore_patterns("run.lock"))
        return step(self, *batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ImageClassifier, "training_step", copy)
        train.run(tiny(*words))
    assert read(tmp_path / "killed", "last.ckpt")["global_step"] == 10
    train.run(tiny(*words, f"output={tmp_path / 'killed'}", "resume=true"))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    rows, again = (list(csv.DictReader((folder / "metrics.csv").open())) for folder in (whole, killed))
    assert [(row["step"], row["train/loss"]) for row in again] == [(row["step"], row["train/loss"]) for row in rows]
    assert scalars(killed) == scalars(whole)


def begin_on_copy(image_folder, tiny, tmp_path):
    """A run on a copy of the images, interrupted after four updates: the copy, and the words of its command."""
    root = tmp_path / "images"
    shutil.copytree(image_folder, root)
    known = ("data=image_folder", f"data.root={root}", "data.img_size=16", "model.patch_size=4", "data.num_workers=0")
    words = (*known, "recipe.epochs=3", "recipe.batch_size=8")
    interrupted(lambda: train.run(tiny(*words)), 4)
    return root, words


@pytest.mark.slow
def test_a_run_goes_on_with_its_own_data_alone(image_folder, tiny, tmp_path, caplog, capsys):
    root, words = begin_on_copy(image_folder, tiny, tmp_path)
    for split in ("train", "val"):
        (root / split / "class0").rename(root / split / "zero")
    capsys.readouterr()
    with pytest.raises(ValueError, match=r"on other data: the class names"):
        train.run(tiny(*words, "resume=true"))
    assert "saved as of update" not in capsys.readouterr().err, "nothing was saved by this run"
    for split in ("train", "val"):
        (root / split / "zero").rename(root / split / "class0")
    added = root / "train" / "class0" / "added.jpg"
    shutil.copy(next((root / "train" / "class0").iterdir()), added)
    with pytest.raises(ValueError, match=r"was trained with num_samples=24, now it is 25"):
        train.run(tiny(*words, "resume=true"))
    added.unlink()
    min((root / "val" / "class0").iterdir()).rename(root / "val" / "class0" / "renamed.jpg")
    caplog.clear()
    train.run(tiny(*words, "resume=true"))
    assert "the data have changed: val has other files or labels than when the model was trained" in caplog.text
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["updates"] == 9
