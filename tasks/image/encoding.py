"""The files of a shard: an image as it is, or decoded, scaled and encoded anew. Processes import this module alone."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from PIL import Image

from longseq.tasks.data.unreadable import UNREADABLE
from longseq.tasks.image.decoding import decode, first_line

_FULL_COLOURS = 95  # the least quality at which colours keep their resolution


class Encoding(NamedTuple):
    """What becomes of an image: `size` is the most pixels of its shorter side, None: as many as it has."""

    format: str
    size: int | None
    quality: int


class Encoded(NamedTuple):
    """The bytes of an image's file and its ending; or `reason`, why it cannot be read."""

    data: bytes
    ending: str
    reason: str | None = None


File = str | Encoded  # a path, or an image in an archive


def encode_files(files: Sequence[File], encoding: Encoding) -> list[Encoded]:
    """`encode_file` of each file."""
    return [encode_file(file, encoding) for file in files]


def encode_file(file: File, encoding: Encoding) -> Encoded:
    """What a shard holds of an image, or why it cannot be read."""
    try:
        read = Encoded(Path(file).read_bytes(), ending_of(file)) if isinstance(file, str) else file
        return read if encoding.format == "keep" or read.reason else encode_image(read, encoding)
    except UNREADABLE as error:
        return Encoded(b"", "", first_line(error))


def ending_of(path: str) -> str:
    """The ending of a file in lower case, without its dot."""
    return PurePosixPath(path).suffix.lower().removeprefix(".")


def encode_image(file: Encoded, encoding: Encoding) -> Encoded:
    """A JPEG file of an image, upright, its shorter side scaled down to `encoding.size`.

    A JPEG file that is small enough stays as it is: encoding it again would only make it worse. Raises one of
    UNREADABLE.
    """
    image = decode(io.BytesIO(file.data))
    shorter, size = min(image.size), encoding.size
    if size is None or shorter <= size:
        if file.data.startswith(b"\xff\xd8"):
            return file._replace(ending="jpg")
    else:
        width, height = (max(1, round(side * size / shorter)) for side in image.size)
        image = _plain(image).resize((width, height), Image.Resampling.BICUBIC)
    written = io.BytesIO()
    # JPEG stores colours at half their width and height unless told otherwise: too coarse where quality is asked for.
    sampling = {"subsampling": 0} if encoding.quality >= _FULL_COLOURS else {}
    _plain(image).save(written, "JPEG", quality=encoding.quality, **sampling)
    return Encoded(written.getvalue(), "jpg")


def _plain(image: Image.Image) -> Image.Image:
    """The image in grey or RGB, as JPEG files have it; transparency is dropped, as in training."""
    return image if image.mode in ("L", "RGB") else image.convert("L" if image.mode in ("1", "LA") else "RGB")
