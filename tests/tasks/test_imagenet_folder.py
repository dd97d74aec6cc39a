"""A folder laid out like ImageNet, with photos of many sizes, through the whole recipe at 224 pixels."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from longseq.tasks import evaluate, train

CLASSES = ("n01440764", "n01443537", "n01484850")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six training and two validation photos of each class: its hue, under smooth noise, in sizes of cameras."""
    root = tmp_path_factory.mktemp("imagenet")
    random = np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 2)):
        for label, name in enumerate(CLASSES):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                size = tuple(int(side) for side in random.integers(180, 420, 2))
                pixels = random.integers(0, 120, (6, 8, 3), dtype=np.uint8)
                pixels[..., label] += 130
                image = Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)
                image.save(folder / f"{name}_{i}.JPEG", quality=90)
    return root


@pytest.mark.slow
def test_a_folder_like_imagenet_trains_through_the_whole_recipe(photos, compose_config, tmp_path):
    run = tmp_path / "run"
    overrides = (
        "data=imagenet",
        f"data.root={photos}",
        "data.num_workers=0",
        "trainer=cpu",
        "model.depth=2",
        "model.embed_dim=32",
        "recipe.epochs=2",
        "recipe.batch_size=4",
        "recipe.schedule.warmup_epochs=1",
    )
    config = compose_config("train", *overrides, f"output={run}")
    augment = config.recipe.augment
    assert augment.auto_augment == "rand-m9-mstd0.5-inc1"
    assert (augment.repeats, augment.erasing.prob, augment.mixing.mixup, augment.mixing.cutmix) == (3, 0.25, 0.8, 1.0)
    train.run(config)
    metrics = json.loads((run / "metrics.json").read_text())
    assert (metrics["epochs"], metrics["updates"]) == (2, 8)  # of 18 images, 16 in whole batches
    assert [row["images"] for row in metrics["test/per_class"]] == [2, 2, 2]
    best = run / "checkpoints" / "best.ckpt"
    stored = torch.load(best, weights_only=True)
    assert stored["hyper_parameters"]["data"]["class_names"] == list(CLASSES)
    averaged, raw = stored["state_dict"], stored["current_model_state"]
    assert all(value.isfinite().all() for value in averaged.values())
    assert any(not torch.equal(value, raw[key]) for key, value in averaged.items())
    evaluated = evaluate.run(compose_config("evaluate", f"checkpoint={best}", "trainer=cpu", "data.num_workers=0"))
    assert evaluated["test/top1"] == metrics["test/top1"]
    assert evaluated["test/loss"] == pytest.approx(metrics["test/loss"])
    known = (f"checkpoint={best}", "trainer=cpu", "data.num_workers=0")
    evaluate.run(compose_config("evaluate", *known, f"data.root={photos / 'val'}", "data.img_size=240"))
    assert json.loads((run / "evaluation_test.json").read_text())["test/images"] == 6
