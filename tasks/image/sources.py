"""Sources of images: each gives decoded images by index, and has class names and paths."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import create_dataset
from timm.data.readers import create_reader
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from longseq.plugins import find_class
from longseq.tasks.data.labels import LabelError, number_of_class, rarest_labels, require_one_list
from longseq.tasks.data.loader import IMAGES, TARGETS, find_entry
from longseq.tasks.image.config import ImageDataKeys
from longseq.tasks.image.decoding import decode, decoding, image_endings, in_eight_bits, upright
from longseq.tasks.image.files import SPLIT_KEYS, FileSource, Layout, Source, class_numbers, names_by_number
from longseq.tasks.training.targets import TARGET

# Data sets of torchvision with the splits train and test. timm reads any unknown name as test.
_TWO_PARTS = ("cifar10", "cifar100", "fashion_mnist", "kmnist", "mnist", "qmnist")
_TRAINING_WORDS = ("train", "training")
_HELD_OUT_WORDS = ("val", "valid", "validation", "eval", "evaluation", "test")
_SETS = {"train": "train_set", "validation": "val_set", "test": "test_set"}


@dataclass(frozen=True)
class Split:
    """The images of a source that are used for one of train, validation and test."""

    source: Source
    indices: np.ndarray  # [N] int64

    def __len__(self) -> int:
        return len(self.indices)

    @classmethod
    def whole(cls, source: Source) -> Split:
        return cls(source, np.arange(len(source)))

    def checksum(self) -> int | None:
        """The CRC-32 of the sorted file names (without folders) and labels; None for images that are not in files."""
        if not isinstance(self.source, FileSource):
            return None
        names = np.asarray(self.source.class_names, dtype=object)
        lines = [
            f"{os.path.basename(self.source.path(index))}\t{names[np.flatnonzero(label) if label.ndim else label]}"
            for index, label in zip(self.indices, self.source.targets()[self.indices], strict=True)
        ]
        return zlib.crc32("\n".join(sorted(lines)).encode(errors="surrogateescape"))


Splits = Mapping[str, Split]  # of train, val and test; the last two may be the same images


class HubSource:
    """A Hugging Face data set with the columns image and label, read by timm."""

    def __init__(self, reader: Any, label: str, num_classes: int | None) -> None:
        self.reader, self.label = reader, label
        self.class_names = names_by_number(reader.class_to_idx)
        self.num_classes = max(len(self.class_names), num_classes or 0)
        self._targets: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.reader)

    def read(self, index: int) -> tuple[Image.Image, int]:
        data, target = self.read_file(index)
        return decode(io.BytesIO(data)), target

    def read_file(self, index: int) -> tuple[bytes, int]:
        """The contents of the image's file, and its class."""
        with decoding():  # a row may have no image
            stream, target = self.reader[index]
        number = number_of_class(target, self.label, self.num_classes)
        with stream:
            return stream.read(), number

    def path(self, index: int) -> str:
        image = self.reader.dataset[index][self.reader.image_key] or {}
        return f"{self.label}/{image.get('path') or index}"

    def targets(self) -> np.ndarray:
        if self._targets is None:
            numbers = (number_of_class(target, self.label) for target in self.reader.iter_targets())
            self._targets = np.fromiter(numbers, dtype=np.int64)
        return self._targets


