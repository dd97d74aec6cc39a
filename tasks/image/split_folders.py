"""The splits of a folder or an archive of images, which the names of folders and files tell."""

from __future__ import annotations

import os
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path, PurePosixPath

from longseq.tasks.data.labels import name_some
from longseq.tasks.image.decoding import is_hidden

SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "val", "valid", "eval"),
    "test": ("test", "testing"),
}
_KINDS = {name: kind for kind, names in SPLIT_NAMES.items() for name in names}

# Names such as train2017, val_1, test-00 and training_set are of splits, too.
_SPLIT = re.compile(
    rf"({'|'.join(sorted(_KINDS, key=len, reverse=True))})([-_ ]?(set|data|dataset|images))?[-_ ]?\d*", re.IGNORECASE
)

# Names such as seg_train are of splits where another one beside them has the same beginning.
_PREFIXED = re.compile(rf"(?P<prefix>.+?)[-_ .]+(?P<split>{_SPLIT.pattern})", re.IGNORECASE)

# Folders of images whatever their classes, and of pictures that belong to them.
_IMAGES = re.compile(r"(jpe?g|rgb)?[-_ ]?(images?|imgs?|pictures?|photos?)|jpe?gs?|pngs?", re.IGNORECASE)
_MASKS = re.compile(
    r"((seg|segmentation|image)[-_ ]?)?(masks?|annotations?|labels?)|segmentations?|trimaps?|ground[-_ ]?truths?",
    re.IGNORECASE,
)

# The innermost folders below each folder of a folder, by its path and their names.
_Tree = Mapping[tuple[str, ...], Mapping[str, set[str]]]

# Archives that are read through from their beginning to reach one image, or that nothing here reads.
_COMPRESSED = re.compile(r"\.((tar\.)?(gz|bz2|xz|zst|lz4)|tgz|tbz2?|txz|tzst|zip|7z|rar)$", re.IGNORECASE)

# The names that messages recommend.
_USUAL = {"train": "train", "validation": "val", "test": "test"}

# The keys of `data` that name the splits.
SPLIT_KEYS = {"train": "train_split", "validation": "val_split", "test": "test_split"}


def find_split(root: str, kind: str, name: str | None = None) -> str | None:
    """The folder or .tar of a split below `root`, by its `name` or one of the usual names of its kind, or None.

    Usual names may have capitals, as Train, if there are class folders below: a class may be called so, too.
    """
    usual = name is None or name == kind
    present = sorted(os.listdir(root)) if os.path.isdir(root) else []
    for candidate in SPLIT_NAMES[kind] if usual else (str(name),):
        for wanted in (candidate, f"{candidate}.tar"):
            if (path := Path(root, wanted)).exists():
                return str(path)
            for other in (Path(root, one) for one in present if usual and one.lower() == wanted):
                if other.is_file() or has_folders(other):
                    return str(other)
    return None


def has_folders(path: str | Path) -> bool:
    """True if a folder has folders that are not hidden, which may be those of classes."""
    return any(entry.is_dir() and not is_hidden(entry.name) for entry in os.scandir(path))


def require_named(root: str, names: Mapping[str, str | None], found: Mapping[str, object]) -> None:
    """Raise ValueError, in one line, for a split that `root` holds under none of the usual names nor the given one.

    `found` has what was found of each kind. A usual name of a kind is no name that the user gave.
    """
    for kind, name in names.items():
        if name is not None and name != kind and found.get(kind) is None:
            raise ValueError(
                f"data.{SPLIT_KEYS[kind]}={name}: {root} holds no {name}: name a split that it holds, or leave the key "
                "out"
            )


def is_compressed(path: str) -> bool:
    """True if a file is an archive whose images cannot be read where they lie."""
    return _COMPRESSED.search(path) is not None and os.path.isfile(path)


def refuse_compressed(root: str, names: Mapping[str, str | None]) -> None:
    """Raise ValueError, in one line, for a split in `names` that `root` holds as a compressed file alone."""
    for entry in sorted(os.scandir(root), key=lambda one: one.name) if os.path.isdir(root) else ():
        if is_hidden(entry.name) or not is_compressed(entry.path):
            continue
        stem = _COMPRESSED.sub("", entry.name)
        for kind, name in names.items():
            own = name is not None and stem.lower() in (name.lower(), *(SPLIT_NAMES[kind] if name == kind else ()))
            if own and find_split(root, kind, name) is None:
                leave = "" if kind == "train" else f", or leave it out by data.{SPLIT_KEYS[kind]}=null"
                raise ValueError(
                    f"{entry.path} is compressed, and its images would be in no split: unpack it to "
                    f"{Path(root, stem)}, or pack it anew as {stem}.tar{leave}"
                )


def refuse_compressed_tables(root: str, names: Mapping[str, str | None]) -> None:
    """Raise ValueError, in one line, for a table of a split in `names` that `root` holds as a compressed file alone."""
    for entry in sorted(os.scandir(root), key=lambda one: one.name) if os.path.isdir(root) else ():
        stem = _COMPRESSED.sub("", entry.name)
        if is_hidden(entry.name) or not is_compressed(entry.path) or not stem.endswith(".csv"):
            continue
        for kind, name in names.items():
            usual = SPLIT_NAMES[kind] if name == kind else (str(name).removesuffix(".csv"),)
            there = any(Path(root, f"{one}.csv").is_file() for one in usual)
            if name is not None and stem.removesuffix(".csv") in usual and not there:
                leave = "" if kind == "train" else f", or leave it out by data.{SPLIT_KEYS[kind]}=null"
                raise ValueError(
                    f"{entry.path} is compressed, and its images would be in no split: decompress it to "
                    f"{Path(root, stem)}{leave}"
                )


