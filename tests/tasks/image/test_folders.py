"""Class folders: which folders are splits, and what is never pooled into one set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from image_data import open_folder
from PIL import Image


def draw(root: Path, *names: str) -> Path:
    """Two images in each of these folders below `root`, each image of its own."""
    for number, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for index in range(2):
            Image.fromarray(np.full((8, 8, 3), 10 * number + index, np.uint8)).save(root / name / f"{index}.png")
    return root


@pytest.mark.parametrize(
    "names",
    [
        ("training/cat", "training/dog", "testing/cat", "testing/dog"),
        ("train2017/cat", "train2017/dog", "val2017/cat", "val2017/dog"),
        ("images/cat", "images/dog", "masks/cat", "masks/dog"),
        ("data/train/cat", "data/train/dog", "data/val/cat", "data/val/dog"),
        ("cat", "dog", "testing/cat"),
        ("cat", "dog", "dog/puppies"),
    ],
)
def test_classes_in_several_folders_are_not_one_set(names, tmp_path):
    root = draw(tmp_path / "root", *names)
    with pytest.raises(ValueError, match="has classes in several folders"):
        open_folder(root, val_fraction=0.5)


def test_splits_of_other_names_are_named(tmp_path):
    root = draw(tmp_path, "training/cat", "training/dog", "testing/cat", "testing/dog")
    module = open_folder(root, train_split="training", val_split="testing")
    assert module.info.sizes == {"train": 4, "val": 4, "test": 4}
    for key in ("train_split", "val_split", "test_split"):
        with pytest.raises(FileNotFoundError, match=f"data.{key}=absent"):
            open_folder(root, **{"train_split": "training", "val_split": "testing", key: "absent"})


def test_held_out_images_alone_are_not_trained_on(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data\.train_split=train"):
        open_folder(draw(tmp_path, "val/cat", "val/dog"))


def test_the_training_is_not_measured(tmp_path):
    root = draw(tmp_path, "train/cat", "train/dog")
    (root / "val").symlink_to(root / "train")
    for options in ({}, {"val_split": "train"}):
        with pytest.raises(ValueError, match="names the training images"):
            open_folder(root, **options)


@pytest.mark.parametrize("held_out", [".", "images"])
def test_images_outside_class_folders_have_no_label(held_out, tmp_path):
    root = draw(tmp_path, "train/cat", "train/dog", f"val/{held_out}")
    with pytest.raises(ValueError, match=r"in no class folder|the training has not: 'images'"):
        open_folder(root)


def test_the_innermost_folder_of_a_split_names_the_class(tmp_path):
    root = draw(tmp_path, "train/pets/cat", "train/pets/dog", "train/wild/fox", "val/cat", "val/fox", "train/.cache")
    module = open_folder(root)
    assert module.info.class_names == ["cat", "dog", "fox"]
    assert module.splits["val"].source.targets().tolist() == [0, 0, 2, 2]


def test_a_class_map_picks_and_orders_classes(tmp_path):
    root = draw(tmp_path / "images", "train/cat", "train/dog", "train/fox", "val/cat", "val/fox")
    (tmp_path / "classes.txt").write_text("fox\ncat\n", encoding="utf-8")
    for class_map in ({"fox": 0, "cat": 1}, str(tmp_path / "classes.txt")):
        module = open_folder(root, class_map=class_map)
        assert module.info.class_names == ["fox", "cat"]
        assert module.splits["train"].source.targets().tolist() == [1, 1, 0, 0]


def test_one_class_is_nothing_to_tell_apart(tmp_path):
    with pytest.raises(ValueError, match="only one class: cat"):
        open_folder(draw(tmp_path, "cat"), val_fraction=0.5)
