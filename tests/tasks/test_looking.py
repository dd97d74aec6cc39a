"""What a run shows: its worst errors by file, and saliency."""

from __future__ import annotations

import csv

import pytest
import torch
from PIL import Image
from representatives import REPRESENTATIVES
from zeros import without_zeros

from longseq.backbones.image import ImageBackbone
from longseq.tasks import predict, train
from longseq.tasks.image.data import ImageDataModule
from longseq.tasks.image.predict import saliency
from longseq.tasks.image.report import COLUMNS
from longseq.tasks.training import checkpoint

SLOW = pytest.mark.slow  # they share a training


@pytest.fixture(scope="module")
def run(tmp_path_factory, compose_config, tiny_overrides):
    """The folder of a run of two epochs of the digits."""
    folder = tmp_path_factory.mktemp("shown") / "run"
    # The second epoch, with a learning rate that is far too high, is worse than the first.
    worse = ("recipe.schedule.sched=step", "+recipe.schedule.decay_epochs=1", "+recipe.schedule.decay_rate=300")
    train.run(compose_config("train", *tiny_overrides, "recipe.epochs=2", *worse, f"output={folder}"))
    return folder


@SLOW
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
    assert tuple(rows[0]) == COLUMNS
    assert all(row["true_class"] != row["predicted_class"] for row in rows)
    assert [float(row["loss"]) for row in rows] == sorted((float(row["loss"]) for row in rows), reverse=True)
    worst = sorted(expected, key=lambda path: -expected[path])[:100]
    assert [row["path"] for row in rows] == worst
    assert [float(row["loss"]) for row in rows] == pytest.approx([expected[path] for path in worst], abs=1e-4)


@pytest.mark.parametrize("mixer", REPRESENTATIVES)
def test_saliency_is_the_gradient_of_a_score(mixer):
    torch.manual_seed(0)
    model = ImageBackbone(img_size=8, patch_size=4, embed_dim=16, depth=1, num_classes=3, mixer=mixer)
    model = without_zeros(model).eval()
    images = torch.randn(2, 3, 8, 8)
    with torch.inference_mode():
        logits, maps = saliency(model, images, torch.tensor([2, 0]))
    assert maps.shape == (2, 8, 8)
    assert all(parameter.grad is None for parameter in model.parameters())
    pixels = images.clone().requires_grad_()
    scores = model(pixels)
    torch.testing.assert_close(logits, scores)
    (scores[0, 2] + scores[1, 0]).backward()
    torch.testing.assert_close(maps, pixels.grad.abs().amax(dim=1))
    assert (maps > 0).float().mean() > 0.9


@SLOW
def test_predict_draws_saliency_beside_its_file(run, tmp_path, compose_config):
    for name in ("a.png", "deep/a.jpg"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        Image.effect_noise((20, 20), 90).save(path)
    known = (f"checkpoint={run}/checkpoints/best.ckpt", f"input={tmp_path}/photos", "device=cpu")
    plain = compose_config("predict", *known, f"output={tmp_path}/plain.csv")
    drawn = compose_config("predict", *known, f"output={tmp_path}/drawn.csv", f"saliency={tmp_path}/seen")
    assert predict.run(plain) == predict.run(drawn) == {"classified": 2, "unreadable": 0}
    assert (tmp_path / "plain.csv").read_text() == (tmp_path / "drawn.csv").read_text()
    seen = sorted(path for path in (tmp_path / "seen").rglob("*") if path.is_file())
    assert [path.relative_to(tmp_path / "seen").as_posix() for path in seen] == ["a.png.png", "deep/a.jpg.png"]
    assert Image.open(seen[0]).size == (256, 128)
    with (tmp_path / "plain.csv").open() as file:
        least = next(csv.DictReader(file))["class_5"]
    predicted = seen[0].read_bytes()
    other = compose_config("predict", *known, f"saliency={tmp_path}/seen", f"saliency_class={least}",
                           f"output={tmp_path}/other.csv")  # fmt: skip
    predict.run(other)
    assert seen[0].read_bytes() != predicted
