"""Images in files: class folders and tables, and where each of them keeps its splits."""

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, Protocol

import numpy as np
from PIL import Image
from timm.data.readers.class_map import load_class_map
from timm.utils.misc import natural_key

from longseq.tasks.data.labels import LABEL_COLUMN, name_some, sort_names, targets_of
from longseq.tasks.data.module import same_root
from longseq.tasks.image.config import ImageDataKeys
from longseq.tasks.image.decoding import decode, is_image
from longseq.tasks.text.sources import Columns, Document, Malformed, Part, files_below, read_part

ClassMap = str | Mapping[str, int] | None

# The names of a split's folder or table.
SPLIT_NAMES = {"train": ("train",), "validation": ("validation", "val"), "test": ("test",)}
# The keys of `data` that name the splits.
SPLIT_KEYS = {"train": "train_split", "validation": "val_split", "test": "test_split"}


class Source(Protocol):
    """Images with random access."""

    class_names: list[str]

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[Image.Image, Any]:
        """The decoded image and its class, or [C] of 0 and 1 for several labels.

        Raises one of UNREADABLE, or LabelError for a wrong label.
        """

    def path(self, index: int) -> str:
        """The name of the image in messages and tables."""

    def targets(self) -> np.ndarray | None:
        """All classes [N], or [N, C] of 0 and 1 for several labels; None if unknown before the images are read."""


class Layout(ABC):
    """Finds the splits of a data set by name, and opens each of them.

    Attributes:
        root: `data.root`, expanded.
        names: the name of each split (train, validation, test); None if the user sets it to null.
        whole: the part to read if the data set has no splits; None if it must have some.
    """

    def __init__(self, keys: ImageDataKeys) -> None:
        self.keys = keys
        self.root = "" if keys.root is None else os.path.expanduser(keys.root)
        self.names: dict[str, str | None] = {kind: getattr(keys, key) for kind, key in SPLIT_KEYS.items()}
        self.whole: str | None = None

    @abstractmethod
    def find(self, kind: str, name: str) -> str | None:
        """The part (a path or a name) of a split; None if the data set does not have it."""

    @abstractmethod
    def open(self, part: str, class_names: Sequence[str] | None = None) -> Source:
        """The images of a part. Classes are numbered as in `class_names`, by default in their own order."""

    def open_all(self) -> dict[str, Source]:
        """All splits that the data set has: `train`, and maybe `validation` and `test`.

        FileNotFoundError for a split that the user named and that is missing. ValueError if validation or test images
        are the training images, or number the classes differently.
        """
        parts = {kind: self.find(kind, name) for kind, name in self.names.items() if name is not None}
        has_splits = self.whole is None or any(parts.values())
        for kind, part in parts.items():
            name, key = self.names[kind], SPLIT_KEYS[kind]
            if part is None and (name != kind or (kind == "train" and has_splits)):
                raise FileNotFoundError(f"data.{key}={name}: {self.root} holds no {name}")
            if part and kind != "train" and parts["train"] and same_root(part, parts["train"]):
                raise ValueError(f"data.{key}={name} names the training images")
        train = self.open(parts.pop("train") or self.whole or "")
        opened = {part: self.open(part, train.class_names) for part in set(parts.values()) if part is not None}
        for kind, part in parts.items():
            if part is not None:
                require_same_numbers(opened[part].class_names, train.class_names, self.keys.source, kind)
        return {"train": train, **{kind: opened[part] for kind, part in parts.items() if part is not None}}

    def open_held_out(self, kind: str, class_names: Sequence[str], *, foreign: bool) -> Source | None:
        """The images of `kind` (validation or test); None if they are held out from the training split.

        Without a test split, validation is the test. `foreign` reads unnamed test splits and data without splits.
        """
        for one in (kind, "validation") if kind == "test" else (kind,):
            name = self.names[one] or (one if foreign else None)
            if name is not None and (part := self.find(one, name)) is not None:
                return self.open(part, class_names)
        if not foreign or self.whole is None:
            return None
        if self.find("train", self.names["train"] or "train") not in (None, self.whole):
            raise ValueError(f"{self.root} has no {kind} images")
        return self.open(self.whole, class_names)


def require_same_numbers(held_out: Sequence[str], train: Sequence[str], label: str, kind: str) -> None:
    """ValueError if a named class has another number in held-out images than in training; the last may be missing."""
    unnamed = all(list(names) == [str(number) for number in range(len(names))] for names in (held_out, train))
    if train and not unnamed and list(held_out) != list(train[: len(held_out)]):
        raise ValueError(f"{label}: {kind} has the classes {name_some(held_out)}, and training {name_some(train)}")


class FileSource:
    """Images in files. Targets are classes `[N]`, or for several labels `[N, C]` of 0 and 1."""

    def __init__(self, class_names: Sequence[str], targets: np.ndarray, paths: Sequence[str]) -> None:
        self.class_names, self._targets, self.paths = list(class_names), targets, paths

    def __len__(self) -> int:
        return len(self._targets)

    def read_file(self, index: int) -> tuple[bytes, Any]:
        """The contents of an image's file, and its class or its labels."""
        target = self._targets[index]
        return Path(self.paths[index]).read_bytes(), target if target.ndim else int(target)

    def read(self, index: int) -> tuple[Image.Image, Any]:
        data, target = self.read_file(index)
        return decode(io.BytesIO(data)), target

    def path(self, index: int) -> str:
        return self.paths[index]

    def targets(self) -> np.ndarray:
        return self._targets


