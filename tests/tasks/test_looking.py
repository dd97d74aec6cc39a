"""What a run shows: its worst errors by file."""

from __future__ import annotations

import csv

import pytest
import torch

from longseq.tasks import train
from longseq.tasks.image.data import ImageDataModule
from longseq.tasks.image.report import Mistake
from longseq.tasks.training import checkpoint


@pytest.fixture(scope="module")
def run(tmp_path_factory, compose_config, tiny_overrides):
    """The folder of a run of two epochs of the digits."""
    folder = tmp_path_factory.mktemp("shown") / "run"
    # The second epoch, with a learning rate that is far too high, is worse than the first.
    worse = ("recipe.schedule.sched=step", "+recipe.schedule.decay_epochs=1", "+recipe.schedule.decay_rate=300")
    train.run(compose_config("train", *tiny_overrides, "recipe.epochs=2", *worse, f"output={folder}"))
    return folder


@pytest.mark.slow
def test_the_worst_errors_are_listed_by_their_files(run):
    loaded = checkpoint.load(run / "checkpoints" / "best.ckpt", tasks=["image"])
    datamodule = ImageDataModule.from_config(loaded.config, 64)
    split, expected = datamodule.splits.test, {}
    for number, batch in enumerate(loader := datamodule.test_dataloader()):
        images, true = datamodule.on_after_batch_transfer(batch, 0)
        with torch.no_grad():
            logits = loaded.backbone.eval()(images)
        losses = torch.nn.functional.cross_entropy(logits, true, reduction="none")
        for row, place in enumerate(loader.sampler.batch(number)):
            if logits[row].argmax() != true[row]:
                expected[split.source.path(split.indices[place])] = float(losses[row])
    assert loaded.epoch == 1
    with (run / "worst_errors_test.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == Mistake._fields
    assert all(row["true_class"] != row["predicted_class"] for row in rows)
    assert [float(row["loss"]) for row in rows] == sorted((float(row["loss"]) for row in rows), reverse=True)
    worst = sorted(expected, key=lambda path: -expected[path])[:100]
    assert [row["path"] for row in rows] == worst
    assert [float(row["loss"]) for row in rows] == pytest.approx([expected[path] for path in worst], abs=1e-4)
