"""Sources of images: each gives decoded images by index, and has class names and paths."""

from __future__ import annotations

import io
import logging
import os
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import numpy as np
from PIL import Image
from timm.data import create_dataset
from timm.data.readers import create_reader
from timm.data.readers.class_map import load_class_map
from timm.data.readers.reader_image_in_tar import CACHE_FILENAME_SUFFIX
from torchvision import datasets as torchvision_datasets

from longseq.tasks.data.class_lists import require_one_list
from longseq.tasks.data.folders import class_name, is_unicode
from longseq.tasks.data.inputs import PassedOver, describe_passed_over
from longseq.tasks.data.labels import alike, name_some, number_of_class, rarest_labels
from longseq.tasks.data.unreadable import UNREADABLE, LabelError
from longseq.tasks.image.decoding import (
    decode,
    first_line,
    image_endings,
    is_hidden,
    is_image,
    open_regular,
)
from longseq.tasks.image.folder import (
    AS_TABLE,
    ClassFolders,
    Found,
    TarImages,
    classes_in_archives,
    find_archives,
    find_images,
    report_passed_over,
)
from longseq.tasks.image.shards import ShardSource, holds_shards, open_shards
from longseq.tasks.image.split_folders import (
    SPLIT_KEYS,
    SPLIT_NAMES,
    find_split,
    has_folders,
    is_compressed,
    is_of_images,
    refuse_compressed,
    require_named,
)
from longseq.tasks.image.torchvision_sets import (
    TorchvisionSource,
    find_folders,
    held_out_folder,
    is_class_folders,
    open_torchvision,
    part_of,
    parts_of,
)
from longseq.tasks.training.options import spell

_log = logging.getLogger(__name__)

# Of more files the sizes are not asked: a network's file system takes minutes for those of a million.
MOST_FILES = 20_000

_STREAMS = ("hfids", "wds", "tfds")
# The libraries of sources that a plain longseq does not bring.
_LIBRARIES = {"hfds": "datasets", "hfids": "datasets", "wds": "webdataset"}

ClassMap = str | Mapping[str, int] | None


class Source(Protocol):
    """Images with random access."""

    class_names: list[str]

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[Image.Image, Any]:
        """The decoded image and its class, or [C] of 0 and 1 for several labels.

        Raises one of UNREADABLE, or LabelError for a label that is wrong.
        """

    def path(self, index: int) -> str:
        """A name of the image for people."""

    def targets(self) -> np.ndarray | None:
        """All classes [N], or [N, C] of 0 and 1 for several labels; None if unknown without reading the images."""


@dataclass(frozen=True)
class Split:
    """The images of a source that are one of train, validation and test."""

    source: Source
    indices: np.ndarray  # [N] int64

    def __len__(self) -> int:
        return len(self.indices)

    @classmethod
    def whole(cls, source: Source) -> Split:
        return cls(source, np.arange(len(source)))

    def files(self) -> list[str] | None:
        """The files of the images; None for images in archives and in memory, and for more than MOST_FILES."""
        if len(self) > MOST_FILES or not getattr(self.source, "has_files", False):
            return None
        return [self.source.path(index) for index in self.indices]

    def checksum(self, *, sizes: bool = False) -> int | None:
        """The CRC-32 of the names and labels of image files, in any order; None for images of other kinds.

        Names are those in the file's own folder, for folders may be moved. With `sizes` those of the files count, too,
        unless they are more than MOST_FILES on a disk; archives and shards then have a checksum, as well.
        """
        source: Any = self.source
        known = getattr(source, "has_files", False) or (sizes and _knows_classes(source))
        targets = source.targets() if known else None
        if targets is None:
            return None
        names = np.asarray(source.class_names, dtype=object)
        lines = [
            f"{os.path.basename(source.path(index))}\t{names[np.flatnonzero(label) if label.ndim else label]}"
            for index, label in zip(self.indices, targets[self.indices], strict=True)
        ]
        if sizes and (len(self) <= MOST_FILES or not getattr(source, "has_files", False)):
            lines = [f"{line}\t{source.size(index)}" for line, index in zip(lines, self.indices, strict=True)]
        return zlib.crc32("\n".join(sorted(lines)).encode(errors="surrogateescape"))


@dataclass(frozen=True)
class Splits:
    """The three splits; `validation` and `test` may be the same images."""

    train: Split
    validation: Split
    test: Split


class ArraySource:
    """Decoded images of one size in memory: uint8 [N, H, W] or [N, H, W, 3]."""

    def __init__(self, images: np.ndarray, targets: np.ndarray, class_names: Sequence[str], label: str) -> None:
        self.images, self._targets = images, np.asarray(targets, dtype=np.int64)
        self.class_names, self.label = list(class_names), label

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.images[index]), int(self._targets[index])

    def path(self, index: int) -> str:
        return f"{self.label}#{index}"

    def targets(self) -> np.ndarray:
        return self._targets


class FolderSource:
    """The images of class folders."""

    has_files = True

    def __init__(self, folders: ClassFolders) -> None:
        self.folders, self.label, self.class_to_idx = folders, folders.root, folders.class_to_idx
        self.class_names = names_by_number(self.class_to_idx)

    def __len__(self) -> int:
        return len(self.folders)

    def read(self, index: int) -> tuple[Image.Image, int]:
        return decode(self.folders.paths[index]), int(self.folders.targets[index])

    def read_file(self, index: int) -> tuple[bytes, int]:
        """The bytes of the image's file, and its class."""
        with open(self.folders.paths[index], "rb", opener=open_regular) as file:
            return file.read(), int(self.folders.targets[index])

    def path(self, index: int) -> str:
        return self.folders.paths[index]

    def size(self, index: int) -> int | None:
        """The bytes of the image's file; None if it is gone."""
        return size_of(self.path(index))

    def targets(self) -> np.ndarray:
        return self.folders.targets