class DatasetSource:
    """The samples of a Dataset: pairs (image, label), or dictionaries with the keys of `ImageClassifier.read_batch`.

    An image is a Pillow image, a uint8 array `[H, W]` or `[H, W, 3]`, or a uint8 tensor `[C, H, W]`. A label is a class
    number, or for several labels `[C]` of 0 and 1. Class names come from the Dataset's `classes` or `class_to_idx`, as
    in torchvision, and are numbers otherwise. If the Dataset has `targets`, each sample must agree with them.
    """

    def __init__(self, dataset: Any, label: str, *, num_classes: int | None, multi_label: bool = False) -> None:
        self.dataset, self.label, self.multi_label = dataset, label, multi_label
        names = getattr(dataset, "classes", None)
        if names is None:
            names = names_by_number(getattr(dataset, "class_to_idx", {}))
        self.class_names = [name[0] if isinstance(name, tuple) else str(name) for name in names]
        self.num_classes = max(len(names), num_classes or 0)
        shape = (len(dataset), self.num_classes) if multi_label else (len(dataset),)
        known = np.asarray(getattr(dataset, "targets", None))
        self._targets = known.astype(np.float32 if multi_label else np.int64) if known.shape == shape else None

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, index: int) -> tuple[Image.Image, Any]:
        sample = self.dataset[index]
        if isinstance(sample, Mapping):
            image, target = find_entry(sample, IMAGES, "images"), find_entry(sample, TARGETS, "labels")
        else:
            image, target = sample
        label = self._label(target)
        if self._targets is not None and not np.array_equal(label, self._targets[index]):
            raise LabelError(f"its label is not targets[{index}], which is {self._targets[index].tolist()}")
        return as_image(image), label

    def path(self, index: int) -> str:
        return f"{self.label}#{index}"

    def targets(self) -> np.ndarray | None:
        return self._targets

    def _label(self, target: Any) -> Any:
        values = np.asarray(target)
        if self.multi_label:
            if values.shape != (self.num_classes,) or not np.isin(values, (0, 1)).all():
                raise LabelError(f"its labels must be {self.num_classes} numbers, each 0 or 1")
            return values.astype(np.float32)
        return number_of_class(values.item() if values.size == 1 else target, self.label, self.num_classes)


def as_image(image: Any) -> Image.Image:
    """An upright 8-bit image from a Pillow image, or a uint8 array `[H, W(, 1 or 3)]` or tensor `[C, H, W]`."""
    if isinstance(image, Image.Image):
        with decoding():
            return in_eight_bits(upright(image))
    pixels = image.permute(1, 2, 0).numpy() if isinstance(image, Tensor) and image.ndim == 3 else np.asarray(image)
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (1, 3)):
        raise ValueError(f"the image {list(pixels.shape)} of {pixels.dtype} must be uint8 with 1 or 3 channels")
    return Image.fromarray(np.ascontiguousarray(pixels.squeeze(2) if pixels.shape[2:] == (1,) else pixels))


def split_off(split: Split, fraction: float, seed: int) -> tuple[Split, Split]:
    """Take `fraction` of every class away: (the rest, the part), both in the source's order.

    A class of two images or more keeps at least one in each; a class of one image stays in the rest. An image with
    several labels counts as one of its rarest label. ValueError if a part is empty.
    """
    targets = split.source.targets()
    classes = np.zeros(len(split), dtype=np.int64) if targets is None else rarest_labels(targets[split.indices])
    generator = np.random.default_rng(seed)
    taken = np.zeros(len(split), dtype=bool)
    for label in np.unique(classes):
        members = generator.permutation(np.flatnonzero(classes == label))
        taken[members[: min(len(members) - 1, max(1, round(fraction * len(members))))]] = True
    if not taken.any() or taken.all():
        raise ValueError(f"data.val_fraction={fraction} of {len(split)} images leaves a split empty")
    return Split(split.source, split.indices[~taken]), Split(split.source, split.indices[taken])


def digits() -> Splits:
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels; the test set is the same fifth for every seed."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.round(bunch.images * (255 / 16)).astype(np.uint8)  # [N, 8, 8], levels 0 to 16
    dataset: Any = TensorDataset(torch.from_numpy(images), torch.from_numpy(bunch.target))
    dataset.classes, dataset.targets = [str(digit) for digit in range(10)], bunch.target
    source = DatasetSource(dataset, "digits", num_classes=None)
    rest, test = split_off(Split.whole(source), 0.2, seed=0)
    train, validation = split_off(rest, 0.1, seed=1)
    return {"train": train, "val": validation, "test": test}


def require_root(root: str | None) -> str:
    """`data.root`, its `~` expanded. ValueError if it is missing."""
    if root is None:
        raise ValueError("data.root=FOLDER is missing")
    return os.path.expanduser(root)


