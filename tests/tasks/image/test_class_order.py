"""Classes have the same numbers in folders, archives, tables and shards, or those of a trained model."""

from __future__ import annotations

import csv
import json
import tarfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_data import image_data
from PIL import Image

from longseq.tasks import evaluate, train
from longseq.tasks.image import folder as folders
from longseq.tasks.image import table as tables
from longseq.tasks.image.module import ImageClassifier

ORDERS = (["-10", "-2", "-1", "0", "01", "1", "10"], ["ant", "class2", "class10", "Zebra"], ["0", "-1", "-2", "none"])
SOURCES = ("folder", "tar", "tars", "csv", "labels", "shards")
IMAGES = 4


def write(root: Path, names: Sequence[str]) -> dict[str, Path]:
    """The same images, each class of another brightness, as every source has them."""
    images, rows = root / "images", []
    for shade, name in enumerate(names):
        (images / name).mkdir(parents=True)
        for index in range(IMAGES):
            path = images / name / f"{index}.png"
            Image.fromarray(np.full((8, 8), 20 * shade + index, np.uint8)).save(path)
            rows.append((str(path.relative_to(root)), name))
    with (root / "table.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("file_name", "label"), *reversed(rows)])
    (root / "tars").mkdir()
    for kind, folder in (("images.tar", images), *((f"tars/{name}.tar", images / name) for name in names)):
        with tarfile.open(root / kind, "w") as archive:
            archive.add(folder, arcname=".")
    paths = {"folder": images, "tar": root / "images.tar", "tars": root / "tars", "csv": root / "table.csv"}
    return {**paths, "labels": root / "table.csv"}


def pack(root: Path, command: Callable[..., Any]) -> Path:
    done = command(root, "prepare", "task=image", "input=images", "output=shards", "format=keep")
    assert done.returncode == 0, done.stderr
    return root / "shards"


def open_data(kind: str, root: Path) -> Any:
    source = kind if kind in ("shards", "csv") else "csv" if kind == "labels" else "folder"
    return image_data(
        source=source, root=str(root), img_size=8, val_fraction=0.25, name="x", multi_label=kind == "labels"
    )


def shades(source: Any) -> Iterable[tuple[int, str]]:
    """The place of each image's brightness, and the name of its class."""
    for index, target in enumerate(source.targets()):
        number = int(target) if np.ndim(target) == 0 else int(np.argmax(target))
        yield int(np.asarray(source.read(index)[0]).max()) // 20, source.class_names[number]


@pytest.mark.parametrize("names", ORDERS, ids=lambda names: names[0])
def test_every_source_gives_classes_the_same_numbers(names, tmp_path, command_here):
    roots = write(tmp_path, names[::-1])
    roots["shards"] = pack(tmp_path, command_here)
    for kind in SOURCES:
        module = open_data(kind, roots[kind])
        module.setup()
        assert module.info.class_names == names, kind
        found = list(shades(module.splits.train.source))
        assert len(found) == IMAGES * len(names)
        assert all(names[::-1][shade] == name for shade, name in found), kind


def test_labels_of_more_digits_than_a_number_holds_are_classes_of_a_table(tmp_path, caplog):
    names = ["2", "1" * 400, "1" * 4999 + "1", "1" * 4999 + "2"]
    write(tmp_path, ["a", "b"])
    files = [f"images/{one}/{index}.png" for one in "ab" for index in range(IMAGES)]
    rows = [(path, names[::-1][number % 4]) for number, path in enumerate(files)]
    with (tmp_path / "table.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("file_name", "label"), *rows])
    module = open_data("csv", tmp_path / "table.csv")
    module.setup()
    assert module.info.class_names == names
    assert "alike" not in caplog.text


def test_a_model_keeps_the_numbers_that_it_was_trained_with(tmp_path, command_here):
    """Also where the measured images are a part of the training images, which are numbered anew."""
    names, trained = ["-1", "0", "1"], ["0", "1", "-1"]
    roots = write(tmp_path, names)
    roots["shards"] = pack(tmp_path, command_here)
    for kind in SOURCES:
        for foreign in (False, True):
            module = open_data(kind, roots[kind])
            module.setup_evaluation("val", trained, foreign=foreign)
            assert module.info.class_names == trained, kind
            source = module.splits.validation.source
            found = list(zip(source.targets(), shades(source), strict=True))
            numbers = [int(target) if np.ndim(target) == 0 else int(np.argmax(target)) for target, _ in found]
            assert [trained[number] for number in numbers] == [names[shade] for _, (shade, _) in found], kind


@pytest.mark.slow
@pytest.mark.parametrize("source", ["folder", "csv"])
def test_a_run_from_before_another_order_of_classes_goes_on_with_its_own(source, tiny, tmp_path, compose_config):
    """Folders once had 0, 1, -1, and tables the order of the alphabet."""
    names = ["-1", "0", "1"] if source == "folder" else ["Zebra", "ant", "class10", "class2"]
    before = ["0", "1", "-1"] if source == "folder" else names
    root = write(tmp_path, names)[source]
    words = ("data=image_folder", f"data.source={source}", f"data.root={root}", "data.img_size=8", "data.num_workers=0")
    words += ("recipe=vim", "model.patch_size=4", "recipe.batch_size=4", "recipe.ema=null", "recipe.augment.repeats=1")
    words += (
        "recipe.augment.mixing={mixup: 0, cutmix: 0}",
        "logger=none",
        "callbacks.worst=null",
        "callbacks.samples=null",
    )
    step = ImageClassifier.training_step

    def fail(self: ImageClassifier, *batch: Any) -> Any:
        if self.current_epoch == 1:
            raise RuntimeError("the machine breaks down")
        return step(self, *batch)

    with pytest.MonkeyPatch.context() as patch:
        for module in (folders, tables):
            patch.setattr(module, "sort_classes", lambda found, order=None: before)
        train.run(tiny(*words, f"output={tmp_path / 'whole'}"))
        patch.setattr(ImageClassifier, "training_step", fail)
        with pytest.raises(RuntimeError, match="breaks down"):
            train.run(tiny(*words))
    train.run(tiny(*words, "resume=true"))
    whole, found = (json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("whole", "run"))
    assert found["test/loss"] == whole["test/loss"]
    assert [row["class"] for row in _rows(tmp_path / "run/classes_test.csv")] == before
    checkpoint = tmp_path / "whole/checkpoints/best.ckpt"
    evaluate.run(compose_config("evaluate", f"checkpoint={checkpoint}", f"output={tmp_path / 'measured.json'}"))
    measured = json.loads((tmp_path / "measured.json").read_text())
    assert measured["test/loss"] == pytest.approx(whole["test/loss"], rel=1e-6)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