class ReaderSource:
    """Images that a reader of timm reads: a tar, or a Hugging Face data set."""

    def __init__(self, reader: Any, label: str) -> None:
        self.reader, self.label = reader, label
        mapping = getattr(reader, "class_to_idx", None)
        self.class_to_idx: dict[str, int] = reader.class_name_to_idx if mapping is None else mapping
        self.class_names = names_by_number(self.class_to_idx)

    def __len__(self) -> int:
        return len(self.reader)

    def read(self, index: int) -> tuple[Image.Image, int]:
        data, target = self.read_file(index)
        # A file in an archive claims to have a descriptor, and Pillow fails to find it where libtiff decodes.
        return decode(io.BytesIO(data)), target

    def read_file(self, index: int) -> tuple[bytes, int]:
        """The bytes of the image's file, and its class."""
        try:
            stream, target = self.reader[index]
        except (AssertionError, TypeError) as error:
            if self._has_image(index):
                raise
            raise ValueError("its row has no image") from error
        with stream:
            return stream.read(), number_of_class(target, self.label)

    def path(self, index: int) -> str:
        try:
            name = self.reader.filename(index, absolute=True)
        except TypeError:  # a row without an image
            name = None
        whole = name and (Path(name).is_absolute() or Path(name).is_relative_to(self.label))
        return str(name) if whole else f"{self.label}/{name or index}"

    def _has_image(self, index: int) -> bool:
        """False for a row of a Hugging Face data set whose cell of the image is empty."""
        column = getattr(self.reader, "image_key", None)
        cell = {} if column is None else self.reader.dataset[index][column]
        return column is None or (cell is not None and any(cell.get(key) for key in ("bytes", "path")))

    def size(self, index: int) -> int:
        """The bytes of the image's file in an archive."""
        return int(self.reader.samples[index][0].size)

    def targets(self) -> np.ndarray | None:
        if isinstance(getattr(self.reader, "targets", None), np.ndarray):
            return self.reader.targets
        if hasattr(self.reader, "iter_targets"):
            numbers = (number_of_class(target, self.label) for target in self.reader.iter_targets())
            try:
                return np.fromiter(numbers, dtype=np.int64)
            except LabelError as error:
                raise ValueError(str(error)) from error
        samples = getattr(self.reader, "samples", None)
        return None if samples is None else np.array([target for _, target in samples])


class DecodedSource:
    """The images of a reader, decoded once into memory: for data sets of small images of one size."""

    def __init__(self, source: FolderSource | ReaderSource) -> None:
        _log.info("decoding the %d images of %s into memory", len(source), source.label)
        self.source, self.class_names = source, source.class_names
        self._targets = source.targets()
        images = [self._decode(index) for index in range(len(source))]
        shapes = {image.shape for image in images if image is not None}
        if len(shapes) != 1:
            raise ValueError(f"{source.label} must hold images of one size, not {len(shapes)}: give data.source=folder")
        blank = np.zeros(shapes.pop(), dtype=np.uint8)
        self._unreadable = {index for index, image in enumerate(images) if image is None}
        self._images = np.stack([blank if image is None else image for image in images])  # [N, H, W, 3]

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int) -> tuple[Image.Image, int]:
        if index in self._unreadable:
            return self.source.read(index)
        assert self._targets is not None
        return Image.fromarray(self._images[index]), int(self._targets[index])

    def path(self, index: int) -> str:
        return self.source.path(index)

    def targets(self) -> np.ndarray | None:
        return self._targets

    def _decode(self, index: int) -> np.ndarray | None:
        try:
            return np.asarray(self.source.read(index)[0].convert("RGB"))
        except UNREADABLE:
            return None


def size_of(path: str) -> int | None:
    """The bytes of a file; None if it cannot be asked for."""
    with suppress(OSError):
        return os.stat(path).st_size
    return None


class RealPaths:
    """Finds of two spellings of a file the one path: without links and detours such as `..` in its folders.

    The folders are asked of the disk, each of them once. A link of the file itself is followed with `links`, for which
    each file is asked.
    """

    def __init__(self, *, links: bool) -> None:
        self._links = links
        self._folders: dict[str, str] = {}

    def find(self, path: str) -> str:
        folder, name = os.path.split(path)
        if (real := self._folders.get(folder)) is None:
            real = self._folders[folder] = os.path.realpath(folder)
        found = os.path.join(real, name)
        return os.path.realpath(found) if self._links and os.path.islink(found) else found


def is_stream(source: str) -> bool:
    """True if timm reads this source only in the source's own order."""
    prefix, slash, _ = source.partition("/")
    return bool(slash) and prefix.lower() in _STREAMS


