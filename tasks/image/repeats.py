"""Equal images: of the held-out splits some that are also trained on, which flatter the model, and of the training
images some that have other labels, about which no model can be right. Of many files the paths are compared alone.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache

from longseq.tasks.image.decoding import open_regular
from longseq.tasks.image.sources import MOST_FILES, RealPaths, Split, Splits, size_of

_log = logging.getLogger(__name__)

# A file is known by its size and these many bytes at its beginning and its end.
COMPARED = 1 << 16


def warn_of_repeats(splits: Splits) -> None:
    """Warn of validation and test images whose file has the bytes of a training image's, and of training images whose
    file has the bytes of one with another label.

    Of more than MOST_FILES files none is read: validation and test images are told that are the file of a training
    image.
    """
    held = {"validation": splits.validation} | ({} if splits.test is splits.validation else {"test": splits.test})
    every = (splits.train, *held.values())
    if not all(getattr(one.source, "has_files", False) for one in every):
        return
    if sum(map(len, every)) > MOST_FILES:
        for name, split in held.items():
            _tell(_find_shared(split, splits.train), "are the file of", name, split)
        return
    trained, read = _by_size(splits.train), cache(_content)
    _tell_contradictions(splits.train, trained, read)
    for name, split in held.items():
        _tell(_find_repeats(split, trained, read), "have the bytes of", name, split)


def _tell(repeats: Sequence[tuple[str, str]], relation: str, name: str, split: Split) -> None:
    """Warn, in one line, of images of a held-out split, each beside the training image that it repeats."""
    if repeats:
        _log.warning(
            "%d of the %d %s images %s a training image, such as %s and %s: figures of images that were trained on "
            "flatter; leave them out of one of the two",
            len(repeats),
            len(split),
            name,
            relation,
            *repeats[0],
        )


def _tell_contradictions(
    split: Split, trained: Mapping[int, list[str]], read: Callable[[str, int], bytes | None]
) -> None:
    """Warn, in one line, of training images whose file has the bytes of one with another label."""
    targets = split.source.targets()
    assert targets is not None, "the labels of files are known"
    label_of = {split.source.path(int(index)): targets[index].tolist() for index in split.indices}
    equal: dict[bytes, list[str]] = {}
    for size, paths in trained.items():
        for path in paths if size and len(paths) > 1 else ():
            if (content := read(path, size)) is not None:
                equal.setdefault(content, []).append(path)
    told = [paths for paths in equal.values() if any(label_of[one] != label_of[paths[0]] for one in paths)]
    if told:
        first = min(min(paths) for paths in told)
        group = next(sorted(paths) for paths in told if first in paths)
        other = next(one for one in group if label_of[one] != label_of[first])
        names = split.source.class_names
        examples = (f"{one} ({_spell(label_of[one], names)})" for one in (first, other))
        _log.warning(
            "%d of the %d training images have the bytes of one with another label, such as %s and %s: no model can be "
            "right about both; correct or remove them",
            sum(map(len, told)),
            len(split),
            *examples,
        )


def _spell(label: int | list[float], names: Sequence[str]) -> str:
    """The class of an image, or its labels."""
    several = [label] if isinstance(label, int) else [number for number, there in enumerate(label) if there]
    return ", ".join(names[number] for number in several) or "no label"


def _find_repeats(
    split: Split, trained: Mapping[int, list[str]], read: Callable[[str, int], bytes | None]
) -> list[tuple[str, str]]:
    """The files of `split` that a training file equals, beside that one. Files that cannot be read equal none.

    `trained` are the training files by size; `read` gives the content of a file, by its path and size.
    """
    held, found = _by_size(split), []
    for size in (held.keys() & trained.keys()) - {0}:  # files without an image are told elsewhere
        known = {content: path for path in trained[size] if (content := read(path, size)) is not None}
        found += [(path, known[content]) for path in held[size] if (content := read(path, size)) in known]
    return sorted(found)


def _find_shared(split: Split, train: Split) -> list[tuple[str, str]]:
    """The files of `split` that are training files, too, beside the path of each there.

    Names are compared first: a file in two splits has one name, though maybe its folders in two spellings.
    """
    real, held = RealPaths(links=False), dict[str, list[str]]()
    for path in (split.source.path(int(index)) for index in split.indices):
        held.setdefault(os.path.basename(path), []).append(path)
    trained: dict[str, str] = {}
    for path in (train.source.path(int(index)) for index in train.indices):
        if os.path.basename(path) in held:
            trained.setdefault(real.find(path), path)
    found = [(path, real.find(path)) for paths in held.values() for path in paths]
    return sorted((path, trained[there]) for path, there in found if there in trained)


def _by_size(split: Split) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for index in split.indices:
        path = split.source.path(int(index))
        if (size := size_of(path)) is not None:
            found.setdefault(size, []).append(path)
    return found


def _content(path: str, size: int) -> bytes | None:
    with suppress(OSError), open(path, "rb", opener=open_regular) as file:
        read = hashlib.blake2b(file.read(COMPARED))
        if size > COMPARED:
            file.seek(max(COMPARED, size - COMPARED))
            read.update(file.read(COMPARED))
        return read.digest()
    return None
