"""Data sets of torchvision, which `data.source=torch/NAME` reads, and what the names of their splits mean."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from timm.data import create_dataset
from torchvision.datasets import ImageFolder

from longseq.tasks.data.labels import number_of_class
from longseq.tasks.image.decoding import decode, in_eight_bits, is_hidden, is_image, upright
from longseq.tasks.image.folder import find_images, report_passed_over
from longseq.tasks.image.split_folders import SPLIT_KEYS, find_split, refuse_pooled, require_named

# timm's words for a split.
_WORDS = {"train": ("train", "training"), "validation": ("val", "valid", "validation", "eval", "evaluation")}
# Sets of two parts: timm takes every name that is none of training for the test images.
_TWO_PARTS = ("cifar10", "cifar100", "fashion_mnist", "kmnist", "mnist", "qmnist")
# The names of other sets that timm takes its words for: those of training, and those of validation.
_MEANT = {
    "imagenet": ("train", "val"),
    "places365": ("train-standard", "val"),
    "inaturalist": ("2021_train", "2021_valid"),
    "inat": ("2021_train", "2021_valid"),
}


class TorchvisionSource:
    """A data set of torchvision."""

    def __init__(self, dataset: Any, label: str) -> None:
        self.dataset, self.label = dataset, label
        targets = getattr(dataset, "targets", None)
        self._targets = None if targets is None else np.asarray(targets, dtype=np.int64)
        names = getattr(dataset, "classes", None)
        if names is None:
            names = [] if self._targets is None else range(int(self._targets.max()) + 1)
        self.class_names = [name[0] if isinstance(name, tuple) else str(name) for name in names]

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, index: int) -> tuple[Image.Image, int]:
        image, target = self.dataset[index]
        return in_eight_bits(upright(image)), number_of_class(target, self.label)

    def path(self, index: int) -> str:
        samples = getattr(self.dataset, "samples", None)
        return str(samples[index][0]) if samples else f"{self.label}#{index}"

    def targets(self) -> np.ndarray | None:
        return self._targets


def is_class_folders(source: str) -> bool:
    """True for torchvision's ImageFolder, whose splits are folders below `data.root`."""
    return source.lower() in ("torch/image_folder", "torch/folder")


def open_torchvision(source: str, root: str | None, name: str, download: bool) -> TorchvisionSource:
    """The split `name` of a data set, of class folders the folder `name`, with the decoding of all sources here."""
    if is_class_folders(source):
        return TorchvisionSource(_open_folder(name), source)
    dataset: Any = create_dataset(source, root=root, split=name, download=download)
    if hasattr(dataset, "loader"):
        dataset.loader = decode
    return TorchvisionSource(dataset, source)


def _open_folder(path: str) -> ImageFolder:
    dataset = ImageFolder(path, loader=decode, is_valid_file=lambda file: is_image(Path(file).name))
    if hidden := [one for one in dataset.classes if is_hidden(one)]:
        raise ValueError(f"class {hidden[0]} is a hidden folder: remove it, or give data.source=folder")
    report_passed_over(find_images(path).passed_over, path)
    return dataset


def find_folder(root: str, kind: str, name: str | None) -> str | None:
    """The folder of a split below `root`, by its `name`, one of timm's words for it, or a usual one; None: none."""
    if name is None:
        return None
    for one in (name, *next((words for words in _WORDS.values() if name in words), ())):
        if os.path.isdir(path := os.path.join(root, one)):
            return path
    usual = find_split(root, kind) if name == kind else None
    return usual if usual is not None and os.path.isdir(usual) else None


def find_folders(root: str, names: Mapping[str, str | None]) -> dict[str, str | None]:
    """The folders of the splits below `root`; None where there is none: without a test, the validation is tested on.

    Without a name of the validation, a `root` of class folders alone is the training. ValueError, in one line, for
    other folders that are missing: timm would take all images in their place.
    """
    names = {**names, "train": names["train"] or "train"}
    found = {kind: find_folder(root, kind, name) for kind, name in names.items()}
    require_named(root, names, found)
    if found["train"] is None and any(found.values()):
        raise ValueError(f"{root} holds no training images: add {root}/train, or give data.train_split=NAME")
    if found["validation"] is None and names["validation"] is not None:
        raise ValueError(
            f"{root} holds no validation images: add {root}/val, or have a part of the training images set apart by "
            "data.source=folder (or data.val_split=null)"
        )
    if found["train"] is None:
        folders = {os.path.dirname(path) for path in find_images(root).images}
        refuse_pooled(root, [os.path.relpath(folder, root) for folder in folders])
    return {**found, "train": found["train"] or root}


def held_out_folder(root: str, kind: str, names: Mapping[str, str | None], *, whole: bool) -> str | None:
    """The folder of the split `kind` (validation or test) below `root`; None if it is a part of the training images.

    Without a test folder, the validation images are the test images. With `whole`, the images are not those of the
    training, and a `root` without such folders is the split. ValueError, in one line, for a missing folder.
    """
    found = find_folder(root, kind, names[kind])
    if not whole:
        require_named(root, {kind: names[kind]}, {kind: found})
    found = found or find_folder(root, "validation", names["validation"])
    if found is not None or not whole or names["validation"] is None:
        return found
    if training := find_folder(root, "train", names["train"] or "train"):
        raise ValueError(
            f"{root} holds training images only: give data.root={training} to measure all of them, or add a {kind} "
            "split"
        )
    return root


def part_of(source: str, kind: str, name: str) -> str:
    """What the `name` of a split means: the part train or test of a set of two parts, the name itself of other sets.

    ValueError, in one line, for a name that is no word for a part.
    """
    if source.lower().rpartition("/")[2] not in _TWO_PARTS:
        return name
    if name in _WORDS["train"]:
        return "train"
    others = (*_WORDS["validation"], "test")
    if name not in others:
        raise ValueError(
            f"data.{SPLIT_KEYS[kind]}={name}: data.source={source} has training images, called "
            f"{' or '.join(_WORDS['train'])}, and test images, called {', '.join(others)}: give one of these names"
        )
    return "test"


def parts_of(source: str, names: Mapping[str, str | None]) -> dict[str, str]:
    """The parts of the splits (see `part_of`), without those that have no name.

    ValueError, in one line, if a part would be trained on and measured.
    """
    parts = {kind: part_of(source, kind, name) for kind, name in names.items() if name is not None}
    for kind, part in parts.items():
        if kind != "train" and _meant(source, part) == _meant(source, parts["train"]):
            raise ValueError(
                f"data.train_split={names['train']} and data.{SPLIT_KEYS[kind]}={names[kind]} are the same images of "
                f"data.source={source}: give another name, or data.{SPLIT_KEYS[kind]}=null"
            )
    return parts


def _meant(source: str, part: str) -> str:
    """The name by which torchvision knows a part; that of INaturalist may begin with the level of its classes."""
    name = part.rpartition("/")[2]
    meant = _MEANT.get(source.lower().rpartition("/")[2], ())
    return next((one for one, words in zip(meant, _WORDS.values(), strict=False) if name in words), name)
