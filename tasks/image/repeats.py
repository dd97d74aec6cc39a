"""Images of the held-out splits that are also trained on: figures of them flatter the model."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache

from longseq.tasks.image.decoding import open_regular
from longseq.tasks.image.sources import MOST_FILES, Split, Splits, size_of

_log = logging.getLogger(__name__)

# A file is known by its size and these many bytes at its beginning and its end.
COMPARED = 1 << 16


def warn_of_repeats(splits: Splits) -> None:
    """Warn of validation and test images whose file has the bytes of a training image's."""
    held = {"validation": splits.validation} | ({} if splits.test is splits.validation else {"test": splits.test})
    every = (splits.train, *held.values())
    if sum(map(len, every)) > MOST_FILES or not all(getattr(one.source, "has_files", False) for one in every):
        return
    trained, read = _by_size(splits.train), cache(_content)
    for name, split in held.items():
        if repeats := _find_repeats(split, trained, read):
            _log.warning(
                "%d of the %d %s images have the bytes of a training image, such as %s and %s: figures of images that "
                "were trained on flatter; leave them out of one of the two",
                len(repeats),
                len(split),
                name,
                *repeats[0],
            )


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