def split_off(split: Split, fraction: float, seed: int) -> tuple[Split, Split]:
    """Take `fraction` of every class away: (the rest, the part), both in the source's order.

    Of a class of two images or more each gets one at least; a class of one image stays in the rest, and a warning names
    it. An image of several labels counts as one of its rarest label.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"data.val_fraction={fraction} of the training images to set apart must lie between 0 and 1")
    targets = split.source.targets()
    classes = np.zeros(len(split), dtype=np.int64) if targets is None else rarest_labels(targets[split.indices])
    generator = np.random.default_rng(seed)
    taken = np.zeros(len(split), dtype=bool)
    for label in np.unique(classes):
        members = generator.permutation(np.flatnonzero(classes == label))
        taken[members[: min(len(members) - 1, max(1, round(fraction * len(members))))]] = True
    if not taken.any() or taken.all():
        raise ValueError(
            f"data.val_fraction={fraction} of {len(split)} images leaves a split empty: give more images or another one"
        )
    if targets is not None:
        _tell_undivided(targets[split.indices], taken, split.source.class_names)
    return Split(split.source, split.indices[~taken]), Split(split.source, split.indices[taken])


def _tell_undivided(targets: np.ndarray, taken: np.ndarray, class_names: Sequence[str]) -> None:
    """Warn, in one line, of classes that have too few images for the part that was taken."""
    every, part = (one if one.ndim == 1 else one.nonzero()[1] for one in (targets, targets[taken]))
    undivided = np.setdiff1d(every, part).tolist()
    if undivided:
        named = [class_names[one] if one < len(class_names) else str(one) for one in undivided]
        _log.warning(
            "no image to set apart of %s: a class needs two images, and one of these stays in training",
            name_some(named),
        )


def holds_jpegs(split: Split) -> bool:
    """True if most images of a split are JPEG files that the source gives as they stand on the disk."""
    if not hasattr(split.source, "read_file"):
        return False
    some = split.indices[:: max(1, len(split) // 1000)]
    names = [split.source.path(int(index)).lower() for index in some]
    return sum(name.endswith((".jpg", ".jpeg")) for name in names) > len(names) / 2


def require_readable(split: Split, kind: str) -> None:
    """Raise ValueError unless at least one image of a split can be read."""
    first: str | None = None
    for index in split.indices:
        try:
            split.source.read(int(index))
        except LabelError as error:
            raise ValueError(f"{split.source.path(int(index))}: {error}") from error
        except UNREADABLE as error:
            first = first or f"{split.source.path(int(index))}: {first_line(error)}"
        else:
            return
    raise ValueError(f"none of the {len(split)} {kind} images can be read ({first or 'there is none'}): replace them")


def classes_at_hand(split: Split) -> np.ndarray | None:
    """The classes of a split's images, or None if finding them would take reading the data set."""
    source = split.source
    targets = source.targets() if _knows_classes(source) else None
    return None if targets is None else np.unique(targets[split.indices])


def _knows_classes(source: Source) -> bool:
    """True for folders, archives and shards: their images' classes are known without reading the images."""
    return isinstance(source, FolderSource | ShardSource) or isinstance(getattr(source, "reader", None), TarImages)


def digits(root: str | None = None, **_: Any) -> Splits:
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels; the test set is the same fifth for every seed."""
    from sklearn.datasets import load_digits

    if root is not None:
        raise ValueError(f"data.source=digits reads no folder: leave data.root={root} out, or give data.source=folder")
    bunch = load_digits()
    images = np.round(bunch.images * (255 / 16)).astype(np.uint8)  # [N, 8, 8], levels 0 to 16
    source = ArraySource(images, bunch.target, [str(digit) for digit in range(10)], "digits")
    rest, test = split_off(Split.whole(source), 0.2, seed=0)
    train, validation = split_off(rest, 0.1, seed=1)
    return Splits(train, validation, test)


def fashion_mnist(root: str | None, *, download: bool, val_fraction: float, split_seed: int) -> Splits:
    """Fashion-MNIST in torchvision's raw format below `root`: validation is part of the 60,000, test is the 10,000."""
    root = _require_root(root, "fashion_mnist")
    train, test = (_torchvision_array("FashionMNIST", root, part, download) for part in (True, False))
    return Splits(*split_off(Split.whole(train), val_fraction, split_seed), Split.whole(test))


def cifar10(root: str | None, *, download: bool, val_fraction: float, split_seed: int) -> Splits:
    """CIFAR-10 below `root`, as folders train/ and test/ (or val/), or as cifar-10-batches-py; test is the 10,000."""
    root = _require_root(root, "cifar10")
    train_folder = find_split(root, "train")
    train: Source
    test: Source
    if train_folder is None:
        train, test = (_torchvision_array("CIFAR10", root, part, download) for part in (True, False))
    else:
        test_folder = find_split(root, "test") or find_split(root, "validation")
        if test_folder is None:
            raise ValueError(f"{root} has train but neither test nor val: put the 10,000 test images of CIFAR-10 there")
        train_reader = _folder(train_folder)
        train, test = DecodedSource(train_reader), DecodedSource(_held_out_folder(test_folder, train_reader))
    return Splits(*split_off(Split.whole(train), val_fraction, split_seed), Split.whole(test))


OpenSplits = Callable[..., Splits]
Opener = TypeVar("Opener", bound=OpenSplits)

_SOURCES: dict[str, OpenSplits] = {"digits": digits, "fashion_mnist": fashion_mnist, "cifar10": cifar10}
SOURCES: Mapping[str, OpenSplits] = MappingProxyType(_SOURCES)


def register_source(name: str) -> Callable[[Opener], Opener]:
    """Register a source, which `data.source=NAME` then chooses: `@register_source("name")`.

    The function is called with (root, download=..., val_fraction=..., split_seed=...), the keys of `data`, and returns
    the splits of one or more `Source`s, which are read in worker processes.
    """

    def enter(opener: Opener) -> Opener:
        if name in _SOURCES or name in ("folder", "shards", "csv", "own") or "/" in name:
            raise ValueError(f"the source {name!r} is there already, or its name is one of timm's; choose another name")
        _SOURCES[name] = opener
        return opener

    return enter


def _require_root(root: str | None, source: str) -> str:
    if root is None:
        raise ValueError(f"data.root is missing: give the folder of {source}, or one to fetch it into")
    return root


def require_one_class_list(source: str, root: str | None, splits: Sequence[str]) -> None:
    """Raise ValueError where the files of hfds/PATH or hfids/PATH number the classes of images otherwise."""
    prefix, _, path = source.partition("/")
    if prefix.lower() in ("hfds", "hfids"):
        require_one_list(f"data.source={source}", path, splits, root=root)