def refuse_pooled(path: str, folders: Iterable[str], *, packed: bool = False) -> None:
    """Raise ValueError, in one line, if the images of several splits lie below one `path` that is read as one set.

    `folders` are those of the images, below `path`, or `packed` in the archives there. A class, which the innermost
    folder names, may be called as a split is, unless all classes are, or it lies beside another split with classes.
    So may one be called as seg_train is, unless seg_test lies beside it with the same class folders.
    """
    parts_of = {PurePosixPath(one).parts for one in folders}
    tree = _tree(parts_of)
    if found := _splits_side_by_side(parts_of) or _prefixed_splits(tree):
        inner, kinds = found
    else:
        names = sorted({parts[-1] for parts in parts_of if parts})
        if not all(map(_kind_of, names)) or len({*map(_kind_of, names)}) < 2:
            return
        raise ValueError(
            f"{path} holds the splits {_join(names)} without class folders, and they would be the classes: move each "
            "image into the folder of its class, such as train/CLASS/*"
        )
    above, names = "/".join(inner), sorted(kinds)
    told = f"{path} holds the splits {_join(names)}{f' in {above}' if above else ''}, which would be one set"
    if others := sorted(set(tree[inner]) - set(kinds)):
        told += f", and {name_some(others)} in no split"
    if packed:
        raise ValueError(
            f"{told}: unpack it and give data.root=FOLDER, or put a .tar of each split into a folder, such as "
            "train.tar and val.tar"
        )
    by_kind = {kinds[name]: name for name in names}
    if all(name.lower() in _KINDS for name in names):
        raise ValueError(f"{told}: give data.root={Path(path, above)}")
    keys = " ".join(
        [
            *([f"data.root={Path(path, above)}"] if above else []),
            *(shlex.quote(f"data.{key}={by_kind[kind]}") for kind, key in SPLIT_KEYS.items() if kind in by_kind),
        ]
    )
    raise ValueError(f"{told}: rename them to {_join([_USUAL[kind] for kind in by_kind])}, or give {keys}")


def refuse_masks(path: str, folders: Iterable[str], *, packed: bool = False) -> None:
    """Raise ValueError, in one line, if the masks or annotations of images below `path` would be images of a class.

    `folders` are as in `refuse_pooled`. Both lie side by side with the same class folders below, or with nothing but
    files and nothing else beside them: a class may be called so, too.
    """
    tree = _tree({PurePosixPath(one).parts for one in folders})
    for above, held in sorted(tree.items(), key=lambda one: (len(one[0]), one[0])):
        images, masks = (sorted(filter(pattern.fullmatch, held)) for pattern in (_IMAGES, _MASKS))
        alone = len(images) + len(masks) == len(held)
        for one, other in ((one, other) for one in images for other in masks):
            flat = alone and not held[one] and not held[other]
            if flat or _are_same_classes(held[one], held[other]):
                place = f" in {'/'.join(above)}" if above else ""
                remedy = f"pack it anew without {other}" if packed else f"move {other} out of {path}"
                if not (flat or packed):
                    remedy += f", or give data.root={Path(path, *above, one)}"
                raise ValueError(
                    f"{path} holds {other} beside {one}{place}, and both would be images to classify: {remedy}"
                )


def is_of_images(name: str) -> bool:
    """True for the name of a folder that tells no more than that images are in it."""
    return _IMAGES.fullmatch(name) is not None


def _tree(folders: Iterable[tuple[str, ...]]) -> _Tree:
    tree: dict[tuple[str, ...], dict[str, set[str]]] = defaultdict(dict)
    for parts in folders:
        for depth, name in enumerate(parts):
            tree[parts[:depth]].setdefault(name, set()).update(parts[max(depth + 1, len(parts) - 1) :])
    return tree


def _are_same_classes(one: set[str], other: set[str]) -> bool:
    """True where one has all class folders of the other: a split may lack some."""
    return bool(one and other) and (one <= other or other <= one)


def _prefixed_splits(tree: _Tree) -> tuple[tuple[str, ...], dict[str, str]] | None:
    """What `_splits_side_by_side` gives, of splits whose names have a beginning in common, such as seg_train."""
    for above, held in sorted(tree.items(), key=lambda one: (len(one[0]), one[0])):
        groups: dict[str, dict[str, str]] = defaultdict(dict)
        for name in sorted(held):
            if match := _PREFIXED.fullmatch(name):
                groups[match["prefix"].lower()][name] = str(_kind_of(match["split"]))
        for kinds in groups.values():
            for one, other in combinations(kinds, 2):
                if kinds[one] != kinds[other] and _are_same_classes(held[one], held[other]):
                    return above, kinds
    return None


def _splits_side_by_side(folders: set[tuple[str, ...]]) -> tuple[tuple[str, ...], dict[str, str]] | None:
    """The folder that holds folders of several splits, and the kinds of these by their names; the highest.

    One of the splits at least has classes below it. Test images often have none.
    """
    held: dict[tuple[str, ...], set[str]] = defaultdict(set)
    divided = set()
    for parts in folders:
        for depth, name in enumerate(parts):
            if _kind_of(name):
                held[parts[:depth]].add(name)
                if depth < len(parts) - 1:
                    divided.add(parts[:depth])
    several = [above for above in divided if len({*map(_kind_of, held[above])}) > 1]
    if not several:
        return None
    above = min(several, key=lambda one: (len(one), one))
    return above, {name: str(_kind_of(name)) for name in held[above]}


def _kind_of(name: str) -> str | None:
    """train, validation or test for the name of a folder that is a split's; None for others."""
    match = _SPLIT.fullmatch(name)
    return None if match is None else _KINDS[match[1].lower()]


def _join(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
