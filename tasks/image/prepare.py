"""`longseq prepare task=image`: pack images of a chosen size into shards (see `longseq.tasks.image.files`).

The input is read as in training: a folder or an archive of class folders, or tables of images. Its splits and the order
of the images stay. Data workers decode, scale and encode the images, and one process writes them.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from omegaconf import DictConfig
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from longseq.tasks.commands import PrepareImages
from longseq.tasks.data.loader import UNREADABLE
from longseq.tasks.image.config import ImageDataKeys
from longseq.tasks.image.decoding import decode, first_line
from longseq.tasks.image.files import MANIFEST, FolderLayout, TableLayout
from longseq.tasks.image.sources import Source
from longseq.tasks.report import progress_bar, quiet_libraries, shorten
from longseq.tasks.training.configuration import command_word, read_command
from longseq.tasks.training.system import usable_cores

_NAMED = 20  # unreadable images that are printed
_FULL_COLOURS = 95  # from this quality on, colours keep their resolution


class Encoded(NamedTuple):
    """The contents of an image's file and its ending; or the `reason` why it cannot be read."""

    data: bytes
    ending: str
    reason: str | None = None


@quiet_libraries()
def run(cfg: DictConfig) -> None:
    """Prepare images as configured, and print a summary."""
    keys = read_command(PrepareImages, cfg)
    print(describe(prepare(keys)))
    several = " data.multi_label=true" if keys.multi_label else ""
    print(f"longseq train data=image_shards {command_word('data.root', shorten(keys.output))}{several}")


def open_input(keys: PrepareImages) -> dict[str, Source]:
    """The splits of the input by name: `train`, and maybe `validation` and `test`."""
    root = os.path.expanduser(str(keys.input))
    data = {"name": "images", "img_size": 1, "root": root, "test_split": "test"}
    if root.endswith(".csv") or Path(root, "train.csv").is_file():
        columns = ("multi_label", "file_column", "label_column", "label_delimiter")
        given = {name: getattr(keys, name) for name in columns}
        return TableLayout(ImageDataKeys(source="csv", **data, **given)).open_all()
    return FolderLayout(ImageDataKeys(source="folder", **data)).open_all()


def describe(manifest: Mapping[str, Any]) -> str:
    """The images of each split, and those that could not be read."""
    lines = [
        f"{split} {found['images']:,} images in {len(found['shards'])} shard(s) of {found['bytes'] / 1e6:,.2f} MB"
        for split, found in manifest["splits"].items()
    ]
    if failed := manifest["unreadable"]:
        lines += [f"left out: {len(failed):,} unreadable", *failed[:_NAMED]]
    return "\n".join(lines)