def timm_splits(
    source: str,
    root: str | None,
    *,
    download: bool,
    names: Mapping[str, str | None],
    class_map: ClassMap,
    val_fraction: float,
    split_seed: int,
    order: Sequence[str] | None = None,
) -> Splits:
    """The splits of a source that timm reads by index: folder, hfds/NAME, torch/NAME (a tar counts as a folder).

    `names` has the split names of train, validation and test, None for a split that does not exist. Without a
    validation split, `val_fraction` of the training images becomes the validation split. Without a test split, the
    validation images are also the test images, and one log line says so. `order` of a folder is that of `sort_classes`.
    """
    train_source: Source
    held_out: dict[str, Source]
    if source == "folder":
        train_source, held_out = open_folders(root, names, class_map, order)
    else:
        path = source.removeprefix("hfds/")
        if path != source and not download and not Path(path).exists():
            raise ValueError(
                f"data.source={source} is no local path: give hfds/PATH, or data.download=true to fetch it"
            )
        require_one_class_list(source, root, [names["train"] or "train", *filter(None, names.values())])
        parts = _parts(source, root, names)
        train_source = _open(source, root, parts["train"], class_map, download)
        if "test" in parts and parts["test"] == parts.get("validation"):
            _log.warning(
                "data.val_split=%s and data.test_split=%s are the same images of data.source=%s: the validation images "
                "are also the test images; data.val_split=null sets a part of the training images apart",
                *(names["validation"], names["test"], source),
            )
        of_kinds = {kind: part for kind, part in parts.items() if kind != "train"}
        opened = {part: _open(source, root, part, class_map, download) for part in dict.fromkeys(of_kinds.values())}
        held_out = {kind: opened[part] for kind, part in of_kinds.items()}
        for kind, other in held_out.items():
            require_same_numbers(other.class_names, train_source.class_names, source, kind)
    tell_joined(getattr(train_source, "class_to_idx", {}), root or source)
    return finish_splits(train_source, held_out, val_fraction, split_seed, root or source)


def _parts(source: str, root: str | None, names: Mapping[str, str | None]) -> dict[str, str]:
    """What `_open` takes for each split of a source other than folder; without the splits that do not exist."""
    named = names = {**names, "train": names["train"] or "train"}
    if is_class_folders(source):
        names = find_folders(require_folder(root), names)
        refuse_trained(named, names)
    elif source.startswith("torch/"):
        return parts_of(source, names)
    else:
        refuse_trained(named, names, label=f" of data.source={source}")
    return {kind: name for kind, name in names.items() if name is not None}


def require_same_numbers(held_out: Sequence[str], train: Sequence[str], label: str, kind: str) -> None:
    """Raise ValueError, in one line, where a class has another number in images that are held out than in training.

    Each split of such a source has its own list of classes. Classes without names are not compared, and the last ones
    may be missing.
    """
    # Without names, numbers from 0 on stand for them.
    unnamed = all(list(names) == [str(number) for number in range(len(names))] for names in (held_out, train))
    if train and not unnamed and list(held_out) != list(train[: len(held_out)]):
        raise ValueError(
            f"{label}: the {kind} images have the classes {name_some(held_out)}, and the training images have "
            f"{name_some(train)}: numbers follow from these lists, so give both the same list, or take "
            "data.source=folder, which goes by names"
        )


def finish_splits(
    source: Source, held_out: Mapping[str, Source], val_fraction: float, split_seed: int, label: str
) -> Splits:
    """The splits of training images and those that are held out, `validation` and `test`, where there are any."""
    train = Split.whole(source)
    if "validation" in held_out:
        validation = Split.whole(held_out["validation"])
    else:
        train, validation = split_off(train, val_fraction, split_seed)
    if "test" in held_out:
        if held_out["test"] is held_out.get("validation"):
            return Splits(train, validation, validation)
        return Splits(train, validation, Split.whole(held_out["test"]))
    _log.warning("%s has no test split: the validation images are also the test images", label)
    return Splits(train, validation, validation)


def shard_splits(
    root: str | None, *, multi_label: bool, val_fraction: float, split_seed: int, order: Sequence[str] | None = None
) -> Splits:
    """The splits of a folder of shards; what it does not set apart is set apart as of a folder of images."""
    found = open_shards(root, multi_label=multi_label, order=order)
    held_out: dict[str, Source] = {name: source for name, source in found.items() if name != "train"}
    return finish_splits(found["train"], held_out, val_fraction, split_seed, str(root))


def held_out_shards(
    root: str | None, kind: str, *, multi_label: bool, whole: bool, order: Sequence[str] | None = None
) -> Split | None:
    """The split `kind` (validation or test) of a folder of shards; None if it is a part of the training images.

    Without a test split, the validation images are the test images. With `whole`, a folder of one split is the split.
    """
    found = open_shards(root, multi_label=multi_label, order=order)
    for name in ("test", "validation") if kind == "test" else ("validation",):
        if name in found:
            return Split.whole(found[name])
    return Split.whole(found["train"]) if whole and len(found) == 1 else None


