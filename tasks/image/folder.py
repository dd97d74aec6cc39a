"""Folders and tar files of images: their images, and the files that are passed over."""

from __future__ import annotations

import logging
import os
import tarfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from timm.data.readers.img_extensions import get_img_extensions, set_img_extensions
from timm.data.readers.reader_image_in_tar import ReaderImageInTar
from timm.utils.misc import natural_key

from longseq.tasks.data.folders import leads_above
from longseq.tasks.data.inputs import PassedOver, describe_passed_over
from longseq.tasks.image.decoding import image_endings, is_hidden, is_image
from longseq.tasks.image.split_folders import refuse_pooled

_log = logging.getLogger(__name__)

# Of a large archive the folders of so many images are compared, evenly spaced.
_COMPARED = 10_000

# timm caches the index of larger tar files, because reading through them takes minutes.
_LARGE_TAR = 10 * 2**30


class Found(NamedTuple):
    """The image files below a folder, the other files, and the folders with nothing in them."""

    images: list[str]
    passed_over: list[PassedOver]
    empty: list[PassedOver]


def find_images(root: str) -> Found:
    """Search a folder on all levels, also through symbolic links; images are recognised by their endings.

    Hidden files and folders are passed over: those of version control and of notebooks, and the second file that macOS
    writes beside each image. So are links to a folder that holds them, below which images would be found many times.
    """
    images, others, empty = [], [], []
    for folder, folders, files in os.walk(root, followlinks=True):
        if not folders and not files and folder != root:
            empty.append(PassedOver(os.path.join(folder, ""), "empty"))
        for name in list(folders):
            path = os.path.join(folder, name)
            if is_hidden(name) or leads_above(path):
                others.append(PassedOver(os.path.join(path, ""), "hidden" if is_hidden(name) else "link to above"))
                folders.remove(name)
        folders.sort()
        for name in sorted(files):
            path = os.path.join(folder, name)
            if is_image(name):
                images.append(path)
            else:
                others.append(PassedOver(path, _why_no_image(name)))
    return Found(images, others, empty)


def report_passed_over(passed_over: Sequence[PassedOver], root: str) -> None:
    """Log in one line which files of `root` are not read, if there are any."""
    if passed_over:
        _log.warning("%s: %d passed over (%s)", root, len(passed_over), describe_passed_over(passed_over, root))


class ClassFolders:
    """Images by class: the class of an image is the innermost folder that holds it.

    Classes are numbered in natural order, or by `class_to_idx`; then images of other classes are passed over.
    ValueError if images lie outside class folders, in a folder below that of a class, or in several splits.
    """

    def __init__(self, root: str, class_to_idx: Mapping[str, int] | None = None) -> None:
        self.root = root
        found = find_images(root)
        self.passed_over = [*found.passed_over, *found.empty]
        folders = defaultdict(list)
        for path in found.images:
            folders[os.path.dirname(path)].append(path)
        kept = (one for one in folders if class_to_idx is None or os.path.basename(one) in class_to_idx)
        refuse_pooled(root, [os.path.relpath(folder, root) for folder in kept])
        if class_to_idx is None:
            self._check(set(folders))
            names = sorted({os.path.basename(folder) for folder in folders}, key=natural_key)
            class_to_idx = {name: index for index, name in enumerate(names)}
        self.class_to_idx = dict(class_to_idx)
        samples = []
        for folder, paths in folders.items():
            name = "" if folder == root.rstrip(os.sep) else os.path.basename(folder)
            if name in self.class_to_idx:
                samples += [(path, self.class_to_idx[name]) for path in paths]
            else:
                self.passed_over += [PassedOver(path, "of no class") for path in paths]
        samples.sort(key=lambda sample: natural_key(sample[0]))
        self.paths = [path for path, _ in samples]
        self.targets = np.array([target for _, target in samples], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.paths)

    def _check(self, folders: set[str]) -> None:
        root = self.root.rstrip(os.sep)
        if root in folders:
            raise ValueError(f"{self.root} has images outside class folders: move each into the folder of its class")
        for folder in sorted(folders):
            above = os.path.dirname(folder)
            while above not in folders and len(above) > len(root):
                above = os.path.dirname(above)
            if above in folders:
                raise ValueError(
                    f"{folder} lies below {above}, which holds images too, and would be a class of its own: "
                    f"move its images to {above}, or out of {self.root}"
                )
        parents = defaultdict(list)
        for folder in sorted(folders):
            parents[os.path.basename(folder)].append(os.path.relpath(folder, root))
        for several in parents.values():
            if len(several) > 1:
                _log.warning(
                    "%s: %s are one class, because the innermost folder names it", self.root, " and ".join(several[:3])
                )


