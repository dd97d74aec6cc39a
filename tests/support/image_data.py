"""Data modules of images, files of the handwritten digits, and tables."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from longseq.tasks.image.config import DataInfo, ImageDataKeys
from longseq.tasks.image.data import ImageDataModule


def image_data(*, batch_size: int = 4, seed: int = 0, augment: Any = None, **keys: Any) -> ImageDataModule:
    """The data module of these keys of `data`; it opens nothing yet."""
    keys = {"num_workers": 0} | keys
    return ImageDataModule(ImageDataKeys(**keys), batch_size=batch_size, seed=seed, augment=augment)


def open_folder(root: Path, source: str = "folder", **keys: Any) -> ImageDataModule:
    """The data module of a folder of images of 8 x 8 pixels, opened."""
    module = image_data(name="test", source=source, root=str(root), img_size=8, **keys)
    module.setup()
    return module


def image_info(
    img_size: int = 32, in_chans: int = 3, crop_pct: float = 1.0, interpolation: str = "bicubic"
) -> DataInfo:
    """The info of data of two classes."""
    return DataInfo(
        class_names=["a", "b"],
        num_classes=2,
        img_size=img_size,
        in_chans=in_chans,
        mean=[0.5, 0.4, 0.3][:in_chans],
        std=[0.2, 0.3, 0.25][:in_chans],
        interpolation=interpolation,
        crop_pct=crop_pct,
        sizes={"train": 10, "val": None, "test": 3},
    )


def write_digits(folder: Path, name: str, numbers: Iterable[int]) -> list[Path]:
    """Write the handwritten digits of these numbers to folder/NAME<NUMBER>.png; the files."""
    images = load_digits().images
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}{i}.png" for i in numbers]
    for path, i in zip(paths, numbers, strict=True):
        Image.fromarray(np.round(images[i] * 255 / 16).astype(np.uint8)).save(path)
    return paths


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a csv file by the names of its columns."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