def held_out_split(
    source: str,
    root: str | None,
    *,
    kind: str,
    names: Mapping[str, str | None],
    class_names: Sequence[str],
    class_map: ClassMap,
    download: bool,
    whole: bool,
) -> Split | None:
    """The split `kind` (validation or test), with classes numbered as in `class_names`; None if the source has no such
    one.

    Without a test split, the validation images are the test images. With `whole`, the images are not those of the
    training: without a name, the test split of a folder is the test split, and a folder that has only class folders is
    the split as a whole; ValueError if such a folder has training images only.
    """
    if source != "folder":
        if is_class_folders(source):
            name = part = held_out_folder(require_folder(root), kind, names, whole=whole)
        else:
            name = names[kind] or names["validation"]
            part = name and part_of(source, kind if names[kind] else "validation", name)
        if name is None or part is None:
            return None
        require_one_class_list(source, root, [name])
        opened = _open(source, root, part, class_map, download)
        if whole and names[kind] is None and name != root:
            _log.warning("data.test_split is not given, and the split %s is measured: name another one by it", name)
        return Split.whole(opened)
    folder = require_folder(root)
    refuse_compressed(folder, {kind: names[kind]})
    path = find_split(folder, kind, names[kind]) if names[kind] is not None else None
    missed = path is None and names[kind] not in (None, kind)
    if path is None and kind == "test" and whole and names[kind] is None:
        path = _unnamed_test(folder)
    for usual in ("validation", "test") if kind == "test" else ("validation",):
        path = path or find_split(folder, usual)
    if missed and path is not None:
        _log.warning("%s holds no %s, and %s is measured: name a split that it holds", folder, names[kind], path)
    if path is not None and whole:
        splits = (find_split(folder, name, names.get(name)) for name in SPLIT_NAMES)
        _report_beside(folder, [path, *(one for one in splits if one is not None)])
    if path is None and whole:
        if training := find_split(folder, "train"):
            raise ValueError(
                f"{folder} holds training images only: give data.root={training} to measure all of them, or add a "
                f"{kind} split"
            )
        if other := find_split(folder, "test"):
            raise ValueError(f"{folder} holds no validation images, but {other}: give split=test")
        path = folder
    return None if path is None else Split.whole(_numbered_folder(path, class_names, class_map))


def _unnamed_test(folder: str) -> str | None:
    """The test split of a folder, of which nobody has said whether it has one; None for one without classes."""
    path = find_split(folder, "test")
    if path is None or not (find_archives(path) or has_folders(path)):
        return None
    if other := find_split(folder, "validation"):
        _log.warning("%s is measured, and not %s: data.test_split=NAME names another split", path, other)
    return path


def open_stream(
    source: str,
    root: str | None,
    *,
    name: str,
    training: bool,
    batch_size: int,
    seed: int,
    class_map: ClassMap,
    num_samples: int | None,
    named: bool = True,
) -> Any:
    """timm's IterableImageDataset of one split; `num_samples` is an epoch's length if the stream does not know it.

    Its reader has `shards`, the files of the stream; that of a Hugging Face data set has, if `named`, the names of
    classes that the data set declares.
    """
    _require_library(source)
    if not training and source.lower().startswith("hfids/"):
        num_samples = -1  # timm requires a length, but evaluates on all images of the stream
    is_shards = source.lower().startswith("wds/")
    try:
        dataset: Any = create_dataset(
            source,
            root=root,
            split=name,
            is_training=training,
            batch_size=batch_size,
            num_samples=num_samples,
            seed=seed,
            class_map=_by_number(_as_dict(class_map)) if is_shards else _as_dict(class_map),
            **_stream_options(source),
        )
        is_hub = source.lower().startswith("hfids/")
        stream = dataset.reader.builder.as_streaming_dataset(split=name) if is_hub else None
    except Exception as error:
        told = _unopened(source, name, error)
        if training:
            told += ", and data.train_samples=N for a stream that does not tell its length"
        if is_shards:
            told += "; a split is the name of shards and the number of their images: 'train-{000..009}.tar|9000'"
        raise ValueError(told) from error
    if is_shards:
        dataset.reader.shards = len(dataset.reader.split_info.filenames)
    if stream is not None:
        _take_columns(dataset.reader, source, stream, named=named)
    _check_mapped(dataset.reader, source, class_map)
    return dataset


def _take_columns(reader: Any, source: str, stream: Any, *, named: bool) -> None:
    """Tell timm's reader what an opened Hugging Face stream declares: timm knows it of prepared data sets alone.

    ValueError, in one line, for columns that are no images and classes.
    """
    reader.shards = stream.num_shards
    features = stream.features
    if features is None:  # as of files of JSON, whose columns the first samples tell
        return
    _require_columns(source, list(features))
    kind = type(features["image"]).__name__
    if kind != "Image":
        told = "bytes or paths" if isinstance(features["image"], Mapping) or kind == "Value" else kind
        raise ValueError(
            f"the column image of data.source={source} has {told}, and declares no images: read the data by index "
            f"(data.source=hfds/{source.partition('/')[2]})"
        )
    if names := getattr(features["label"], "names", None):
        reader._source_names = dict(enumerate(names))
        if named and not reader.remap_class:
            reader.class_to_idx = {name: number for number, name in enumerate(names)}


def _stream_options(source: str) -> dict[str, Any]:
    """Options that let timm keep the images' own mode (it would clip 16 bits) and accept all image endings."""
    if source.lower().startswith("tfds/"):
        return {}  # decoded by TensorFlow, to 8 bits
    if not source.lower().startswith("wds/"):
        return {"input_img_mode": ""}
    # timm also uses the first ending as the name of a sample's image.
    endings = {ending.removeprefix(".") for ending in image_endings()} - {"jpg"}
    return {"input_img_mode": "", "input_key": ";".join(["jpg", *sorted(endings)])}


def _torchvision_array(name: str, root: str, train: bool, download: bool) -> ArraySource:
    label = f"{root}/{name}/{'train' if train else 'test'}"
    try:
        data = getattr(torchvision_datasets, name)(root, train=train, download=download)
    except RuntimeError as error:
        raise ValueError(_not_held(name, root)) from error
    return ArraySource(np.asarray(data.data), np.asarray(data.targets), data.classes, label)


def _not_held(name: str, root: str) -> str:
    return f"data.root={root} does not hold {name}: give the folder that does, or data.download=true to fetch it"


def require_arrays(source: str, root: str | None, *, download: bool) -> None:
    """Raise ValueError, in one line, if `root` is not there for one of the data sets that torchvision reads."""
    name = {"fashion_mnist": "FashionMNIST", "cifar10": "CIFAR10"}.get(source)
    if name is not None and not download and not Path(_require_root(root, source)).exists():
        raise ValueError(_not_held(name, str(root)))


