"""Class folders of images, and tar files of them: train, val or validation, and test, or classes alone."""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from timm.data.readers.class_map import load_class_map

from longseq.tasks.data.labels import name_some, sort_names
from longseq.tasks.data.module import PassedOver
from longseq.tasks.image.decoding import decode, is_hidden, is_image

ClassMap = str | Mapping[str, int] | None

# The folders, tar files and tables of a split, whatever their capitals.
SPLIT_NAMES = {"train": ("train",), "validation": ("validation", "val"), "test": ("test",)}

# The keys of `data` that name the splits.
SPLIT_KEYS = {"train": "train_split", "validation": "val_split", "test": "test_split"}


class Found(NamedTuple):
    """The image files below a folder, and the other files."""

    images: list[str]
    passed_over: list[PassedOver]


class _Item(NamedTuple):
    """An image: the folders that hold it, its path, and of one in a tar file its place: archive, offset, bytes."""

    folders: tuple[str, ...]
    path: str
    place: tuple[str, int, int] | None = None


def natural_order(name: str) -> tuple[list[str | Decimal], str]:
    """A key that sorts names as people do: numbers by their value, and capitals like small letters."""
    parts = re.split(r"(\d+)", name.lower())
    return [Decimal(part) if index % 2 else part for index, part in enumerate(parts)], name


def sort_classes(names: Iterable[str]) -> list[str]:
    """The names of classes in their order, for every source: whole numbers by value, others in natural order."""
    return sort_names(names, natural_order)


def find_images(root: str) -> Found:
    """Search a folder on all levels, also through symbolic links; hidden files and folders are passed over."""
    images: list[str] = []
    others: list[PassedOver] = []
    for folder, folders, files in os.walk(root, followlinks=True):
        others += [PassedOver(os.path.join(folder, name, ""), "hidden") for name in folders if is_hidden(name)]
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        for name in sorted(files):
            path = os.path.join(folder, name)
            if is_image(name):
                images.append(path)
            else:
                kind = "hidden" if is_hidden(name) else Path(name).suffix.lower() or "without an ending"
                others.append(PassedOver(path, kind))
    return Found(images, others)


