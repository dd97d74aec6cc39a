"""`longseq prepare task=image`: images become shards of a chosen size (see `longseq.tasks.image.shards`).

The input is read as training reads it: a folder or an archive of class folders, or tables of images. Its splits, and
the order of the images in them, stay; what the input does not set apart, training sets apart. Processes decode, scale
and encode the images, and one process writes them. An interrupted preparation begins anew.
"""

from __future__ import annotations

import io
import json
import logging
import multiprocessing
import os
import re
import tarfile
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from omegaconf import DictConfig

from longseq.files import crc32_of
from longseq.tasks.commands import PrepareImages
from longseq.tasks.data.unreadable import UNREADABLE
from longseq.tasks.image.config import ImageDataKeys
from longseq.tasks.image.decoding import first_line
from longseq.tasks.image.encoding import Encoded, Encoding, File, encode_file, encode_files, ending_of
from longseq.tasks.image.ranges import warn_of_narrow_ranges
from longseq.tasks.image.shards import MANIFEST, SPLITS, VERSION
from longseq.tasks.image.sources import ReaderSource, Source, Split, open_folders
from longseq.tasks.image.split_folders import find_split
from longseq.tasks.image.table import open_tables
from longseq.tasks.report import progress_bar, quiet_libraries, shorten
from longseq.tasks.training.configuration import command_word, read_command
from longseq.tasks.training.files import write_text
from longseq.tasks.training.lock import LOCK_FILE, locked
from longseq.tasks.training.processes import usable_cores

# How many unreadable images a manifest names.
NAMED = 20

# The images that a process encodes before it answers, and that may wait to be written.
_CHUNK, _AHEAD = 16, 4

_OF_TABLES = ("multi_label", "file_column", "label_column", "label_delimiter")

_OWN = re.compile(
    rf"(({'|'.join(SPLITS)})(-\d{{6}}\.tar|\.index\.npy|\.targets\.npy|\.names\.txt)|{re.escape(MANIFEST)})(\.partial)?"
)

# The second remedy of a message of training, which names splits by keys that are not of this command.
_SPLIT_KEYS = re.compile(r", or (give|leave it out by) (data\.root=\S+ )?data\.\w+_split=.*")

_log = logging.getLogger(__name__)

_NAMES = {"train": "train", "validation": "validation", "test": "test"}


@quiet_libraries()
def run(cfg: DictConfig) -> None:
    """Prepare images as configured, and print a summary."""
    keys = read_command(PrepareImages, cfg)
    assert keys.input is not None
    assert keys.output is not None
    _check_apart(keys.input, keys.output)
    sources = open_input(keys)
    warn_of_narrow_ranges(Split.whole(sources["train"]))  # of encoded images nobody can tell it later
    encoding = Encoding(keys.format, keys.size, keys.quality)
    manifest = prepare(
        sources,
        Path(keys.output),
        encoding,
        shard_bytes=keys.shard_bytes,
        multi_label=keys.multi_label,
        processes=keys.processes,
    )
    print(describe(manifest))
    several = " data.multi_label=true" if keys.multi_label else ""
    print(f"longseq train data=image_shards {command_word('data.root', shorten(keys.output))}{several}")


def _check_apart(given: str, output: str) -> None:
    """Raise ValueError, in one line, where a later command would take the shards for a class of the input.

    Beside the folders of splits, and beside a table, they are no part of the images.
    """
    root = os.path.expanduser(given)
    if not os.path.isdir(root) or Path(root, "train.csv").is_file():
        return
    splits = [path for kind in _NAMES if (path := find_split(root, kind)) is not None]
    target = Path(output).expanduser().resolve()
    if place := next((path for path in splits or [root] if target.is_relative_to(Path(path).resolve())), None):
        raise ValueError(
            f"output={output} lies in {place}, with whose images its shards would be read: name a folder apart"
        )


def open_input(keys: PrepareImages) -> dict[str, Source]:
    """The splits that the input has, by name: `train`, and `validation` and `test` where they are set apart."""
    assert keys.input is not None
    root = os.path.expanduser(keys.input)
    given = {name: getattr(keys, name) for name in _OF_TABLES}
    is_table = root.endswith(".csv") or Path(root, "train.csv").is_file()
    if not is_table and (wrong := next((name for name, value in given.items() if value), None)):
        raise ValueError(f"{wrong} is of a table of images, and input={keys.input} is none: leave it out")
    try:
        if is_table:
            if (folder := _class_folders(root)) is not None:
                _log.warning(
                    "%s holds train.csv, which is read, and class folders in %s, which are not: for these give an "
                    "input without train.csv",
                    keys.input,
                    folder,
                )
            read = ImageDataKeys(name="images", source="csv", img_size=1, root=root, **given)
            train, held_out = open_tables(read, root, _NAMES)
            return {"train": train, **held_out}
        images, others = open_folders(root, _NAMES, None)
        return {"train": images, **others}
    except ValueError as error:  # of a training, which has other names for these keys
        told = _SPLIT_KEYS.sub("", str(error))
        raise ValueError(
            told.replace("data.source=csv data.root=", "input=").replace("data.root=", "input=").replace("data.", "")
        ) from error