def open_folders(
    root: str | None, names: Mapping[str, str | None], class_map: ClassMap, order: Sequence[str] | None = None
) -> tuple[FolderSource | ReaderSource, dict[str, Source]]:
    """The training images of a folder, and those of `validation` and `test` that it sets apart."""
    root = require_folder(root)
    refuse_compressed(root, names)
    paths = {kind: find_split(root, kind, name) for kind, name in names.items() if name is not None}
    require_named(root, names, paths)
    if any(paths.values()) and paths.get("train") is None:
        raise ValueError(f"{root} holds no training images: add {root}/train, or give data.train_split=NAME")
    refuse_trained(names, paths)
    _report_beside(root, [path for path in paths.values() if path is not None])
    train = _folder(paths.get("train") or root, class_map, order=order)
    _refuse_unsorted(paths, train)
    held_out: dict[str, Source] = {
        kind: _held_out_folder(path, train, class_map)
        for kind, path in paths.items()
        if kind != "train" and path is not None
    }
    return train, held_out


def _refuse_unsorted(paths: Mapping[str, str | None], train: FolderSource | ReaderSource) -> None:
    """Raise ValueError, in one line, for folders that are held out whose images lie in no class folders.

    Such are ImageNet's val/ before its images are sorted, Tiny ImageNet's val/images and test images without labels.
    """
    found = {
        kind: path
        for kind, path in paths.items()
        if kind != "train" and path is not None and _is_unsorted(path, train.class_to_idx)
    }
    if found:
        (path, *others), keys = found.values(), [f"data.{SPLIT_KEYS[kind]}=null" for kind in found]
        too = f", and so has {others[0]}" if others and others[0] != path else ""
        raise ValueError(
            f"{path} has images outside class folders{too}: move each into the folder of its class, list all images "
            "and their classes in tables train.csv and val.csv (data.source=csv data.root=FOLDER), or give "
            f"{' '.join(keys)}, which leaves them out"
        )


def _is_unsorted(path: str, classes: Mapping[str, int]) -> bool:
    """True for a folder with images and no folders, or with one alone that says no more than images."""
    if not os.path.isdir(path) or find_archives(path):
        return False
    with os.scandir(path) as entries:
        present = [entry for entry in entries if not is_hidden(entry.name)]
    folders = [entry.name for entry in present if entry.is_dir()]
    if len(folders) == 1:
        (name,) = folders
        return is_of_images(name) and name not in classes and not has_folders(Path(path, name))
    return not folders and any(is_image(entry.name) for entry in present)


def refuse_trained(names: Mapping[str, str | None], parts: Mapping[str, str | None], *, label: str = "") -> None:
    """Raise ValueError, in one line, for a split that is measured and the training split, too.

    `names` are those of the keys; `parts` what they mean: folders and archives, or names of the splits of a source.
    """
    train = parts.get("train")
    for kind, part in parts.items():
        if kind == "train" or train is None or part is None or not _are_same(part, train):
            continue
        key = SPLIT_KEYS[kind]
        instead = "the validation images" if kind == "test" else "a part of the training images that is set apart"
        raise ValueError(
            f"data.{key}={names[kind]} and data.train_split={names['train']} are the same images{label} ({part}): give "
            f"another name, or data.{key}=null, which measures {instead}"
        )


def _are_same(part: str, train: str) -> bool:
    return part == train or (os.path.exists(part) and os.path.realpath(part) == os.path.realpath(train))


def _report_beside(root: str, splits: Sequence[str]) -> None:
    """Warn, in one line, of images beside the folders of the splits, which no split has."""
    if not splits:
        return
    paths = [Path(path) for path in splits]
    if beside := list(_images_beside(Path(root), paths)):
        _log.warning(
            "%s: the images of %s are in no split, beside %s: name a split by data.train_split, data.val_split or "
            "data.test_split",
            root,
            name_some([f"{one.relative_to(root)}{'/' * one.is_dir()}" for one in beside]),
            ", ".join(dict.fromkeys(os.path.relpath(path, root) for path in paths)),
        )


def _images_beside(folder: Path, splits: Sequence[Path]) -> Iterator[Path]:
    """What holds images in a folder and is none of the splits; a folder on the way to a split is looked into."""
    for entry in sorted(folder.iterdir()):
        if is_hidden(entry.name) or entry in splits:
            continue
        if any(split.is_relative_to(entry) for split in splits):
            yield from _images_beside(entry, splits)
        elif entry.is_dir():
            if any(is_image(name) for _, _, names in os.walk(entry) for name in names):
                yield entry
        elif is_image(entry.name) or entry.suffix == ".tar" or is_compressed(str(entry)):
            yield entry


def require_folder(root: str | None) -> str:
    """`data.root` of class folders. ValueError, in one line, where it is none."""
    if not root:
        raise ValueError("this data set needs a folder: give data.root=FOLDER with train/ and val/ in it")
    if not Path(root).exists():
        raise ValueError(f"data.root={root} does not exist: give the folder (or .tar file) that holds the images")
    if is_compressed(root):
        raise ValueError(f"data.root={root} is compressed: unpack it and give the folder, or pack it anew as a .tar")
    if holds_shards(root):
        raise ValueError(f"data.root={root} holds shards: give data=image_shards, or data.source=shards")
    return root


def _numbered_folder(path: str, class_names: Sequence[str], class_map: ClassMap) -> FolderSource | ReaderSource:
    """A folder with some or all of the classes `class_names`, with their numbers or those of `class_map`."""
    if class_map is not None:
        return _folder(path, class_map)
    own = _folder(path, reported=False).class_to_idx
    if extra := sorted(set(own) - set(class_names)):
        raise ValueError(
            f"{path} has {len(extra)} class folder(s) that the {len(class_names)} classes of the checkpoint lack "
            f"({', '.join(extra[:3])}): remove them, or give data.class_map"
            + (f"; or {AS_TABLE}" if all(map(is_of_images, own)) else "")
        )
    return _folder(path, {name: index for index, name in enumerate(class_names)})


