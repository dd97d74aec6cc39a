"""Decode image files to upright images of 8 bits per channel, for training, evaluation and prediction."""

import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO

import numpy as np
from PIL import ExifTags, Image, ImageOps

from longseq.tasks.data.loader import UNREADABLE

# Exported files contain these texts, for programs that prepare images.
DECODING = (
    "first frame; turned upright by its EXIF orientation; 16-bit grey divided by 257 (fewer bits by their range), "
    "floats in 0..1 multiplied by 255, both rounded; of 16-bit colours the upper 8 bits (PPM: rounded as grey); "
    "colour profiles not applied; transparency dropped; converted to RGB, or grey for one channel"
)
# The resizing of `transforms.evaluation_transform`, by `crop_mode`.
_FILTER = "by Pillow's filter of the name interpolation"
_SCALED = "img_size / crop_pct, rounded down"
_CUT = "of these img_size are cut out, from round((side - img_size) / 2), halves to the even number"
RESIZING = {
    "center": f"the short side becomes {_SCALED}, the long side in proportion, rounded down, {_FILTER}; {_CUT}",
    "squash": f"height and width become {_SCALED}, {_FILTER}; {_CUT}",
    "border": (
        f"height and width are divided by the larger of their ratios to {_SCALED}, and rounded, {_FILTER}; {_CUT}; a "
        "shorter side gets (img_size - side) // 2 pixels of round(255 * mean) before it, and the others behind it"
    ),
}
# `center` for images that are not square.
RESIZING_OBLONG = (
    f"height and width are divided by the smaller of their ratios to {_SCALED}, and rounded, {_FILTER}; {_CUT}"
)

# Formats that Pillow recognises but does not decode itself, or only with another program (Ghostscript).
_NOT_DECODED = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}
_TURNED = range(2, 9)  # EXIF orientations


@cache
def image_endings() -> frozenset[str]:
    """The lower-case endings of the files that Pillow decodes here."""
    known = Image.registered_extensions()
    decoded = {*Image.OPEN, "MPO"} - _NOT_DECODED  # MPO files begin as JPEG files and are opened as such
    return frozenset(ending for ending, kind in known.items() if kind in decoded)


def is_image(path: str) -> bool:
    """True if the file has one of the `image_endings`."""
    return os.path.splitext(path)[1].lower() in image_endings()


def decode(file: str | Path | IO[bytes]) -> Image.Image:
    """The image of a file, upright, with 8 bits per channel; raises one of UNREADABLE.

    16-bit integers are scaled by their range, so that a picture has the same values in 8 and in 16 bits. Floats must
    lie in [0, 1]. ValueError for integers and floats of unknown range.
    """
    if isinstance(file, (str, Path)):
        # Pillow 13 maps files that it opens itself into memory, and then misreads rotated TIFF images.
        with open(file, "rb") as stream:
            return decode(stream)
    with decoding(), Image.open(file) as image:
        image.load()
        return in_eight_bits(upright(image))


@contextmanager
def decoding() -> Iterator[None]:
    """Raise ValueError for whatever a decoder raises: damaged bytes lead to errors of many types."""
    try:
        yield
    except (OSError, ValueError, MemoryError):
        raise
    except Exception as error:
        raise ValueError(first_line(error)) from error


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without the file object that Pillow prints; or the name of its type."""
    message = re.sub(r" ?<_io\.[^>]*>", "", str(error)).strip()
    return (message or type(error).__name__).splitlines()[0]


def find_jpeg_size(data: bytes) -> tuple[int, int] | None:
    """The height and width of a JPEG file that any decoder reads as `decode` does, up to rounding.

    None for other formats, CMYK, colours stored as RGB, images that EXIF turns, and truncated files.
    """
    if not data.startswith(b"\xff\xd8") or not data.rstrip(b"\0").endswith(b"\xff\xd9"):
        return None
    with decoding(), Image.open(io.BytesIO(data)) as image:  # reads only the header
        if image.format != "JPEG" or image.mode not in ("RGB", "L") or image.info.get("adobe_transform") == 0:
            return None
        if "exif" in image.info and _orientation(image) in _TURNED:
            return None
        return image.height, image.width


def _orientation(image: Image.Image) -> int | None:
    """The EXIF orientation; None if it is missing or damaged."""
    try:
        with decoding():
            return image.getexif().get(ExifTags.Base.Orientation)
    except UNREADABLE:
        return None


def upright(image: Image.Image) -> Image.Image:
    """Rotate and mirror an image in place by its EXIF orientation; damaged EXIF data is ignored."""
    if _orientation(image) in _TURNED:
        image.load()
        with suppress(Exception):  # Pillow turns the image before it writes EXIF data without the orientation
            ImageOps.exif_transpose(image, in_place=True)
    return image


def in_eight_bits(image: Image.Image) -> Image.Image:
    """Convert an image of any mode to 8 bits per channel, in a mode that converts to RGB and L, or raise ValueError."""
    if image.mode.startswith("I;16"):
        bits = getattr(image, "tag_v2", {}).get(258, 16)  # of TIFF, which may have 12
        return _scaled(image, 2 ** (bits[0] if isinstance(bits, tuple) else bits) - 1)
    if image.mode == "I":
        # Pillow uses this mode for 16 bits of PGM, and before version 11 also of PNG.
        if image.format not in ("PNG", "PPM"):
            raise ValueError("32-bit integers of unknown range: store 8 or 16 bits, or floats in 0..1")
        return _scaled(image, 65535)
    if image.mode == "F":
        return _scaled(image, 1)
    # Pillow converts these modes to RGB or L only in two steps, or with a warning.
    between = {"P": "RGBA" if "transparency" in image.info else "P", "La": "LA", "LAB": "RGB"}.get(image.mode)
    return image if between in (None, image.mode) else image.convert(between)


def _scaled(image: Image.Image, white: float) -> Image.Image:
    """Convert numbers between 0 and `white` to grey of 8 bits."""
    values = np.asarray(image).astype(np.float64)
    lowest, highest = float(values.min()), float(values.max())
    if not (lowest >= 0 and highest <= white):
        raise ValueError(f"its pixels are in {lowest:g}..{highest:g}, and must be in 0..{white}")
    return Image.fromarray(np.rint(values * (255 / white)).astype(np.uint8))