class FileSource:
    """Images of class folders: files, or members of tar files. The innermost folder names the class."""

    def __init__(self, label: str, items: Sequence[_Item], class_to_idx: Mapping[str, int]) -> None:
        self.label, self.class_to_idx = label, dict(class_to_idx)
        self.class_names = names_by_number(self.class_to_idx)
        kept = [item for item in items if item.folders[-1] in self.class_to_idx]
        self.paths = [item.path for item in kept]
        self.has_files = all(item.place is None for item in kept)
        self._places = [item.place for item in kept]
        self._targets = np.array([self.class_to_idx[item.folders[-1]] for item in kept], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> tuple[Image.Image, int]:
        data, target = self.read_file(index)
        return decode(io.BytesIO(data)), target

    def read_file(self, index: int) -> tuple[bytes, int]:
        """The bytes of the image's file, and its class."""
        path, offset, size = self._places[index] or (self.paths[index], 0, -1)
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(size), int(self._targets[index])

    def path(self, index: int) -> str:
        return self.paths[index]

    def targets(self) -> np.ndarray:
        return self._targets


def open_classes(path: str, class_map: ClassMap = None, *, is_root: bool = False) -> FileSource:
    """The images of a folder of class folders, of a .tar of one, or of a folder of .tar files.

    Classes are numbered as `sort_classes` has them, or by `class_map`, which also picks them. `is_root` marks a folder
    without splits: its classes must lie side by side, or training and test images could become one set. ValueError for
    images outside class folders, and if there are none.
    """
    items = _find_items(path, is_root=is_root)
    numbers = class_numbers(class_map, path)
    if numbers is None:
        names = sort_classes(item.folders[-1] for item in items)
        numbers = {name: number for number, name in enumerate(names)}
    source = FileSource(path, items, numbers)
    if not len(source):
        raise ValueError(f"{path} has none of the classes {name_some(list(numbers))}")
    return source


def open_numbered(
    path: str, class_to_idx: Mapping[str, int], class_map: ClassMap = None, *, is_root: bool = False
) -> FileSource:
    """A folder with some or all of the classes of `class_to_idx`, numbered by it, or by `class_map`."""
    if class_map is not None:
        return open_classes(path, class_map, is_root=is_root)
    items = _find_items(path, is_root=is_root)
    if extra := sorted({item.folders[-1] for item in items} - set(class_to_idx)):
        raise ValueError(f"{path} has class folders that the training has not: {name_some(extra)}; see data.class_map")
    return FileSource(path, items, class_to_idx)


def _find_items(path: str, *, is_root: bool) -> list[_Item]:
    items = _find_files(path) if os.path.isdir(path) else []
    if not items:
        archives = [Path(path)] if os.path.isfile(path) else sorted(Path(path).glob("*.tar"))
        items = _find_members([archive for archive in archives if not is_hidden(archive.name)])
    if not items:
        raise ValueError(f"{path} holds no images in class folders")
    if outside := next((item.path for item in items if not item.folders), None):
        raise ValueError(f"{outside} is in no class folder")
    above = sorted({os.sep.join(item.folders[:-1]) for item in items})
    if is_root and len(above) > 1:
        raise ValueError(
            f"{path} has classes in several folders ({name_some([name or '.' for name in above])}), and none is called "
            "train, val, validation or test: name the splits by data.train_split, data.val_split and data.test_split"
        )
    return items


def _find_files(root: str) -> list[_Item]:
    images = sorted(find_images(root).images, key=natural_order)
    return [_Item(PurePosixPath(os.path.relpath(image, root)).parent.parts, image) for image in images]


def _find_members(archives: Sequence[Path]) -> list[_Item]:
    """The images in tar files; one outside folders is of the class that its archive is called."""
    found: dict[tuple[str, str], _Item] = {}
    for archive in archives:
        with tarfile.open(archive) as content:
            for member in content:
                path = PurePosixPath(os.path.normpath(member.name))
                if not member.isfile() or not is_image(path.name) or any(map(is_hidden, path.parts)):
                    continue
                folders = path.parent.parts or ((archive.stem,) if len(archives) > 1 else ())
                place = (str(archive), member.offset_data, member.size)
                # As tar does, take the last of several files of one name.
                found[member.name, archive.name] = _Item(folders, str(archive / path), place)
    return [found[key] for key in sorted(found, key=lambda key: (natural_order(key[0]), key[1]))]


def find_split(root: str, kind: str, name: str | None = None) -> str | None:
    """The folder or .tar of a split below `root`: `name`, or where that is None or the kind, one of `SPLIT_NAMES`."""
    present = {entry.lower(): entry for entry in sorted(os.listdir(root))} if os.path.isdir(root) else {}
    if name is not None and name != kind:
        named = (os.path.join(root, one) for one in (name, f"{name}.tar"))
        return next((path for path in named if os.path.exists(path)), None)
    for candidate in SPLIT_NAMES[kind]:
        for entry in (candidate, f"{candidate}.tar"):
            path = Path(root, present.get(entry, entry))
            # A class may be called so, too, but a split with capitals holds folders.
            if path.exists() and (path.name == entry or path.is_file() or any(map(Path.is_dir, path.iterdir()))):
                return str(path)
    return None


def find_splits(root: str, names: Mapping[str, str | None]) -> dict[str, str]:
    """The paths of the splits of a folder by kind: of `train`, and of `validation` and `test` where it has them.

    FileNotFoundError for a split that the user has named and that is not there; ValueError for held-out images that are
    the training images.
    """
    found = {kind: find_split(root, kind, name) for kind, name in names.items() if name is not None}
    for kind, path in found.items():
        if path is None and (names[kind] != kind or (kind == "train" and any(found.values()))):
            raise FileNotFoundError(f"data.{SPLIT_KEYS[kind]}={names[kind]}: {root} holds no {names[kind]}")
    paths = {kind: path for kind, path in found.items() if path is not None}
    refuse_trained(names, {kind: os.path.realpath(path) for kind, path in paths.items()})
    return paths


def refuse_trained(names: Mapping[str, str | None], parts: Mapping[str, str | None]) -> None:
    """Raise ValueError for a held-out split that is the training split; `parts` are what the names mean."""
    for kind in ("validation", "test"):
        if parts.get("train") is not None and parts.get(kind) == parts["train"]:
            raise ValueError(f"data.{SPLIT_KEYS[kind]}={names[kind]} names the training images")


def open_folders(
    root: str, names: Mapping[str, str | None], class_map: ClassMap = None
) -> tuple[FileSource, dict[str, FileSource]]:
    """The training images of a folder, and those of `validation` and `test` that it sets apart."""
    if not os.path.exists(root):
        raise FileNotFoundError(f"data.root={root} does not exist")
    paths = find_splits(root, names)
    train = open_classes(paths.get("train", root), class_map, is_root="train" not in paths)
    held_out = {
        kind: open_numbered(path, train.class_to_idx, class_map) for kind, path in paths.items() if kind != "train"
    }
    return train, held_out


def class_numbers(class_map: ClassMap, root: str = "") -> dict[str, int] | None:
    """The numbers of `data.class_map`, which may be a file: a .txt has one class a line, each of them once."""
    if class_map is None:
        return None
    if isinstance(class_map, str) and class_map.endswith(".txt"):
        path = Path(class_map) if os.path.exists(class_map) else Path(root, class_map)
        names = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
        if len(set(names)) < len(names):
            raise ValueError(f"{path} names a class twice")
        return {name: number for number, name in enumerate(names)}
    numbers = load_class_map(class_map if isinstance(class_map, str) else dict(class_map), root)
    return {str(name): number for name, number in numbers.items()}


def names_by_number(class_to_idx: Mapping[Any, int]) -> list[str]:
    """Class names by index; an index without a name gets its number."""
    names = [str(index) for index in range(max(class_to_idx.values(), default=-1) + 1)]
    for name, index in class_to_idx.items():
        names[index] = str(name)
    return names
