"""`longseq evaluate` and `longseq predict` on a checkpoint."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from sklearn.datasets import load_digits

import longseq
from longseq.tasks import evaluate, predict, train

pytestmark = pytest.mark.slow  # they share a trained model


@pytest.fixture(scope="module")
def run(tmp_path_factory, compose_config, tiny_overrides):
    """The folder of a trained run."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    average = "++recipe.ema={decay: 0.95, warmup: true}"
    train.run(compose_config("train", *tiny_overrides, "recipe.epochs=5", average, f"output={folder}"))
    return folder


@pytest.fixture
def checkpoint(run):
    return run / "checkpoints" / "best.ckpt"


@pytest.fixture
def pictures(tmp_path):
    """Five digits in a folder below, one file that is no image, one that is no picture at all."""
    data = load_digits()
    folder = tmp_path / "pictures" / "deep"
    folder.mkdir(parents=True)
    for i in range(5):
        Image.fromarray((data.images[i] * 255 / 16).astype(np.uint8)).save(folder / f"{i}.png")
    (folder / "broken.png").write_bytes(b"no image")
    (folder / "notes.txt").write_text("no picture")
    return tmp_path / "pictures"


def save_model(folder: Path, **options) -> torch.nn.Module:
    torch.manual_seed(0)
    small = {"mixer": "deltanet", "embed_dim": 32, "depth": 1, "patch_size": 8, "num_classes": 4, "img_size": 48}
    model = timm.create_model("longseq_vit_tiny_patch16_224", **small | options).eval()
    torch.nn.init.normal_(model.head.weight)
    model.save_pretrained(folder)
    return longseq.from_pretrained(folder)  # its pretrained_cfg states its size


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"pretrained_cfg_overlay": {"crop_mode": "squash", "crop_pct": 0.9}},
        {"img_size": (48, 80)},
        {"img_size": (80, 48), "pretrained_cfg_overlay": {"crop_mode": "squash"}},
    ],
)
def test_predict_cuts_images_as_timm_does_for_the_model(options, compose_config, tmp_path):
    model, files = save_model(tmp_path / "model", **options), tmp_path / "files"
    files.mkdir()
    for number, size in enumerate([(48, 80), (300, 40), (40, 300), (9, 7)]):
        pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), np.uint8)
        Image.fromarray(pixels).resize(size).save(files / f"{number}.png")
    words = (f"checkpoint={tmp_path / 'model'}", f"input={files}", f"output={tmp_path / 'out.json'}", "device=cpu")
    predict.run(compose_config("predict", *words))
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    for found in json.loads((tmp_path / "out.json").read_text())["predictions"]:
        with torch.no_grad():
            expected = model(transform(Image.open(found["path"]))[None]).softmax(1)[0]
        given = torch.zeros(4)
        for one in found["classes"]:
            given[int(one["class"])] = one["probability"]
        torch.testing.assert_close(given, expected, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_evaluate_repeats_the_test_of_training(run, checkpoint, compose_config):
    metrics = evaluate.run(compose_config("evaluate", f"checkpoint={checkpoint}", "trainer=cpu"))
    trained = json.loads((run / "metrics.json").read_text())
    assert metrics["test/top1"] == trained["test/top1"]
    written = json.loads((run / "evaluation_test.json").read_text())
    assert written["test/loss"] == pytest.approx(trained["test/loss"])
    raw = evaluate.run(compose_config("evaluate", f"checkpoint={checkpoint}", "trainer=cpu", "weights=model"))
    assert raw["test/loss"] != pytest.approx(trained["test/loss"])
    assert [row["class"] for row in written["test/per_class"]] == [str(digit) for digit in range(10)]
    assert sum(row["images"] for row in written["test/per_class"]) == written["test/images"] == 359
    assert written["evaluated"] == {"checkpoint": str(checkpoint), "weights": "auto", "split": "test", "data": {}}
    other = run.parent / "other.json"
    words = ("trainer=cpu", "data.crop_pct=0.5", f"output={other}")
    evaluate.run(compose_config("evaluate", f"checkpoint={checkpoint}", *words))
    assert json.loads(other.read_text())["evaluated"]["data"] == {"crop_pct": 0.5}


def test_evaluate_measures_other_data_of_the_same_classes(checkpoint, compose_config, tmp_path):
    data = load_digits()
    for split, indices in (("train", range(40)), ("val", range(40, 100))):
        for i in indices:
            folder = tmp_path / "other" / split / str(data.target[i])
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray((data.images[i] * 255 / 16).astype(np.uint8)).save(folder / f"{i}.png")
    output = tmp_path / "metrics.json"
    overrides = (
        "data.source=folder",
        f"data.root={tmp_path / 'other'}",
        "split=val",
        f"output={output}",
        "trainer=cpu",
    )
    metrics = evaluate.run(compose_config("evaluate", f"checkpoint={checkpoint}", *overrides))
    assert metrics.keys() == {"val/loss", "val/top1", "val/top5", "val/f1", "val/balanced_accuracy"}
    assert metrics["val/top1"] > 0.3
    shutil.rmtree(tmp_path / "other" / "train")
    shutil.rmtree(tmp_path / "other" / "val" / "3")
    evaluate.run(compose_config("evaluate", f"checkpoint={checkpoint}", *overrides))
    third = json.loads(output.read_text())["val/per_class"][3]
    assert (third["class"], third["recall"], third["images"]) == ("3", None, 0)
    turned = f"data.class_map={{{','.join(f'{digit}: {9 - digit}' for digit in range(10))}}}"
    with pytest.raises(ValueError, match="class_map"):
        evaluate.run(compose_config("evaluate", f"checkpoint={checkpoint}", *overrides, turned))


@pytest.mark.slow
@pytest.mark.parametrize("source", ["folder", "csv"])
def test_the_test_of_other_data_is_their_test_split(source, checkpoint, compose_config, tmp_path):
    data, root = load_digits(), tmp_path / "other"
    for split, count in (("train", 20), ("val", 12), ("test", 16)):
        rows = ["file_name,label"]
        for i in range(count):
            name = f"{split}/{data.target[i]}/{i}.png"
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((data.images[i] * 255 / 16).astype(np.uint8)).save(root / name)
            rows.append(f"{name},{data.target[i]}")
        (root / f"{split}.csv").write_text("\n".join(rows))
    output = tmp_path / "metrics.json"
    known = (f"checkpoint={checkpoint}", f"data.source={source}", "trainer=cpu", f"output={output}")
    for words, measured in (((), 16), (("data.test_split=val",), 12)):
        evaluate.run(compose_config("evaluate", *known, f"data.root={root}", *words))
        assert json.loads(output.read_text())["test/images"] == measured


def test_predict_lists_every_picture_of_a_folder(checkpoint, pictures, compose_config, tmp_path):
    output = tmp_path / "predictions.csv"
    config = compose_config(
        "predict", f"checkpoint={checkpoint}", f"input={pictures}", f"output={output}", "top_k=3", "batch_size=2"
    )
    assert predict.run(config) == {"classified": 5, "unreadable": 1}
    rows = list(csv.DictReader(output.open()))
    assert [row["error"].partition(": ")[0] for row in rows] == [""] * 5 + ["unreadable"]
    assert rows[5]["path"].endswith("broken.png")
    guesses = [row["class_1"] for row in rows[:5]]
    shares = [float(rows[0][f"probability_{rank}"]) for rank in (1, 2, 3)]
    assert sum(guess == str(i) for i, guess in enumerate(guesses)) >= 2
    assert shares == sorted(shares, reverse=True)
    assert len(shares) == 3
