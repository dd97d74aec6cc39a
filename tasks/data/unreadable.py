"""The errors of files that are not what they should be."""

from __future__ import annotations

import struct
import tarfile
import zlib

from PIL import Image

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
