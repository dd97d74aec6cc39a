"""Folders and tar files of images: their images, and the files that are passed over."""

from __future__ import annotations

import logging
import os
import re
import tarfile
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from timm.data.readers.img_extensions import get_img_extensions, set_img_extensions
from timm.data.readers.reader_image_in_tar import ReaderImageInTar

from longseq.tasks.data.folders import class_name, leads_above
from longseq.tasks.data.inputs import PassedOver, describe_passed_over
from longseq.tasks.data.labels import name_some, sort_names
from longseq.tasks.image.decoding import image_endings, is_hidden, is_image
from longseq.tasks.image.shard_streams import tell_cut_off
from longseq.tasks.image.split_folders import is_of_images, refuse_masks, refuse_pooled

_log = logging.getLogger(__name__)

# Of a large archive the folders of so many images are compared, evenly spaced.
_COMPARED = 10_000

# timm caches the index of larger tar files, because reading through them takes minutes.
_LARGE_TAR = 10 * 2**30


# Parts of a set of one class, which are no classes of their own.
_PART = re.compile(r"(cv|fold|part|batch|chunk|shard|split|subset|set|group)[-_ ]?\d+", re.IGNORECASE)

# What messages recommend where no folder tells the class of an image.
AS_TABLE = "list the files and their classes in a table (data.source=csv data.root=FILE.csv)"


class Found(NamedTuple):
    """The image files below a folder, the other files, and the folders with nothing in them."""

    images: list[str]
    passed_over: list[PassedOver]
    empty: list[PassedOver]


def natural_order(name: str) -> tuple[list[str | Decimal], str]:
    """A key that sorts names as people do: numbers by their value, letters of any case beside each other.

    Names that differ only in capitals, or in zeros before a number, have an order, too: a set of them does not, and
    their classes would have other numbers in every process.
    """
    parts = re.split(r"(\d+)", name.lower())
    return [Decimal(part) if index % 2 else part for index, part in enumerate(parts)], name


def sort_classes(names: Iterable[str], order: Sequence[str] | None = None) -> list[str]:
    """The names of classes in their order, the same for every source: whole numbers by value, others in natural order.

    `order`, that of a trained model, is kept for the same classes: it may be of a version that sorted otherwise.
    """
    found = set(names)
    return list(order) if order is not None and set(order) == found else sort_names(found, natural_order)


