"""Classes have the same numbers in folders, archives and tables, or those of a trained model."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_data import image_data
from PIL import Image

ORDERS = (["-10", "-2", "-1", "0", "01", "1", "10"], ["ant", "class2", "class10", "Zebra"], ["0", "-1", "-2", "none"])
SOURCES = ("folder", "csv", "labels")
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
    return {"folder": images, "csv": root / "table.csv", "labels": root / "table.csv"}


def open_data(kind: str, root: Path) -> Any:
    source = "csv" if kind in ("csv", "labels") else "folder"
    return image_data(
        source=source, root=str(root), img_size=8, val_fraction=0.25, name="x", multi_label=kind == "labels"
    )


def shades(source: Any) -> Iterable[tuple[int, str]]:
    """The place of each image's brightness, and the name of its class."""
    for index, target in enumerate(source.targets()):
        number = int(target) if np.ndim(target) == 0 else int(np.argmax(target))
        yield int(np.asarray(source.read(index)[0]).max()) // 20, source.class_names[number]


@pytest.mark.parametrize("names", ORDERS, ids=lambda names: names[0])
def test_every_source_gives_classes_the_same_numbers(names, tmp_path):
    roots = write(tmp_path, names[::-1])
    for kind in SOURCES:
        module = open_data(kind, roots[kind])
        module.setup()
        assert module.info.class_names == names, kind
        found = list(shades(module.splits["train"].source))
        assert len(found) == IMAGES * len(names)
        assert all(names[::-1][shade] == name for shade, name in found), kind


def test_a_model_keeps_the_numbers_that_it_was_trained_with(tmp_path):
    names, trained = ["-1", "0", "1"], ["0", "1", "-1"]
    roots = write(tmp_path, names)
    for kind in SOURCES:
        module = open_data(kind, roots[kind])
        module.setup_evaluation("val", trained, foreign=True)
        assert module.info.class_names == trained, kind
        source = module.splits["val"].source
        found = list(zip(source.targets(), shades(source), strict=True))
        numbers = [int(target) if np.ndim(target) == 0 else int(np.argmax(target)) for target, _ in found]
        assert [trained[number] for number in numbers] == [names[shade] for _, (shade, _) in found], kind