class TarImages(ReaderImageInTar):
    """timm's reader of a .tar of class folders, or of a folder of .tar files, with all endings and no hidden files.

    `passed_over` lists the other files, except those of tar files inside tar files, and those of archives above 10 GiB.
    ValueError if images are of several splits.
    """

    def __init__(self, root: str, class_map: Mapping[str, int] | str | None = None) -> None:
        with _all_endings():
            super().__init__(root, class_map=class_map or "")
            shown = np.array([not _is_below_hidden(sample[0].path) for sample in self.samples])
            if class_map is None and len(names := np.unique(self.targets[shown])) < len(self.class_name_to_idx):
                kept = [self.class_idx_to_name[int(index)] for index in names]
                super().__init__(root, class_map={name: index for index, name in enumerate(kept)})
                shown = np.array([not _is_below_hidden(sample[0].path) for sample in self.samples])
        self.samples, self.targets = self.samples[shown], self.targets[shown]
        some = self.samples[:: max(1, len(self.samples) // _COMPARED)]
        refuse_pooled(root, {_folder_in_archives(*sample) for sample in some})
        self.passed_over = self._others()
        self._opened_by: int | None = None

    def __getitem__(self, index: int) -> tuple[Any, int]:
        # A forked process shares the position in open files with its parent, so that it must open them again.
        if self._opened_by != os.getpid():
            for state in [self.tar_state] if self.root_is_tar else self.tar_state.values():
                state.reset()
                for child in state.children.values():
                    child.reset()
            self._opened_by = os.getpid()
        return super().__getitem__(index)

    def _others(self) -> list[PassedOver]:
        archives = [Path(self.root)] if Path(self.root).is_file() else sorted(Path(self.root).glob("*.tar"))
        if sum(archive.stat().st_size for archive in archives) > _LARGE_TAR:
            return []
        others = []
        for archive in archives:
            with tarfile.open(archive) as content:
                for member in content:
                    name = PurePosixPath(member.path).name
                    if not member.isfile() or name.endswith(".tar"):
                        continue
                    if _is_below_hidden(member.path) or not is_image(name):
                        reason = "hidden" if _is_below_hidden(member.path) else _why_no_image(name)
                        others.append(PassedOver(str(archive / PurePosixPath(member.path)), reason))
        return others


def _folder_in_archives(image: tarfile.TarInfo, archive: str | None, inner: tarfile.TarInfo | None) -> str:
    """The folder of an image, with archives as folders: `archive` in a folder of several, `inner` inside of one."""
    archives = [one.removesuffix(".tar") for one in (archive, inner and inner.path) if one]
    return str(PurePosixPath(*archives, image.path).parent)


def _is_below_hidden(path: str) -> bool:
    return any(is_hidden(part) for part in PurePosixPath(path).parts if part != "..")


def _why_no_image(name: str) -> str:
    return "hidden" if is_hidden(name) else PurePosixPath(name).suffix.lower() or "without an ending"


@contextmanager
def _all_endings() -> Iterator[None]:
    """Let timm's readers accept all of Pillow's endings: timm keeps the endings in one table for the whole process."""
    before = get_img_extensions()
    set_img_extensions(sorted(image_endings()))
    try:
        yield
    finally:
        set_img_extensions(before)