def find_images(root: str) -> Found:
    """Search a folder on all levels, also through symbolic links; images are recognised by their endings.

    Hidden files and folders are passed over: those of version control and of notebooks, and the second file that macOS
    writes beside each image, or below `__MACOSX`. So are links to a folder that holds them, below which images would be
    found many times.
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
                others.append(PassedOver(path, "broken link" if _is_broken(path) else _why_no_image(name)))
    return Found(images, others, empty)


def _is_broken(path: str) -> bool:
    """True for a link to nothing without an ending, such as one to a folder of a class that has moved.

    Files with an ending are not asked for on the disk: there may be a million of them.
    """
    return "." not in os.path.basename(path) and os.path.islink(path) and not os.path.exists(path)


def find_archives(root: str) -> list[Path]:
    """The archive `root`, or the .tar files of a folder that are not hidden, by name."""
    path = Path(root)
    if path.is_file():
        return [path]
    return sorted(one for one in path.glob("*.tar") if one.is_file() and not is_hidden(one.name))


def classes_in_archives(archives: Iterable[Path], known: Set[str]) -> set[str]:
    """The classes of the images in archives of a folder; the search ends where all that are `known` are found.

    An archive that cannot be read is passed over from there on.
    """
    found: set[str] = set()
    for archive in archives:
        with suppress(OSError, tarfile.TarError), tarfile.open(archive) as content:
            for member, inner in _members(content):
                if member.isfile() and is_image(member.path) and not _is_below_hidden(member.path):
                    found.add(_class_in_archives(member, archive.name, inner))
                    if known <= found:
                        return found
    return found


def _members(content: tarfile.TarFile) -> Iterator[tuple[tarfile.TarInfo, tarfile.TarInfo | None]]:
    """The members of an archive and of the archives in it, with these."""
    for member in content:
        if member.isfile() and member.path.lower().endswith(".tar"):
            with suppress(tarfile.TarError), tarfile.open(fileobj=content.extractfile(member)) as inner:
                yield from ((one, member) for one in inner)
        else:
            yield member, None


def report_passed_over(passed_over: Sequence[PassedOver], root: str) -> None:
    """Log in one line which files of `root` are not read, if there are any."""
    if passed_over:
        _log.warning("%s: %d passed over (%s)", root, len(passed_over), describe_passed_over(passed_over, root))


class ClassFolders:
    """Images by class: the class of an image is the innermost folder that holds it.

    Where all of these have one name that tells nothing, as in CLASS/images, it is the folder above.
    Classes are numbered as `sort_classes` has them, or by `class_to_idx`; then images of other classes are passed over.
    `found` is what `find_images` finds in `root`, if that is known.
    ValueError if images lie outside class folders, in a folder below that of a class, or in several splits.
    """

    def __init__(
        self,
        root: str,
        class_to_idx: Mapping[str, int] | None = None,
        order: Sequence[str] | None = None,
        *,
        found: Found | None = None,
    ) -> None:
        self.root = root
        found = find_images(root) if found is None else found
        self.passed_over = [*found.passed_over, *found.empty]
        folders = defaultdict(list)
        for path in found.images:
            folders[os.path.dirname(path)].append(path)
        named = {folder: class_name(folder) for folder in folders}
        above = _classes_above(root, folders, class_to_idx or ())
        if above is not None:
            named = above
        kept = [os.path.relpath(one, root) for one in folders if class_to_idx is None or named[one] in class_to_idx]
        refuse_pooled(root, kept)
        refuse_masks(root, kept)
        if class_to_idx is None:
            if above is None:
                self._check(set(folders))
            else:
                _tell_above(root, os.path.basename(next(iter(above))), above.values())
            names = sort_classes(named.values(), order)
            class_to_idx = {name: index for index, name in enumerate(names)}
        self.class_to_idx = dict(class_to_idx)
        samples = []
        for folder, paths in folders.items():
            name = "" if folder == root.rstrip(os.sep) else named[folder]
            if name in self.class_to_idx:
                samples += [(path, self.class_to_idx[name]) for path in paths]
            else:
                self.passed_over += [PassedOver(path, "of no class") for path in paths]
        samples.sort(key=lambda sample: natural_order(sample[0]))
        self.paths = [path for path, _ in samples]
        self.targets = np.array([target for _, target in samples], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.paths)

    def _check(self, folders: set[str]) -> None:
        root = self.root.rstrip(os.sep)
        if root in folders:
            raise ValueError(
                f"{self.root} has images outside class folders: move each into the folder of its class, or {AS_TABLE}"
            )
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
        pooled = [several for several in parents.values() if len(several) > 1]
        if pooled:
            _log.warning(
                "%s: %s are one class, because the innermost folder names it%s",
                self.root,
                " and ".join(pooled[0][:3]),
                f", and so are those of {len(pooled) - 1} more" if len(pooled) > 1 else "",
            )


def _classes_above(root: str, folders: Iterable[str], known: Container[str]) -> dict[str, str] | None:
    """The classes of images in root/.../CLASS/images by their folders, as Tiny ImageNet has them; None of others.

    All folders have one name, which says no more than images, and those above lie side by side. Parts of one set, such
    as fold1 and fold2, are no classes. A class that is `known` may be called images.
    """
    named = {folder: class_name(os.path.dirname(folder)) for folder in folders}
    inner = {os.path.basename(folder) for folder in named}
    places = {os.path.dirname(os.path.dirname(folder)) for folder in named}
    if len(named) < 2 or len(inner) > 1 or len(places) > 1 or root.rstrip(os.sep) in named:
        return None
    (name,) = inner
    is_told = not is_of_images(name) or name in known or all(map(_PART.fullmatch, named.values()))
    return None if is_told else named


def _tell_above(root: str, inner: str, names: Iterable[str]) -> None:
    _log.warning(
        "%s: all images lie in folders called %s, so the folders above these are the classes: %s",
        root,
        inner,
        name_some(sort_classes(names)),
    )


class TarImages(ReaderImageInTar):
    """timm's reader of a .tar of class folders, or of a folder of .tar files, with all endings and no hidden files.

    Classes are in the order of `sort_classes`, images in that of `natural_order`, those of one path in that of the
    archives' names: timm takes them as the disk lists the archives. Of a file that an archive holds twice the last one
    counts, as for tar. The class of CLASS/images is the folder above, as in `ClassFolders`.

    `passed_over` lists the other files and all links, except those of tar files inside tar files, and those of archives
    above 10 GiB, and what is `beside` the archives of a folder. RuntimeError if there are no images, ValueError if they
    are of several splits.
    """

    def __init__(
        self,
        root: str,
        class_map: Mapping[str, int] | None = None,
        order: Sequence[str] | None = None,
        *,
        beside: Sequence[PassedOver] = (),
    ) -> None:
        try:
            with _all_endings():
                super().__init__(root)
        except ValueError as error:
            if "unpack" in str(error):  # timm has found no image
                raise RuntimeError(f"{root} holds no images") from error
            raise
        self._beside = beside
        tell_cut_off([str(archive) for archive in find_archives(root)])
        kept = self._kept()
        names = [_class_in_archives(*self.samples[index]) for index in kept]
        class_of: Callable[..., str] = _class_in_archives
        if above := _classes_above_in_archives(self.samples[kept], names, class_map or ()):
            class_of = above
            names = [class_of(*self.samples[index]) for index in kept]
            if class_map is None:
                _tell_above(root, PurePosixPath(self.samples[kept[0]][0].path).parent.name, names)
        if class_map is None:
            class_map = {name: index for index, name in enumerate(sort_classes(names, order))}
        self.class_name_to_idx = dict(class_map)
        self.class_idx_to_name = {index: name for name, index in class_map.items()}
        known = [(index, class_map[name]) for index, name in zip(kept, names, strict=True) if name in class_map]
        self.samples = self.samples[[index for index, _ in known]]
        self.targets = np.array([target for _, target in known], dtype=np.int64)
        some = self.samples[:: max(1, len(self.samples) // _COMPARED)]
        inside = {_folder_in_archives(*sample) for sample in some}
        refuse_pooled(root, inside, packed=True)
        refuse_masks(root, inside, packed=True)
        self.passed_over = self._others(class_of)
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

    def _kept(self) -> list[int]:
        """The indices of the images that are not hidden and the last ones of their names, in their order."""
        places = [
            (image.path, archive or "", "" if inner is None else inner.path) for image, archive, inner in self.samples
        ]
        last = {place: index for index, place in enumerate(places) if not _is_below_hidden(place[0])}
        return [index for _, index in sorted(last.items(), key=lambda one: (natural_order(one[0][0]), one[0][1:]))]

    def _others(self, class_of: Callable[..., str]) -> list[PassedOver]:
        archives = find_archives(self.root)
        others = list(self._beside)
        if sum(archive.stat().st_size for archive in archives) > _LARGE_TAR:
            return others
        for archive in archives:
            outer = None if archive == Path(self.root) else archive.name
            seen = set()
            with tarfile.open(archive) as content:
                for member in content:
                    name = PurePosixPath(member.path).name
                    linked = member.issym() or member.islnk()
                    if not (linked or member.isfile()) or name.lower().endswith(".tar"):
                        continue
                    reason = _why_not_read(member, linked=linked)
                    if reason is None and class_of(member, outer, None) not in self.class_name_to_idx:
                        reason = "of no class"
                    if reason is None and member.path in seen:
                        reason = "replaced by a later file of its name"
                    if reason is not None:
                        others.append(PassedOver(str(archive / PurePosixPath(member.path)), reason))
                    seen.add(member.path)
        return others


def _why_not_read(member: tarfile.TarInfo, *, linked: bool) -> str | None:
    """Why a file in an archive is not read, whatever its class; None if it is an image."""
    name = PurePosixPath(member.path).name
    if _is_below_hidden(member.path):
        return "hidden"
    if linked:
        return "link in an archive"
    return None if is_image(name) else _why_no_image(name)


def _class_in_archives(image: tarfile.TarInfo, archive: str | None, inner: tarfile.TarInfo | None) -> str:
    """The class of an image: its folder, or the archive that it is in without one. (timm calls that of ./0.png ".")"""
    name = os.path.basename(os.path.normpath(os.path.dirname(image.path)))
    above = inner.path if inner is not None else archive or ""
    return class_name(os.path.splitext(os.path.basename(above))[0] if name == "." else name)


def _classes_above_in_archives(
    samples: Sequence[tuple[tarfile.TarInfo, str | None, tarfile.TarInfo | None]],
    names: Sequence[str],
    known: Container[str],
) -> Callable[..., str] | None:
    """What tells the class of an image where `_classes_above` finds it in archives; `names` are the innermost folders.

    Archives are folders, as cat.tar of images/ is one of a class; those of classes side by side in each are parts.
    """
    if len(set(names)) != 1 or not is_of_images(names[0]):  # the paths of a million images take seconds
        return None
    for folder_of in (_folder_in_archives, lambda image, *_: _folder_in_archives(image, None, None)):
        named = _classes_above("", {folder_of(*sample) for sample in samples}, known)
        if named is not None:
            return lambda *sample, named=named, folder_of=folder_of: named.get(folder_of(*sample), "")
    return None


def _folder_in_archives(image: tarfile.TarInfo, archive: str | None, inner: tarfile.TarInfo | None) -> str:
    """The folder of an image, with archives as folders: `archive` in a folder of several, `inner` inside of one."""
    archives = [os.path.splitext(one)[0] for one in (archive, inner and inner.path) if one]
    return str(PurePosixPath(*archives, image.path).parent)


def _is_below_hidden(path: str) -> bool:
    # Archives have millions of names, of which few have such a part.
    if "/." not in f"/{path.removeprefix('./')}" and "__MACOSX" not in path:
        return False
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
