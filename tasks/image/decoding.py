"""Image files -> upright images of 8 bits a channel: the one way in, for training, evaluation and prediction."""

from __future__ import annotations

import struct
import tarfile
import zlib
from functools import cache
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
from PIL import ExifTags, Image

# What decoders raise for bytes that are no image.
UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    zlib.error,
    tarfile.TarError,
    Image.DecompressionBombError,
)

# Exported files state it, for whoever prepares images for them.
DECODING = (
    "first frame; turned upright by its EXIF orientation; 16-bit integers divided by 257 (fewer bits by their range), "
    "floats in 0..1 multiplied by 255, both rounded; transparency dropped; converted to RGB, or grey for one channel"
)

# Pillow recognises these without decoding them, or starts another program for it (Ghostscript).
_NOT_DECODED = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@cache
def image_endings() -> frozenset[str]:
    """The endings, in small letters, of the files that Pillow decodes here."""
    known = Image.registered_extensions()
    decoded = {*Image.OPEN, "MPO"} - _NOT_DECODED  # MPO begins as JPEG, and is opened as that
    return frozenset(ending for ending, kind in known.items() if kind in decoded)


def is_hidden(name: str) -> bool:
    """Whether a file or folder is one that systems and editors keep for themselves: its name begins with a dot."""
    return name.startswith(".")


def is_image(name: str) -> bool:
    """Whether a file is taken for an image, by its ending and because it is not hidden."""
    path = PurePosixPath(name)
    return path.suffix.lower() in image_endings() and not is_hidden(path.name)


def decode(file: str | Path | IO[bytes]) -> Image.Image:
    """The image of a file, upright, with 8 bits a channel; raises one of UNREADABLE.

    16-bit integers are scaled by their range, so that a picture means the same in 8 and in 16 bits. Other integers and
    floats have no range of their own: floats in [0, 1] are taken, everything else is a ValueError.
    """
    if isinstance(file, (str, Path)):
        # Pillow 13 maps files that it opens itself into memory, and then misreads TIFF images that are turned.
        with open(file, "rb") as stream:
            return decode(stream)
    with Image.open(file) as image:
        image.load()
        return in_eight_bits(upright(image))


def upright(image: Image.Image) -> Image.Image:
    """Turn and mirror an image as its EXIF orientation says. Of damaged EXIF data nothing is taken."""
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except UNREADABLE:
        return image
    turn = _TURNS.get(orientation)  # type: ignore[arg-type]
    if turn is None:
        return image
    turned = image.transpose(turn)
    turned.format = image.format
    # Without its EXIF data, or whoever looks at the image next would turn it again.
    turned.info = {key: value for key, value in image.info.items() if key == "transparency"}
    return turned


def in_eight_bits(image: Image.Image) -> Image.Image:
    """An image of any mode -> one of 8 bits a channel that converts to RGB and L. ValueError where none fits."""
    if image.mode.startswith("I;16"):
        return _scaled(image, 2 ** _bits(image) - 1, inverted=_white_is_zero(image))
    if image.mode == "I":
        # So Pillow holds 16 bits of PGM, and before version 11 those of PNG.
        if image.format not in ("PNG", "PPM"):
            raise ValueError("32-bit integers do not tell which one is white: store 8 or 16 bits, or floats in 0..1")
        return _scaled(image, 65535)
    if image.mode == "F":
        return _scaled(image, 1)
    # What Pillow converts to RGB or L in two steps only, or with a warning.
    between = {"P": "RGBA" if "transparency" in image.info else "P", "La": "LA", "LAB": "RGB"}.get(image.mode)
    return image if between in (None, image.mode) else image.convert(between)


def _scaled(image: Image.Image, white: float, *, inverted: bool = False) -> Image.Image:
    """Grey of 8 bits from numbers between 0 and `white`."""
    values = np.asarray(image).astype(np.float64)
    lowest, highest = float(values.min()), float(values.max())
    if not (lowest >= 0 and highest <= white):
        raise ValueError(f"its pixels go from {lowest:g} to {highest:g}, and must lie in 0..{white}: scale them")
    grey = np.rint(values * (255 / white)).astype(np.uint8)
    return Image.fromarray(255 - grey if inverted else grey)


def _bits(image: Image.Image) -> int:
    """The bits of a 16-bit mode that are in use: TIFF files of 12 bits come in it too."""
    stored = _tags(image).get(258, 16)
    return int(stored[0] if isinstance(stored, (tuple, list)) else stored)


def _white_is_zero(image: Image.Image) -> bool:
    # Pillow inverts such TIFF files of 8 bits, and those of 16 not.
    return _tags(image).get(262) == 0


def _tags(image: Image.Image) -> dict[int, Any]:
    return dict(getattr(image, "tag_v2", None) or {})