def _folder(
    path: str, class_map: ClassMap = None, *, order: Sequence[str] | None = None, reported: bool = True
) -> FolderSource | ReaderSource:
    """A folder of class folders, a .tar of them, or a folder of .tar files; files that are passed over are logged.

    Class folders count, and not the archives beside them, if one of the two has the classes of the other: the folders
    were unpacked from the archives, or packed into them. ValueError where both have classes of their own.
    """
    numbers = class_numbers(class_map, path)
    try:
        source: FolderSource | ReaderSource
        archives, found = find_archives(path), None if os.path.isfile(path) else find_images(path)
        if found is None or (archives and not found.images):
            beside = [] if found is None else _beside_archives(path, found, archives)
            source = ReaderSource(TarImages(path, numbers, order, beside=beside), path)
            passed_over = source.reader.passed_over
        else:
            if archives:
                _refuse_loose_images(path, found.images, archives)
                _refuse_other_archives(path, found.images, archives)
            source = FolderSource(ClassFolders(path, numbers, order, found=found))
            passed_over = source.folders.passed_over
    except (RuntimeError, AssertionError, OSError, tarfile.TarError) as error:
        raise ValueError(_no_images(path)) from error
    if not len(source):
        unknown = [Path(one.path).parent for one in passed_over if one.reason == "of no class"]
        others = {folder.name for folder in unknown if folder != Path(path)}
        raise ValueError(_no_class_of(path, numbers, others) if numbers and others else _no_images(path, passed_over))
    if reported:
        report_passed_over(passed_over, path)
    _refuse_unwritable(path, source.class_to_idx)
    if reported and (told := alike(map(str, source.class_to_idx))) is not None:
        _log.warning("%s: %s", path, told)
    if "" in source.class_to_idx:
        raise ValueError(
            f"{path} has images outside class folders: move each into the folder of its class, or {AS_TABLE}"
        )
    return source


def _refuse_loose_images(path: str, images: Sequence[str], archives: Sequence[Path]) -> None:
    """Raise ValueError for images in no folder beside archives: nobody says which of the two are the data."""
    if all(os.path.dirname(one) == path.rstrip(os.sep) for one in images):
        packed, loose = name_some([one.name for one in archives]), name_some([os.path.basename(one) for one in images])
        raise ValueError(
            f"{path} holds {packed} and images outside class folders ({loose}): move the images away to read the "
            "archives, or each into the folder of its class to read these"
        )


def _refuse_other_archives(path: str, images: Sequence[str], archives: Sequence[Path]) -> None:
    """Raise ValueError for class folders beside archives of other classes: nobody says which are the data."""
    folders = {os.path.dirname(one) for one in images} - {path.rstrip(os.sep)}
    classes = {class_name(folder) for folder in folders}
    packed = classes_in_archives(archives, classes)
    if not (packed <= classes or classes <= packed):
        raise ValueError(
            f"{path} holds {name_some([one.name for one in archives])} of the classes {name_some(sorted(packed))}, and "
            f"folders of other images ({name_some(sorted(os.path.relpath(one, path) for one in folders))}): move the "
            "folders away to read the archives, or the archives to read the folders"
        )


def _beside_archives(path: str, found: Found, archives: Sequence[Path]) -> list[PassedOver]:
    """What lies in a folder of archives beside these and timm's index of them."""
    names = {one.name for one in archives}
    return [
        one
        for one in (*found.passed_over, *found.empty)
        if os.path.relpath(one.path, path) not in names and not one.path.endswith(CACHE_FILENAME_SUFFIX)
    ]


def _refuse_unwritable(path: str, names: Iterable[Any]) -> None:
    """Raise ValueError for a class that no file of the run can name: its folder's name is no UTF-8."""
    for name in map(str, names):
        if not is_unicode(name):
            raise ValueError(f"{path}: the class folder {name!a} has a name that is no UTF-8: rename it")


def _no_images(path: str, passed_over: Sequence[PassedOver] = ()) -> str:
    others = f" ({len(passed_over)} passed over: {describe_passed_over(passed_over, path)})" if passed_over else ""
    return f"{path} holds no images in class folders{others}: give a folder with one folder per class, or a .tar of it"


def _no_class_of(path: str, numbers: Mapping[str, int], others: Iterable[str]) -> str:
    return (
        f"{path} has no folder of the classes {name_some(list(numbers))}, and has {name_some(sorted(others))}: give "
        "other images, or the number of each folder by data.class_map"
    )


def class_numbers(class_map: ClassMap, root: str) -> dict[str, int] | None:
    if class_map is None:
        return None
    try:
        numbers = load_class_map(_as_dict(class_map, root), root)
    except (AssertionError, OSError, ValueError, UnpicklingError) as error:
        raise ValueError(f"data.class_map={class_map} cannot be read ({first_line(error)}): give a .txt") from error
    if not numbers or not all(isinstance(number, int) and number >= 0 for number in numbers.values()):
        raise ValueError(f"data.class_map={class_map} must give classes numbers from 0 on, such as {{cat: 0, dog: 1}}")
    return {str(name): number for name, number in numbers.items()}


def check_class_map(source: str, class_map: ClassMap, class_names: Sequence[str]) -> None:
    """Raise ValueError, in one line, for a `data.class_map` that a source does not read, unless it says the same."""
    if class_map is None or source == "folder" or source.startswith("hfds/") or is_stream(source):
        return
    numbers = class_numbers(class_map, "")
    if numbers != {name: number for number, name in enumerate(class_names)}:
        raise ValueError(
            f"data.class_map={spell(class_map)} does not fit data.source={source}, whose {len(class_names)} classes "
            f"are {name_some(class_names)} in this order: leave it out"
        )