def _class_folders(root: str) -> str | None:
    """The training folder beside a train.csv, if it has folders, as a data set of class folders has; or None."""
    folder = find_split(root, "train") if os.path.isdir(root) else None
    if folder is None or not os.path.isdir(folder):
        return None
    return folder if any(entry.is_dir() for entry in os.scandir(folder)) else None


def describe(manifest: Mapping[str, Any]) -> str:
    """The images of each split, and those that could not be read."""
    lines = [
        f"{split} {told['images']:,} images in {len(told['shards'])} shard(s) of {_spell(told['shards'])}"
        for split, told in manifest["splits"].items()
    ]
    if count := manifest["unreadable"]:
        lines += [f"left out: {count:,} unreadable", *manifest["named"]]
    return "\n".join(lines)


def _spell(shards: Sequence[Mapping[str, Any]]) -> str:
    size = sum(one["size"] for one in shards)
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"


def prepare(
    sources: Mapping[str, Source],
    output: Path,
    encoding: Encoding,
    *,
    shard_bytes: int,
    multi_label: bool = False,
    processes: int | None = None,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Write the images of each split to shards in the folder `output`; returns its manifest.

    A shard ends before it has more than `shard_bytes`, but has one image at least. `processes` decode and encode, by
    default one for each core. ValueError, in one line: the folder holds something else, another process writes there,
    or no image can be read; OSError: a file cannot be written.
    """
    if (output / MANIFEST).exists():
        raise ValueError(f"{output} holds prepared data already: choose another output, or remove it")
    begun = _begun_in(output)
    with locked(output):
        for old in begun:
            old.unlink()
        written: list[Path] = []
        try:
            with progress_bar("packing", sum(map(len, sources.values())), shown=show_progress) as advance:
                writer = _Writer(output, shard_bytes, sources["train"].class_names, multi_label, written)
                manifest = _write_splits(sources, writer, encoding, processes, advance)
            write_text(output / MANIFEST, json.dumps(manifest, indent=1) + "\n")
        except BaseException:
            for path in written:
                with suppress(OSError):
                    path.unlink()
            raise
    return manifest


def _begun_in(output: Path) -> list[Path]:
    """The files that a killed preparation has left in a folder.

    Its lock or a file that is not whole tells that they are ours: other programs name their shards in the same way.
    ValueError if the folder holds anything else.
    """
    inside = sorted(output.iterdir()) if output.is_dir() else []
    locks = [path for path in inside if path.name.startswith(LOCK_FILE)]
    left = [path for path in inside if _OWN.fullmatch(path.name)]
    others = [path for path in inside if path not in left and path not in locks]
    if not others and not locks and not any(path.suffix == ".partial" for path in left):
        others = left
    if others:
        raise ValueError(f"output={output} holds other files, such as {others[0].name}: choose a new or empty folder")
    return left


def _write_splits(
    sources: Mapping[str, Source],
    writer: _Writer,
    encoding: Encoding,
    processes: int | None,
    advance: Callable[[int], None],
) -> dict[str, Any]:
    """Write the shards of all splits; returns the manifest."""
    splits: dict[str, Any] = {}
    failed: list[str] = []
    for split, source in sources.items():
        writer.begin(split)
        for index, one in enumerate(encode(source, encoding, processes)):
            if one.reason is None:
                writer.add(one, _target(source, index), _name(source, index, one))
            else:
                failed.append(f"{source.path(index)}: {one.reason}")
            advance(1)
        if not writer.names:
            raise ValueError(f"not one of the {len(source)} {split} images can be read ({failed[-1]})")
        splits[split] = writer.finish()
    return {
        "version": VERSION,
        "kind": "images",
        "format": encoding._asdict(),
        "class_names": list(writer.class_names),
        "multi_label": writer.multi_label,
        "unreadable": len(failed),
        "named": failed[:NAMED],
        "splits": splits,
    }


def encode(source: Source, encoding: Encoding, processes: int | None) -> Iterator[Encoded]:
    """Each image of a source, in its order, as the file that a shard holds."""
    count = min(processes or usable_cores(), -(-len(source) // _CHUNK))
    if encoding.format == "keep" or count <= 1:
        yield from (encode_file(_file_of(source, index), encoding) for index in range(len(source)))
        return
    # Not forked: the libraries of this process have threads.
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        waiting: deque[Any] = deque()
        chunks = iter(range(0, len(source), _CHUNK))
        try:
            while True:
                while len(waiting) < _AHEAD * count and (first := next(chunks, None)) is not None:
                    files = [_file_of(source, index) for index in range(first, min(first + _CHUNK, len(source)))]
                    waiting.append(pool.submit(encode_files, files, encoding))
                if not waiting:
                    return
                yield from waiting.popleft().result()
        except BrokenProcessPool as error:
            raise ValueError("a process that encodes has ended, maybe for lack of memory: give processes=1") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _file_of(source: Source, index: int) -> File:
    """The path of an image, or of one in an archive its bytes, its ending, and why these cannot be read."""
    if not isinstance(source, ReaderSource):
        return source.path(index)
    try:
        return Encoded(source.read_file(index)[0], ending_of(source.path(index)))
    except UNREADABLE as error:
        return Encoded(b"", "", first_line(error))


def _target(source: Source, index: int) -> Any:
    targets = source.targets()
    assert targets is not None, "folders, archives and tables tell all classes"
    return targets[index]


def _name(source: Any, index: int, one: Encoded) -> str:
    """The path of an image below its folder, with the ending of its file in the shard."""
    path = PurePosixPath(os.path.relpath(source.path(index), os.path.dirname(source.label) or "."))
    return str(path if ending_of(path.name) == one.ending else path.with_name(f"{path.name}.{one.ending}"))


class _File:
    """A new file that knows the checksum of what is written to it."""

    def __init__(self, path: Path) -> None:
        self.file, self.crc32, self.size = path.open("wb"), 0, 0

    def write(self, data: bytes) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        self.size += len(data)
        return self.file.write(data)

    def tell(self) -> int:
        return self.size


@dataclass
class _Shard:
    """A tar file that is being written: its path until it is whole, its name, and how much of it there is."""

    path: Path
    name: str
    file: _File
    tar: tarfile.TarFile
    images: int = 0


class _Writer:
    """Writes the files of one split after the other; `written` collects the paths of all of them."""

    def __init__(
        self, output: Path, shard_bytes: int, class_names: Sequence[str], multi_label: bool, written: list[Path]
    ) -> None:
        self.output, self.shard_bytes, self.written = output, shard_bytes, written
        self.class_names, self.multi_label = class_names, multi_label
        self.begin("")

    def begin(self, split: str) -> None:
        self.split = split
        self.names: list[str] = []
        self.rows: list[tuple[int, int, int, int]] = []
        self.targets: list[Any] = []
        self.shards: list[dict[str, Any]] = []
        self.shard: _Shard | None = None

    def add(self, one: Encoded, target: Any, name: str) -> None:
        key, (ending, label) = f"{len(self.names):09d}", self._label(target)
        if self.shard is not None and self.shard.file.size + _space(one.data) + _space(label) > self.shard_bytes:
            self._close()
        shard = self.shard = self.shard or self._open()
        offset = _add(shard.tar, f"{key}.{one.ending}", one.data)
        _add(shard.tar, f"{key}.{ending}", label)
        shard.images += 1
        self.rows.append((len(self.shards), offset, len(one.data), zlib.crc32(one.data)))
        self.targets.append(target)
        self.names.append(name)

    def finish(self) -> dict[str, Any]:
        """Write the rest of the split; returns its entry in the manifest."""
        if self.shard is not None:
            self._close()
        kind = np.uint8 if self.multi_label else np.int64
        told = {
            "index": self._save("index.npy", np.array(self.rows, dtype=np.int64)),
            "targets": self._save("targets.npy", np.array(self.targets).astype(kind)),
            "names": self._save("names.txt", "".join(f"{json.dumps(name)}\n" for name in self.names)),
        }
        return {"images": len(self.names), "shards": self.shards, **told}

    def _label(self, target: Any) -> tuple[str, bytes]:
        if not self.multi_label:
            return "cls", str(int(target)).encode()
        names = [self.class_names[int(place)] for place in np.flatnonzero(target)]
        return "json", json.dumps({"labels": names}).encode()

    def _open(self) -> _Shard:
        name = f"{self.split}-{len(self.shards):06d}.tar"
        path = self.output / f"{name}.partial"
        self.written.append(path)
        file = _File(path)
        return _Shard(path, name, file, tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT))  # type: ignore[call-overload]

    def _close(self) -> None:
        shard = self.shard
        assert shard is not None
        shard.tar.close()
        shard.file.file.close()
        os.replace(shard.path, self.output / shard.name)
        self.written.append(self.output / shard.name)
        self.shards.append(
            {"name": shard.name, "images": shard.images, "size": shard.file.size, "crc32": shard.file.crc32}
        )
        self.shard = None

    def _save(self, name: str, values: np.ndarray | str) -> dict[str, Any]:
        path = self.output / f"{self.split}.{name}"
        self.written.append(path)
        if isinstance(values, str):
            write_text(path, values)
        else:
            np.save(path, values)
        return {"name": path.name, "size": path.stat().st_size, "crc32": crc32_of(path)}


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> int:
    """Add a file to an archive; returns the offset of its bytes. The archive depends on names and bytes alone."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    offset = tar.offset + tarfile.BLOCKSIZE
    tar.addfile(member, io.BytesIO(data))
    return offset


def _space(data: bytes) -> int:
    """The bytes that a file takes in an archive: its head, and itself in whole blocks."""
    return tarfile.BLOCKSIZE * (1 + -(-len(data) // tarfile.BLOCKSIZE))
