"""The errors of files that are not what they should be."""

from __future__ import annotations

import struct
import tarfile
import zlib

from PIL import Image


class LabelError(Exception):
    """A label that is wrong. A run stops at it: if it passed over such samples, it could lose a whole class."""


class SampleError(Exception):
    """A data set's own error at a sample that names it, where the error does not say that a file is unreadable."""


# What decoders raise for bytes that are not an image.
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