class NamedLayout(Layout):
    """hfds/NAME and torch/NAME: timm opens each split by its name."""

    def __init__(self, keys: ImageDataKeys) -> None:
        super().__init__(keys)
        self.cache = None if keys.root is None else self.root
        require_one_class_list(keys, self.cache)

    def find(self, kind: str, name: str) -> str | None:
        if self.names[kind] is None:
            return None
        if self.keys.source.rpartition("/")[2] in _TWO_PARTS:
            if name not in (*_TRAINING_WORDS, *_HELD_OUT_WORDS):
                raise ValueError(f"data.{SPLIT_KEYS[kind]}={name}: {self.keys.source} has the splits train and test")
            return "train" if name in _TRAINING_WORDS else "test"
        return "train" if name in _TRAINING_WORDS else name

    def open(self, part: str, class_names: Sequence[str] | None = None) -> Source:
        source = self.keys.source
        if source.startswith("torch/"):
            root = require_root(self.cache)
            dataset: Any = create_dataset(source, root=root, split=part, download=self.keys.download)
            if hasattr(dataset, "loader"):
                dataset.loader = decode
            return DatasetSource(dataset, source, num_classes=self.keys.num_classes)
        numbers = class_numbers(self.keys.class_map)
        reader = create_reader(source, root=self.cache, split=part, class_map=numbers)
        return HubSource(reader, source, self.keys.num_classes)


class OwnLayout(Layout):
    """The Datasets of `data.train_set`, `data.val_set` and `data.test_set`; the last two may be missing."""

    def __init__(self, keys: ImageDataKeys) -> None:
        super().__init__(keys)
        self.names = {kind: kind for kind in _SETS}

    def find(self, kind: str, name: str) -> str | None:
        return _SETS[kind] if kind == "train" or getattr(self.keys, _SETS[kind]) else None

    def open(self, part: str, class_names: Sequence[str] | None = None) -> DatasetSource:
        node, keys = getattr(self.keys, part), self.keys
        cls: Any = find_class(node[TARGET], Dataset, f"data.{part}.{TARGET}")
        dataset = cls(**{name: value for name, value in node.items() if name != TARGET})
        return DatasetSource(dataset, str(node[TARGET]), num_classes=keys.num_classes, multi_label=keys.multi_label)


def require_one_class_list(keys: ImageDataKeys, root: str | None) -> None:
    """ValueError if the files of hfds/PATH or hfids/PATH number the classes differently."""
    prefix, _, path = keys.source.partition("/")
    if prefix in ("hfds", "hfids"):
        require_one_list(f"data.source={keys.source}", path, root=root)


def is_stream(source: str) -> bool:
    """True if timm reads this source only in the source's own order."""
    return source.startswith(("hfids/", "wds/"))


def open_stream(keys: ImageDataKeys, root: str | None, split: str, *, batch_size: int, seed: int) -> Any:
    """timm's IterableImageDataset of a split (train, validation, test); without a test split, the validation.

    Its reader gets `shards`, their number, and declared class names. FileNotFoundError for missing local shards.
    """
    kind, training = keys.source.partition("/")[0], split == "train"
    name = getattr(keys, SPLIT_KEYS[split]) or keys.val_split
    if name is None:
        raise ValueError(f"data.source={keys.source} is a stream: give data.val_split=NAME")
    num_samples = keys.train_samples if training else None
    numbers: Any = class_numbers(keys.class_map)
    options: dict[str, Any] = {"input_img_mode": ""}  # keeps the mode of the images: timm clips 16 bits
    if kind == "wds":
        # timm also uses the first ending as the name of a sample's image.
        endings = {ending.removeprefix(".") for ending in image_endings()} - {"jpg"}
        options["input_key"] = ";".join(["jpg", *sorted(endings)])
        numbers = None if numbers is None else {int(label): number for label, number in numbers.items()}
    elif not training:
        num_samples = -1  # timm requires a length, but evaluates on all images of the stream
    options |= {"root": root, "split": name, "is_training": training, "batch_size": batch_size, "seed": seed}
    dataset: Any = create_dataset(keys.source, num_samples=num_samples, class_map=numbers, **options)
    reader = dataset.reader
    if kind == "wds":
        paths = [os.path.join(reader.root, file) for file in reader.split_info.filenames]
        for path in paths:
            if "://" not in path and not path.startswith("pipe:") and not os.path.isfile(path):
                raise FileNotFoundError(f"the split {name} has no shard {path}")
        reader.shards = len(paths)
    else:
        stream = reader.builder.as_streaming_dataset(split=name)
        reader.shards = stream.num_shards
        if names := getattr((stream.features or {}).get("label"), "names", None):
            reader._source_names = dict(enumerate(names))
            if keys.num_classes is None and not reader.remap_class:
                reader.class_to_idx = {label: number for number, label in enumerate(names)}
    return dataset