class FolderLayout(Layout):
    """Class folders: in folders of splits, or directly in the root."""

    def __init__(self, keys: ImageDataKeys) -> None:
        super().__init__(keys)
        self.whole = self.root

    def find(self, kind: str, name: str) -> str | None:
        """The folder of a split below the root: `name`, or one of `SPLIT_NAMES` if it is the kind."""
        names = SPLIT_NAMES[kind] if name == kind else (name,)
        return next(filter(os.path.exists, (os.path.join(self.root, one) for one in names)), None)

    def open(self, part: str, class_names: Sequence[str] | None = None) -> Source:
        """The images of a folder of class folders.

        Classes are numbered by `data.class_map`, which also selects them; else as in `class_names`; else whole numbers
        by value, and other names in natural order. ValueError for images outside class folders, for classes that are
        not in `class_names`, without images, and if classes are in several folders of the root: these may be splits.
        """
        images = sorted(filter(is_image, files_below(Path(part))), key=natural_order)
        if not images:
            raise ValueError(f"{part} holds no images in class folders")
        folders = [PurePath(os.path.relpath(image, part)).parent.parts for image in images]
        if not all(folders):
            raise ValueError(f"{images[folders.index(())]} is in no class folder")
        above = sorted({os.sep.join(parts[:-1]) for parts in folders})
        if part == self.root and len(above) > 1:
            several = name_some([name or "." for name in above])
            raise ValueError(f"{part} has classes in several folders ({several}): name the splits, as data.train_split")
        labels = [parts[-1] for parts in folders]
        numbers = class_numbers(self.keys.class_map, part)
        if numbers is None:
            if class_names is not None and (extra := sorted(set(labels) - set(class_names))):
                raise ValueError(f"{part} has class folders that the training has not: {name_some(extra)}")
            names = sort_names(labels, natural_order) if class_names is None else class_names
            numbers = {name: number for number, name in enumerate(names)}
        chosen = [(numbers[label], image) for label, image in zip(labels, images, strict=True) if label in numbers]
        if not chosen:
            raise ValueError(f"{part} has none of the classes {name_some(list(numbers))}")
        targets, paths = zip(*chosen, strict=True)
        return FileSource(names_by_number(numbers), np.array(targets, dtype=np.int64), paths)


def natural_order(name: str) -> tuple[list[str | int], str]:
    """A sort key for names: numbers by value, without regard to case."""
    return natural_key(name), name


def class_numbers(class_map: ClassMap, root: str = "") -> dict[str, int] | None:
    """The class numbers of `data.class_map`, a mapping or a file; a .txt file names one class per line."""
    if class_map is None:
        return None
    numbers = load_class_map(class_map if isinstance(class_map, str) else dict(class_map), root)
    return {str(name): number for name, number in numbers.items()}


def names_by_number(class_to_idx: Mapping[Any, int]) -> list[str]:
    """Class names by index; an index without a name gets its number."""
    names = [str(index) for index in range(max(class_to_idx.values(), default=-1) + 1)]
    for name, index in class_to_idx.items():
        names[index] = str(name)
    return names


class TableLayout(Layout):
    """A csv file of training images; or a folder with train.csv and maybe val.csv and test.csv."""

    def __init__(self, keys: ImageDataKeys) -> None:
        super().__init__(keys)
        self.whole = self.root if Path(self.root).is_file() else None

    def find(self, kind: str, name: str) -> str | None:
        if self.whole is not None:
            return self.whole if kind == "train" else None
        usual = SPLIT_NAMES[kind] if name == kind else (name.removesuffix(".csv"),)
        return next((str(path) for one in usual if (path := Path(self.root, f"{one}.csv")).is_file()), None)

    def open(self, part: str, class_names: Sequence[str] | None = None) -> Source:
        """The images of a table. ValueError for rows without a label, and for files listed twice."""
        given, several = self.keys.label_column or LABEL_COLUMN, self.keys.multi_label
        columns = Columns(self.keys.file_column, None, given, several, self.keys.label_delimiter)
        rows: dict[str, Document] = {}
        for row in read_part(Part("csv", part), columns):
            if isinstance(row, Malformed):
                raise ValueError(row.describe())
            image = str(Path(part).parent / row.text)  # "./a.png" and "a.png" are one file
            if image in rows:
                raise ValueError(f"{row.place.describe()}: {row.text!r} is in {rows[image].place.where} already")
            rows[image] = row
        if not rows:
            raise ValueError(f"{part} lists no images")
        if class_names is None:
            names = (name for row in rows.values() for name in row.labels)
            class_names = sort_names(names, natural_order) if isinstance(given, str) else list(given)
        known = set(class_names)
        for row in rows.values():
            if unknown := sorted(set(row.labels) - known):
                classes = name_some(class_names)
                raise ValueError(f"{row.place.describe()}: the label {unknown[0]!r} is not among {classes}")
        sets = [row.labels for row in rows.values()]
        targets = targets_of(np.arange(len(rows)), sets, class_names, multi_label=several)
        return FileSource(class_names, targets, list(rows))