def _held_out_folder(
    path: str, train: FolderSource | ReaderSource, class_map: ClassMap = None
) -> FolderSource | ReaderSource:
    """A folder with the class numbers of the training folder; it may lack some classes."""
    if class_map is not None:
        return _folder(path, class_map)
    own = _folder(path, reported=False).class_to_idx
    if extra := sorted(set(own) - set(train.class_to_idx)):
        raise ValueError(f"{path} has class folders that {train.label} has not: {', '.join(extra[:5])}; remove them")
    return _folder(path, train.class_to_idx)


def _require_library(source: str) -> None:
    """Raise ValueError where the library that reads a source is not installed: it comes with an extra of longseq."""
    library = _LIBRARIES.get(source.partition("/")[0].lower())
    if library is not None and find_spec(library) is None:
        raise ValueError(f'data.source={source} needs the library {library}: pip install "longseq[datasets]"')


def _open(
    source: str, root: str | None, name: str, class_map: ClassMap, download: bool
) -> TorchvisionSource | ReaderSource:
    _require_library(source)
    try:
        if source.startswith("torch/"):
            return open_torchvision(source, root, name, download)
        reader = create_reader(source, root=root, split=name, class_map=_as_dict(class_map))
    except Exception as error:
        raise ValueError(_unopened(source, name, error)) from error
    if (dataset := getattr(reader, "dataset", None)) is not None:
        # The reader casts a column of images that is not there to one of empty cells.
        columns = [one for one in dataset.column_names if one != "image" or not _is_empty(dataset.data[one])]
        _require_columns(source, columns)
    _check_mapped(reader, source, class_map)
    return ReaderSource(reader, source)


def _is_empty(column: Any) -> bool:
    return 0 < len(column) == column.null_count


def _require_columns(source: str, columns: Sequence[str]) -> None:
    """Raise ValueError, in one line, for a Hugging Face data set without the columns of images and classes."""
    for column in ("image", "label"):
        if column not in columns:
            raise ValueError(
                f"data.source={source} has no column {column}, but {name_some(list(columns))}: give a data set with "
                "the columns image and label"
            )


def names_by_number(class_to_idx: Mapping[Any, int]) -> list[str]:
    """Class names by index; an index without a name gets its number."""
    names = [str(index) for index in range(max(class_to_idx.values(), default=-1) + 1)]
    for name, index in class_to_idx.items():
        names[index] = str(name)
    return names


def tell_joined(class_to_idx: Mapping[Any, int], label: str) -> None:
    """Warn, in one line, of classes that `data.class_map` gives one number: one name stands for all of them."""
    members: dict[int, list[str]] = {}
    for name, number in class_to_idx.items():
        members.setdefault(number, []).append(str(name))
    joined = [f"{names[-1]} ({name_some(names)})" for names in members.values() if len(names) > 1]
    if joined:
        _log.warning(
            "%s: data.class_map gives several classes one number, and they are called as the last of them: %s",
            label,
            name_some(joined),
        )


def _check_mapped(reader: Any, source: str, class_map: ClassMap) -> None:
    """Raise ValueError, in one line, for classes of a Hugging Face data set to which `data.class_map` gives no number.

    Of a stream those count that the data set declares.
    """
    if class_map is None or not source.startswith(("hfds/", "hfids/")):
        return
    dataset = getattr(reader, "dataset", None)
    features = (reader.builder.info.features if dataset is None else dataset.features) or {}
    if "label" not in features:
        return
    names = getattr(features["label"], "names", None) or []
    if not names and dataset is None and "int" in str(getattr(features["label"], "dtype", "")):
        raise ValueError(
            f"data.source={source} has numbers of classes without names, to which data.class_map={spell(class_map)} "
            "gives no number: leave it out and give data.num_classes=N, or read the data by index "
            "(data.source=hfds/NAME)"
        )
    labels = range(len(names)) if dataset is None else dataset.unique("label")
    spelled = {one: names[one] if isinstance(one, int) and 0 <= one < len(names) else one for one in labels}
    lacking = [name for one, name in spelled.items() if not {one, name} & reader.class_to_idx.keys()]
    if lacking:
        raise ValueError(
            f"data.class_map gives no number to {name_some([str(name) for name in lacking])} of data.source={source}: "
            "give each of its classes one, or leave its rows out; only of folders and archives are classes picked"
        )


def _by_number(class_map: Any) -> Any:
    """The class map of shards, whose samples have numbers of classes: the lines of a file are their text."""
    if not isinstance(class_map, Mapping):
        return class_map
    wrong = [str(name) for name in class_map if not str(name).strip().isdecimal()]
    if wrong:
        raise ValueError(
            f"the samples of shards have numbers of classes, and data.class_map has {name_some(wrong)}: give the "
            "number of each number, such as {0: 1, 1: 0}"
        )
    return {int(name): number for name, number in class_map.items()}


def _as_dict(class_map: ClassMap, root: str = "") -> Any:
    """A class map as timm takes it. ValueError for a .txt with a class twice or an empty line between classes.

    A .txt is read here: timm takes the mark at the beginning of a file, and an empty last line, for a part of a name.
    """
    if not isinstance(class_map, str):
        return None if class_map is None else dict(class_map)
    path = Path(class_map) if os.path.exists(class_map) else Path(root, class_map)
    if path.suffix.lower() != ".txt" or not path.is_file():
        return class_map
    names = [line.strip() for line in path.read_text(encoding="utf-8-sig").rstrip().split("\n")]
    if (wrong := next((name for name, count in Counter(names).items() if not name or count > 1), None)) is not None:
        raise ValueError(f"the class {wrong!r} is there twice" if wrong else "an empty line between classes")
    return {name: number for number, name in enumerate(names)}


def _unopened(source: str, split: str, error: BaseException) -> str:
    return (
        f"data.source={source} does not open with the split {split!r} ({first_line(error)}): "
        "check data.root and data.train_split, data.val_split, data.test_split (in training null = none)"
    )