def prepare(keys: PrepareImages) -> dict[str, Any]:
    """Write the images of each split to shards in the new or empty folder `keys.output`; returns its manifest.

    A shard ends after the image that reaches `shard_bytes`. ValueError if no image of a split can be read.
    """
    sources, output = open_input(keys), Path(keys.output)
    if output.is_dir() and any(output.iterdir()):
        raise FileExistsError(f"{output} is not empty")
    begun = output.with_name(f"{output.name}.partial")
    shutil.rmtree(begun, ignore_errors=True)
    begun.mkdir(parents=True)
    splits: dict[str, Any] = {}
    failed: list[str] = []
    try:
        with progress_bar("packing", sum(map(len, sources.values()))) as advance:
            for split, source in sources.items():
                writer = _Writer(begun, split, source, keys)
                workers = 0 if keys.format == "keep" else min(keys.processes or usable_cores(), len(source) // 16)
                for index, one in enumerate(DataLoader(_Files(source, keys), batch_size=None, num_workers=workers)):
                    if one.reason is None:
                        writer.add(index, one)
                    else:
                        failed.append(f"{source.path(index)}: {one.reason}")
                    advance(1)
                splits[split] = writer.finish()
        manifest = {
            "class_names": list(sources["train"].class_names),
            "multi_label": keys.multi_label,
            "unreadable": failed,
            "splits": splits,
        }
        (begun / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        os.replace(begun, output)
    finally:
        shutil.rmtree(begun, ignore_errors=True)
    return manifest


class _Files(Dataset[Encoded]):
    """Each image of a source as the file that a shard holds."""

    def __init__(self, source: Any, keys: PrepareImages) -> None:
        self.source, self.keys = source, keys

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Encoded:
        try:
            data = self.source.read_file(index)[0]
            if self.keys.format == "keep":
                return Encoded(data, ending_of(self.source.path(index)))
            return encode_image(data, self.keys.size, self.keys.quality)
        except UNREADABLE as error:
            return Encoded(b"", "", first_line(error))


def ending_of(path: str) -> str:
    """The ending of a file in lower case, without its dot."""
    return PurePosixPath(path).suffix.lower().removeprefix(".")


def encode_image(data: bytes, size: int | None, quality: int) -> Encoded:
    """Encode the image of a file as JPEG, upright, its shorter side scaled down to `size`.

    A JPEG file that is small enough is kept as it is. Raises one of UNREADABLE.
    """
    image = decode(io.BytesIO(data))
    shorter = min(image.size)
    if size is None or shorter <= size:
        if data.startswith(b"\xff\xd8"):
            return Encoded(data, "jpg")
    else:
        width, height = (max(1, round(side * size / shorter)) for side in image.size)
        image = _plain(image).resize((width, height), Image.Resampling.BICUBIC)
    written = io.BytesIO()
    # By default, JPEG files store colours at half their width and height.
    sampling = {"subsampling": 0} if quality >= _FULL_COLOURS else {}
    _plain(image).save(written, "JPEG", quality=quality, **sampling)
    return Encoded(written.getvalue(), "jpg")


def _plain(image: Image.Image) -> Image.Image:
    """The image in grey or RGB; transparency is dropped, as in training."""
    return image if image.mode in ("L", "RGB") else image.convert("L" if image.mode in ("1", "LA") else "RGB")


class _Writer:
    """Writes the shards and the index of one split."""

    def __init__(self, folder: Path, split: str, source: Any, keys: PrepareImages) -> None:
        self.folder, self.split, self.source, self.keys = folder, split, source, keys
        self.rows: list[tuple[int, int, int]] = []
        self.targets: list[Any] = []
        self.names: list[str] = []
        self.shards: list[str] = []
        self.tar: tarfile.TarFile | None = None

    def add(self, index: int, one: Encoded) -> None:
        key, target = f"{len(self.rows):09d}", self.source.targets()[index]
        if self.keys.multi_label:
            names = [self.source.class_names[int(place)] for place in np.flatnonzero(target)]
            ending, label = "json", json.dumps({"labels": names}).encode()
        else:
            ending, label = "cls", str(int(target)).encode()
        if self.tar is not None and self.tar.offset >= self.keys.shard_bytes:
            self.tar.close()
            self.tar = None
        if self.tar is None:
            self.shards.append(f"{self.split}-{len(self.shards):06d}.tar")
            path = self.folder / self.shards[-1]
            self.tar = tarfile.open(path, "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115 - closed when it is full
        offset = self.tar.offset + tarfile.BLOCKSIZE
        for name, data in ((f"{key}.{one.ending}", one.data), (f"{key}.{ending}", label)):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            self.tar.addfile(member, io.BytesIO(data))
        self.rows.append((len(self.shards) - 1, offset, len(one.data)))
        self.targets.append(target)
        place = os.path.relpath(self.source.path(index), os.path.dirname(self.source.label) or ".")
        self.names.append(place if ending_of(place) == one.ending else f"{place}.{one.ending}")

    def finish(self) -> dict[str, Any]:
        """Write the index of the split; returns its entry in the manifest."""
        if self.tar is None:
            raise ValueError(f"no image of the split {self.split} can be read")
        self.tar.close()
        np.save(self.folder / f"{self.split}.index.npy", np.array(self.rows, dtype=np.int64))
        targets = np.array(self.targets).astype(np.uint8 if self.keys.multi_label else np.int64)
        np.save(self.folder / f"{self.split}.targets.npy", targets)
        lines = "".join(f"{json.dumps(name)}\n" for name in self.names)
        (self.folder / f"{self.split}.names.txt").write_text(lines, encoding="utf-8")
        size = sum((self.folder / shard).stat().st_size for shard in self.shards)
        return {"images": len(self.rows), "shards": self.shards, "bytes": size}
